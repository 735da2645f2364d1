"""Cumulative sums and products, against NumPy's, at lengths on both sides of a block's."""

import tracemalloc

import numpy as np
import pytest

from dptrain import layers, ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import differentiable
from tests.unit.program.virtual_ranks import run_on_ranks

RNG = np.random.default_rng(0)
LENGTHS = [0, 1, 2, 15, 16, 17, 32, 33, 255, 256, 257, 300]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_any_length(name, length):
    x = RNG.uniform(0.8, 1.2, (2, length, 3))
    for axis in (1, -2, None):
        expected = getattr(np, name)(x, axis)
        np.testing.assert_allclose(getattr(ops, name)(x, axis), expected, rtol=1e-11)


@pytest.mark.parametrize("length", [3, 16, 40])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_gradient(name, length):
    """The derivative of each result in an element of it or before it; zeros in a product do not disturb."""
    x, weights = RNG.normal(size=length), RNG.normal(size=length)
    x[1] = 0
    source = differentiable(x)
    (gradient,) = gradients(getattr(ops, name)(source), [source], weights)
    expected = np.cumsum(weights[::-1])[::-1]
    if name == "cumprod":
        expected = np.array(
            [sum(weights[k] * np.delete(x[: k + 1], n).prod() for k in range(n, length)) for n in range(length)]
        )
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-14)


def test_nan_and_infinity_stay_behind_their_place():
    x = np.ones(40)
    x[20], x[30] = np.inf, np.nan
    np.testing.assert_array_equal(ops.cumsum(x), np.cumsum(x))
    np.testing.assert_array_equal(ops.cumprod(x), np.cumprod(x))


def test_types():
    flags, small = np.array([True, False, True]), np.full(9, 100, np.uint8)
    np.testing.assert_array_equal(ops.cumsum(flags), [1, 1, 2])
    sums = ops.cumsum(small)
    assert (sums.dtype, int(sums[-1])) == (np.uint32, 900)
    assert ops.cumsum(small, dtype="float32").dtype == np.float32


def test_memory_is_linear():
    """A product with a triangular matrix would take 1 GB."""
    tracemalloc.start()
    sums = ops.cumsum(np.ones(16_000, np.float32))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (float(sums[-1]), most < 4_000_000) == (16_000, True)
    assert ops.cumsum(layers.Input((16_000,)), 1).shape[1] == 16_000


def step(x):
    return {"y": ops.cumsum(x, 1), "loss": ops.sum(ops.cumprod(x, 1))}


def test_on_ranks():
    x = RNG.normal(size=(5, 40))
    program = trace(step, {"x": ((Dim.rows(5), 40), x.dtype)})
    single_rank, _ = evaluate(program, {"x": x})
    np.testing.assert_allclose(single_rank["y"], np.cumsum(x, 1), rtol=1e-11)
    per_rank, _ = run_on_ranks(place(program), {"x": x}, [2, 0, 3], {"x": 0})
    np.testing.assert_allclose(np.concatenate([outputs["y"] for outputs, _ in per_rank]), single_rank["y"], rtol=1e-12)
    np.testing.assert_allclose(per_rank[1][0]["loss"], single_rank["loss"], rtol=1e-10)


def test_along_the_rows_of_a_batch():
    x = RNG.normal(size=(5, 4))
    program = trace(lambda x: {"y": ops.cumsum(x, 0)}, {"x": ((Dim.rows(5), 4), np.float64)})
    per_rank, _ = run_on_ranks(place(program), {"x": x}, [2, 0, 3], {"x": 0})
    actual = np.concatenate([outputs["y"] for outputs, _ in per_rank])
    np.testing.assert_allclose(actual, np.cumsum(x, 0), rtol=1e-13, atol=1e-15)
