"""Functions made of other ops, against NumPy's in float64."""

import warnings

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError

RNG = np.random.default_rng(0)
X, M, V = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(3, 5)), RNG.normal(size=4)
NAN = np.where(RNG.random((3, 5)) < 0.4, np.nan, M)
NAN[1] = np.nan
SMALL = np.array([1e-12, -1e-12, 0.0, 3.0, -20.0])
NUMPY = [
    *((name, (M,)) for name in ("exp2", "expm1", "sinh", "cosh", "arcsinh", "cbrt", "deg2rad", "rad2deg", "fabs")),
    *((name, (SMALL,)) for name in ("expm1", "sinh", "arcsinh", "cbrt")),
    ("arccosh", (1 + M * M,)),
    ("arctanh", (np.tanh(M),)),
    ("arctanh", (SMALL[:3],)),
    ("trunc", (M * 3,)),
    ("hypot", (M, M[0])),
    ("logaddexp2", (M * 900, M[0])),
    ("heaviside", (np.array([-1.0, 0.0, 2.0, np.nan]), 0.5)),
    ("true_divide", (M, M[0])),
    ("isneginf", (np.array([1.0, np.inf, -np.inf, np.nan]),)),
    ("isposinf", (np.array([1.0, np.inf, -np.inf, np.nan]),)),
    ("allclose", (M, M + 1e-9)),
    ("allclose", (M, M + 1)),
    *((name, (X, 1)) for name in ("amax", "amin", "ptp")),
    *((name, (NAN, axis)) for name in ("nansum", "nanprod", "nanmean", "nanvar", "nanstd") for axis in (None, 0, 1)),
    *((name, (NAN, axis)) for name in ("nanmax", "nanmin") for axis in (None, 0, 1)),
    *(("append", (M, M, axis)) for axis in (None, 0, -1)),
    ("dstack", ([M, M],)),
    ("dstack", ([V, V],)),
    *(("roll", (X, *arguments)) for arguments in ((5,), (-1, 1), ((1, -2), (0, 2)), (4, -1))),
    ("fliplr", (X,)),
    ("flipud", (X,)),
    *(("rot90", (X, k, axes)) for k in range(-1, 5) for axes in ((0, 1), (2, 1))),
    *(("diagonal", (X, *arguments)) for arguments in ((), (1,), (-1, 1, 2), (2, 2, 0), (9,))),
    *(("diag", (array, k)) for array in (V, M) for k in (-2, 0, 1)),
    ("trace", (X, 1, 1, 2)),
    *(("diff", (X, n, axis)) for n in (1, 2) for axis in (0, -1)),
    ("inner", (X, M[:, :4])),
    ("inner", (V, 2.0)),
    ("arctan", (M * 5,)),
    *((name, (np.tanh(M),)) for name in ("arcsin", "arccos")),
    ("arctan2", (M, M[::-1])),
    ("arctan2", (np.array([0.0, 0, 1, -1, np.inf, np.inf]), np.array([0.0, -1, 0, 0, 5, np.inf]))),
    ("fmod", (M * 3, np.array([1.5, -1.5, 0.7, -0.7, 2.0]))),
    ("fmod", (np.array([7, -7]), 3)),
    *((name, (NAN, M[::-1])) for name in ("fmax", "fmin")),
    ("sinc", (np.append(M, [0.0, 1.0, -2.0]),)),
    ("trapezoid", (M,)),
    ("trapezoid", (M, None, 0.5, 0)),
    ("trapezoid", (M, np.array([0.0, 1, 3, 3.5, 7]))),
    ("trapezoid", (M, np.cumsum(np.exp(M), 0), 1.0, 0)),
    *((name, (NAN[[0, 2]], axis)) for name in ("nanargmax", "nanargmin") for axis in (1, None)),
    *((name, (NAN, axis)) for name in ("nancumsum", "nancumprod") for axis in (0, 1, None)),
    ("diagflat", (M[:2, :2], -1)),
    *(("vander", arguments) for arguments in ((V,), (V, 3), (V, 3, True))),
    *(("kron", arguments) for arguments in ((M, X[0]), (V, V), (M, X), (X, 2.0))),
    ("cross", (X[..., :3], X[..., 1:])),
    ("cross", (X[..., :3], V[:3], -1, -1, 0)),
    ("cross", (X, X[::-1], 1, 1, 2)),
    ("cross", (X, X[::-1], -1, -1, -1, 1)),
    *(("isin", (np.arange(6).reshape(2, 3), [1, 4, 9], *arguments)) for arguments in ((), (False, True))),
    *(("searchsorted", (np.array([1.0, 2, 2, 5]), np.array([[0.0, 2], [3, 9]]), side)) for side in ("left", "right")),
    ("digitize", (M, np.array([-1.0, 0.0, 0.5]))),
    ("select", ([M > 1, M > 0], [M, -M], 7.0)),
]


@pytest.mark.parametrize(
    ("name", "arguments"), NUMPY, ids=lambda parameter: parameter if isinstance(parameter, str) else ""
)
def test_values_are_numpys(name, arguments):
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # all NaN
        expected = getattr(np, name)(*arguments)
    actual = getattr(ops, name)(*arguments)
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-18)


def test_parts():
    for actual, expected in (
        (ops.array_split(M, 3, 1), np.array_split(M, 3, 1)),
        (ops.array_split(M, [1, 2], 1), np.array_split(M, [1, 2], 1)),
        (ops.hsplit(X, 3), np.hsplit(X, 3)),
        (ops.hsplit(V, 2), np.hsplit(V, 2)),
        (ops.vsplit(X, 2), np.vsplit(X, 2)),
        (ops.dsplit(X, 2), np.dsplit(X, 2)),
        (ops.meshgrid(V, M[0], M[:, 0]), np.meshgrid(V, M[0], M[:, 0])),
        (ops.meshgrid(V, M[0], indexing="ij"), np.meshgrid(V, M[0], indexing="ij")),
        (ops.moments(X, [0, 2]), (X.mean((0, 2)), X.var((0, 2)))),
    ):
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_elements_along_an_axis():
    order = np.argsort(X, 1)
    np.testing.assert_array_equal(ops.take_along_axis(X, order, 1), np.sort(X, 1))
    np.testing.assert_array_equal(ops.take_along_axis(X, order[:1], 1), np.take_along_axis(X, order[:1], 1))
    np.testing.assert_array_equal(ops.take_along_axis(X, [3, -1], None), X.ravel()[[3, -1]])
    np.testing.assert_array_equal(ops.get_item(X, (0, ..., -1)), X[0, ..., -1])


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_elements_along_an_axis_of_a_batch(axis):
    class Sorted(dp.layers.Layer):
        def call(self, x):
            return ops.take_along_axis(x, ops.argsort(x, axis), axis)

    model = dp.Sequential([dp.Input((3, 4)), Sorted()])
    np.testing.assert_allclose(model.predict(X, verbose=0), np.sort(X, axis), rtol=1e-6)


def test_the_greatest_of_each_vector_of_a_batch():
    class Greatest(dp.layers.Layer):
        def call(self, x):
            return ops.top_k(x, 2)[0]

    model = dp.Sequential([dp.Input((3, 4)), Greatest()])
    np.testing.assert_allclose(model.predict(X, verbose=0), np.sort(X, -1)[..., :-3:-1], rtol=1e-6)
    assert ops.top_k(dp.Input((None, 4)), 2)[1].shape[-1] == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_moments_of_half_precision_do_not_overflow(dtype):
    x = ops.cast(np.array([0.0, 1000.0, 3000.0]), dtype)
    center, spread = (float(moment) for moment in ops.moments(x, 0))
    assert center == pytest.approx(4000 / 3, rel=1e-2)
    assert spread == pytest.approx(65504 if dtype == "float16" else np.var([0, 1000, 3000]), rel=1e-2)


def test_places_of_nothing_but_nan_are_below_0():
    np.testing.assert_array_equal(ops.nanargmax(NAN, 1, keepdims=True)[1], [-1])
    np.testing.assert_array_equal(ops.nanargmin(np.full(3, np.nan)), -1)


def test_vectors_of_a_plane_and_of_space():
    x, y = X[..., :2], X[..., 2:]
    np.testing.assert_allclose(ops.cross(x, y), x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0], rtol=1e-12)
    flat = np.append(x, np.zeros((2, 3, 1)), -1)
    np.testing.assert_allclose(ops.cross(x, X[..., 1:]), np.cross(flat, X[..., 1:]), rtol=1e-12)


def test_a_block_is_replaced():
    actual = ops.slice_update(X, (0, 1, 1), np.ones((1, 2, 2)))
    expected = X.copy()
    expected[:1, 1:3, 1:3] = 1
    np.testing.assert_array_equal(actual, expected)


def test_halves_gate_each_other():
    np.testing.assert_allclose(ops.glu(X), X[..., :2] / (1 + np.exp(-X[..., 2:])), rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.roll(M, (1, 2)), "without an axis; expected one integer"),
        (lambda: ops.roll(M, (1, 2), 0), "expected one shift for each axis"),
        (lambda: ops.diag(X), "expected a vector or a matrix"),
        (lambda: ops.meshgrid(V, indexing="a"), "expected 'xy' or 'ij'"),
        (lambda: ops.take_along_axis(X, [0], 1), "indices with 1 axes, a tensor with 3"),
        (lambda: ops.segment_sum(X, [0, 1, 1]), "same leading dimension"),
        (lambda: ops.segment_max(X, [[0, 1]]), "should be an 1-D vector"),
        (lambda: ops.segment_prod(X, [0.0, 1.0]), "of integers"),
        (lambda: ops.cross(V, V), "vectors of lengths 4 and 4; expected 2 or 3"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
