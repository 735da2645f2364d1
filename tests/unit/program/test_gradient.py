"""What the reverse pass writes down."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.lowering import Insert, lowering_of
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

X = np.random.default_rng(0).normal(size=(4, 6))
PARTS = {
    "tiles": (lambda x: (x[:, 3:], x[:, :1], x[:, 1:3]), True),
    "one element each": (lambda x: ops.split(x, 6, 1), True),
    "a gap": (lambda x: (x[:, :2], x[:, 3:]), False),
    "an overlap": (lambda x: (x[:, :4], x[:, 3:]), False),
    "a step": (lambda x: (x[:, ::2], x[:, 1::2]), False),
    "two axes": (lambda x: (x[:2, :3], x[:2, 3:], x[2:, :3], x[2:, 3:]), False),
    "rows": (lambda x: (x[:2], x[2:]), True),
    "places": (lambda x: (x[0], x[1], x[2:]), False),
    "used twice": (lambda x: (x[:, :3], x[:, 3:], x * x), False),
}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_parts_that_tile_a_tensor_are_put_beside_each_other(name):
    cut, partial_reduce = PARTS[name]
    w = Variable(X, "w")

    def step():
        w._gradient = None
        ops.sum(ops.stack([ops.sum(part**3) * (n + 1) for n, part in enumerate(cut(w * 1.0))])).backward()
        return {"grad": w.value.grad}

    program = trace(step, {})
    kinds = [type(lowering_of(tensor)) for tensor in program.derived.tensors]
    assert kinds.count(Insert) == 0 if partial_reduce else kinds.count(Insert) > 0
    expected, shift = np.zeros_like(X), 1e-6

    def loss(x):
        return sum(float(ops.sum(part**3)) * (n + 1) for n, part in enumerate(cut(ops.convert_to_tensor(x))))

    for place in np.ndindex(X.shape):
        change = np.zeros_like(X)
        change[place] = shift
        expected[place] = (loss(X + change) - loss(X - change)) / (2 * shift)
    np.testing.assert_allclose(evaluate(program, {})[0]["grad"], expected, rtol=1e-5, atol=1e-7)


def test_rows_of_a_batch_that_are_cut_stay_on_their_rank():
    def step(x):
        joined = ops.concatenate([x, 2 * x])
        n = x.shape[0]
        w = Variable(np.ones(3))
        y = joined * w
        ops.sum(ops.exp(y[:n]) + y[n:]).backward()
        return {"w": w.value.grad}

    program = trace(step, {"x": ((Dim.rows(4), 3), np.float64)})
    assert not program.shape_specialised
    assert Insert in [type(lowering_of(tensor)) for tensor in program.tensors]
