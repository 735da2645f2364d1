"""Activations: formulas, gradients, names, logits; regularizers."""

import math

import numpy as np
import pytest

from dptrain import activations, layers, ops, regularizers
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import constant, differentiable

X = np.concatenate([np.linspace(-3.95, 3.95, 80), [-30.0, 30.0]])
E = np.exp(X)
SIGMOID = 1 / (1 + np.exp(-X))
PHI = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in X])
# The sum of what sparsemax leaves above it is 1.
THRESHOLD = max((np.sort(X)[-k:].sum() - 1) / k for k in range(1, len(X) + 1))
EXPECTED = {
    "celu": np.maximum(X, 0) + np.minimum(0, np.expm1(np.minimum(X, 0))),
    "elu": np.where(X > 0, X, E - 1),
    "exponential": E,
    "gelu": X * PHI,
    "hard_shrink": np.where(np.abs(X) > 0.5, X, 0),
    "hard_sigmoid": np.clip(X / 6 + 0.5, 0, 1),
    "hard_silu": X * np.clip(X / 6 + 0.5, 0, 1),
    "hard_tanh": np.clip(X, -1, 1),
    "leaky_relu": np.where(X > 0, X, 0.2 * X),
    "linear": X,
    "log_sigmoid": np.log(SIGMOID),
    "log_softmax": X - np.log(E.sum()),
    "mish": X * np.tanh(np.log1p(E)),
    "relu": np.maximum(X, 0),
    "relu6": np.clip(X, 0, 6),
    "selu": 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * (E - 1)),
    "sigmoid": SIGMOID,
    "silu": X * SIGMOID,
    "soft_shrink": np.where(X > 0.5, X - 0.5, np.where(X < -0.5, X + 0.5, 0)),
    "softmax": E / E.sum(),
    "softplus": np.log1p(E),
    "softsign": X / (1 + np.abs(X)),
    "sparsemax": np.maximum(X - THRESHOLD, 0),
    "sparse_plus": np.where(X <= -1, 0, np.where(X < 1, (X + 1) ** 2 / 4, X)),
    "sparse_sigmoid": np.clip((X + 1) / 2, 0, 1),
    "squareplus": (X + np.sqrt(X**2 + 4)) / 2,
    "tanh": np.tanh(X),
    "tanh_shrink": X - np.tanh(X),
}


def test_every_activation_has_a_formula():
    assert set(EXPECTED) | {"glu", "threshold"} == set(activations.BY_NAME)


@pytest.mark.parametrize("name", EXPECTED)
def test_values_and_slopes(name):
    function = activations.get(name)
    x = differentiable(X)
    y = function(x)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, EXPECTED[name], rtol=1e-12, atol=1e-14)
    pull = np.random.default_rng(1).normal(size=X.shape) / (1 + E if name == "exponential" else 1)
    (slope,) = gradients(ops.sum(y * pull), [x])
    step = 1e-6
    moved = [np.zeros_like(X), np.zeros_like(X)]
    for at in range(len(X)):
        for n, sign in enumerate((1, -1)):
            shifted = X.copy()
            shifted[at] += sign * step
            moved[n][at] = np.sum((function(constant(shifted)).numpy() - EXPECTED[name]) * pull)
    np.testing.assert_allclose(slope, (moved[0] - moved[1]) / (2 * step), rtol=1e-5, atol=1e-7)
    assert function(X.astype(np.float32)).dtype == np.float32


def test_arguments():
    np.testing.assert_allclose(activations.relu(X, 0.1, 2.0, 0.5), np.where(X > 0.5, np.minimum(X, 2), 0.1 * (X - 0.5)))
    np.testing.assert_allclose(activations.relu(X, max_value=6.0), np.clip(X, 0, 6))
    np.testing.assert_allclose(activations.leaky_relu(X, 0.3), np.where(X > 0, X, 0.3 * X))
    np.testing.assert_allclose(activations.threshold(X, 1.0, -2.0), np.where(X > 1, X, -2))
    np.testing.assert_allclose(activations.celu(X, 0.5), np.where(X > 0, X, 0.5 * np.expm1(X / 0.5)))
    rough = 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    np.testing.assert_allclose(activations.gelu(X, approximate=True), rough, rtol=1e-12)
    x = X.reshape(2, 41)
    np.testing.assert_allclose(activations.glu(x[:, :40]), x[:, :20] / (1 + np.exp(-x[:, 20:40])), rtol=1e-12)
    np.testing.assert_allclose(ops.softmax(x, 0), np.exp(x) / np.exp(x).sum(0), rtol=1e-12)


def test_erf_is_that_of_the_standard_library():
    for dtype, atol in ((np.float64, 2e-15), (np.float32, 3e-7)):
        x = np.concatenate([np.linspace(-8, 8, 2001), [0, -0.0, 1e-30]]).astype(dtype)
        np.testing.assert_allclose(ops.erf(x), [math.erf(value) for value in x], atol=atol, rtol=0)
    assert np.isnan(ops.erf(np.array([np.nan])).numpy()).all()


def test_softmax_and_sigmoid_remember_their_logits():
    x = differentiable(X.reshape(2, 41))
    assert activations.softmax(x).logits is x
    assert activations.sigmoid(x).logits is x
    assert ops.softmax(x, axis=1).logits is x
    assert ops.softmax(x, axis=0).logits is None
    assert layers.Softmax(dtype="float64")(x).logits is x
    dense = layers.Dense(3, "softmax", dtype="float64")
    y = dense(x)
    np.testing.assert_allclose(ops.softmax(y.logits), y)
    assert (y * 1.0).logits is None


def test_names():
    assert activations.get(None) is activations.linear
    assert activations.get("swish") is activations.silu is activations.swish
    assert activations.get(abs) is abs
    assert activations.get({"class_name": "function", "config": "relu"}) is activations.relu
    for name, activation in activations.BY_NAME.items():
        assert activations.serialize(activation) == name
        assert activations.deserialize(name) is activation
    assert activations.deserialize("mine", {"mine": abs}) is abs
    assert layers.Dense(2, "hard_swish").activation is activations.hard_silu
    with pytest.raises(ConfigError, match="unknown activation 'rel'; did you mean"):
        activations.get("rel")
    with pytest.raises(ConfigError, match="Could not interpret activation function identifier: 3"):
        activations.get(3)
    with pytest.raises(ConfigError, match="writing the lambda"):
        activations.serialize(lambda x: x)


def test_regularizers():
    w = differentiable(np.array([[1.0, -2.0], [0.5, 0.0]]))
    for regularizer, expected, slope in (
        (regularizers.L1(0.1), 0.35, [0.1, -0.1, 0.1, 0]),
        (regularizers.L2(0.1), 0.525, [0.2, -0.4, 0.1, 0]),
        (regularizers.L1L2(0.1, 0.1), 0.875, [0.3, -0.5, 0.2, 0]),
        (regularizers.L1L2(), 0, [0, 0, 0, 0]),
    ):
        penalty = regularizer(w)
        assert float(penalty) == pytest.approx(expected)
        np.testing.assert_allclose(gradients(penalty, [w])[0].numpy().reshape(-1), slope, atol=1e-15)
        restored = regularizers.deserialize(regularizers.serialize(regularizer))
        assert (type(restored), restored.get_config()) == (type(regularizer), regularizer.get_config())
    assert regularizers.get("l1l2").l1 == 0
    assert regularizers.get("l2").get_config() == {"l2": 0.01}
    assert regularizers.get(None) is None is regularizers.serialize(None)
    assert regularizers.get(regularizers.L1).l1 == 0.01
    with pytest.raises(ConfigError, match="writing the lambda"):
        regularizers.serialize(lambda x: x)


@pytest.mark.parametrize(("dtype", "units"), [("float32", 3), ("float64", 3)])
def test_the_error_function_has_its_digits_near_0_too(dtype, units):
    x = np.concatenate([np.linspace(-6, 6, 2001), np.logspace(-30, 0, 301), -np.logspace(-30, 0, 301)]).astype(dtype)
    expected = np.array([math.erf(value) for value in x.tolist()])
    np.testing.assert_allclose(ops.erf(x).numpy(), expected, rtol=units * np.finfo(dtype).eps, atol=0)
    assert np.signbit(ops.erf(np.array(-0.0, dtype)).numpy())
