"""What a message overwrites, or a loop computes in one order, is right where something reads it in another way."""

import itertools

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.program import trace
from tests.programs.case import Case
from tests.programs.interpreted import InterpretedExecutable
from tests.programs.meshes import wrong_on_mesh
from tests.sample import sample

# Of a summand v, another one w and a whole number n: what stays a summand, and what needs the sum over the ranks.
OF_SUMMANDS = ("{v} * {n}", "{v} + {w}", "{v} * 0.5", "{v} / (1 + ops.square({n}))")
OF_SUMS = ("ops.tanh({v})", "{v} * {w}", "ops.maximum({v}, {w})")
NUMBERS = ("ops.tanh({n})", "ops.sum({v})", "ops.max({v}) * {n}")


def of_summands(seed):
    """Return a program on two ranks of sums over rows, of which each may be read before and after it is summed."""
    rng = np.random.default_rng(seed)
    lines, vectors, numbers = ["t0 = ops.sum(x, 0)", "t1 = ops.sum(x * x)"], ["t0"], ["t1"]
    for index in range(2, 9):
        names = {"v": rng.choice(vectors), "w": rng.choice(vectors), "n": rng.choice(numbers)}
        is_number = rng.random() < 0.3
        form = rng.choice(NUMBERS if is_number else (*OF_SUMMANDS, *OF_SUMS))
        lines.append(f"t{index} = {form.format(**names)}")
        (numbers if is_number else vectors).append(f"t{index}")
    return Case(
        lengths={"n": 5, "a": 3},
        leaves={"x": "input n a float64 normal"},
        lines=tuple(lines),
        outputs=tuple(f"t{index}" for index in range(9)),
        shards=(2, 3),
        mesh={"batch": 2},
        seed=seed,
    )


@pytest.mark.parametrize("seed", sample(range(24), 8))
def test_a_summand_is_its_own_wherever_it_is_read(seed):
    case = of_summands(seed)
    assert not (fault := wrong_on_mesh(case, compiles=False)), f"{fault}\n{case}"


SHAPE = (4, 6)
VIEWS = {
    "transposed": lambda y: ops.transpose(y, (*range(1, y.ndim), 0)),
    "as 6 x 4": lambda y: ops.reshape(y, (6, 4)),
    "as 2 x 2 x 6": lambda y: ops.reshape(y, (2, 2, 6)),
    "as 24": lambda y: ops.reshape(y, (24,)),
    "backwards": lambda y: y[::-1],
    "halves exchanged": lambda y: ops.concatenate([y[y.shape[0] // 2 :], y[: y.shape[0] // 2]], 0),
}


JOINS = {
    "plus": lambda seen, x: seen + x,
    "summed": lambda seen, x: ops.sum(seen * x, -1),
    "alone": lambda seen, x: ops.exp(seen),
}


@pytest.mark.parametrize("first", VIEWS)
def test_a_loop_s_result_is_right_in_any_view_beside_the_loop_s_operand(first):
    """A loop reads what it has just computed at the same place only."""

    def step(x):
        outputs = {}
        for (second, view), (name, join) in itertools.product(VIEWS.items(), JOINS.items()):
            y = ops.tanh(x + len(outputs))
            seen = ops.reshape(view(VIEWS[first](y)), SHAPE)
            outputs[f"{second}, {name}"] = join(seen, x)
            outputs[f"{second}, {name}, and itself"] = y
        return outputs

    array = np.random.default_rng(0).normal(size=SHAPE)
    program = trace(step, {"x": (SHAPE, "float64")})
    expected, _ = evaluate(program, {"x": array})
    executable = InterpretedExecutable(program, HostMemory(), {"x": array})
    executable.run()
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-12, err_msg=name)
