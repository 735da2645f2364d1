"""Normalisation and the greatest few, against NumPy in float64."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers import LayerNormalization
from dptrain.program.tensor import Variable

RNG = np.random.default_rng(4)
X, G = RNG.normal(size=(5, 3, 4)), RNG.normal(size=4)


def test_layers_are_normalised_over_axes():
    expected = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-7)
    np.testing.assert_allclose(ops.layer_normalization(X), expected, rtol=1e-12)
    np.testing.assert_allclose(ops.layer_normalization(X, G, G + 1), expected * G + G + 1, rtol=1e-12)
    row = X.mean(1, keepdims=True), X.var(1, keepdims=True)
    actual = ops.layer_normalization(X, gamma=G[:3], axis=1, epsilon=0.1)
    np.testing.assert_allclose(actual, (X - row[0]) / np.sqrt(row[1] + 0.1) * G[:3, None], rtol=1e-12)
    scaled = ops.layer_normalization(X, gamma=G, beta=G, rms_scaling=True)
    np.testing.assert_allclose(scaled, X / np.sqrt(X.var(-1, keepdims=True) + 1e-7) * G, rtol=1e-12)
    with pytest.raises(ConfigError, match="layer_normalization: unknown argument 'scaling'"):
        ops.layer_normalization(X, scaling=True)


def test_a_layer_has_the_bits_of_the_op():
    x, gamma = X.astype(np.float32), RNG.normal(size=(3, 4)).astype(np.float32)
    layer = LayerNormalization([1, 2], beta_initializer="ones", epsilon=0.01)
    layer(x)
    layer.gamma.assign(gamma)
    for scale in (gamma, gamma.reshape(1, 3, 4), gamma.ravel()):
        expected = ops.layer_normalization(x, scale, np.ones(12), axis=(1, 2), epsilon=0.01)
        np.testing.assert_array_equal(layer(x), expected)


def test_by_the_root_of_the_mean_square():
    expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-7)
    np.testing.assert_allclose(ops.rms_normalization(X, G), expected * G, rtol=1e-12)


def test_batches_are_normalised_by_given_moments():
    mean, variance = X.mean((0, 2)), X.var((0, 2))
    shape = (3, 1)
    expected = (X - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + 1e-3)
    np.testing.assert_allclose(ops.batch_normalization(X, mean, variance, 1), expected, rtol=1e-12)
    actual = ops.batch_normalization(X, mean, variance, 1, offset=G[:3], scale=G[1:])
    np.testing.assert_allclose(actual, expected * G[1:].reshape(shape) + G[:3].reshape(shape), rtol=1e-12)


def test_classes_that_are_there():
    np.testing.assert_array_equal(ops.multi_hot([0, 2], 4), [1, 0, 1, 0])
    np.testing.assert_array_equal(ops.multi_hot([[0, 2], [1, 1]], 3, dtype="int32"), [[1, 0, 1], [0, 1, 0]])
    with pytest.raises(ConfigError, match="num_classes=None"):
        ops.multi_hot([0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8"])
def test_the_greatest_few(dtype):
    x = (RNG.normal(size=(3, 2, 7)) * 3 + 9).astype(dtype)
    values, places = ops.top_k(x, 4)
    order = np.argsort(-x.astype(np.float64), -1, kind="stable")[..., :4]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))
    assert (places.dtype.name, values.dtype.name) == ("int32", dtype)


def test_the_greatest_of_what_is_no_number():
    values, places = ops.top_k(np.array([-np.inf, np.nan, -np.inf, 2.0]), 4)
    np.testing.assert_array_equal(places, [1, 3, 0, 2])
    np.testing.assert_array_equal(values, [np.nan, 2, -np.inf, -np.inf])
    assert ops.top_k(X, 0)[1].shape == (5, 3, 0)
    with pytest.raises(ConfigError, match="k=5; expected 0 to 4"):
        ops.top_k(X, 5)


def test_gradients_go_to_the_greatest():
    w = Variable(np.array([1.0, 5.0, 3.0]))
    ops.sum(ops.top_k(w, 2)[0] * np.array([2.0, 7.0])).backward()
    np.testing.assert_array_equal(w.value.grad, [0, 2, 7])
