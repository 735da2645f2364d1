"""Sorting, partitioning, distinct and greatest elements. The host sorts, also for a GPU."""

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import ravel
from dptrain.ops.common import first_dtype
from dptrain.ops.elementwise import (
    cast,
    equal,
    logical_and,
    logical_not,
    logical_or,
    where,
)
from dptrain.ops.indexing import divide_rows, gather_rows_along, normalized_indices, one_hot, take, take_each
from dptrain.ops.manipulation import broadcast_to, concatenate, reshape, stack, transpose, zeros_like
from dptrain.ops.math.cumulative import cumsum
from dptrain.ops.math.rounding import isnan
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import argmax, max
from dptrain.ops.sorting.counting import segment_max, segment_min
from dptrain.ops.sorting.searching import segment_sum
from dptrain.program.lowering import HostCall
from dptrain.program.op import op
from dptrain.program.shapes import broadcast, normalized_axes, row_axis
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.types import is_floating


def vector_rule(shapes: Any, out: Any, attributes: Any) -> str:
    """Sharding rule of ops on whole vectors of the last axis: `aX->aX`."""
    rows = names(len(out) - 1)
    return f"{rows}X->{rows}X"


@op(shape=lambda shape: shape, letters=vector_rule, dtype=first_dtype, lowering=HostCall())
def sort_last(x: Array, *, out: Array) -> None:
    """The elements of each vector of the last axis, ascending, NaN last; stably, which 0 and -0 show."""
    out[...] = np.sort(x, axis=-1, kind="stable")


@sort_last.gradient
def _sort_last(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return along_last(dy, argsort_last(argsort_last(x)))


@op(shape=lambda shape: shape, letters=vector_rule, dtype=lambda x: np.int32, lowering=HostCall())
def argsort_last(x: Array, *, out: Array) -> None:
    """The indices that sort each vector of the last axis, stably."""
    out[...] = np.argsort(x, axis=-1, kind="stable")


def along_last(x: Tensor, places: Tensor) -> Tensor:
    """Return elements of each vector of the last axis: x (..., n), indices (..., m) from 0 to n - 1."""
    if x.ndim == 1:
        return take(x, places, 0)
    rows = row_axis(x.shape)
    if rows is not None and 0 < rows < x.ndim - 1:  # in front it can be divided among ranks
        order = [rows, *(at for at in range(x.ndim) if at != rows)]
        rows_first = along_last(transpose(x, order), transpose(places, order))
        return transpose(rows_first, [order.index(at) for at in range(x.ndim)])
    rows_first = take_each(reshape(x, (-1, x.shape[-1])), reshape(places, (-1, places.shape[-1])))
    return reshape(rows_first, places.shape)


def move_to_last(x: Any, axis: int | None) -> tuple[Tensor, Sequence[int] | None]:
    """Move an axis last (None: flatten); also return the order of axes that undoes it, or None."""
    (tensor,) = as_tensors([x])
    if axis is None or not tensor.ndim:
        return ravel(gather_rows_along(tensor, range(tensor.ndim))), None
    (place,) = normalized_axes(axis, tensor.ndim)
    tensor = gather_rows_along(tensor, [place])
    if place == tensor.ndim - 1:
        return tensor, None
    order = [at for at in range(tensor.ndim) if at != place] + [place]
    return transpose(tensor, order), [order.index(at) for at in range(tensor.ndim)]


@operation
@for_open_shapes
def sort(x: Any, axis: int | None = -1) -> Tensor:
    """Sort along an axis, ascending, NaN last; None flattens."""
    last, back = move_to_last(x, axis)
    result = sort_last(last)
    return _moved_back(result, back, x, axis)


@operation
@for_open_shapes
def argsort(x: Any, axis: int | None = -1) -> Tensor:
    """Return the indices that sort x along an axis (int32), stably."""
    last, back = move_to_last(x, axis)
    result = argsort_last(last)
    return _moved_back(result, back, x, axis)


def _moved_back(x: Tensor, order: Sequence[int] | None, like: Any, axis: int | None) -> Tensor:
    """Undo `move_to_last` of a tensor along an axis."""
    x, shape = x if order is None else transpose(x, order), as_tensors([like])[0].shape
    return x if axis is None or not shape else divide_rows(x, shape)


@operation
@for_open_shapes
def take_along_axis(x: Any, indices: Any, axis: int | None = None) -> Tensor:
    """Return the element of x at each index along an axis; by default both are vectors.

    `indices` have x's number of axes and, except along the axis, lengths that broadcast to x's.
    """
    tensor, places = as_tensors([x, indices])
    if axis is None:
        return take(tensor, ravel(places))
    if places.ndim != tensor.ndim:
        raise ConfigError(
            f"take_along_axis: indices with {places.ndim} axes, a tensor with {tensor.ndim}; expected as many"
        )
    last, back = move_to_last(tensor, axis)
    chosen, _ = move_to_last(normalized_indices(places, last.shape[-1]), axis)
    first = broadcast(last.shape[:-1], chosen.shape[:-1])
    last, chosen = (broadcast_to(operand, (*first, operand.shape[-1])) for operand in (last, chosen))
    result = along_last(last, chosen)
    return result if back is None else transpose(result, back)


@operation
@for_open_shapes
def argpartition(x: Any, kth: int | Sequence[int], axis: int | None = -1) -> Tensor:
    """Return indices that partition x along an axis (int32): all before the k-th are of lesser elements."""
    last, _ = move_to_last(x, axis)
    length = int(last.shape[-1])
    for number in (kth,) if isinstance(kth, int) else kth:
        if not -length <= int(number) < length:
            raise ConfigError(f"argpartition: kth={int(number)} is out of range for a length of {length}")
    return argsort(x, axis)


@operation
@for_open_shapes
def unravel_index(indices: Any, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the indices along each axis of the elements with these flat indices, which may be negative."""
    (number,) = as_tensors([indices])
    if number.dtype.kind not in "iu":
        raise ConfigError(f"unravel_index: indices of {number.dtype.name}; expected integers")
    lengths = [int(n) for n in shape]
    size = int(np.prod(lengths, dtype=np.int64))
    if number.value is not None and ((number.value < -size) | (number.value >= size)).any():
        raise ConfigError(f"unravel_index: an index is out of range for shape {tuple(lengths)}")
    remaining = where(number < 0, number + size, number) if number.dtype.kind == "i" else number
    places = []
    for length in reversed(lengths):
        places.append(cast(remaining - remaining // length * length, number.dtype))
        remaining = remaining // length
    return tuple(reversed(places))


@operation
def unique(
    x: Any,
    sorted: bool = True,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    size: int | None = None,
    fill_value: Any = None,
) -> Any:
    """Return the distinct elements of a tensor, always sorted, or its distinct parts along an axis; NaNs all differ.

    Args:
        x: a tensor or an array.
        sorted: has no effect.
        return_index: also return where each occurs first.
        return_inverse: also return the number of each element among them, of x's shape or a vector along the axis.
        return_counts: also return how often each occurs.
        axis: None for single elements.
        size: cut or fill to this length; a traced step needs it and takes None as the axis.
        fill_value: by default the least of them.

    Returns:
        A tensor, or a tuple with those requested (int32).
    """
    (tensor,) = as_tensors([x])
    if tensor.value is None:
        if size is None:
            raise ConfigError(
                "not supported: unique without size while a step is traced, as the number of distinct elements depends "
                "on values; pass size"
            )
        if axis is not None and tensor.ndim > 1:
            raise ConfigError(f"not supported: unique along axis={axis} of {tensor} while a step is traced")
        parts = _unique_in_step(tensor, size, fill_value)
    else:
        parts = _unique_of_values(tensor.value, axis, size, fill_value)
    requested = (True, return_index, return_inverse, return_counts)
    returned = tuple(part for part, is_requested in zip(parts, requested, strict=True) if is_requested)
    return returned[0] if len(returned) == 1 else returned


def _unique_of_values(value: Array, axis: int | None, size: int | None, fill_value: Any) -> list[Tensor]:
    distinct, index, inverse, counts = np.unique(value, True, True, True, axis, equal_nan=False)
    inverse = inverse.reshape(value.shape if axis is None else -1)
    along = 0 if axis is None else axis
    if size is not None:
        distinct = np.take(distinct, range(builtins.min(size, distinct.shape[along])), along)
        index, counts = index[:size], counts[:size]
        inverse = np.minimum(inverse, builtins.max(size - 1, 0))
        missing = size - distinct.shape[along]
        if missing:
            shape = list(distinct.shape)
            shape[along] = missing
            first = np.take(distinct, [0], along) if fill_value is None and distinct.shape[along] else fill_value or 0
            distinct = np.concatenate([distinct, np.broadcast_to(first, shape).astype(distinct.dtype)], along)
            index = np.append(index, np.full(missing, index[0] if index.size else 0))
            counts = np.append(counts, np.zeros(missing, counts.dtype))
    return list(as_tensors([distinct, *(part.astype(np.int32) for part in (index, inverse, counts))]))


def _unique_in_step(x: Tensor, size: int, fill_value: Any) -> list[Tensor]:
    """Compute `unique` in ops: number runs of equal elements of the sorted vector."""
    flat = ravel(gather_rows_along(x, range(x.ndim)))
    order = argsort_last(flat)
    ordered = take(flat, order, 0)
    starts = concatenate([np.ones(1, np.bool_), ordered[1:] != ordered[:-1]], 0)
    number = cumsum(cast(starts, "int32")) - 1
    segments = where(number < size, number, -1)
    counts = segment_sum(cast(starts, "int32") * 0 + 1, segments, size)
    index = segment_min(order, segments, size)
    inverse = take(number, argsort_last(order), 0)
    first = segment_max(ordered, segments, size)
    absent = counts == 0
    filler = ordered[0] if fill_value is None else fill_value
    distinct = cast(where(absent, filler, first), x.dtype)
    places = reshape(where(inverse < size, inverse, size - 1), x.shape)
    return [distinct, cast(where(absent, order[0], index), "int32"), cast(places, "int32"), cast(counts, "int32")]


@operation
@for_open_shapes
def top_k(x: Any, k: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k greatest elements along the last axis, always descending, and their indices (int32).

    Of equal elements the first comes first; NaN counts as the greatest. It takes k passes; k is a known number.
    """
    (tensor,) = as_tensors([x])
    length = int(tensor.shape[-1]) if tensor.ndim else 0
    if not 0 <= k <= length:
        raise ConfigError(f"top_k: k={k}; expected 0 to {length}, the length of the last axis")
    least = (
        -math.inf if is_floating(tensor.dtype) else int(np.iinfo(tensor.dtype).min) if tensor.dtype.kind != "b" else 0
    )
    chosen, places = zeros_like(tensor, "bool"), []
    for _ in range(k):
        remaining = where(chosen, least, tensor)
        greatest = max(remaining, -1, keepdims=True)
        candidates = logical_and(logical_or(equal(tensor, greatest), isnan(tensor)), logical_not(chosen))
        places.append(argmax(cast(candidates, "int32"), -1))
        chosen = logical_or(chosen, one_hot(places[-1], length, dtype="bool"))
    if not places:
        empty = tensor[..., :0]
        return empty, cast(empty, "int32")
    indices = stack(places, -1)
    return along_last(tensor, indices), cast(indices, "int32")
