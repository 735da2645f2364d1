"""A program that is executed many times has the bits of one that is evaluated anew at each step."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.unit.program.sharding.test_placement import (
    DATA,
    ROWS,
    SPECS,
)


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
