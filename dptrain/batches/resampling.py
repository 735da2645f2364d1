"""`ops.image.resize` of one picture on the host: the same weights, without the op's products by zero."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.ops.image.resizing import border_around, cropped_box, nearest_pixels, pixel_weights

Array = npt.NDArray[Any]


def resized(x: Array, size: Sequence[int], interpolation: str, *, crops: bool = False, pads: bool = False) -> Array:
    """Return a picture (height, width, channels), float32, cropped, padded or stretched to another size."""
    height, width = size
    own_height, own_width, _ = x.shape
    if crops:
        top, left, own_height, own_width = cropped_box(own_height, own_width, height, width)
        x = x[top : top + own_height, left : left + own_width]
    elif pads:
        above, left = border_around(own_height, own_width, height, width)
        x = np.pad(x, [(above, above), (left, left), (0, 0)])
    return _resized_axis(_resized_axis(x, 0, height, interpolation), 1, width, interpolation)


def _resized_axis(x: Array, axis: int, target: int, interpolation: str) -> Array:
    length = x.shape[axis]
    if length == target:
        return x
    if interpolation == "nearest":
        return np.take(x, nearest_pixels(length, target), axis)
    total: Array | None = None
    for places, weights in zip(*_taps(length, target, interpolation), strict=True):
        part = np.take(x, places, axis)
        part *= weights.reshape(-1, *(1,) * (x.ndim - 1 - axis))
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


@lru_cache(maxsize=256)
def _taps(length: int, target: int, interpolation: str) -> tuple[Array, Array]:
    """Return the indices and weights of the source pixels of each target pixel, (taps, target) each."""
    weights = pixel_weights(length, target, np.asarray(length / target), 0.0, interpolation, False).numpy()
    first, behind = (weights != 0).argmax(1), (weights[:, ::-1] != 0).argmax(1)
    taps = first[:, None] + np.arange(length - int((first + behind).min()))
    inside = taps < length
    places = np.where(inside, taps, length - 1)
    return places.T, np.where(inside, np.take_along_axis(weights, places, 1), 0).T.astype(np.float32)
