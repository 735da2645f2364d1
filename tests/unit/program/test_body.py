"""Loops: nodes with a body, their gradients, where ranks place them, and what is left of them."""

import numpy as np
import pytest

from dptrain import ops, random
from dptrain.backend.cpu.compiled import CompiledExecutable, lowered
from dptrain.backend.cuda.compose import Composition
from dptrain.errors import ConfigError
from dptrain.program.body import body_of, has_body
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.gradient import topological
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.messages import stages
from dptrain.program.sharding.placement import place
from dptrain.program.steps import unrolled
from dptrain.program.tensor import Variable
from tests.programs import table
from tests.programs.table import recurrent
from tests.unit.program.virtual_ranks import run_on_ranks

STEPS, ROWS, WIDTH = 4, 5, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, ROWS, WIDTH))
INPUTS = {"x": ((STEPS, Dim.rows(ROWS), WIDTH), np.float64)}


# Losses whose steps need nothing of all ranks.
LOOPS = [table.LOOPS[name] for name in ("recurrent", "reversed_steps", "of_last", "of_stacked", "nested", "of_counter")]
LOOPS.append(table.LOOPS["of_first"])


def weights():
    rng = np.random.default_rng(1)
    return Variable(rng.normal(size=(WIDTH, WIDTH)), "u"), Variable(rng.normal(size=WIDTH), "b")


def trained(make):
    """Return the program of what `make` returns for x and the weights: loss, its gradients."""
    u, b = weights()

    def step(x):
        u._gradient = b._gradient = None
        loss = make(x, u, b)
        loss.backward()
        outputs = {"loss": loss, "u": u.value.grad, "b": b.value.grad}
        return {name: value for name, value in outputs.items() if value is not None}

    return step


def assert_same_on_ranks(step):
    """Run a step on one rank, and on three of which one has no rows."""
    program = trace(step, INPUTS)
    expected = evaluate(program, {"x": X})[0]
    for outputs, _ in run_on_ranks(place(program), {"x": X}, [3, 0, 2], {"x": 1})[0]:
        for name, value in expected.items():
            if outputs[name].shape == value.shape:
                np.testing.assert_allclose(outputs[name], value, rtol=1e-12, atol=1e-13)


def loops(program):
    return [tensor for tensor in program.tensors if has_body(tensor)]


@pytest.mark.parametrize("make", LOOPS)
def test_gradients_are_those_of_steps_one_by_one(make):
    step = trained(make)
    program = trace(step, INPUTS)
    assert loops(program)
    steps = unrolled(program)
    assert not loops(steps)
    outputs, expected = (evaluate(variant, {"x": X})[0] for variant in (program, steps))
    eager = step(ops.convert_to_tensor(X))
    for name, value in eager.items():
        np.testing.assert_allclose(outputs[name], value.numpy(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(expected[name], value.numpy(), rtol=1e-12, atol=1e-13)


def test_the_code_of_a_loop_is_as_long_for_many_steps_as_for_few():
    def code(steps):
        program = trace(trained(recurrent), {"x": ((steps, Dim.rows(ROWS), WIDTH), np.float64)})
        return lowered(place(program))[1].source

    short, long = code(10), code(1000)
    assert short.count("\n") == long.count("\n")
    assert len(long) - len(short) < 100


@pytest.mark.parametrize("make", LOOPS)
def test_ranks_send_nothing_in_a_loop(make):
    placed = place(trace(trained(make), INPUTS))
    assert loops(placed)
    assert sum(tensor.op is ALL_REDUCE for tensor in placed.tensors) == len(placed.outputs)


def test_second_derivatives():
    u, b = weights()

    def step(x):
        u._gradient = None
        recurrent(x, u, b).backward()
        norm = ops.sum(u.value.grad * u.value.grad)
        u._gradient = None
        norm.backward()
        return {"u": u.value.grad, "b": b.value.grad}

    outputs = evaluate(trace(step, INPUTS), {"x": X})[0]
    b._gradient = None
    for name, value in step(ops.convert_to_tensor(X)).items():
        np.testing.assert_allclose(outputs[name], value.numpy(), rtol=1e-11)


def test_the_program_of_a_loop_is_as_long_for_many_steps_as_for_few():
    def size(steps):
        shape = (steps, Dim.rows(ROWS), WIDTH)
        program = trace(trained(recurrent), {"x": (shape, np.float64)})
        return len(program.tensors), [len(body_of(loop).results) for loop in loops(program)]

    assert size(3) == size(300)


def test_what_depends_on_captures_alone_is_computed_once():
    u = Variable(np.eye(WIDTH))
    program = trace(lambda x: {"y": ops.map(lambda xt: xt @ ops.exp(u) * ops.sum(u), x)}, INPUTS)
    (loop,) = loops(program)
    names = [tensor.op.name for tensor in topological(body_of(loop).results) if tensor.op is not None]
    assert names == ["batch_matmul", "multiply"]


def test_what_nobody_reads_is_left_out():
    def step(x):
        _, ys = ops.scan(lambda c, xt: ((c[0] + xt, c[1] * xt), (ops.exp(xt), c[0])), (x[0], x[1]), x)
        return {"y": ys[1]}

    (loop,) = loops(trace(step, INPUTS))
    body = body_of(loop)
    assert (len(body.carries), len(body.stacked), len(loop.inputs)) == (1, 1, 2)


def test_a_carry_that_stays_is_captured():
    (loop,) = loops(trace(lambda x: {"y": ops.scan(lambda c, xt: (c, xt * c), x[0], x)[1]}, INPUTS))
    assert (len(body_of(loop).carries), len(body_of(loop).captures)) == (0, 1)


def test_variables_that_steps_assign_are_carried():
    total, factor = Variable(np.zeros(WIDTH), "total"), Variable(np.full(WIDTH, 2.0), "factor")

    def step(x):
        def add(xt):
            total.assign_add(ops.sum(xt, 0) * factor)
            return ops.sum(total)

        return {"y": ops.map(add, x)}

    program = trace(step, INPUTS)
    assert loops(program)
    outputs, updates = evaluate(program, {"x": X})
    sums = 2 * np.cumsum(X.sum(1), 0)
    np.testing.assert_allclose(outputs["y"], sums.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(updates[total], sums[-1], rtol=1e-12)
    compiled = CompiledExecutable(place(program), HostMemory(), {"x": X})
    compiled.run((0, 0))
    np.testing.assert_allclose(total.numpy(), 2 * sums[-1], rtol=1e-12)
    np.testing.assert_allclose(compiled.outputs["y"], (sums + sums[-1]).sum(-1), rtol=1e-12)
    assert factor not in updates


def test_random_numbers_of_steps_differ():
    seed = random.SeedGenerator(7)
    program = trace(lambda x: {"y": ops.map(lambda xt: random.uniform(xt.shape, seed=seed), x)}, INPUTS)
    assert loops(program)
    outputs, updates = evaluate(program, {"x": X})
    expected, _ = evaluate(unrolled(program), {"x": X})
    np.testing.assert_array_equal(outputs["y"], expected["y"])
    compiled = CompiledExecutable(place(program), HostMemory(), {"x": X})
    compiled.run()
    np.testing.assert_array_equal(compiled.outputs["y"], outputs["y"])
    assert len(np.unique(outputs["y"])) == X.size
    assert list(updates.values()) == [STEPS]


@pytest.mark.parametrize("layout", [("batch", None), (None, "model"), ("model", "batch")])
@pytest.mark.parametrize("make", LOOPS)
def test_sharded_weights_are_gathered_before_the_loop(make, layout):
    program = trace(trained(make), INPUTS)
    u = next(variable for variable in program.state if variable.path == "u")
    placed = place(program, layouts={u: layout})
    assert len(loops(placed)) == len(loops(place(program)))
    names = [tensor.op.name for loop in loops(placed) for tensor in topological(body_of(loop).results) if tensor.op]
    assert not {"all_gather", "all_reduce", "reduce_scatter"}.intersection(names)


def test_an_input_that_no_step_can_leave_partial_is_reduced_before_the_loop():
    u, _ = weights()

    def step(x):
        summands = x @ u @ ops.stop_gradient(u)  # partial where rows of the second factor are sharded
        return {"y": ops.sum(ops.scan(lambda h, xt: (ops.tanh(h + xt), None), ops.zeros_like(x[0]), summands)[0])}

    program = trace(step, INPUTS)
    placed = place(program, layouts={variable: ("model", None) for variable in program.state})
    (loop,) = loops(placed)
    assert loop.inputs[1].op is ALL_REDUCE or loop.inputs[0].op is ALL_REDUCE


@pytest.mark.parametrize("make", LOOPS)
def test_every_executor_sends_the_same_in_the_same_order(make):
    def numbers(messages_of_stages):
        return [
            [[tensor.attributes["number"] for tensor in message] for message in messages]
            for messages in messages_of_stages
        ]

    placed = place(trace(trained(make), INPUTS))
    expected = numbers(stage.messages for stage in stages(placed))
    assert sum(map(len, expected)) == 1
    composed, (fused, _) = Composition(placed, alone=False), lowered(placed, alone=False)
    fused_messages = ([[result for _, result in message] for message in stage.messages] for stage in fused.stages)
    assert numbers(fused_messages) == expected
    assert numbers([message.results for message in messages] for messages in composed.messages) == expected


def test_a_loop_in_which_ranks_would_meet_is_unrolled():
    def step(x):
        def normalized(h, xt):
            h = h + xt
            return h - ops.mean(h, 0), None

        return {"y": ops.sum(ops.scan(normalized, x[0], x)[0] ** 2)}

    assert not loops(place(trace(step, INPUTS)))
    assert_same_on_ranks(step)


def test_no_step_and_one():
    for steps in (0, 1):
        program = trace(
            lambda x: dict(zip("cy", ops.scan(lambda c, xt: (c + xt, c * xt), ops.ones(2), x), strict=True)),
            {"x": ((steps, 2), np.float32)},
        )
        evaluated = evaluate(program, {"x": np.full((steps, 2), 3, np.float32)})[0]
        compiled = CompiledExecutable(place(program), HostMemory(), {"x": np.full((steps, 2), 3, np.float32)})
        compiled.run()
        for outputs in (evaluated, compiled.outputs):
            np.testing.assert_array_equal(outputs["c"], [1 + 3 * steps] * 2)
            assert outputs["y"].shape == (steps, 2)


def test_a_carry_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"changes its carry 0 .* from float64 \(\) to float64 \(5, 3\)"):
        trace(lambda x: {"y": ops.scan(lambda c, xt: (c + xt, None), np.float64(0), x)[0]}, INPUTS)
