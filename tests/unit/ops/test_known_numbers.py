"""Control flow with numbers that are known, and with the same ones as inputs: equal values and gradients.

Each number of a call is given as Python's, as NumPy's, as a constant and as an input of a traced step, while the others
stay known; and all of them at once.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.ops.loops import remat
from dptrain.program.execute import HostMemory, ReferenceExecutable
from tests.options.check import Call, eagerly, program_of, wrong, wrong_of_program
from tests.programs.check import not_optimized
from tests.sample import sample

ROWS = 4
X = np.random.default_rng(0).normal(size=(ROWS, 3))
FORMS: dict[str, Callable[[Any], Any]] = {
    "Python": lambda number: number,
    "NumPy": lambda number: np.array(number)[()],
    "constant": lambda number: ops.convert_to_tensor(np.array(number)),
}


@dataclass(frozen=True)
class Flow:
    """A call of control flow.

    Attributes:
        call: takes x (rows, 3) and numbers, and returns tensors.
        reference: the same in NumPy, also of complex numbers.
        numbers: the values of each, by name.
        is_differentiable: whether it has a gradient, given the names of the numbers that are not known.
    """

    call: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]
    numbers: dict[str, Sequence[Any]]
    is_differentiable: Callable[[set[str]], bool] = lambda unknown: True


def _fori(x, lower, upper, a):
    for n in range(int(np.real(lower)), int(np.real(upper))):
        x = x * a + n
    return [x]


def _while(x, start, limit, a, most=None):
    n = start
    while np.real(n) < np.real(limit) and (most is None or n - start < most):
        n, x = n + 1, x * a + n
    return [x, x * 0 + n]


def _flag(x, going, bound, a, most=None):
    times = 0
    while np.real(going) and (most is None or times < most):
        x, times = 1.3 * x + a, times + 1
        going = np.real((x * x).sum()) < np.real(bound)
    return [x, x * 0 + times]


def _while_flag(most):
    def call(x, going, bound, a):
        def step(going, x, n):
            x = 1.3 * x + a
            return ops.sum(x * x) < bound, x, n + 1

        _, x, n = ops.while_loop(lambda going, *_: going, step, (going, x, 0), most)
        return [x, x * 0 + ops.cast(n, x.dtype)]

    return call


def _while_count(most):
    def call(x, start, limit, a):
        body = lambda n, x: (n + 1, x * a + ops.cast(n, x.dtype))  # noqa: E731
        n, x = ops.while_loop(lambda n, x: n < limit, body, (start, x), most)
        return [x, x * 0 + ops.cast(n, x.dtype)]

    return call


def _scan(x, first, a):
    carry, carries = first, []
    for part in x.T:
        carry = carry * a + part
        carries.append(carry)
    return [carry, np.stack(carries, 1)]


def _powers(x, first, a):
    carries = [first * a**n for n in range(5)]
    return [x * carries[4], *(x * carry for carry in carries[:4])]


def _call_powers(x, first, a):
    last, carries = ops.scan(lambda carry, _: (carry * a, carry), ops.cast(first, x.dtype), length=4)
    return [x * last, *(x * carries[number] for number in range(4))]


def _call_nested(x, upper, least, a):
    def step(n, value):
        return ops.cond(n >= least, lambda: ops.fori_loop(0, 2, lambda _, y: y * a, value), lambda: value + a)

    return [ops.fori_loop(0, upper, step, x)]


def _nested(x, upper, least, a):
    for n in range(int(upper)):
        x = x * a**2 if n >= least else x + a
    return [x]


def _associative(x, a):
    sums = [x[:, 0]]
    for column in x.T[1:]:
        sums.append(sums[-1] + column + a)
    return [np.stack(sums, 1)]


def _transposed(y):
    return ops.transpose(y, (1, 0))


COUNTS = {"start": [-1, 0, 2], "limit": [0, 2, 3], "a": [0.75]}
FLAGS = {"going": [True, False], "bound": [1.0, 60.0, 1e9], "a": [0.5]}
FLOWS = {
    "cond": Flow(
        lambda x, holds, a: [ops.cond(holds, lambda: ops.sin(x) * a, lambda: x * x + a)],
        lambda x, holds, a: [np.sin(x) * a if holds else x * x + a],
        {"holds": [True, False, 0, 2, 0.5, 0.0], "a": [0.75]},
    ),
    "switch": Flow(
        lambda x, index, a: [ops.switch(index, [lambda y: y * a, lambda y: ops.sin(y), lambda y: y + a], x)],
        lambda x, index, a: [[x * a, np.sin(x), x + a][min(max(int(index), 0), 2)]],
        {"index": [-1, 0, 1, 2, 7], "a": [0.75]},
    ),
    "fori_loop": Flow(
        lambda x, lower, upper, a: [ops.fori_loop(lower, upper, lambda n, y: y * a + ops.cast(n, x.dtype), x)],
        _fori,
        {"lower": [-2, 0, 3], "upper": [0, 1, 3], "a": [0.75]},
        lambda unknown: not unknown & {"lower", "upper"},
    ),
    "while_loop": Flow(_while_count(None), _while, COUNTS, lambda unknown: not unknown & {"start", "limit"}),
    **{
        f"while_loop of at most {most}": Flow(
            _while_count(most), lambda *numbers, most=most: _while(*numbers, most), COUNTS
        )
        for most in (0, 1, 2, 5)
    },
    "while_loop of a flag": Flow(_while_flag(None), _flag, FLAGS, lambda unknown: False),
    **{
        f"while_loop of a flag, of at most {most}": Flow(
            _while_flag(most), lambda *numbers, most=most: _flag(*numbers, most), FLAGS
        )
        for most in (0, 1, 2, 5)
    },
    "scan": Flow(
        lambda x, first, a: (lambda last, carries: [last, _transposed(carries)])(
            *ops.scan(lambda carry, part: (carry * a + part,) * 2, first + 0 * x[:, 0], _transposed(x))
        ),
        _scan,
        {"first": [0.0, 0.5, 2], "a": [0.75, 2]},
    ),
    "scan over a number": Flow(_call_powers, _powers, {"first": [0.5, 1.0], "a": [0.75, 2.0]}),
    "map": Flow(
        lambda x, a, b: [_transposed(ops.map(lambda part: ops.sin(part) * a + b, _transposed(x)))],
        lambda x, a, b: [np.sin(x) * a + b],
        {"a": [0.75, 2], "b": [0.5, 0]},
    ),
    "vectorized_map": Flow(
        lambda x, a, b: [_transposed(ops.vectorized_map(lambda part: ops.sin(part) * a + b, _transposed(x)))],
        lambda x, a, b: [np.sin(x) * a + b],
        {"a": [0.75, 2], "b": [0.5, 0]},
    ),
    "associative_scan": Flow(
        lambda x, a: [ops.associative_scan(lambda p, q: p + q + a, x, axis=1)], _associative, {"a": [0.75, 2]}
    ),
    "remat": Flow(
        lambda x, a, b: [remat(lambda y, scale: ops.sin(y) * scale + b)(x, a)],
        lambda x, a, b: [np.sin(x) * a + b],
        {"a": [0.75, 2], "b": [0.5, 0]},
    ),
    "loops and branches in a loop": Flow(
        _call_nested,
        _nested,
        {"upper": [0, 1, 4], "least": [0, 2, 9], "a": [0.75]},
        lambda unknown: "upper" not in unknown,
    ),
}


def calls(name: str) -> list[Call]:
    """Return a call for all values of its numbers and all ways to give them."""
    flow = FLOWS[name]
    names = list(flow.numbers)
    ways = [set(), *({name} for name in names), set(names)]
    return [
        _call(flow, dict(zip(names, values, strict=True)), unknown, form)
        for values in itertools.product(*flow.numbers.values())
        for number, unknown in enumerate(ways)
        for form in (FORMS if not unknown else [list(FORMS)[number % len(FORMS)]])
    ]


def _call(flow: Flow, numbers: dict[str, Any], unknown: set[str], form: str) -> Call:
    inputs = {"x": X} | {name: np.array(numbers[name]) for name in numbers if name in unknown}
    known = {name: value for name, value in numbers.items() if name not in unknown}
    is_differentiable = flow.is_differentiable(unknown)

    def layer(tensors):
        given = {name: FORMS[form](value) for name, value in known.items()}
        given |= {name: tensors[name] for name in unknown}
        results = flow.call(tensors["x"], **{name: given[name] for name in numbers})
        return results if is_differentiable else list(map(ops.stop_gradient, results))

    def reference(values, weights):
        results = flow.reference(*(values[name] if name in values else known[name] for name in ("x", *numbers)))
        return results if is_differentiable else list(map(np.real, results))

    return Call({"numbers": numbers, "not known": unknown, "form": form}, inputs, [], layer, reference)


@pytest.mark.parametrize("name", FLOWS)
def test_each_call_by_itself(name):
    for call in calls(name):
        assert not wrong(call, eagerly(call), 1e-12)


@pytest.mark.parametrize("name", FLOWS)
def test_traced(name):
    program, values = program_of(calls(name), ROWS)
    executable = ReferenceExecutable(program, HostMemory(), values)
    executable.run()
    assert not wrong_of_program(calls(name), executable.outputs, 1e-12)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", sample(FLOWS, 6))
def test_compiled(name):
    program, values = program_of(calls(name), ROWS)

    def run():
        executable = CompiledExecutable(program, HostMemory(), values)
        executable.run()
        return executable.outputs

    assert not wrong_of_program(calls(name), not_optimized(run), 1e-12)
