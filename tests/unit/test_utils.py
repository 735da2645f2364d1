"""Keras' small helpers."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError


def test_labels_become_one_hot_vectors():
    found = dp.utils.to_categorical([0, 2, 1, -1])
    assert found.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert found.dtype == np.float64
    assert dp.utils.to_categorical(np.uint8([[1], [0]]), 4).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert dp.utils.to_categorical(np.zeros((2, 3, 1)), num_classes=2).shape == (2, 3, 2)
    assert dp.utils.to_categorical(1).tolist() == [0, 1]
    assert dp.utils.to_categorical([], 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [([3], 3, "labels 3 to 3, 3 classes"), ([-4, 0], 3, "labels -4 to 0"), ([], None, "num_classes must be given")],
)
def test_labels_without_a_class_are_refused(labels, classes, message):
    with pytest.raises(ConfigError, match=message):
        dp.utils.to_categorical(labels, classes)
