"""Loops whose batch rows do not need each other, and rows of tables: threads take rows each, with one thread's bits."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable, lowered
from dptrain.backend.cpu.separate_rows import LEAST_ROWS
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.programs.check import by_numpy

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

STEPS, UNITS = 6, 40
RNG = np.random.default_rng(0)
KERNEL, TABLE = (
    Variable(RNG.normal(scale=0.1, size=shape).astype(np.float32)) for shape in ((UNITS, UNITS), (5, UNITS))
)
BIAS = Variable(RNG.normal(size=UNITS).astype(np.float32))


def carried(step):
    return lambda x: ops.scan(step, ops.zeros_like(x[0]), x)


APART = {
    "a recurrent cell": carried(lambda c, x: (ops.tanh(x + c @ KERNEL + BIAS), c)),
    "parts of features": carried(lambda c, x: (ops.concatenate([c[:, 3:] * 0.5, x[:, :3]], -1), c[:, 1:] * x[:, :-1])),
    "sums along a row": carried(lambda c, x: (ops.softmax(c + x), ops.sum(c * x, -1))),
    "rows of a table": carried(lambda c, x: (c + ops.take(TABLE, ops.cast(ops.abs(x[:, 0]) * 1.2, "int32"), 0), c)),
    "a mask": carried(lambda c, x: (ops.where(x[:, :1] > 0, ops.sin(c + x), c), x)),
    "two carries, backwards": lambda x: ops.scan(
        lambda c, x: ((c[1] @ KERNEL, ops.sin(c[0] + x)), c[0]), (x[0], x[1] * 2), x, reverse=True
    ),
    "a loop in a loop": carried(
        lambda c, x: (ops.scan(lambda a, b: (ops.cos(a) + b, None), c, ops.stack([x, c]))[0], x)
    ),
    "matrices of a row": carried(
        lambda c, x: (ops.tanh(c + x), ops.reshape(c, (-1, 8, 5)) @ ops.reshape(x, (-1, 5, 8)))
    ),
}
TOGETHER = {
    "a mean of all rows": carried(lambda c, x: (c * 0.5 + x - ops.mean(x, 0, keepdims=True), c)),
    "products of rows": carried(lambda c, x: (ops.tanh((c @ ops.transpose(x)) @ x * 0.01), c)),
    "another row's table": carried(lambda c, x: (c * 0.5 + ops.take(x, ops.cast(x[:, 0] > 0, "int32"), 0), c)),
    "the greatest of all rows": carried(lambda c, x: (c * 0.5 + ops.max(x, 0), c)),
    "a carry without rows": lambda x: ops.scan(
        lambda c, x: ((c[0] + x * c[1], c[1] * 0.5), c[0]), (x[0], BIAS * 1.0), x
    ),
}


def program(loop, rows, backward=False):
    def step(x):
        last, stacked = loop(x)
        last = last if isinstance(last, tuple) else (last,)
        outputs = {f"last {number}": value for number, value in enumerate(last)} | {"stacked": stacked * 1.0}
        if backward:
            loss = ops.sum(ops.square(stacked)) + sum(ops.sum(ops.sin(value)) for value in last)
            outputs |= dict(
                zip(("dx", "dkernel", "dbias"), gradients(loss, [x, KERNEL.value, BIAS.value]), strict=True)
            )
        return {name: value for name, value in outputs.items() if value is not None}

    return trace(step, {"x": ((STEPS, Dim.rows(rows), UNITS), "float32")})


def run(traced, rows, threads):
    x = np.random.default_rng(rows).normal(size=(STEPS, rows, UNITS)).astype(np.float32)
    executable = CompiledExecutable(traced, HostMemory(), {"x": x}, rows=rows, threads=threads)
    executable.run()
    reference = by_numpy(traced, {"x": x}, rows=rows)
    reference.run()
    for name, expected in reference.outputs.items():
        np.testing.assert_allclose(executable.outputs[name], expected, rtol=2e-4, atol=2e-4, err_msg=name)
    return {name: np.array(array) for name, array in executable.outputs.items()}


@pytest.mark.parametrize("name", APART)
def test_threads_that_take_rows_have_the_bits_of_one(name):
    traced = program(APART[name], 24)
    assert len(lowered(traced)[1].apart) == 1
    for rows, threads in ((24, 3), (LEAST_ROWS * 3 - 1, 4), (LEAST_ROWS * 3 - 1, 5), (3, 2), (100, 5)):
        alone = run(traced, rows, 1)
        for _ in range(3):
            for result, array in run(traced, rows, threads).items():
                np.testing.assert_array_equal(array, alone[result], err_msg=f"{result} of {rows} rows")


@pytest.mark.parametrize("name", TOGETHER)
def test_loops_whose_rows_need_each_other_stay_whole(name):
    traced = program(TOGETHER[name], 24)
    assert not lowered(traced)[1].apart
    np.testing.assert_array_equal(run(traced, 24, 3)["stacked"], run(traced, 24, 1)["stacked"])


def test_gradients_of_a_cell_and_of_its_bias_are_apart_too():
    traced = program(APART["a recurrent cell"], 24, backward=True)
    assert len(lowered(traced)[1].apart) == 2
    for rows in (24, 50):
        alone, shared = (run(traced, rows, threads) for threads in (1, 3))
        for name, array in alone.items():
            np.testing.assert_array_equal(shared[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("length", "width", "count"), [(700, 15, 9000), (700, 16, 9000), (40, 33, 1000), (9000, 33, 70)]
)
def test_threads_share_the_rows_of_a_table_that_rows_are_added_to(length, width, count):
    """With fewer columns, and with fewer rows, one thread adds them all."""
    table = Variable(np.zeros((length, width), np.float32))

    def step(places, factors):
        (grad,) = gradients(ops.sum(ops.take(table, places, 0) * factors), [table.value])
        return {"grad": grad}

    rng = np.random.default_rng(0)
    places, factors = rng.integers(0, length, count), rng.normal(size=(count, width)).astype(np.float32)
    traced = trace(step, {"places": ((count,), "int64"), "factors": ((count, width), "float32")})
    expected = np.zeros((length, width), np.float32)
    np.add.at(expected, places, factors)
    for threads in (1, 2, 5):
        arrays = {"places": places, "factors": factors}
        executable = CompiledExecutable(traced, HostMemory(), arrays, threads=threads)
        executable.run()
        np.testing.assert_array_equal(executable.outputs["grad"], expected, err_msg=f"{threads} threads")
