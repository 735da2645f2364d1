"""Which totals are sums over samples."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.additive import sums_over_samples
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.tensor import Variable


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (lambda x: ops.sum(x), True),
        (lambda x: ops.mean(x) * x.shape[0], True),
        (lambda x: ops.cast(x.shape[0], "float32"), True),
        (lambda x: -2.0 * ops.sum(ops.where(x > 0, x, 0.0)), True),
        (lambda x: ops.sum(x / 7) - ops.mean(x) * 3 * x.shape[0], True),
        (lambda x: ops.mean(x), False),
        (lambda x: ops.sum(x) * x.shape[0], False),
        (lambda x: ops.sum(x) + ops.mean(x), False),
        (lambda x: ops.sqrt(ops.mean(x)) * x.shape[0], False),
        (lambda x: ops.cast(x.shape[0], "float32") * x.shape[0], False),
        (lambda x: 1.0, False),
    ],
)
def test_what_is_added(added, expected):
    total, other = Variable(np.float32(0), "total"), Variable(np.float32(0), "other")

    def step(x):
        total.assign_add(added(x))
        return {}

    program = trace(step, {"x": ((Dim.rows(6),), np.float32)})
    assert sums_over_samples(program, [total, other]) is expected


def test_what_is_not_added():
    total = Variable(np.float32(0), "total")

    def step(x):
        total.assign(ops.maximum(total, ops.max(x)))
        return {}

    assert not sums_over_samples(trace(step, {"x": ((Dim.rows(6),), np.float32)}), [total])


def test_several_sums():
    total = Variable(np.float32(0), "total")

    def step(x):
        total.assign_add(ops.sum(x))
        total.assign_add(ops.sum(x * x))
        return {"sum": total}

    assert sums_over_samples(trace(step, {"x": ((Dim.rows(6),), np.float32)}), [total])
