"""Every op of every backend against NumPy float64, written here in the plainest way."""

import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.backend.base import ACTIVATIONS, INPUT_ACTIVATIONS, SELU_ALPHA, SELU_SCALE, Backend
from tests.ops.conftest import poisoned
from tests.tolerances import assert_near

# Ones, odd and prime sizes, and the edges of powers of two, where tiles and vector loads end.
SIZES = st.sampled_from([1, 2, 3, 5, 8, 10, 17, 31, 32, 33, 64, 127, 129])
SEEDS = st.integers(0, 2**32 - 1)
relaxed = settings(
    max_examples=int(os.environ.get("DPTRAIN_OPS_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def draw(ops: Backend, seed: int, *shape: int) -> tuple[object, np.ndarray]:
    """Return a normal array on the device, and the same numbers in float64."""
    host = np.random.default_rng(seed).standard_normal(shape).astype(ops.dtype)
    buffer = ops.empty(shape)
    ops.write(buffer, host)
    return buffer, host.astype(np.float64)


def normal_distribution(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda one: 0.5 * math.erfc(-one / math.sqrt(2)), otypes=[np.float64])(x)


@np.errstate(over="ignore")
def activate(x: np.ndarray, name: str, alpha: float | None = None) -> np.ndarray:
    sigmoid = 1 / (1 + np.exp(-x))
    if name == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return {
        "linear": lambda: x,
        "relu": lambda: x * (x > 0),
        "sigmoid": lambda: sigmoid,
        "tanh": lambda: np.tanh(x),
        "leaky_relu": lambda: np.where(x > 0, x, (0.2 if alpha is None else alpha) * x),
        "elu": lambda: np.where(x > 0, x, (1.0 if alpha is None else alpha) * (np.exp(np.minimum(x, 0)) - 1)),
        "selu": lambda: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * (np.exp(np.minimum(x, 0)) - 1)),
        "softplus": lambda: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
        "exponential": lambda: np.exp(x),
        "gelu": lambda: x * normal_distribution(x),
        "silu": lambda: x * sigmoid,
    }[name]()


def activation_gradient(y: np.ndarray, dy: np.ndarray, name: str, alpha: float | None = None) -> np.ndarray:
    """From the output y; of gelu and silu from the input."""
    if name == "softmax":
        return y * (dy - (y * dy).sum(-1, keepdims=True))
    if name == "silu":
        return dy * activate(y, "sigmoid") * (1 + y * (1 - activate(y, "sigmoid")))
    if name == "gelu":
        return dy * (normal_distribution(y) + y * np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi))
    slopes = {"linear": 1 + 0 * y, "relu": 1.0 * (y > 0), "sigmoid": y * (1 - y), "tanh": 1 - y**2}
    slopes["leaky_relu"] = np.where(y > 0, 1, 0.2 if alpha is None else alpha)
    slopes["elu"] = np.where(y > 0, 1, y + (1.0 if alpha is None else alpha))
    slopes["selu"] = np.where(y > 0, SELU_SCALE, y + SELU_SCALE * SELU_ALPHA)
    slopes["softplus"] = 1 - np.exp(-y)
    slopes["exponential"] = y
    return dy * slopes[name]


def test_overflow_is_a_number_as_in_training(ops):
    x, y = ops.empty((1,)), poisoned(ops, (1,))
    ops.write(x, np.array([1000.0], ops.dtype))
    ops.activation_forward(x, "exponential", y)
    assert ops.download(y).tolist() == [np.inf]


@relaxed
@given(B=SIZES, F=SIZES, seed=SEEDS, scale=st.sampled_from([1.0, 1 / 255, -2.5]), offset=st.sampled_from([0.0, -1.0]))
@pytest.mark.parametrize("stored", [np.uint8, np.int16, np.float32, np.float64])
def test_gather(ops, stored, B, F, seed, scale, offset):
    rng = np.random.default_rng(seed)
    x = (rng.random((50, F)) * 255).astype(stored)
    rows = rng.integers(0, 50, B)
    out = poisoned(ops, (B, F))
    ops.gather(ops.upload(x), ops.upload(rows), scale, offset, out)
    assert_near(ops.download(out), x[rows].astype(np.float64) * scale + offset, ops.dtype, scale=255)


def test_large_batches_that_threads_share(ops):
    """Large enough to be cut among threads, where each needs intermediate memory of its own."""
    B, F = 1024, 784
    rng = np.random.default_rng(0)
    x, rows = rng.integers(0, 256, (2000, F), np.uint8), rng.integers(0, 2000, B)
    bias, bias64 = draw(ops, 1, F)
    identity = ops.upload(np.eye(F).astype(ops.dtype))
    batch, y = poisoned(ops, (B, F)), poisoned(ops, (B, F))
    for _ in range(10):
        ops.gather(ops.upload(x), ops.upload(rows), 1 / 255, -0.5, batch)
        ops.dense_forward(batch, identity, bias, "relu", y)
        assert_near(ops.download(batch), x[rows] / 255 - 0.5, ops.dtype)
        assert_near(ops.download(y), activate(x[rows] / 255 - 0.5 + bias64, "relu"), ops.dtype, scale=4)


@relaxed
@given(B=SIZES, seed=SEEDS)
def test_gather_targets(ops, B, seed):
    rng = np.random.default_rng(seed)
    labels, rows = rng.integers(0, 10, 50), rng.integers(0, 50, B)
    out = poisoned(ops, (B,), np.int64)
    ops.gather_targets(ops.upload(labels), ops.upload(rows), out)
    assert ops.download(out).tolist() == labels[rows].tolist()


@relaxed
@given(B=SIZES, I=SIZES, O=SIZES, seed=SEEDS, use_bias=st.booleans())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense(ops, activation, B, I, O, seed, use_bias):  # noqa: E741 - the legend's letters
    x, x64 = draw(ops, seed, B, I)
    if activation == "exponential":  # sums of about 1, or it magnifies their errors
        ops.write(x, (x64 / math.sqrt(I)).astype(ops.dtype))
        x64 = ops.download(x).astype(np.float64)
    kernel, kernel64 = draw(ops, seed + 1, I, O)
    bias, bias64 = draw(ops, seed + 2, O)
    y = poisoned(ops, (B, O))
    ops.dense_forward(x, kernel, bias if use_bias else None, activation, y)
    y64 = activate(x64 @ kernel64 + (bias64 if use_bias else 0), activation)
    assert_near(ops.download(y), y64, ops.dtype, scale=4 * I)

    dy, dy64 = draw(ops, seed + 3, B, O)
    dkernel, dbias, dx = poisoned(ops, (I, O)), poisoned(ops, (O,)), poisoned(ops, (B, I))
    # From the backend's own y: at a relu's corner rounding may fall on either side.
    dz64 = activation_gradient(ops.download(y).astype(np.float64), dy64, activation)
    ops.dense_backward(x, kernel, y, dy, activation, dkernel, dbias if use_bias else None, dx)
    assert_near(ops.download(dkernel), x64.T @ dz64, ops.dtype, scale=4 * B)
    assert_near(ops.download(dx), dz64 @ kernel64.T, ops.dtype, scale=4 * O)
    if use_bias:
        assert_near(ops.download(dbias), dz64.sum(0), ops.dtype, scale=4 * B)


def test_a_frozen_dense_layer_has_a_gradient_in_its_input_alone(ops):
    x, _ = draw(ops, 1, 5, 7)
    kernel, kernel64 = draw(ops, 2, 7, 3)
    dy, dy64 = draw(ops, 3, 5, 3)
    y, dx = poisoned(ops, (5, 3)), poisoned(ops, (5, 7))
    ops.dense_forward(x, kernel, None, "tanh", y)
    dz64 = activation_gradient(ops.download(y).astype(np.float64), dy64, "tanh")
    ops.dense_backward(x, kernel, y, dy, "tanh", None, None, dx)
    assert_near(ops.download(dx), dz64 @ kernel64.T, ops.dtype, scale=4)


@pytest.mark.parametrize("activation", ACTIVATIONS + INPUT_ACTIVATIONS)
def test_activation_of_extreme_values(ops, activation):
    x64 = np.array([[-1e4, -50.0, 0.0, 50.0, 1e4 if activation != "exponential" else 60.0]])
    x, y = ops.empty(x64.shape), poisoned(ops, x64.shape)
    ops.write(x, x64.astype(ops.dtype))
    ops.activation_forward(x, activation, y)
    assert_near(ops.download(y), activate(x64, activation), ops.dtype)


@pytest.mark.parametrize("activation", [one for one in ACTIVATIONS + INPUT_ACTIVATIONS if one != "softmax"])
def test_activations_keep_what_is_no_number(ops, activation):
    x, y = ops.empty((3,)), poisoned(ops, (3,))
    ops.write(x, np.array([1.0, np.nan, -1.0], ops.dtype))
    ops.activation_forward(x, activation, y)
    assert np.isnan(ops.download(y)).tolist() == [False, True, False]


def test_gelu_over_its_whole_range(ops):
    """Where the pieces of an approximation of the error function would meet."""
    x64 = np.linspace(-9, 9, 20_001).astype(ops.dtype).astype(np.float64)
    x, y = ops.empty(x64.shape), poisoned(ops, x64.shape)
    ops.write(x, x64.astype(ops.dtype))
    ops.activation_forward(x, "gelu", y)
    assert_near(ops.download(y), activate(x64, "gelu"), ops.dtype)


@relaxed
@given(B=SIZES, F=SIZES, seed=SEEDS)
@pytest.mark.parametrize(
    ("activation", "alpha"),
    [
        *((name, None) for name in ACTIVATIONS + INPUT_ACTIVATIONS),
        ("leaky_relu", 0.3),
        ("leaky_relu", 0.0),
        ("elu", 1.7),
    ],
)
def test_activation_and_its_gradient(ops, activation, alpha, B, F, seed):
    x, x64 = draw(ops, seed, B, F)
    y, dx = poisoned(ops, (B, F)), poisoned(ops, (B, F))
    ops.activation_forward(x, activation, y, alpha)
    assert_near(ops.download(y), activate(x64, activation, alpha), ops.dtype)
    dy, dy64 = draw(ops, seed + 1, B, F)
    kept = x if activation in INPUT_ACTIVATIONS else y
    expected = activation_gradient(ops.download(kept).astype(np.float64), dy64, activation, alpha)
    ops.activation_backward(kept, dy, activation, dx, alpha)
    assert_near(ops.download(dx), expected, ops.dtype, 4)
    ops.activation_backward(kept, dy, activation, dy, alpha)
    assert_near(ops.download(dy), expected, ops.dtype, 4)


@pytest.mark.parametrize("features", [1, 7, 8, 13, 64])
def test_dropout_mask_is_a_function_of_the_place_in_the_global_batch(ops, features):
    whole = poisoned(ops, (40, features))
    ops.dropout_mask(0.25, 7, 3, 2, 0, whole)
    part = poisoned(ops, (11, features))
    ops.dropout_mask(0.25, 7, 3, 2, 29, part)
    assert np.array_equal(ops.download(part), ops.download(whole)[29:])
    others = [(8, 3, 2), (7, 4, 2), (7, 3, 1)]
    for seed, step, layer in others:
        ops.dropout_mask(0.25, seed, step, layer, 0, part)
        assert features < 3 or not np.array_equal(ops.download(part), ops.download(whole)[:11])


def test_dropout_mask_has_its_rate_and_scale(ops):
    mask = poisoned(ops, (500, 100))
    ops.dropout_mask(0.3, 1, 0, 0, 0, mask)
    host = ops.download(mask)
    assert set(np.unique(host)) == {ops.dtype.type(0), ops.dtype.type(1 / 0.7)}
    # 50,000 draws: five standard deviations of the fraction are 0.0102
    assert abs((host == 0).mean() - 0.3) < 0.0103


def test_affine_multiply_copy_add_fill(ops):
    a, a64 = draw(ops, 1, 6, 5)
    b, b64 = draw(ops, 2, 6, 5)
    out = poisoned(ops, (6, 5))
    ops.affine(a, 3.0, -0.5, out)
    assert_near(ops.download(out), 3 * a64 - 0.5, ops.dtype)
    ops.multiply(a, b, out)
    assert_near(ops.download(out), a64 * b64, ops.dtype)
    ops.copy(a, out)
    assert np.array_equal(ops.download(out), a64.astype(ops.dtype))
    ops.add(b, out)
    assert_near(ops.download(out), a64 + b64, ops.dtype)
    ops.fill(out, 2.5)
    assert np.array_equal(ops.download(out), np.full((6, 5), 2.5))


# Below, at and above where chunks end and a second thread starts.
FLAT_SIZES = [1, 64, 1000, 102_400, 102_401, 300_001]
# The three sums over a flat buffer, in float64.
SUMS = {
    "sum": lambda x: x.sum(),
    "squared_norm": lambda x: (x * x).sum(),
    "count_nonfinite": lambda x: np.count_nonzero(~np.isfinite(x)),
}


def total_of(ops: Backend, op: str, x: object, start: float = 0.0) -> float:
    total = ops.zeros((1,), np.float64)
    ops.fill(total, start)
    getattr(ops, op)(x, total)
    return float(ops.download(total)[0])


@relaxed
@given(P=st.sampled_from([1, 2, 31, 255, 256, 257, 4095, 4096, 4097, 8192, 12_289]), seed=SEEDS)
@pytest.mark.parametrize("op", SUMS)
def test_sums_over_a_flat_buffer(ops, op, P, seed):
    x, x64 = draw(ops, seed, P)
    assert_near(total_of(ops, op, x, start=7.0), 7.0 + SUMS[op](x64), "float64", scale=P)
    assert total_of(ops, op, x[: P // 2]) == total_of(ops, op, x[: P // 2]), "the same bits"
    assert total_of(ops, op, x[:0], start=7.0) == 7.0


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("P", FLAT_SIZES)
def test_large_sums_are_made_in_float64(ops, op, P):
    """Every element is 1 + 2^-20: a float32 sum of a thousand of them is wrong in its sixth digit."""
    x = ops.empty((P,))
    ops.fill(x, 1 + 2**-20)
    expected = {"sum": P * (1 + 2**-20), "squared_norm": P * (1 + 2**-20) ** 2, "count_nonfinite": 0}[op]
    assert_near(total_of(ops, op, x), expected, "float64")


@relaxed
@given(
    P=st.sampled_from([1, 2, 255, 257, 4095, 4096, 4097, 8192, 12_289]),
    seed=SEEDS,
    factors=st.sampled_from([(0.01, 0.0), (0.0, 0.02), (0.3, 0.7)]),
)
def test_regularize(ops, P, seed, factors):
    l1, l2 = factors
    p, p64 = draw(ops, seed, P)
    p64[:: max(1, P // 7)] = 0  # where |p| has a corner
    ops.write(p, p64.astype(ops.dtype))
    g, g64 = draw(ops, seed + 1, P)
    weight, total = ops.empty((2,)), ops.zeros((1,), np.float64)
    ops.write(weight, np.array([32, 5], ops.dtype))  # what gradients will be divided by, and what the total will
    ops.fill(total, 7.0)
    ops.regularize(p, g, weight, l1, l2, total)
    expected = 7.0 + 5 * (l1 * np.abs(p64).sum() + l2 * (p64**2).sum())
    assert_near(ops.download(total), [expected], "float32", scale=P)
    assert_near(ops.download(g), g64 + 32 * (l1 * np.sign(p64) + 2 * l2 * p64), ops.dtype, scale=64)
    again = ops.zeros((1,), np.float64)
    ops.regularize(p, None, weight, l1, l2, again)
    assert_near(ops.download(again) + 7.0, [expected], "float32", scale=P)
    ops.regularize(p[:0], None, weight, l1, l2, total)


@relaxed
@given(
    P=st.sampled_from([1, 33, 4096, 9000]), place=st.integers(0, 8999), value=st.sampled_from([np.nan, np.inf, -np.inf])
)
def test_sums_of_what_is_no_number(ops, P, place, value):
    host = np.ones(P, ops.dtype)
    host[place % P] = value
    x = ops.empty((P,))
    ops.write(x, host)
    np.testing.assert_equal(total_of(ops, "sum", x), value)
    np.testing.assert_equal(total_of(ops, "squared_norm", x), abs(value))
    assert total_of(ops, "count_nonfinite", x) == 1
    ops.write(x, np.full(P, value, ops.dtype))
    assert total_of(ops, "count_nonfinite", x, start=0.5) == P + 0.5


def test_infinities_of_both_signs(ops):
    x = ops.empty((5000,))
    host = np.zeros(5000, ops.dtype)
    host[[3, 4999]] = np.inf, -np.inf
    ops.write(x, host)
    assert np.isnan(total_of(ops, "sum", x))
    assert total_of(ops, "squared_norm", x) == np.inf
    assert total_of(ops, "count_nonfinite", x) == 2


def test_the_largest_numbers_are_finite(ops):
    """Their squares overflow float32, and in float64 the backend's own infinity begins."""
    largest = float(np.finfo(ops.dtype).max)
    x = ops.empty((2,))
    ops.write(x, np.array([largest, -largest], ops.dtype))
    assert total_of(ops, "count_nonfinite", x) == 0
    assert total_of(ops, "sum", x) == 0
    assert total_of(ops, "squared_norm", x) == (2 * largest**2 if ops.dtype == np.float32 else np.inf)


@pytest.mark.parametrize("P", FLAT_SIZES)
def test_adam(ops, P):
    p, p64 = draw(ops, 1, P)
    m64, v64 = np.zeros(P), np.zeros(P)
    m, v, weight = ops.zeros((P,)), ops.zeros((P,)), ops.empty((1,))
    ops.fill(weight, 32)
    for iteration in (1, 2, 3):
        g, g64 = draw(ops, 10 + iteration, P)
        g64 = g64 / 32
        alpha = 0.01 * np.sqrt(1 - 0.999**iteration) / (1 - 0.9**iteration)
        ops.adam(p, g, m, v, weight, alpha, 0.9, 0.999, 1e-7)
        m64 += (g64 - m64) * (1 - 0.9)
        v64 += (g64**2 - v64) * (1 - 0.999)
        p64 = p64 - alpha * m64 / (np.sqrt(v64) + 1e-7)
    assert_near(ops.download(p), p64, ops.dtype)
    assert_near(ops.download(m), m64, ops.dtype)
    assert_near(ops.download(v), v64, ops.dtype)


@pytest.mark.parametrize("P", FLAT_SIZES)
def test_rmsprop(ops, P):
    p, p64 = draw(ops, 1, P)
    v64 = np.zeros(P)
    v, weight = ops.zeros((P,)), ops.empty((1,))
    ops.fill(weight, 4)
    for step in range(3):
        g, g64 = draw(ops, 10 + step, P)
        ops.rmsprop(p, g, v, weight, 0.01, 0.9, 1e-7)
        v64 = 0.9 * v64 + (1 - 0.9) * (g64 / 4) ** 2
        p64 = p64 - 0.01 * (g64 / 4) / np.sqrt(v64 + 1e-7)
    assert_near(ops.download(p), p64, ops.dtype)
    assert_near(ops.download(v), v64, ops.dtype)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("P", FLAT_SIZES)
def test_sgd(ops, P, momentum):
    p, p64 = draw(ops, 1, P)
    m64 = np.zeros(P)
    m, weight = ops.zeros((P,)), ops.empty((1,))
    ops.fill(weight, 4)
    for step in range(3):
        g, g64 = draw(ops, 10 + step, P)
        ops.sgd(p, g, m if momentum else None, weight, 0.1, momentum)
        m64 = momentum * m64 - 0.1 * g64 / 4
        p64 = p64 + m64
    assert_near(ops.download(p), p64, ops.dtype)


def test_the_same_bits_on_every_run(ops):
    def once() -> np.ndarray:
        x, _ = draw(ops, 1, 33, 129)
        kernel, _ = draw(ops, 2, 129, 65)
        y = ops.empty((33, 65))
        ops.dense_forward(x, kernel, None, "tanh", y)
        return ops.download(y)

    assert once().tobytes() == once().tobytes()
