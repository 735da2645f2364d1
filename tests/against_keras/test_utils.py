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
