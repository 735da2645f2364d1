"""Lengths and repetitions that are tensors, among them those of a batch that is not known yet."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops
from dptrain.errors import ConfigError


def causal_mask(rows, length):
    """As Keras' example "Text generation with a miniature GPT" computes it."""
    row, column = ops.arange(length)[:, None], ops.arange(length)
    mask = ops.reshape(ops.cast(row >= column, "bool"), [1, length, length])
    repeats = ops.concatenate([ops.expand_dims(rows, -1), ops.convert_to_tensor([1, 1])], 0)
    return ops.tile(mask, repeats)


class Function(layers.Layer):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def tensor(*lengths):
    return ops.convert_to_tensor(lengths)


def with_rows(x, *lengths):
    return ops.concatenate([ops.expand_dims(ops.shape(x)[0], -1), tensor(*lengths)], 0)


X = np.arange(24.0, dtype="float32").reshape(2, 4, 3)
CASES = {
    "causal mask": (
        lambda x: ops.cast(causal_mask(ops.shape(x)[0], ops.shape(x)[1]), "float32") @ x,
        lambda x: np.tril(np.ones((4, 4))) @ x,
    ),
    "tile": (lambda x: ops.tile(x, tensor(1, 2, 1)), lambda x: np.tile(x, (1, 2, 1))),
    "repeat": (lambda x: ops.repeat(x, tensor(2), 1), lambda x: np.repeat(x, 2, 1)),
    "repeat each": (lambda x: ops.repeat(x, tensor(0, 2, 1, 1), 1), lambda x: np.repeat(x, (0, 2, 1, 1), 1)),
    "reshape": (lambda x: ops.reshape(x, with_rows(x, 12)), lambda x: x.reshape(len(x), 12)),
    "reshape, inferred": (lambda x: ops.reshape(x, tensor(-1, 12)), lambda x: x.reshape(-1, 12)),
    "stack": (
        lambda x: ops.reshape(x, ops.stack([ops.shape(x)[0], ops.shape(x)[1] * 3])),
        lambda x: x.reshape(len(x), 12),
    ),
    "halves": (
        lambda x: ops.reshape(x, with_rows(x, 2) * tensor(2, 1) + tensor(0, 4)),
        lambda x: x.reshape(2 * len(x), 6),
    ),
    "broadcast_to": (
        lambda x: ops.broadcast_to(ops.ones((1, 4, 1)), with_rows(x, 4, 3)) * x,
        lambda x: x,
    ),
    "ones": (lambda x: ops.ones(with_rows(x, 4, 1)) * x, lambda x: x),
    "full": (lambda x: ops.full(ops.cast(with_rows(x, 4, 3), "int32"), 2.0) * x, lambda x: 2 * x),
}


@pytest.mark.parametrize("name", CASES)
def test_lengths_are_tensors(name):
    function, expected = CASES[name]
    np.testing.assert_allclose(function(ops.convert_to_tensor(X)), expected(X), rtol=1e-6)
    inputs = layers.Input((4, 3))
    outputs = Function(function)(inputs)
    assert outputs.shape[1:] == expected(X).shape[1:]
    model = keras.Model(inputs, outputs)
    for rows in (2, 1):
        np.testing.assert_allclose(model.predict(X[:rows], verbose=0), expected(X[:rows]), rtol=1e-6)


def test_lengths_of_data_are_not_known_in_a_step():
    inputs = layers.Input((4, 3))
    with pytest.raises(ConfigError, match="is not known while a step is traced"):
        Function(lambda x: ops.tile(x, ops.cast(x[0, 0], "int32")))(inputs)


@pytest.mark.parametrize("repeats", [[2, 1, 3], 3, np.array([1, 2]), [0, 1, 2]])
def test_tile_by_a_tensor_is_numpys(repeats):
    np.testing.assert_array_equal(ops.tile(X, ops.convert_to_tensor(repeats)), np.tile(X, repeats))
    np.testing.assert_array_equal(ops.tile(X, repeats), np.tile(X, repeats))


def test_one_hot_labels_and_lengths_of_tensors_in_a_step():
    def function(x):
        labels = keras.utils.to_categorical(ops.cast(ops.sum(x, (1, 2), keepdims=True)[:, 0], "int32") % 5, 5)
        return ops.concatenate([labels, keras.utils.normalize(ops.sum(x, 1))], -1)

    inputs = layers.Input((4, 3))
    model = keras.Model(inputs, Function(function)(inputs))
    summed = X.sum(1)
    expected = np.concatenate([np.eye(5)[(X.sum((1, 2)) % 5).astype(int)], keras.utils.normalize(summed)], -1)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-6)
    np.testing.assert_allclose(function(ops.convert_to_tensor(X)), expected, rtol=1e-6)
    with pytest.raises(ConfigError, match="to_categorical: pass num_classes"):
        Function(lambda x: keras.utils.to_categorical(ops.cast(x, "int32")))(inputs)
