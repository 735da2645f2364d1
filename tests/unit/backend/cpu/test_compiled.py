"""Compiled programs compute what NumPy computes op by op; fused or not, they have the same bits."""

import numpy as np
import pytest
from hypothesis import given, settings

from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.ops import random
from dptrain.program.evaluate import evaluate
from dptrain.program.execute import HostMemory
from dptrain.program.placement import place
from dptrain.program.program import trace
from tests.unit.ops.test_every_op import ALL, program_of, step_of
from tests.unit.program.test_execute import network
from tests.unit.program.test_placement import DATA, SPECS, steps, weights
from tests.unit.program.virtual_ranks import on_ranks

pytestmark = pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def compare(program, steps=2, data=DATA, close=CLOSE):
    """Assert that fused and not fused give the same bits, and nearly those of `evaluate`; return what came out."""
    before = {one: one.numpy() for one in program.state}
    expected, state = [], dict(before)
    for _ in range(steps):
        outputs, updates = evaluate(program, data, state)
        state |= updates
        expected.append(outputs)
    ends = []
    for join in (True, False):
        for variable, value in before.items():
            variable.assign(value)
        executable, found = CompiledExecutable(program, HostMemory(), data, join=join), []
        for wanted in expected:
            executable.run()
            found.append(executable.outputs)
            readings = program.readings.outputs if program.readings is not None else {}
            assert executable.outputs.keys() == wanted.keys() - readings.keys()
            for name, value in executable.outputs.items():
                assert (value.dtype, value.shape) == (wanted[name].dtype, wanted[name].shape)
                np.testing.assert_allclose(value, wanted[name], **close, err_msg=name)
        for variable, value in state.items():
            np.testing.assert_allclose(variable.numpy(), value, **close, err_msg=variable.path)
        ends.append((found, {variable.path: variable.numpy() for variable in state}))
    fused, alone = ends
    for one, other in ((fused[1], alone[1]), *zip(fused[0], alone[0], strict=True)):
        for name, value in one.items():
            assert value.tobytes() == other[name].tobytes(), name
    return fused[0]


@settings(max_examples=10, deadline=None)
@given(step=steps())
def test_random_programs(step):
    variables = weights(first=(4, 3), square=(3, 3))

    def traced(x, y, sample_weight):
        loss = step(variables, x, y, sample_weight)
        loss.backward()
        for one in variables.values():
            if one.grad is not None:
                one.assign(one - 0.01 * one.grad)
        return {"loss": loss, "same": x * 2}

    compare(trace(traced, SPECS))


def together(cases):
    """Return one program of many, and the values of its inputs."""
    programs = [program_of(*one.values) for one in cases]
    specs, values, parts = {}, {}, []
    for number, (program, own) in enumerate(programs):
        names = {name: f"{number} {name}" for name in program.inputs}
        specs |= {names[name]: (one.shape, one.dtype) for name, one in program.inputs.items()}
        values |= {names[name]: own[name] for name in names}
        parts.append((number, list(names.values())))

    def step(*xs):
        given = dict(zip(specs, xs, strict=True))
        found = {}
        for number, names in parts:
            outputs = step_of(*cases[number].values)(*(given[name] for name in names))
            found |= {f"{cases[number].id} {name}": one for name, one in outputs.items()}
        return found

    return trace(step, specs), values


@pytest.mark.parametrize("part", range(4))
def test_every_op(part):
    """With its gradient; an op that has no code of its own is called."""
    program, values = together(ALL[part::4])
    compare(program, 1, values)


def test_many_steps():
    seed = random.SeedGenerator(3)
    program = trace(network(weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3)), seed), SPECS)
    found = compare(program, 10)
    assert found[-1]["loss"] < found[0]["loss"]


@pytest.mark.parametrize("shards", [[4, 4, 3], [0, 11]], ids=str)
def test_on_ranks(shards):
    starts = np.cumsum([0, *shards])

    def work(comm):
        own = {name: value[starts[comm.rank] : starts[comm.rank + 1]] for name, value in DATA.items()}
        variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
        program = place(trace(network(variables), SPECS))
        where = {"rows": shards[comm.rank], "first_row": int(starts[comm.rank])}
        step = CompiledExecutable(program, HostMemory(), own, **where, comm=comm)
        step.run([0] * 5)
        return step.outputs, {name: one.numpy() for name, one in variables.items()}

    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    whole = CompiledExecutable(trace(network(variables), SPECS), HostMemory(), DATA)
    whole.run([0] * 5)
    for outputs, own in on_ranks(len(shards), work):
        for name, value in whole.outputs.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12)
        for name, one in variables.items():
            np.testing.assert_allclose(own[name], one.numpy(), rtol=1e-11, atol=1e-13)
