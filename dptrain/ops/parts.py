"""Indexing by NumPy's rules: slices and integers are views; arrays of integers gather; None adds an axis."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.indexing import divide_rows, gather_rows_along, normalized_indices, take_at_axis, take_rows
from dptrain.ops.manipulation import getitem, reshape_to, transpose_to
from dptrain.ops.operation_calls import operation
from dptrain.program.dims import Dim, counts_rows, greatest, is_number, least
from dptrain.program.operand import METHODS
from dptrain.program.tensor import Tensor, as_tensors

Slice = tuple[int, int, int]
_WHOLE = slice(None)


def part(x: Any, key: Any) -> Tensor:
    """Return x[key].

    Args:
        x: a tensor or a variable.
        key: a slice, an integer, None, an ellipsis, an array, a list or a tensor of integers or booleans, or a tuple of
            these. Booleans must be known: an array, or a tensor outside a trace.

    Raises:
        ConfigError: out of range, too many indices, or a shape that depends on unknown values.
    """
    (tensor,) = as_tensors([x])
    indices = key if isinstance(key, tuple) else (key,)
    for index in indices:
        if index is None or index is Ellipsis or not isinstance(index, int | slice) or isinstance(index, bool):
            return _advanced_indexing(tensor, list(indices))
        if isinstance(index, slice) and index.step is not None and index.step < 0:
            return _advanced_indexing(tensor, list(indices))
    return _basic_indexing(tensor, indices)


@operation
def get_item(x: Any, key: Any) -> Tensor:
    """Return x[key]; see `part`."""
    return part(x, key)


METHODS["[]"] = get_item


def _basic_indexing(x: Tensor, indices: Sequence[Any]) -> Tensor:
    """Return the view of slices and integers, for the first axes."""
    shape = x.shape
    if len(indices) > len(shape):
        raise ConfigError(f"too many indices: {len(indices)} for {len(shape)} dimensions")
    bounds: list[Slice | int] = []
    for index, length in zip(indices, shape, strict=False):
        bounds.append(_bounds(index, length) if isinstance(index, slice) else _checked_index(index, length))
    bounds += [(0, length, 1) for length in shape[len(indices) :]]
    return getitem(x, key=tuple(bounds))


def _bounds(index: slice, length: int) -> Slice:
    start, stop, step = index.start, index.stop, 1 if index.step is None else index.step
    if step == 0:
        raise ConfigError("slice step cannot be zero")
    if any(isinstance(end, Tensor) and end.value is None for end in (start, stop)):
        raise ConfigError(
            "a slice between ends that a step computes, whose length would depend on values; use "
            "ops.slice(x, start_indices, shape), whose start may be computed"
        )
    start = 0 if start is None else start if start >= 0 else greatest(length + start, 0)
    stop = length if stop is None else stop if stop >= 0 else length + stop
    first = least(start, length)
    return first, greatest(least(stop, length), first), step


def _checked_index(index: int, length: int) -> int:
    if not is_number(length):
        return index if index >= 0 else length + index
    if index == 0 and isinstance(length, Dim):  # with no rows it is refused when the step runs
        return 0
    if not -length <= index < length:
        raise ConfigError(f"index {index} is out of range for a length of {int(length)}")
    return index % length


def _advanced_indexing(x: Tensor, indices: list[Any]) -> Tensor:
    """Index in steps: new axes for None, then slices, then arrays, then reversed axes."""
    indices = _masks_to_integers(x, indices)
    dots = [at for at, index in enumerate(indices) if index is Ellipsis]
    if len(dots) > 1:
        raise ConfigError("an index can only have a single ellipsis ('...')")
    count = sum(index is not None and index is not Ellipsis for index in indices)
    if count > x.ndim:
        raise ConfigError(f"too many indices: {count} for {x.ndim} dimensions")
    at = dots[0] if dots else len(indices)
    indices[at : at + 1] = [_WHOLE] * (x.ndim - count)
    if any(index is None for index in indices):
        lengths = iter(x.shape)
        x = reshape_to(x, shape=tuple(1 if index is None else next(lengths) for index in indices))
        indices = [_WHOLE if index is None else index for index in indices]
    arrays = any(not isinstance(index, slice | int) for index in indices)
    slices: list[slice | int] = []
    backwards: list[int] = []
    remaining: list[Any] = []  # indices that have not become slices
    for index, length in zip(indices, x.shape, strict=True):
        if isinstance(index, slice):
            if index.step is not None and index.step < 0:
                index = _reversed_slice(index, length)
                backwards.append(len(remaining))
            slices.append(index)
            remaining.append(_WHOLE)
        elif isinstance(index, int) and not arrays:
            slices.append(index)
        else:
            slices.append(_WHOLE)
            remaining.append(index)
    x = x if all(index == _WHOLE for index in slices) else _basic_indexing(x, slices)
    for axis in backwards:
        places = as_tensors([np.arange(int(x.shape[axis]))[::-1]])[0]
        x = divide_rows(take_at_axis(x, places, axis), x.shape)
    return _gather(x, remaining) if arrays else x


def _reversed_slice(index: slice, length: int) -> slice:
    """Return the ascending slice with the elements of one with a negative step."""
    places = range(*index.indices(int(length)))
    if counts_rows(length) and places == range(int(length))[::-1]:
        return _WHOLE
    return slice(places[-1], places[0] + 1, -places.step) if places else slice(0, 0)


def _masks_to_integers(x: Tensor, indices: list[Any]) -> list[Any]:
    """Return indices with integers for boolean masks, and tensors for arrays and lists."""
    integers: list[Any] = []
    for item in indices:
        if (
            item is None
            or item is Ellipsis
            or isinstance(item, slice)
            or (isinstance(item, int) and type(item) is not bool)
        ):
            integers.append(item)
            continue
        if isinstance(item, list) and not item:
            item = np.zeros(0, np.int64)
        (index,) = as_tensors([item])
        if index.dtype.kind == "b":
            integers += _nonzero_indices(
                x, index, sum(integer is not None and integer is not Ellipsis for integer in integers)
            )
        elif index.dtype.kind in "iu":
            integers.append(index)
        else:
            raise ConfigError(f"an index of {index.dtype.name}: expected integers, slices, None or booleans")
    return integers


def _nonzero_indices(x: Tensor, mask: Tensor, axis: int) -> Sequence[Tensor]:
    """Return the indices of a mask's true elements along each of its axes."""
    if not mask.ndim:
        raise ConfigError("a single boolean cannot be an index; expected integers, slices, None or boolean arrays")
    if mask.value is None:
        raise ConfigError(
            f"not supported: {x} indexed by a boolean mask that is not known while a step is traced, as the length of "
            "the result depends on values; use ops.where(mask, x, 0), or compile with run_eagerly=True"
        )
    lengths = tuple(int(n) for n in x.shape[axis : axis + mask.ndim])
    if tuple(mask.shape) != lengths:
        raise ConfigError(
            f"a boolean index of shape {tuple(mask.shape)} for axes of shape {lengths}: expected equal shapes"
        )
    return as_tensors(np.nonzero(mask.value))


def _gather(x: Tensor, indices: list[Any]) -> Tensor:
    """Take arrays of indices along their axes, and all of the others."""
    axes = [axis for axis, index in enumerate(indices) if not isinstance(index, slice)]
    if len(axes) > 1:
        x = gather_rows_along(x, axes)
    places = [normalized_indices(indices[axis], x.shape[axis]) for axis in axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    if len(axes) == 1:
        return take_at_axis(x, places[0], axes[0])
    other_axes = [axis for axis in range(x.ndim) if axis not in axes]
    lengths = [int(x.shape[axis]) for axis in axes]
    front = transpose_to(x, axes=(*axes, *other_axes))
    flat = reshape_to(front, shape=(math.prod(lengths), *front.shape[len(axes) :]))
    number = places[0]
    for place, length in zip(places[1:], lengths[1:], strict=True):
        number = number * length + place
    rows = take_rows(flat, number)
    before = sum(axis < axes[0] for axis in other_axes) if together else 0  # NumPy puts them first if separated
    order = (*range(number.ndim, number.ndim + before), *range(number.ndim), *range(number.ndim + before, rows.ndim))
    return rows if order == tuple(range(rows.ndim)) else transpose_to(rows, axes=order)
