"""Small helpers as in Keras."""

import numpy as np
import pytest

import dptrain as dp


@pytest.mark.parametrize("labels", [[0, 2, 1, -1], np.uint8([[1], [0]]), np.zeros((2, 3, 1)), 1])
@pytest.mark.parametrize("classes", [None, 4])
def test_to_categorical(keras, labels, classes):
    expected = keras.utils.to_categorical(labels, classes)
    encoded = dp.utils.to_categorical(labels, classes)
    np.testing.assert_array_equal(encoded, expected)
    assert encoded.dtype == expected.dtype


def to_numpy(tensor):
    return np.asarray(tensor.tolist())  # PyTorch's `__array__` warns


@pytest.mark.parametrize("labels", [[0, 2, 1, 3], [[1], [0]], [[[1], [0]]], 1])
def test_to_categorical_of_a_tensor(keras, labels):
    encoded = dp.utils.to_categorical(dp.ops.convert_to_tensor(labels), 4)
    expected = to_numpy(keras.utils.to_categorical(keras.ops.convert_to_tensor(labels), 4))
    np.testing.assert_array_equal(encoded, expected)
    assert isinstance(encoded, type(dp.ops.ones(())))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_normalize_of_a_tensor(keras, order, axis):
    x = np.array([[3.0, -4.0, 1.0], [0.0, 0.0, 0.0], [1e-9, 0.0, 0.0]])
    expected = keras.utils.normalize(keras.ops.convert_to_tensor(x), axis, order)
    np.testing.assert_allclose(
        dp.utils.normalize(dp.ops.convert_to_tensor(x), axis, order), to_numpy(expected), rtol=1e-12
    )
    with pytest.raises(ValueError, match="Argument `order` must be an int >= 1"):
        dp.utils.normalize(dp.ops.convert_to_tensor(x), axis, 0)
