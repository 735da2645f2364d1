"""A prepared program has the bits of one that is evaluated op by op, step after step, and takes less memory."""

import numpy as np
import pytest
from hypothesis import given, settings

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops import random
from dptrain.program.evaluate import evaluate
from dptrain.program.execute import Executable
from dptrain.program.memory import plan
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.unit.program.test_placement import DATA, ROWS, SPECS, batch_normalization, cross_entropy, steps, weights
from tests.unit.program.virtual_ranks import on_ranks


def network(variables, seed=None):
    def step(x, y, sample_weight):
        w1, b1, gamma, w2 = variables.values()
        hidden = ops.relu(batch_normalization(x @ w1 + b1, gamma))
        if seed is not None:
            hidden = random.dropout(hidden, 0.3, seed=seed)
        loss = ops.sum(cross_entropy(hidden @ w2, y) * sample_weight) / ops.sum(sample_weight)
        loss.backward()
        for one in variables.values():
            one.assign(one - 0.1 * one.grad)
        return {"loss": loss, "right": ops.sum(ops.cast(ops.equal(ops.argmax(hidden @ w2), y), "float64"))}

    return step


def compare_steps(program, state, steps):
    """Assert that a prepared program has the bits of an evaluated one; return it, and what came out."""
    executable, came_out = Executable(program, state), []
    for _ in range(steps):
        expected, updates = evaluate(program, DATA | state)
        state = state | updates
        came_out.append(executable(**DATA))
        for found, wanted in ((came_out[-1], expected), (executable.state, state)):
            for name, value in wanted.items():
                assert found[name].tobytes() == np.asarray(value).tobytes(), name
    return executable, came_out


def test_bits_over_many_steps():
    seed = random.SeedGenerator(3)
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    program = trace(network(variables, seed), SPECS, [*variables.values(), seed.count])
    state = {one.name: one.numpy() for one in variables.values()} | {"seed_generator": np.int64(0)}
    executable, came_out = compare_steps(program, state, 10)
    assert came_out[-1]["loss"] < came_out[0]["loss"]
    # Weights are written over; what lives shortly shares its place with others.
    # (w2 is copied: its new value is made early, for `right`, and the reverse pass still reads the old one.)
    assert sorted(one.name for one in executable.plan.in_place.values()) == ["b1", "gamma", "seed_generator", "w1"]
    assert executable.plan.size < executable.plan.alone / 2


@pytest.mark.parametrize("shards", [[4, 4, 3], [0, 11]], ids=str)
def test_on_ranks(shards):
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    program = trace(network(variables), SPECS, list(variables.values()))
    state = {one.name: one.numpy() for one in variables.values()}
    whole = Executable(program, state)
    placed, starts = place(program), np.cumsum([0, *shards])

    def work(comm):
        own = {name: value[starts[comm.rank] : starts[comm.rank + 1]] for name, value in DATA.items()}
        place = {"rows": shards[comm.rank], "first_row": int(starts[comm.rank])}
        step = Executable(placed, state, **place, comm=comm)
        outputs = [step(**own) for _ in range(5)]
        return outputs[-1], step.state

    expected = [whole(**DATA) for _ in range(5)][-1]
    for outputs, own in on_ranks(len(shards), work):
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12)
        for name, value in whole.state.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-11, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_random_programs(step):
    """Whatever shares memory, the second step has the bits of the first."""
    variables = weights(first=(4, 3), square=(3, 3))

    def traced(x, y, sample_weight):
        loss = step(variables, x, y, sample_weight)
        loss.backward()
        for one in variables.values():
            if one.grad is not None:
                one.assign(one - 0.01 * one.grad)
        return {"loss": loss, "same": x * 2}

    program = trace(traced, SPECS, list(variables.values()))
    state = {one.name: one.numpy() for one in variables.values()}
    compare_steps(program, state, 2)


def test_state_that_is_still_read_is_not_written_over():
    w = Variable(np.arange(3.0), "w")

    def step(x, y, sample_weight):
        w.assign(w + ops.sum(sample_weight))
        return {"new": w * 2, "old": before * 2}

    def both(x, y, sample_weight):
        nonlocal before
        before = w.value
        return step(x, y, sample_weight)

    before = w.value
    program = trace(both, SPECS, [w])
    assert plan(program).in_place == {}
    executable = Executable(program, {"w": w.numpy()})
    for number in range(3):
        found = executable(**DATA)
        added = DATA["weights"].sum()
        np.testing.assert_allclose(found["old"], 2 * (np.arange(3.0) + number * added))
        np.testing.assert_allclose(found["new"], found["old"] + 2 * added)


def test_variables_that_change_places():
    a, b = Variable(np.arange(3.0), "a"), Variable(np.arange(3.0) + 10, "b")

    def step(x, y, sample_weight):
        old = a.value
        a.assign(b)
        b.assign(old)
        return {"of a": a * 1, "old": old, "a view of it": old[1:]}

    program = trace(step, SPECS, [a, b])
    executable, _ = compare_steps(program, {"a": a.numpy(), "b": b.numpy()}, 3)
    np.testing.assert_array_equal(executable.state["a"], [10, 11, 12])


def test_a_variable_that_is_transposed():
    w = Variable(np.arange(9.0).reshape(3, 3), "w")

    def step(x, y, sample_weight):
        w.assign(ops.transpose(w))
        return {}

    compare_steps(trace(step, SPECS, [w]), {"w": w.numpy()}, 3)


def test_views_of_every_kind():
    """Of one element, of strides that no reshape can keep, of nothing."""
    w = Variable(np.arange(12.0).reshape(3, 4), "w")

    def step(x, y, sample_weight):
        w.assign(w * 2)
        columns = ops.transpose(w)
        return {
            "one": w[1, 2],
            "row": w[-1] + 1,
            "flat": ops.reshape(columns, (-1,)) + w[1, 2],
            "none": columns[2:2],
            "spread": ops.broadcast_to(w[:, 1], (2, 3)),
        }

    compare_steps(trace(step, SPECS, [w]), {"w": w.numpy()}, 3)


def test_lives_do_not_overlap_in_memory():
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    program = trace(network(variables), SPECS, list(variables.values()))
    small, large = plan(program, 2), plan(program, 200)
    assert small.size < large.size
    assert all(offset % 64 == 0 for offset in large.offsets.values())


def test_refused():
    w = Variable(np.zeros(3), "w")
    program = trace(lambda x, y, weight: {"w": w + ops.sum(weight)}, SPECS, [w])
    with pytest.raises(ConfigError, match=r"input 'w' has shape \(2,\): expected \(3,\)"):
        Executable(program, {"w": np.zeros(2)})
    executable = Executable(program, {"w": np.zeros(3)}, rows=2)
    with pytest.raises(ConfigError, match="input 'x' is missing"):
        executable()
    with pytest.raises(ConfigError, match=rf"input 'x' has shape \({ROWS}, 4\): expected \(2, 4\)"):
        executable(**DATA)
