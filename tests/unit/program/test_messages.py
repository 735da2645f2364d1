"""Which sums travel together, and in what order."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program import messages
from dptrain.program.execute import Executable, HostMemory
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.program.shapes import Rows
from dptrain.program.tensor import Variable
from tests.unit.program.virtual_ranks import on_ranks

ROWS, FEATURES = 6, 4
DATA = {"x": np.random.default_rng(0).normal(size=(ROWS, FEATURES))}


def chain(layers):
    """Return a step of some layers in a row, and their weights."""
    rng = np.random.default_rng(1)
    weights = [Variable(rng.normal(size=(FEATURES, FEATURES)), f"w{number}") for number in range(layers)]

    def step(x):
        for one in weights:
            x = ops.tanh(x @ one)
        loss = ops.mean(ops.square(x))
        loss.backward()
        for one in weights:
            one.assign(one - 0.1 * one.grad)
        return {"loss": loss}

    return trace(step, {"x": ((Rows(ROWS), FEATURES), np.float64)}), weights


WEIGHT_BYTES = FEATURES * FEATURES * 8


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        (None, [["loss", "w2", "w1", "w0"]]),
        (1, [["loss"], ["w2"], ["w1"], ["w0"]]),
        (2 * WEIGHT_BYTES, [["loss", "w2"], ["w1", "w0"]]),
    ],
)
def test_buckets_in_the_order_of_the_backward_pass(bucket, expected):
    program, weights = chain(3)
    placed = place(program, bucket_bytes=bucket)
    (stage, last) = messages.stages(placed)
    assert not last.messages
    of = {id(placed.outputs["loss"]): "loss"}
    for variable in weights:
        of |= {id(one): variable.name for one in placed.updates[variable].inputs}
    assert [[of[id(one)] for one in message] for message in stage.messages] == expected
    assert messages.count(placed) == len(expected)


@pytest.mark.parametrize("bucket", [1, 2 * WEIGHT_BYTES])
def test_buckets_change_nothing(bucket):
    results = []
    for most in (None, bucket):
        program, weights = chain(3)
        placed = place(program, bucket_bytes=most)

        def work(comm, placed=placed, weights=weights):
            rows, start = (4, 0) if comm.rank == 0 else (2, 4)
            memory = HostMemory()
            own = {"x": DATA["x"][start : start + rows]}
            made = Executable(placed, memory, own, rows=rows, first_row=start, comm=comm)
            made.run()
            return [memory.array(one).copy() for one in weights]

        results.append(on_ranks(2, work)[0])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
