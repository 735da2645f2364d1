"""How the same numbers may lie in memory: arrays as users have them."""

from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray


def swapped(array: Array) -> Array:
    """Return it in the other byte order, as FITS and netCDF have it."""
    return array.astype(array.dtype.newbyteorder(">")) if array.dtype.kind in "iuf" else array


def backwards(array: Array) -> Array:
    """Return it with strides below 0."""
    return np.flip(np.flip(array).copy())


def apart(array: Array) -> Array:
    """Return it as every second of more elements, of which the others are no numbers of it."""
    if not array.ndim:
        return array
    spread = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77).astype(array.dtype)
    spread[..., ::2] = array
    return spread[..., ::2]


def columns(array: Array) -> Array:
    """Return it with the first axis contiguous."""
    return np.array(array, order="F")


def repeated(array: Array) -> Array:
    """Return it with a stride of 0 along the axes in which it does not vary."""
    for axis in range(array.ndim):
        first = array[(slice(None),) * axis + (slice(0, 1),)]
        if array.shape[axis] > 1 and np.array_equal(array, np.broadcast_to(first, array.shape)):
            return np.broadcast_to(first, array.shape)
    return array


def unaligned(array: Array) -> Array:
    """Return it at an odd address, as a field of a record."""
    shifted = np.ndarray(array.shape, array.dtype, np.empty(array.nbytes + 1, np.uint8), 1)
    shifted[...] = array
    return shifted


def read_only(array: Array) -> Array:
    """Return it as what nobody may write to."""
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def view(array: Array) -> Array:
    """Return it as a part of a larger buffer that holds other batches before and behind it."""
    if not array.ndim:
        return array
    buffer = np.full((len(array) + 7, *array.shape[1:]), 55).astype(array.dtype)
    buffer[3 : 3 + len(array)] = array
    return buffer[3 : 3 + len(array)]


WAYS: Mapping[str, Callable[[Array], Array]] = {
    way.__name__: way for way in (swapped, backwards, apart, columns, repeated, unaligned, read_only, view)
}
