"""Histograms, segment maxima and products, and scattered updates."""

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.ops.arrays import ravel
from dptrain.ops.elementwise import cast, equal, floating, logical_and, maximum, minimum, where
from dptrain.ops.indexing import add_rows, gather_rows_along, normalized_indices, one_hot, take_at_axis, take_rows
from dptrain.ops.manipulation import expand_dims, put, reshape
from dptrain.ops.math.bits import bit_invert
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.parts import part
from dptrain.ops.reduction import max, min, sum
from dptrain.ops.sorting.searching import scatter, searchsorted, segment_sum, segments_of
from dptrain.program.dims import Dim
from dptrain.program.lowering import HostCall
from dptrain.program.op import op
from dptrain.program.shapes import Shape
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.types import is_floating


def _segment_letters(needs_all_rows: bool) -> Any:
    """Return the sharding rule `ab,a->Xb`, or `Xb,X->Xb` where ranks cannot reduce partial results."""

    def letters(shapes: Sequence[Shape], out: Shape, attributes: Any) -> str:
        rows = "X" if needs_all_rows else "a"
        row_letters = names(len(out))[1:]
        return f"{rows}{row_letters},{rows}->X{row_letters}"

    return letters


def _segment_shape(values: Shape, places: Shape, *, length: int) -> Shape:
    return (length, *values[1:])


@op(
    shape=_segment_shape,
    letters=_segment_letters(False),
    partial_reduce="max",
    dtype=lambda values, places, *, length: values,
    lowering=HostCall(),
)
def greatest_rows(values: Array, places: Array, *, length: int, out: Array) -> None:
    """The maxima of the rows of each segment; of no rows the type's least number."""
    out.fill(-np.inf if is_floating(out.dtype) else np.iinfo(out.dtype).min if out.dtype.kind in "iu" else 0)
    inside = (places >= 0) & (places < length)
    np.maximum.at(out, places[inside], values[inside])


@greatest_rows.gradient
def _greatest_rows(y: Tensor, dy: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, None]:
    """Equal maxima share the gradient."""
    length = y.attributes["length"]
    inside, segments = _inside(places, length, values.ndim)
    chosen = cast(logical_and(inside, equal(values, take_rows(y, segments))), dy.dtype)
    count = maximum(add_rows(chosen, segments, length=length), 1.0)
    return chosen * take_rows(dy / count, segments), None


@op(
    shape=_segment_shape,
    letters=_segment_letters(True),
    dtype=lambda values, places, *, length: values,
    lowering=HostCall(),
)
def multiplied_rows(values: Array, places: Array, *, length: int, out: Array) -> None:
    """The products of the rows of each segment; 1 of no rows."""
    out.fill(1)
    inside = (places >= 0) & (places < length)
    np.multiply.at(out, places[inside], values[inside])


@multiplied_rows.gradient
def _multiplied_rows(y: Tensor, dy: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, None]:
    """The product of the other factors: where one factor is 0, it alone has a gradient."""
    length = y.attributes["length"]
    inside, segments = _inside(places, length, values.ndim)
    zero = equal(values, 0)
    counted = cast(logical_and(zero, inside), dy.dtype)
    zeros = take_rows(add_rows(counted, segments, length=length), segments)
    others_product = take_rows(multiplied_rows(where(zero, 1, values), places, length=length), segments)
    shared = where(
        zero,
        where(equal(zeros, 1), others_product, 0),
        where(equal(zeros, 0), others_product / where(zero, 1, values), 0),
    )
    return where(inside, take_rows(dy, segments) * shared, 0), None


def _inside(places: Tensor, length: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return whether rows belong to a segment, as a column, and their segments or 0."""
    inside = logical_and(places >= 0, places < length)
    return reshape(inside, (places.shape[0], *(1,) * (rank - 1))), where(inside, places, 0)


def _segments(data: Any, segment_ids: Any, num_segments: int | None, name: str) -> tuple[Tensor, Tensor, int]:
    values, ids = segments_of(data, segment_ids)
    if num_segments is None:
        if ids.value is None:
            raise ConfigError(f"{name}: pass num_segments, as segment_ids are not known while a step is traced")
        num_segments = int(ids.value.max(initial=-1)) + 1
    return values, ids, int(num_segments)


@operation
def segment_max(data: Any, segment_ids: Any, num_segments: int | None = None, sorted: bool = False) -> Tensor:
    """Return the maxima of the rows of each segment; of no rows the type's least number.

    Args:
        data: (rows, ...).
        segment_ids: (rows,) integers; rows with ids outside 0 to num_segments - 1 belong to no segment.
        num_segments: by default derived from known ids; a traced step needs it (else ConfigError).
        sorted: has no effect.
    """
    values, places, length = _segments(data, segment_ids, num_segments, "segment_max")
    return greatest_rows(values, places, length=length)


@operation
def segment_min(data: Any, segment_ids: Any, num_segments: int | None = None, sorted: bool = False) -> Tensor:
    """Return the minima of the rows of each segment, like `segment_max`."""
    values, places, length = _segments(data, segment_ids, num_segments, "segment_min")
    if values.dtype.kind in "iu":  # the least integer has no negative
        return bit_invert(greatest_rows(bit_invert(values), places, length=length))
    return -greatest_rows(-values, places, length=length)


@operation
def segment_prod(data: Any, segment_ids: Any, num_segments: int | None = None, sorted: bool = False) -> Tensor:
    """Return the products of the rows of each segment, 1 of no rows; like `segment_max`."""
    values, places, length = _segments(data, segment_ids, num_segments, "segment_prod")
    values, places = gather_rows_along(values, [0]), gather_rows_along(places, [0])
    return multiplied_rows(values, places, length=length)


# Places of a tensor


@operation
@for_open_shapes
def scatter_update(inputs: Any, indices: Any, updates: Any, reduction: str | None = None) -> Tensor:
    """Return inputs, of known lengths, with updates at indices.

    Args:
        inputs: a tensor.
        indices: (n, axes) integers: an index along each of the first axes.
        updates: (n, ...); of equal indices the last counts.
        reduction: None overwrites; "add", "max", "min" and "mul" combine with the old values.
    """
    tensor, places, values = as_tensors([inputs, indices, updates])
    values = cast(values, tensor.dtype)
    count = int(places.shape[-1])
    lengths, row_shape = [int(n) for n in tensor.shape[:count]], tuple(tensor.shape[count:])
    if reduction == "add":
        return tensor + scatter(places, values, tuple(tensor.shape))
    number: Any = 0
    for axis, length in enumerate(lengths):
        number = number * length + normalized_indices(places[..., axis], length)
    number, total = ravel(number), int(np.prod(lengths, dtype=np.int64))
    rows = reshape(values, (-1, *row_shape))
    if reduction == "mul":
        return tensor * reshape(segment_prod(rows, number, total), tuple(tensor.shape))
    if reduction in ("max", "min"):
        joined = (segment_max if reduction == "max" else segment_min)(rows, number, total)
        return (maximum if reduction == "max" else minimum)(tensor, reshape(joined, tuple(tensor.shape)))
    if reduction is not None:
        raise ConfigError(f"Unsupported reduction: {reduction}")
    last = segment_max(np.arange(int(number.shape[0]), dtype=np.int32), number, total)
    written = reshape(last >= 0, (*lengths, *(1,) * len(row_shape)))
    return where(written, reshape(take_rows(rows, where(last < 0, 0, last)), tuple(tensor.shape)), tensor)


@operation
@for_open_shapes
def slice(inputs: Any, start_indices: Any, shape: Sequence[int]) -> Tensor:
    """Return a block of a tensor.

    Args:
        inputs: the tensor.
        start_indices: for each axis a number, or an integer computed in the step, clamped so that the block fits.
        shape: of the block; -1 takes the rest of an axis and needs a known start.

    Raises:
        ConfigError: another number of axes, or a known block out of range.
    """
    (tensor,) = as_tensors([inputs])
    starts = _starts("slice", tensor, start_indices, len(shape), "shape")
    for axis, (start, length) in enumerate(zip(starts, shape, strict=True)):
        if _is_whole_axis(start, length, tensor.shape[axis]):
            continue
        if start.value is not None:
            tensor = part(tensor, (*(np.s_[:],) * axis, np.s_[_known_block("slice", tensor, axis, start, length)]))
            continue
        if length == -1:
            raise ConfigError(
                f"slice: shape={tuple(shape)}: expected a length for axis {axis}, whose start is not known"
            )
        begin_at = minimum(maximum(start, 0), int(tensor.shape[axis]) - int(length))
        tensor = take_at_axis(tensor, begin_at + np.arange(int(length), dtype=np.int32), axis)
    return tensor


@operation
@for_open_shapes
def slice_update(inputs: Any, start_indices: Any, updates: Any) -> Tensor:
    """Return inputs with a block replaced.

    Args:
        inputs: the tensor.
        start_indices: for each axis a number, or an integer computed in the step, clamped so that the block fits.
        updates: the block, cast to the type of `inputs`.

    Raises:
        ConfigError: another number of axes, or a block that does not fit.
    """
    tensor, block = as_tensors([inputs, updates])
    starts = _starts("slice_update", tensor, start_indices, block.ndim, "updates")
    block, lengths = cast(block, tensor.dtype), block.shape
    written: Any = np.ones((1,) * tensor.ndim, np.bool_)
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if _is_whole_axis(start, length, tensor.shape[axis]):
            continue
        axis_length, across = int(tensor.shape[axis]), [-1 if at == axis else 1 for at in range(tensor.ndim)]
        if int(length) > axis_length:
            raise ConfigError(
                f"slice_update: updates of shape {lengths} do not fit in axis {axis} of shape {tensor.shape}"
            )
        if start.value is not None:
            known, before = _known_block("slice_update", tensor, axis, start, length), block.shape[:axis]
            ends = [(0, n, 1) for n in block.shape]
            ends[axis] = (known.start, known.stop, 1)
            block = put(block, key=tuple(ends), shape=(*before, axis_length, *block.shape[axis + 1 :]))
            start = as_tensors([known.start])[0]
        else:
            start = minimum(maximum(start, 0), axis_length - int(length))
        # For each place of the axis, the place in the block.
        places = np.arange(axis_length, dtype=np.int32) - start
        written = logical_and(written, reshape(logical_and(places >= 0, places < int(length)), across))
        if block.shape[axis] not in (1, axis_length):  # a block of length 1 is broadcast
            block = take_at_axis(block, minimum(maximum(places, 0), int(length) - 1), axis)
    return where(written, block, tensor)


def _starts(name: str, tensor: Tensor, start_indices: Any, axes: int, other: str) -> list[Tensor]:
    """Return where a block begins along each axis, each a tensor; refuse another number of axes than the tensor's."""
    is_list = isinstance(start_indices, list | tuple)
    vector = None if is_list else as_tensors([start_indices])[0]
    count = len(start_indices) if vector is None else int(vector.shape[0]) if vector.ndim else 0
    if not tensor.ndim == axes == count:
        raise ConfigError(
            f"{name}: the number of dimensions in `inputs` must match those in `{other}` and `start_indices`; found "
            f"{tensor.ndim}, {axes} and {count}"
        )
    return [as_tensors([(start_indices if vector is None else vector)[axis]])[0] for axis in range(count)]


def _is_whole_axis(start: Tensor, length: Any, axis_length: Any) -> bool:
    """Whether a block has all of an axis; asks for no number of rows of a batch."""
    if start.value is None or start.value != 0:
        return False
    is_same = isinstance(length, Dim) == isinstance(axis_length, Dim) and length == axis_length
    return bool(is_same or length == -1)


def _known_block(name: str, tensor: Tensor, axis: int, start: Tensor, length: Any) -> builtins.slice:
    begin, axis_length = int(start), int(tensor.shape[axis])
    stop = axis_length if length == -1 else begin + int(length)
    if not 0 <= begin <= stop <= axis_length:
        raise ConfigError(f"{name}: {begin} to {stop} is out of range for axis {axis} of shape {tensor.shape}")
    return np.s_[begin:stop]


# Counts


@operation
def bincount(x: Any, weights: Any = None, minlength: int = 0, sparse: bool = False) -> Tensor:
    """Count each number from 0 in a vector (n,), or in each row of a matrix (rows, n), of integers.

    Args:
        x: the integers.
        weights: summed instead of ones, of x's shape; the result has their type instead of int32.
        minlength: least length of the result; in a traced step, which must pass it, the length.
        sparse: must be False.
    """
    if sparse:
        raise ConfigError("not supported: sparse tensors")
    (numbers,) = as_tensors([x])
    if numbers.dtype.kind not in "iub" or numbers.ndim not in (1, 2):
        raise ConfigError(
            f"bincount: {numbers.dtype.name} of shape {numbers.shape}; expected integers, (n,) or (rows, n)"
        )
    length = int(minlength)
    if numbers.value is not None:
        length = builtins.max(int(numbers.value.max(initial=-1)) + 1, length)
    elif not length:
        raise ConfigError("bincount: pass minlength, as x is not known while a step is traced")
    dtype = np.dtype("int32") if weights is None else as_tensors([weights])[0].dtype
    if numbers.ndim == 2:
        places = one_hot(numbers, length, dtype=dtype)
        return cast(sum(places if weights is None else places * expand_dims(weights, -1), 1), dtype)
    counted = cast(numbers * 0 + 1, dtype) if weights is None else as_tensors([weights])[0]
    inside = logical_and(numbers >= 0, numbers < length)
    return segment_sum(where(inside, counted, 0), where(inside, numbers, 0), length)


@operation
def histogram(x: Any, bins: int = 10, range: tuple[float, float] | None = None) -> tuple[Tensor, Tensor]:
    """Return the counts of a vector's elements in `bins` equally wide bins, and the bins' bounds.

    `range` is the first and last bound, by default the least and greatest element.
    """
    if not isinstance(bins, int):
        raise ArgumentTypeError("bins must be of type `int`")
    if bins < 0:
        raise ConfigError("`bins` should be a non-negative integer")
    if range:
        if len(range) < 2 or not isinstance(range, tuple | list):  # files have lists
            raise ConfigError("range must be a tuple of two elements")
        if range[1] < range[0]:
            raise ConfigError("The second element of range must be greater than the first")
    (vector,) = as_tensors([x])
    if vector.ndim > 1:
        raise ConfigError("Input tensor must be 1-dimensional")
    values = floating(vector)
    first, last = (min(values), max(values)) if not range else as_tensors([float(range[0]), float(range[1])])
    first, last = cast(first, values.dtype), cast(last, values.dtype)
    is_constant = equal(first, last)
    first, last = where(is_constant, first - 0.5, first), where(is_constant, last + 0.5, last)
    share = np.arange(bins + 1, dtype=values.dtype) / builtins.max(bins, 1)
    bounds = cast(first * (1 - share) + last * share, values.dtype)
    place = searchsorted(bounds, values, "right") - 1
    place = where(equal(values, bounds[bins]), bins - 1, place)
    inside = logical_and(values >= bounds[0], values <= bounds[bins])
    counts = segment_sum(cast(inside, values.dtype), where(inside, place, 0), builtins.max(bins, 1))[:bins]
    return counts, bounds
