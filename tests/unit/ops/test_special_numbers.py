"""NaN, infinities, integers, truth values and no elements: what NumPy and Keras say of them."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

INF, NAN = np.inf, np.nan
BYTES = np.array([[200, 0, 7], [255, 128, 1]], np.uint8)
FLAGS = np.array([[True, False, True], [False, False, True]])
LEAST = np.array([np.iinfo(np.int32).min, 5], np.int32)
EMPTY = np.zeros((0, 3), np.float32)


@pytest.mark.parametrize("name", ["exp", "log", "log1p", "sqrt", "sin", "cos", "tanh", "arctan", "arcsin", "arccos"])
@pytest.mark.parametrize("x", [BYTES, FLAGS, BYTES.view(np.int8)], ids=["bytes", "flags", "int8"])
def test_functions_of_narrow_integers_are_as_exact_as_float32(name, x):
    actual = getattr(ops, name)(x)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x.astype(np.float64)).astype(np.float32)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_sigmoid_of_bytes():
    np.testing.assert_allclose(ops.sigmoid(np.array([0, 3, 200], np.uint8)), [0.5, 0.95257413, 1], rtol=1e-6)
    np.testing.assert_allclose(ops.softplus(np.array([0, 3], np.uint8)), np.log1p(np.exp([0.0, 3])), rtol=1e-6)
    np.testing.assert_allclose(ops.elu(np.array([-1, 3], np.int8)), [np.expm1(-1), 3], rtol=1e-6)


CASES = {
    "sum of bytes": (lambda: ops.sum(BYTES), np.array(591, np.uint32)),
    "sum of int8": (lambda: ops.sum(np.full(9, 100, np.int8)), np.array(900, np.int32)),
    "prod of bytes": (lambda: ops.prod(BYTES[1:]), np.array(255 * 128, np.uint32)),
    "min of bytes": (lambda: ops.min(BYTES, 1), np.array([0, 1], np.uint8)),
    "min of the least": (lambda: ops.min(LEAST), LEAST[0]),
    "argmin of the least": (lambda: ops.argmin(LEAST), np.array(0, np.int32)),
    "argmin of bytes": (lambda: ops.argmin(BYTES, 1), np.array([1, 2], np.int32)),
    "argmin of flags": (lambda: ops.argmin(FLAGS, 1), np.array([1, 0], np.int32)),
    "max of flags": (lambda: ops.max(FLAGS, 1), np.array([True, True])),
    "min of flags": (lambda: ops.min(FLAGS, 1), np.array([False, False])),
    "max from": (lambda: ops.max(EMPTY, 0, initial=2.0), np.full(3, 2, np.float32)),
    "min from": (lambda: ops.min(BYTES, 1, initial=0), np.array([0, 0], np.uint8)),
    "all of nothing": (lambda: ops.all(EMPTY, 0), np.array([True] * 3)),
    "any of nothing": (lambda: ops.any(EMPTY, 0), np.array([False] * 3)),
    "logsumexp of infinities": (
        lambda: ops.logsumexp([[INF, 1.0], [-INF, -INF], [NAN, 1.0]], 1),
        np.array([INF, -INF, NAN], np.float32),
    ),
    "logsumexp of bytes": (lambda: ops.logsumexp(np.array([200, 0], np.uint8)), np.array(200, np.float32)),
    "softmax of bytes": (lambda: ops.softmax(np.array([[1, 255]], np.uint8)), np.array([[0, 1]], np.float32)),
    "logaddexp": (
        lambda: ops.logaddexp([INF, -INF, INF, NAN], [INF, -INF, -INF, 0.0]),
        np.array([INF, -INF, INF, NAN], np.float32),
    ),
    "isclose": (
        lambda: ops.isclose([INF, INF, -INF, NAN, 1.0], [INF, 1.0, INF, NAN, 1.0]),
        np.array([True, False, False, False, True]),
    ),
    "isclose of NaN": (lambda: ops.isclose([NAN, 1.0], [NAN, NAN], equal_nan=True), np.array([True, False])),
    "nan_to_num": (
        lambda: ops.nan_to_num([NAN, INF, -INF, 2.0]),
        np.array([0, np.finfo(np.float32).max, np.finfo(np.float32).min, 2], np.float32),
    ),
    "nan_to_num to": (lambda: ops.nan_to_num([NAN, INF, -INF], 1, 2, 3), np.array([1, 2, 3], np.float32)),
    "nan_to_num of integers": (lambda: ops.nan_to_num(BYTES), BYTES),
    "square of flags": (lambda: ops.square(FLAGS), FLAGS.astype(np.int32)),
    "where of a number": (lambda: ops.where(np.array([2, 0, -1]), 1.0, 0.0), np.array([1, 0, 1], np.float32)),
    "tril of flags": (lambda: ops.tril(FLAGS), np.tril(FLAGS)),
    "soft_shrink of integers": (lambda: ops.soft_shrink([2, 0]), np.array([1.5, 0], np.float32)),
    "squareplus of bytes": (lambda: ops.squareplus(np.array([200], np.uint8)), np.array([200.005], np.float32)),
    "round of integers": (lambda: ops.round(LEAST), LEAST),
    "vectors": (lambda: ops.matmul([1.0, 2.0], [3.0, 4.0]), np.array(11, np.float32)),
    "no copies": (lambda: ops.tile(np.ones((2, 3)), (0, 2)), np.ones((0, 6))),
    "numbers beside each other": (lambda: ops.hstack([1.0, 2.0]), np.array([1, 2], np.float32)),
    "numbers below each other": (lambda: ops.vstack([1.0, 2.0]), np.array([[1], [2]], np.float32)),
    "weights along an axis": (
        lambda: ops.average(np.arange(6.0).reshape(2, 3), 1, [1.0, 0.0, 1.0]),
        np.array([1.0, 4.0]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_type(case):
    compute, expected = CASES[case]
    actual = compute()
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_gradient_of_logsumexp_where_there_is_nothing():
    x = differentiable(np.array([[-INF, -INF], [-INF, 1.0]]))
    (gradient,) = gradients(ops.sum(ops.logsumexp(x, 1)), [x])
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 1]])


def test_no_greatest_of_nothing():
    for function in (ops.max, ops.min):
        with pytest.raises(
            ConfigError, match=r"over axes \(0,\) of shape \(0, 3\), which has no elements; pass `initial`"
        ):
            function(EMPTY, 0)
    for function in (ops.argmax, ops.argmin):
        with pytest.raises(ConfigError, match=r"over axis 0 of shape \(0, 3\), which has no elements"):
            function(EMPTY, 0)
        assert function(EMPTY, 1).shape == (0,)
    with pytest.raises(ConfigError, match=r"weights of shape \(2,\) for a tensor of shape \(2, 3\), axis=1"):
        ops.average(FLAGS, 1, [1.0, 2.0])


def test_in_top_k_with_nan():
    """A NaN at the target is the least, one beside it no greater than anything; as Keras on JAX."""
    scores = np.array([[0.1, 0.5, 0.4], [NAN, 0.2, 0.3], [0.3, NAN, 0.2], [INF, 0.2, -INF], [0.3, 0.3, 0.3]])
    for k, label, expected in (
        (1, 0, [False, False, True, True, True]),
        (1, 1, [True, False, False, False, True]),
        (2, 2, [True, True, True, False, True]),
        (3, 5, [False, True, True, True, False]),
    ):
        np.testing.assert_array_equal(ops.in_top_k(np.full(5, label), scores, k), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_limits_of_half_precision(dtype):
    """NumPy alone does not know those of bfloat16."""
    x = ops.cast(np.array([np.nan, np.inf, -np.inf, 2.0]), dtype)
    output = ops.cast(ops.nan_to_num(x), "float64").numpy()
    largest = 65504 if dtype == "float16" else (2 - 2**-7) * 2.0**127
    np.testing.assert_array_equal(output, [0, largest, -largest, 2])
    q, k, v = (ops.cast(np.random.default_rng(n).normal(size=(2, 3, 1, 4)), dtype) for n in range(3))
    causal = ops.cast(ops.dot_product_attention(q, k, v, is_causal=True), "float64").numpy()
    np.testing.assert_allclose(causal[:, 0], ops.cast(v, "float64").numpy()[:, 0], rtol=1e-6)


NAN_FUNCTIONS = [
    *("nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin", "nanargmax", "nanargmin", "nancumsum"),
    *("nancumprod", "nanmedian"),
]
NAN_ROWS = {
    "an infinity": [1, INF, 3],
    "a negative infinity": [1, -INF, 3],
    "both": [INF, -INF, 1],
    "infinities": [INF, INF, INF],
    "NaN beside an infinity": [NAN, INF, 2],
    "NaN": [NAN, 1, 2],
    "NaN but for an infinity": [NAN, NAN, -INF],
    "a single number": [NAN, 2, NAN],
}


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("name", NAN_FUNCTIONS)
@pytest.mark.parametrize("row", NAN_ROWS)
def test_functions_that_ignore_nan(name, row):
    x = np.array([NAN_ROWS[row], NAN_ROWS["NaN"]])
    for axis in (None, 1):
        np.testing.assert_array_equal(getattr(ops, name)(x, axis), getattr(np, name)(x, axis))


def test_the_gradient_of_a_variance_is_zero_at_nan():
    x = differentiable(np.array([NAN, 1.0, 2, 4]))
    (gradient,) = gradients(ops.nanvar(x), [x])
    mean = 7 / 3
    np.testing.assert_allclose(gradient, [0, *(2 / 3 * (np.array([1, 2, 4]) - mean))])
