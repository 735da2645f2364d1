"""Order, distinct elements, quantiles, counts, places and bits, against NumPy."""

import warnings

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace

RNG = np.random.default_rng(0)
X, N = RNG.normal(size=(3, 4, 5)), RNG.integers(0, 7, (3, 4)).astype(np.int32)
NAN = np.where(RNG.random((4, 6)) < 0.3, np.nan, RNG.normal(size=(4, 6)))
NAN[1] = np.nan
METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_sort(axis):
    np.testing.assert_array_equal(ops.sort(X, axis), np.sort(X, axis))
    np.testing.assert_array_equal(ops.argsort(N, axis if axis < 1 else 1), np.argsort(N, axis, kind="stable"))
    places = ops.argpartition(X, 2, axis).numpy()
    np.testing.assert_array_equal(np.take_along_axis(X, places, axis).take(2, axis), np.sort(X, axis).take(2, axis))
    assert ops.argsort(X).dtype == places.dtype == np.int32
    with pytest.raises(ConfigError, match="kth=9 is out of range"):
        ops.argpartition(X, 9, axis)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, (0, 2), -1])
def test_quantiles(axis, keepdims):
    for method in METHODS:
        for q in (0.3, [0.1, 0.5, 0.93], [[0.2], [1.0]]):
            quantiles = ops.quantile(X, q, axis, method, keepdims)
            np.testing.assert_allclose(quantiles, np.quantile(X, q, axis, method=method, keepdims=keepdims), rtol=1e-12)
            quantiles = ops.percentile(X, np.multiply(q, 100), axis, method, keepdims)
            np.testing.assert_allclose(quantiles, np.quantile(X, q, axis, method=method, keepdims=keepdims), rtol=1e-9)
    np.testing.assert_allclose(ops.median(X, axis, keepdims), np.median(X, axis, keepdims=keepdims), rtol=1e-12)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_quantiles_beside_nans(axis):
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # all NaN
        for method in METHODS:
            expected = np.nanquantile(NAN, [0.1, 0.5, 0.8], axis, method=method)
            np.testing.assert_allclose(ops.nanquantile(NAN, [0.1, 0.5, 0.8], axis, method), expected, rtol=1e-12)
            expected = np.nanpercentile(NAN, 30, axis, method=method)
            np.testing.assert_allclose(ops.nanpercentile(NAN, 30, axis, method), expected, rtol=1e-12)
        np.testing.assert_allclose(ops.nanmedian(NAN, axis), np.nanmedian(NAN, axis), rtol=1e-12)
        np.testing.assert_allclose(ops.median(NAN, axis), np.median(NAN, axis), rtol=1e-12)
    for arguments, message in (((X, 1.2), "from 0 to 1"), ((X, 0.5, 0, "middle"), "method='middle'; expected")):
        with pytest.raises(ConfigError, match=message):
            ops.quantile(*arguments)


def test_unique():
    for axis in (None, 0, 1):
        actual = ops.unique(N, True, True, True, True, axis=axis)
        for part, expected in zip(actual, np.unique(N, True, True, True, axis), strict=True):
            np.testing.assert_array_equal(part.numpy().ravel(), expected.ravel())
    values = np.unique(N)
    np.testing.assert_array_equal(ops.unique(N, size=3), values[:3])
    np.testing.assert_array_equal(ops.unique(N, size=9), np.append(values, [values[0]] * (9 - len(values))))
    for size in (3, 9):
        for fill in (None, -5):

            def step(x, size=size, fill=fill):
                parts = ops.unique(x, True, True, True, True, size=size, fill_value=fill)
                return dict(zip("vijc", parts, strict=True))

            outputs, _ = evaluate(trace(step, {"x": (N.shape, "int32")}), {"x": N})
            for key, expected in zip(
                "vijc", ops.unique(N, True, True, True, True, size=size, fill_value=fill), strict=True
            ):
                np.testing.assert_array_equal(outputs[key], expected, err_msg=key)
    with pytest.raises(ConfigError, match="unique without size"):
        trace(lambda x: {"y": ops.unique(x)}, {"x": (N.shape, "int32")})


def test_counts():
    for x, weights, least in ((N[0], None, 0), (N[0], None, 12), (N[0], X[0, :, 0], 0)):
        np.testing.assert_allclose(ops.bincount(x, weights, least), np.bincount(x, weights, least), rtol=1e-12)
    np.testing.assert_array_equal(ops.bincount(N, minlength=9), [np.bincount(row, minlength=9) for row in N])
    outside = trace(lambda x: {"y": ops.bincount(x, minlength=3)}, {"x": ((4,), "int32")})
    np.testing.assert_array_equal(evaluate(outside, {"x": np.array([0, 2, 2, 7], np.int32)})[0]["y"], [1, 0, 2])
    for x, bins, bounds in ((X.ravel(), 10, None), (X.ravel(), 4, (-1.0, 1.0)), (np.ones(3), 3, None)):
        for actual, expected in zip(ops.histogram(x, bins, bounds), np.histogram(x, bins, bounds), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12)
    with pytest.raises(ConfigError, match="pass minlength"):
        trace(lambda x: {"y": ops.bincount(x)}, {"x": ((4,), "int32")})
    for arguments, message in (
        ((X.ravel(), -1), "non-negative"),
        ((X,), "1-dimensional"),
        ((N[0], 3, (2, 1)), "greater"),
    ):
        with pytest.raises(ConfigError, match=message):
            ops.histogram(*arguments)


def test_places():
    updates = RNG.normal(size=(3, 5))
    expected = X.copy()
    expected[0, 1], expected[2, 3] = updates[2], updates[1]
    np.testing.assert_array_equal(ops.scatter_update(X, [[0, 1], [2, 3], [0, 1]], updates), expected)
    for name, function in (("add", np.add), ("max", np.maximum), ("min", np.minimum), ("mul", np.multiply)):
        expected = X.copy()
        function.at(expected, ([0, 2, 0], [1, 3, 1]), updates)
        actual = ops.scatter_update(X, [[0, 1], [2, 3], [0, 1]], updates, reduction=name)
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
    np.testing.assert_array_equal(ops.slice(X, (0, 1, 2), (2, -1, 3)), X[:2, 1:, 2:5])
    program = trace(
        lambda x, at: {"y": ops.slice(x, at, (2, 2, 2))}, {"x": (X.shape, "float64"), "at": ((3,), "int32")}
    )
    actual = evaluate(program, {"x": X, "at": np.array([1, 0, 9], np.int32)})[0]["y"]
    np.testing.assert_array_equal(actual, X[1:3, 0:2, 3:5])
    for actual, expected in zip(ops.unravel_index([5, -1], (3, 4)), np.unravel_index([5, 11], (3, 4)), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for name, empty in (("segment_max", -np.inf), ("segment_min", np.inf), ("segment_prod", 1)):
        actual = getattr(ops, name)(X, np.array([1, 1, -1]), num_segments=3).numpy()
        join = {"segment_max": np.max, "segment_min": np.min, "segment_prod": np.prod}[name]
        np.testing.assert_allclose(actual[1], join(X[:2], 0), rtol=1e-12)
        assert (actual[[0, 2]] == empty).all()
    assert ops.segment_min(N, np.array([0, 0, 0]), 2).numpy()[1].tolist() == [np.iinfo(np.int32).max] * 4


@pytest.mark.parametrize("block", [(2, 2, 2), (1, 4, 1), (3, 1, 5)])
def test_a_block_starts_where_the_step_says(block):
    updates, at = RNG.normal(size=block), np.array([1, 0, 9], np.int32)
    first = np.clip(at, 0, np.subtract(X.shape, block))
    key = tuple(slice(start, start + length) for start, length in zip(first, block, strict=True))

    def step(x, at, updates):
        starts = (int(first[0]), at[1], at[2])
        return {
            "all": ops.slice_update(x, at, updates),
            "some": ops.slice_update(x, starts, updates),
            "taken": ops.slice(x, starts, block),
        }

    arrays = {"x": X, "at": at, "updates": updates}
    program = trace(step, {name: (array.shape, array.dtype.name) for name, array in arrays.items()})
    actual = evaluate(program, arrays)[0]
    expected = X.copy()
    expected[key] = updates
    np.testing.assert_array_equal(actual["all"], expected)
    np.testing.assert_array_equal(actual["some"], expected)
    np.testing.assert_array_equal(actual["taken"], X[key])


def test_the_gradient_of_a_block_that_is_written_in_a_loop():
    x, y = dp.Variable(X), dp.Variable(RNG.normal(size=(4, 3, 1, 5)))
    weights = RNG.normal(size=(3, 4, 5))

    def step():
        with dp.GradientTape() as tape:
            filled = ops.fori_loop(0, 2, lambda i, cache: ops.slice_update(cache, (0, i + 1, 0), y[i]), x * 1.0)
            loss = ops.sum(filled * weights)
        return dict(zip("xy", tape.gradient(loss, [x, y]), strict=True))

    for gradients in (evaluate(trace(step, {}), {})[0], step()):
        expected = weights.copy()
        expected[:, 1:3] = 0
        np.testing.assert_allclose(gradients["x"], expected)
        expected = np.zeros((4, 3, 1, 5))
        expected[:2, :, 0] = weights[:, 1:3].transpose(1, 0, 2)
        np.testing.assert_allclose(gradients["y"], expected)


def test_a_block_of_all_rows_holds_for_any_number_of_rows():
    def step(x, at):
        block = ops.slice(x, (0, at, 0), (x.shape[0], 2, 5))
        return {"rest": ops.slice(x, (0, 1, 0), (-1, 1, -1)), "y": ops.slice_update(x, (0, at, 1), block[..., :4])}

    program = trace(step, {"x": ((Dim.rows(3), 4, 5), "float64"), "at": ((), "int32")})
    assert not program.shape_specialised
    actual = evaluate(program, {"x": X[:2], "at": np.int32(2)}, rows=2)[0]
    expected = X[:2].copy()
    expected[:, 2:, 1:] = X[:2, 2:, :4]
    np.testing.assert_array_equal(actual["y"], expected)
    np.testing.assert_array_equal(actual["rest"], X[:2, 1:2])


_TYPES = ["int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("theirs", _TYPES)
def test_views_of_every_type_are_its_bytes(theirs):
    for dtype in _TYPES:
        numbers = np.arange(-8, 8).astype(dtype)
        view, expected = ops.view(numbers, theirs), numbers.view(theirs)
        assert (view.shape, view.dtype) == (expected.shape, expected.dtype)
        assert view.value.tobytes() == expected.tobytes(), dtype


def test_bits():
    a, b = N - 3, N[::-1]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "lcm", "left_shift", "right_shift"):
        np.testing.assert_array_equal(getattr(ops, name)(a, b), getattr(np, name)(a, b), err_msg=name)
    np.testing.assert_array_equal(ops.bitwise_not(a), ~a)
    np.testing.assert_array_equal(ops.bitwise_invert(a > 0), a <= 0)
    np.testing.assert_array_equal(ops.left_shift(a, 40), np.zeros_like(a))
    np.testing.assert_array_equal(ops.ldexp(X, np.arange(5)), np.ldexp(X, np.arange(5)))
    assert float(ops.ldexp(np.float64(0.25), 1025)) == 2.0**1023
    np.testing.assert_array_equal(ops.signbit(np.array([-0.0, 0.0, -1.0, np.inf])), [True, False, True, False])
    np.testing.assert_array_equal(ops.view(X, "int64"), X.view(np.int64))
    np.testing.assert_array_equal(ops.view(a, "int16"), a.view(np.int16))
    np.testing.assert_array_equal(ops.nextafter(X, 0.0), np.nextafter(X, 0.0))
    with pytest.raises(ConfigError, match="expected integers, found float"):
        ops.bitwise_and(X, 1)
    with pytest.raises(ConfigError, match="must be an integer type"):
        ops.ldexp(X, 2.0)
