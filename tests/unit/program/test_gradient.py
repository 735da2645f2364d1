"""What the reverse pass writes down."""

import itertools

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
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


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_any_slices_add_up(seed):
    """Beside each other, over each other, with gaps, by steps, in any order."""
    rng, length = np.random.default_rng(seed), 8

    def key():
        start, stop = np.sort(rng.integers(0, length + 1, 2), kind="stable").tolist()
        return slice(start, stop, int(rng.choice([1, 1, 1, 2, 3])))

    def tiles():
        ends = [0, *np.unique(rng.integers(1, length, 2)).tolist(), length]
        return [slice(*pair, int(rng.choice([1, 1, 2]))) for pair in itertools.pairwise(ends)]

    drawn = [tiles() if rng.random() < 0.6 else [key() for _ in range(rng.integers(1, 4))] for _ in range(60)]
    keys = [[chosen[n] for n in rng.permutation(len(chosen))] for chosen in drawn]

    def step(x):
        return {
            f"{n}": gradients(sum(ops.sum(ops.sin(x[:, part]) * (k + 1)) for k, part in enumerate(chosen)), [x])[0]
            for n, chosen in enumerate(keys)
        }

    x = rng.normal(size=(2, length))
    outputs, _ = evaluate(trace(step, {"x": (x.shape, x.dtype)}), {"x": x})
    for n, chosen in enumerate(keys):
        expected = np.zeros_like(x)
        for k, part in enumerate(chosen):
            expected[:, part] += (k + 1) * np.cos(x[:, part])
        np.testing.assert_allclose(outputs[f"{n}"], expected, rtol=1e-12, err_msg=str(chosen))
