"""Masks: Softmax takes one; what would ignore a mask refuses it."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain import ops
from dptrain.errors import ConfigError

X = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, -1.0]], np.float32)


def softmax_where(counts, x):
    powers = np.exp(x) * counts
    return powers / np.maximum(powers.sum(-1, keepdims=True), 1e-30)


@pytest.mark.parametrize(
    "mask", [np.array([[1, 0, 1], [0, 0, 0]], bool), np.array([[0.9, 0.2, 0.0], [1.0, 1.0, 0.0]], np.float32)]
)
def test_softmax_of_what_a_mask_leaves(mask):
    np.testing.assert_allclose(L.Softmax()(X, mask=mask), softmax_where(mask > 0.5, X), rtol=1e-6)


def test_a_mask_broadcasts_to_the_input_and_not_the_other_way_round():
    row = np.array([True, True, False])
    np.testing.assert_allclose(L.Softmax()(X, mask=row), softmax_where(row, X), rtol=1e-6)
    for mask in (np.ones((1, 2, 3), bool), np.ones((2, 2), bool)):
        with pytest.raises(ConfigError, match=r"must be broadcastable to `inputs`. Received: inputs.shape=\(2, 3\)"):
            L.Softmax()(X, mask=mask)


def test_softmax_over_several_axes():
    powers = np.exp(X)
    np.testing.assert_allclose(L.Softmax([0, 1])(X), powers / powers.sum(), rtol=1e-6)
    np.testing.assert_allclose(L.Softmax([1])(X), powers / powers.sum(1, keepdims=True), rtol=1e-6)
    assert L.Softmax((0, 1)).get_config()["axis"] == [0, 1]
    with pytest.raises(ConfigError, match="`axis` must be an integer or a list of integers"):
        L.Softmax("last")


def test_a_mask_is_an_input_of_a_functional_model():
    x, mask = keras.Input((3,)), keras.Input((3,), dtype="bool")
    model = keras.Model([x, mask], L.Softmax()(x, mask=mask))
    counts = np.array([[1, 0, 1], [1, 1, 1]], bool)
    np.testing.assert_allclose(model.predict([X, counts], verbose=0), softmax_where(counts, X), rtol=1e-6)


class Halves(L.Layer):
    def call(self, x):
        return x / 2


class Ignores(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    "layer", [L.Dense(2), L.Dropout(0.5), L.BatchNormalization(), Halves(), Ignores(), keras.Sequential([L.ReLU()])]
)
def test_what_ignores_a_mask_refuses_it(layer):
    assert layer(X, mask=None).shape[0] == 2
    with pytest.raises(ConfigError, match=r"^not supported: mask of layer '\w+' \(\w+\), which ignores it$"):
        layer(X, mask=np.ones((2, 3), bool))


def test_merging_layers_and_functional_models_refuse_masks():
    with pytest.raises(ConfigError, match="mask of layer 'add'"):
        L.Add()([X, X], mask=[None, np.ones(2, bool)])
    assert L.Add()([X, X], mask=[None, None]).shape == (2, 3)
    x = keras.Input((3,))
    with pytest.raises(ConfigError, match="mask of layer 'functional'"):
        keras.Model(x, L.Dense(1)(x))(X, mask=np.ones(2, bool))


def test_a_layer_of_ones_own_gets_the_mask_that_it_takes():
    class Masked(L.Layer):
        def call(self, x, mask=None):
            return x if mask is None else x * ops.expand_dims(ops.cast(mask, x.dtype), 1)

    np.testing.assert_array_equal(Masked()(X, mask=np.array([True, False])), X * [[1], [0]])


def test_masks_that_layers_make_are_refused():
    with pytest.raises(ConfigError, match="not supported: mask_zero = True of layer Embedding"):
        L.Embedding(4, 2, mask_zero=True)

    class NotZero(L.Layer):
        def call(self, x):
            return x

        def compute_mask(self, inputs, previous_mask=None):
            return ops.not_equal(inputs, 0)

    with pytest.raises(ConfigError, match="not supported: the mask that `compute_mask` of layer 'not_zero' returns"):
        NotZero()(X)


def test_a_layer_that_hands_masks_on_has_none_to_hand_on():
    class Doubles(L.Layer):
        def call(self, x):
            return 2 * x

        def compute_mask(self, inputs, previous_mask=None):
            return previous_mask

    np.testing.assert_array_equal(Doubles()(X), 2 * X)
