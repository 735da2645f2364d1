"""Indexing by NumPy's rules: slices and integers are views; arrays of integers gather; None adds an axis."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.indexing import in_range, take_rows, taken
from dptrain.ops.manipulation import getitem, reshape_to, transpose_to
from dptrain.program.dims import Dim, counts_rows, greatest, is_number, least
from dptrain.program.operand import METHODS
from dptrain.program.tensor import Tensor, as_tensors

Slice = tuple[int, int, int]
_WHOLE = slice(None)


def part(x: Any, key: Any) -> Tensor:
    """Return x[key].

    Args:
        x: a tensor or a variable.
        key: a slice, an integer, None, an ellipsis, an array, a list or a tensor of integers or truth values, or a
            tuple of these. Truth values must be known: an array, or a tensor outside of a trace.

    Raises:
        ConfigError: it is out of range, has too many indices, or a shape that hangs on values that are not known.
    """
    (tensor,) = as_tensors([x])
    given = key if isinstance(key, tuple) else (key,)
    for one in given:
        if one is None or one is Ellipsis or not isinstance(one, int | slice) or isinstance(one, bool):
            return _general(tensor, list(given))
        if isinstance(one, slice) and one.step is not None and one.step < 0:
            return _general(tensor, list(given))
    return _viewed(tensor, given)


METHODS["[]"] = part


def _viewed(x: Tensor, given: Sequence[Any]) -> Tensor:
    """Return the view of slices and integers, for the first axes."""
    shape = x.shape
    if len(given) > len(shape):
        raise ConfigError(f"{len(given)} indices for {len(shape)} dimensions")
    found: list[Slice | int] = []
    for one, length in zip(given, shape, strict=False):
        found.append(_bounds(one, length) if isinstance(one, slice) else _place(one, length))
    found += [(0, length, 1) for length in shape[len(given) :]]
    return getitem(x, key=tuple(found))


def _bounds(one: slice, length: int) -> Slice:
    start, stop, step = one.start, one.stop, 1 if one.step is None else one.step
    if step == 0:
        raise ConfigError("slice step cannot be zero")
    start = 0 if start is None else start if start >= 0 else greatest(length + start, 0)
    stop = length if stop is None else stop if stop >= 0 else length + stop
    first = least(start, length)
    return first, greatest(least(stop, length), first), step


def _place(one: int, length: int) -> int:
    if not is_number(length):
        return one if one >= 0 else length + one
    if one == 0 and isinstance(length, Dim):  # of no rows it is refused when the step runs
        return 0
    if not -length <= one < length:
        raise ConfigError(f"index {one} is out of range for a length of {int(length)}")
    return one % length


def _general(x: Tensor, given: list[Any]) -> Tensor:
    """Return x[given] in steps: axes of length 1 for None, then slices, then arrays, then axes backwards."""
    given = _without_masks(x, given)
    dots = [at for at, one in enumerate(given) if one is Ellipsis]
    if len(dots) > 1:
        raise ConfigError("an index can only have a single ellipsis ('...')")
    named = sum(one is not None and one is not Ellipsis for one in given)
    if named > x.ndim:
        raise ConfigError(f"{named} indices for {x.ndim} dimensions")
    at = dots[0] if dots else len(given)
    given[at : at + 1] = [_WHOLE] * (x.ndim - named)
    if any(one is None for one in given):
        lengths = iter(x.shape)
        x = reshape_to(x, shape=tuple(1 if one is None else next(lengths) for one in given))
        given = [_WHOLE if one is None else one for one in given]
    arrays = any(not isinstance(one, slice | int) for one in given)
    slices: list[slice | int] = []
    backwards: list[int] = []
    left: list[Any] = []  # for arrays: what has not become a slice
    for one, length in zip(given, x.shape, strict=True):
        if isinstance(one, slice):
            if one.step is not None and one.step < 0:
                one = _forwards(one, length)
                backwards.append(len(left))
            slices.append(one)
            left.append(_WHOLE)
        elif isinstance(one, int) and not arrays:
            slices.append(one)
        else:
            slices.append(_WHOLE)
            left.append(one)
    x = x if all(one == _WHOLE for one in slices) else _viewed(x, slices)
    for axis in backwards:
        x = taken(x, as_tensors([np.arange(int(x.shape[axis]))[::-1]])[0], axis)
    return _gathered(x, left) if arrays else x


def _forwards(one: slice, length: int) -> slice:
    """Return the slice whose elements, backwards, are those of a slice with a negative step."""
    if counts_rows(length):
        raise ConfigError("not supported: a slice with a negative step along the rows of a batch")
    places = range(*one.indices(length))
    return slice(places[-1], places[0] + 1, -places.step) if places else slice(0, 0)


def _without_masks(x: Tensor, given: list[Any]) -> list[Any]:
    """Return an index with integers for truth values, and tensors for arrays and lists."""
    found: list[Any] = []
    for one in given:
        if one is None or one is Ellipsis or isinstance(one, slice) or (isinstance(one, int) and type(one) is not bool):
            found.append(one)
            continue
        if isinstance(one, list) and not one:
            one = np.zeros(0, np.int64)
        (index,) = as_tensors([one])
        if index.dtype.kind == "b":
            found += _places_of(x, index, sum(each is not None and each is not Ellipsis for each in found))
        elif index.dtype.kind in "iu":
            found.append(index)
        else:
            raise ConfigError(f"an index of {index.dtype.name}: expected integers, slices, None or truth values")
    return found


def _places_of(x: Tensor, mask: Tensor, axis: int) -> Sequence[Tensor]:
    """Return the places along each of its axes at which a mask is true."""
    if mask.value is None or not mask.ndim:
        raise ConfigError(
            f"not supported: {x} indexed by truth values that are not known before the step runs; the result would "
            "have as many elements as they are true: compute with ops.where(mask, x, 0), or with run_eagerly=True"
        )
    lengths = tuple(int(n) for n in x.shape[axis : axis + mask.ndim])
    if tuple(mask.shape) != lengths:
        raise ConfigError(f"a mask of shape {tuple(mask.shape)} for axes of shape {lengths}: expected the same")
    return as_tensors(np.nonzero(mask.value))


def _gathered(x: Tensor, given: list[Any]) -> Tensor:
    """Return what arrays of places take, of x whole along the other axes."""
    axes = [axis for axis, one in enumerate(given) if not isinstance(one, slice)]
    places = [in_range(given[axis], x.shape[axis]) for axis in axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    if len(axes) == 1:
        return taken(x, places[0], axes[0])
    if any(counts_rows(x.shape[axis]) for axis in axes):
        raise ConfigError(f"not supported: several arrays index {x} along the rows of a batch; use one, or ops.take")
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    lengths = [int(x.shape[axis]) for axis in axes]
    front = transpose_to(x, axes=(*axes, *rest))
    flat = reshape_to(front, shape=(math.prod(lengths), *front.shape[len(axes) :]))
    number = places[0]
    for one, length in zip(places[1:], lengths[1:], strict=True):
        number = number * length + one
    found = take_rows(flat, number)
    before = sum(axis < axes[0] for axis in rest) if together else 0  # NumPy puts them first where they are apart
    order = (*range(number.ndim, number.ndim + before), *range(number.ndim), *range(number.ndim + before, found.ndim))
    return found if order == tuple(range(found.ndim)) else transpose_to(found, axes=order)
