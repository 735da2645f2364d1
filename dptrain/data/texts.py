"""Arrays of texts whose memory is that of their letters: NumPy's fixed-width type takes the longest for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import DataError

Array = npt.NDArray[Any]
# Bytes from which fixed width must not waste memory, and what it may take then: a multiple of the letters'.
_SMALL, _MOST_WASTE = 1 << 24, 4
_LETTER = 4  # bytes


def text_array(texts: Sequence[str], shape: tuple[int, ...] | None = None) -> Array:
    """Return texts as an array, by default (texts,), of NumPy's `str`, or of objects where that takes much memory."""
    width = max(map(len, texts), default=1)
    needed = _LETTER * width * len(texts)
    is_wasteful = needed > _SMALL and needed > _MOST_WASTE * _LETTER * sum(map(len, texts))
    array = object_array(texts) if is_wasteful else np.array(texts, dtype=np.str_)
    return array if shape is None else array.reshape(shape)


def object_array(values: Sequence[Any]) -> Array:
    """Return values as an array of objects, (values,)."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def without_width(values: Any) -> Array:
    """Return `numpy.asarray(values)`, but lists of texts, and other types of texts than `str`, as `str` objects.

    Bytes are decoded as UTF-8, other objects become text.
    """
    array = np.asarray(values, object) if _begins_with_text(values) else np.asarray(values)
    if array.dtype.kind not in "SOT":
        return array
    elements = array.ravel().tolist()
    if any(isinstance(element, list | tuple) for element in elements):
        raise DataError("expected texts in rows of one length; found rows of different lengths")
    texts = [element.decode() if isinstance(element, bytes) else str(element) for element in elements]
    return object_array(texts).reshape(array.shape)


def _begins_with_text(values: Any) -> bool:
    while isinstance(values, list | tuple) and len(values):
        values = values[0]
    return isinstance(values, str | bytes)
