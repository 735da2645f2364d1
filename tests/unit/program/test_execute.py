"""A program that is executed many times has the bits of one that is evaluated anew at each step."""

import numpy as np
import pytest
from hypothesis import given, settings

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops import random
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.sample import examples
from tests.unit.program.sharding.test_placement import (
    DATA,
    ROWS,
    SPECS,
    batch_normalization,
    cross_entropy,
    steps,
    weights,
)
from tests.unit.program.virtual_ranks import on_ranks


def network(variables, seed=None):
    def step(x, y, sample_weight):
        w1, b1, gamma, w2 = variables.values()
        hidden = ops.relu(batch_normalization(x @ w1 + b1, gamma))
        if seed is not None:
            hidden = random.dropout(hidden, 0.3, seed=seed)
        loss = ops.sum(cross_entropy(hidden @ w2, y) * sample_weight) / ops.sum(sample_weight)
        loss.backward()
        for variable in variables.values():
            variable.assign(variable - 0.1 * variable.value.grad)
        return {"loss": loss, "right": ops.sum(ops.cast(ops.equal(ops.argmax(hidden @ w2, -1), y), "float64"))}

    return step


def random_training(step):
    """Return a program that makes an update by a random step's loss."""
    variables = weights(first=(4, 3), square=(3, 3))

    def traced(x, y, sample_weight):
        loss = step(variables, x, y, sample_weight)
        loss.backward()
        for variable in variables.values():
            if variable.value.grad is not None:
                variable.assign(variable - 0.01 * variable.value.grad)
        return {"loss": loss, "same": x * 2}

    return trace(traced, SPECS)


def five_steps_on_ranks(shards, executable):
    """Return what a network's last step gives, and its weights, by rank.

    Args:
        shards: rows of each rank.
        executable: makes one of a program and arrays.
    """
    starts = np.cumsum([0, *shards])

    def work(comm):
        inputs = {name: value[starts[comm.rank] : starts[comm.rank + 1]] for name, value in DATA.items()}
        variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
        program = place(trace(network(variables), SPECS))
        step = executable(
            program, HostMemory(), inputs, rows=shards[comm.rank], first_row=int(starts[comm.rank]), comm=comm
        )
        step.run([0] * 5)
        return step.outputs, {name: variable.numpy() for name, variable in variables.items()}

    return on_ranks(len(shards), work)


def compare_steps(program, steps):
    """Assert that an executable has the bits of `evaluate`; return what came out."""
    state = {variable: variable.numpy() for variable in program.state}
    executable, came_out = ReferenceExecutable(program, HostMemory(), DATA), []
    for _ in range(steps):
        expected, updates = evaluate(program, DATA, state)
        state = state | updates
        executable.run()
        came_out.append(executable.outputs)
        assert executable.outputs.keys() == program.outputs.keys()
        for name in program.outputs:
            value = expected[name]
            assert executable.outputs[name].tobytes() == value.tobytes(), name
        for variable, value in state.items():
            assert variable.numpy().tobytes() == value.tobytes(), variable
    return came_out


def test_bits_over_many_steps():
    seed = random.SeedGenerator(3)
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    program = trace(network(variables, seed), SPECS)
    came_out = compare_steps(program, 10)
    assert came_out[-1]["loss"] < came_out[0]["loss"]


@pytest.mark.parametrize("shards", [[4, 4, 3], [0, 11]], ids=str)
def test_on_ranks(shards):
    variables = weights(w1=(4, 6), b1=6, gamma=6, w2=(6, 3))
    executable = ReferenceExecutable(trace(network(variables), SPECS), HostMemory(), DATA)
    executable.run([0] * 5)
    for outputs, rank_weights in five_steps_on_ranks(shards, ReferenceExecutable):
        for name, value in executable.outputs.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12)
        for name, variable in variables.items():
            np.testing.assert_allclose(rank_weights[name], variable.numpy(), rtol=1e-11, atol=1e-13)


def test_steps_read_their_own_rows():
    """Stored rows stay where they are; each step reads the ones whose numbers stand where it starts."""
    table, order = np.arange(20.0).reshape(10, 2), np.random.default_rng(0).permutation(10)
    total = Variable(np.zeros(2), "total")

    def step(stored, rows):
        x = take_rows(stored, rows)
        total.assign_add(ops.sum(x, 0))
        return {"x": x}

    program = trace(step, {"stored": (table.shape, table.dtype), "rows": ((Dim.rows(3),), np.int64)})
    executable = ReferenceExecutable(program, HostMemory(), {"stored": table, "rows": order})
    executable.run([0, 6, 3])
    np.testing.assert_array_equal(executable.outputs["x"], table[order[3:6]])
    np.testing.assert_array_equal(total, table[order[:9]].sum(0))
    order[:] = 4  # an order of another epoch is written over the old one
    executable.run([7])
    np.testing.assert_array_equal(executable.outputs["x"], [[8, 9]] * 3)


@settings(max_examples=examples(40), deadline=None)
@given(step=steps())
def test_random_programs(step):
    """Whatever arrays are used again, the second step has the bits of the first."""
    compare_steps(random_training(step), 2)


def test_state_that_is_still_read_is_not_written_over():
    w = Variable(np.arange(3.0), "w")

    def step(x, y, sample_weight):
        before = w.value
        w.assign(w + ops.sum(sample_weight))
        return {"new": w * 2 + 0 * ops.sum(sample_weight), "old": before * 2}

    program = trace(step, SPECS)
    executable = ReferenceExecutable(program, HostMemory(), DATA)
    for number in range(3):
        executable.run()
        outputs = executable.outputs
        added = DATA["weights"].sum()
        np.testing.assert_allclose(outputs["old"], 2 * (np.arange(3.0) + number * added))
        np.testing.assert_allclose(outputs["new"], outputs["old"] + 2 * added)


def test_variables_that_change_places():
    a, b = Variable(np.arange(3.0), "a"), Variable(np.arange(3.0) + 10, "b")

    def step(x, y, sample_weight):
        old = a.value
        a.assign(b)
        b.assign(old)
        return {"of a": a * 1, "old": old, "a view of it": old[1:]}

    compare_steps(trace(step, SPECS), 3)
    np.testing.assert_array_equal(a, [10, 11, 12])


def test_a_variable_that_is_transposed():
    w = Variable(np.arange(9.0).reshape(3, 3), "w")

    def step(x, y, sample_weight):
        w.assign(ops.transpose(w))
        return {}

    compare_steps(trace(step, SPECS), 3)


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

    compare_steps(trace(step, SPECS), 3)


def test_refused():
    w = Variable(np.zeros(3), "w")
    program = trace(lambda x, y, weight: {"w": w + ops.sum(weight)}, SPECS)
    with pytest.raises(ConfigError, match="input 'x' is missing"):
        ReferenceExecutable(program, HostMemory(), {})
    with pytest.raises(ConfigError, match=rf"input 'x' has shape \({ROWS}, 4\): expected \(2, 4\)"):
        ReferenceExecutable(program, HostMemory(), DATA, rows=2)


def test_a_variable_lives_where_programs_read_it():
    """Programs of one memory share it, `assign` writes through, and it comes back with its value."""
    w, memory = Variable(np.zeros(3), "w"), HostMemory()

    def step(x, y, sample_weight):
        w.assign(w + 1)
        return {}

    first, second = (ReferenceExecutable(trace(step, SPECS), memory, DATA) for _ in range(2))
    first.run([0, 0])
    second.run()
    np.testing.assert_array_equal(w, [3, 3, 3])
    w.assign([5, 6, 7])
    first.run()
    np.testing.assert_array_equal(w * 2, [12, 14, 16])
    snapshot = w.numpy()
    second.run()
    np.testing.assert_array_equal(snapshot, [6, 7, 8])
    w._move(None)
    first.run()
    np.testing.assert_array_equal(w, [7, 8, 9])
