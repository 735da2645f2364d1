"""Arguments at their limits: the last value that is right is taken, the next one refused in one line."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dptrain import layers
from dptrain.errors import ConfigError

X, IMAGES, VOLUMES = np.ones((2, 5, 4)), np.ones((2, 5, 4, 6)), np.ones((2, 5, 4, 3, 6))
# By name: a call with the argument, the values next to a limit that are right, and those that are wrong.
LIMITS: dict[str, tuple[Callable[[Any], Any], list[Any], list[Any]]] = {
    "Cropping1D": (lambda n: layers.Cropping1D(n)(X), [(2, 2), (4, 0), (0, 4)], [(2, 3), (5, 0), (0, 6)]),
    "Cropping2D": (
        lambda n: layers.Cropping2D(n)(IMAGES),
        [((2, 2), (0, 3)), ((0, 0), (3, 0))],
        [((2, 3), (0, 0)), ((0, 0), (0, 4)), 2],
    ),
    "Cropping2D, channels first": (
        lambda n: layers.Cropping2D(n, data_format="channels_first")(IMAGES),
        [((1, 2), (5, 0))],
        [((4, 0), (0, 0)), ((0, 0), (3, 3))],
    ),
    "Cropping3D": (
        lambda n: layers.Cropping3D(n)(VOLUMES),
        [((4, 0), (0, 3), (1, 1)), 1],
        [((0, 0), (0, 0), (2, 1)), ((5, 0), (0, 0), (0, 0)), 2],
    ),
    "ZeroPadding1D": (lambda n: layers.ZeroPadding1D(n)(X), [0, (0, 3)], [-1, (0, -1)]),
    "UpSampling1D": (lambda n: layers.UpSampling1D(n)(X), [1], [0]),
    "RepeatVector": (lambda n: layers.RepeatVector(n)(X[:, 0]), [1], [0]),
    "Dropout": (lambda n: layers.Dropout(n)(X), [0, 1], [-0.01, 1.01]),
    "SpatialDropout1D": (lambda n: layers.SpatialDropout1D(n)(X), [0, 1], [-0.01, 1.01]),
    "GroupNormalization": (lambda n: layers.GroupNormalization(n)(IMAGES), [-1, 1, 6], [0, -2, 4, 7, 12]),
    "MaxPooling1D": (lambda n: layers.MaxPooling1D(n)(X), [1, 5], [0, 6]),
    "AveragePooling2D": (lambda n: layers.AveragePooling2D(n)(IMAGES), [1, 4, (5, 4)], [0, 5, (5, 5)]),
    "AdaptiveMaxPooling1D": (lambda n: layers.AdaptiveMaxPooling1D(n)(X), [1], [0]),
    "Conv1D": (lambda n: layers.Conv1D(2, n)(X), [1, 5], [0, 6]),
    "Conv2D, dilated": (lambda n: layers.Conv2D(2, 2, dilation_rate=n)(IMAGES), [1, 3], [0, 4]),
    "Dense": (lambda n: layers.Dense(n)(X), [1], [0]),
    "Embedding": (lambda n: layers.Embedding(n, 2)(np.array([[0, 4]])), [5], [0, 4]),
    "CategoryEncoding": (lambda n: layers.CategoryEncoding(n)(np.array([[0, 4]])), [5], [0, 4]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_last_right_value_and_the_next(name):
    call, right, wrong = LIMITS[name]
    for value in right:
        result = np.asarray(call(value))
        assert result.size, value
        assert np.isfinite(result).all(), value
    for value in wrong:
        with pytest.raises((ConfigError, ValueError, IndexError)) as refused:
            call(value)
        assert "\n" not in str(refused.value).strip(), value
