"""Membership, sorted search, selection and segment sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import any, ravel
from dptrain.ops.elementwise import cast, equal, less, less_equal, logical_and, logical_not, logical_or, minimum, where
from dptrain.ops.indexing import add_rows, normalized_indices, take
from dptrain.ops.manipulation import expand_dims, reshape, zeros_like
from dptrain.ops.math.rounding import isnan
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import sum
from dptrain.program.shapes import differ, without_rows
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

# Elements of a sequence up to which comparing all takes less time than bisecting.
_MOST_COMPARED = 256


@operation
def isin(x1: Any, x2: Any, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Return whether each element of x1 is in x2 (or with `invert` is not), comparing all pairs."""
    is_member = any(equal(expand_dims(x1, -1), ravel(x2)), -1)
    return logical_not(is_member) if invert else is_member


@operation
def searchsorted(sorted_sequence: Any, values: Any, side: str = "left") -> Tensor:
    """Return the index before which each value keeps a rising vector sorted (int32).

    `side` is "left" or "right" of equal elements. NaN is greater than all numbers, and equal to NaN. Short sequences
    are compared with all values, longer ones bisected.
    """
    row, needles = as_tensors([sorted_sequence, values])
    if row.ndim != 1 or side not in ("left", "right"):
        raise ConfigError(
            f"searchsorted: a sequence of shape {row.shape}, side={side!r}; expected a vector, and 'left' or 'right'"
        )
    length = row.shape[0]
    if not isinstance(length, int) or length <= _MOST_COMPARED:
        return cast(sum(_is_before(row, expand_dims(needles, -1), side), -1), "int32")
    index, step = zeros_like(needles, "int32"), 1 << (length.bit_length() - 1)
    while step:
        following = index + step
        element = take(row, minimum(following, length) - 1)
        goes_on = logical_and(less_equal(following, length), _is_before(element, needles, side))
        index, step = where(goes_on, following, index), step // 2
    return index


def _is_before(elements: Tensor, needles: Tensor, side: str) -> Tensor:
    before = (less if side == "left" else less_equal)(elements, needles)
    if not is_floating(needles.dtype):
        return before
    is_last = isnan(needles)
    return logical_or(before, is_last if side == "right" else logical_and(is_last, logical_not(isnan(elements))))


@operation
def digitize(x: Any, bins: Any) -> Tensor:
    """Return each element's bin (int32): how many of the rising bounds are at most it; NaN is in the last."""
    return searchsorted(bins, x, "right")


@operation
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    """Return for each element the choice of the first condition that is true, else the default."""
    if len(condlist) != len(choicelist) or not condlist:
        raise ConfigError(
            f"select: {len(condlist)} conditions, {len(choicelist)} choices; expected one choice for each condition"
        )
    selected = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        selected = where(condition, choice, selected)
    return selected


def segments_of(data: Any, segment_ids: Any) -> tuple[Tensor, Tensor]:
    """Check and return rows and their segments."""
    values, ids = as_tensors([data, segment_ids])
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            "Argument `segment_ids` should be an 1-D vector, of integers. Received: "
            f"segment_ids.shape={without_rows(ids.shape)}, dtype {ids.dtype.name}"
        )
    if not values.ndim or differ(values.shape[0], ids.shape[0]):
        raise ConfigError(
            "Argument `segment_ids` and `data` should have same leading dimension. Received: "
            f"data.shape={without_rows(values.shape)}, segment_ids.shape={without_rows(ids.shape)}"
        )
    return values, ids


@operation
def segment_sum(data: Any, segment_ids: Any, num_segments: int | None = None, sorted: bool = False) -> Tensor:
    """Return the sums of the rows of each segment.

    Args:
        data: (rows, ...).
        segment_ids: (rows,) integers of 0 to num_segments - 1; rows of negative ones belong to no segment.
        num_segments: by default derived from known ids; a traced step needs it (else ConfigError).
        sorted: has no effect.
    """
    values, ids = segments_of(data, segment_ids)
    if num_segments is None:
        if ids.value is None:
            raise ConfigError("segment_sum: pass num_segments, as segment_ids are not known while a step is traced")
        num_segments = int(ids.value.max(initial=-1)) + 1
    if ids.value is None or (ids.value < 0).any():  # those rows go to an extra segment, which is cut off
        places = where(ids < 0, num_segments, normalized_indices(where(ids < 0, 0, ids), num_segments))
        return add_rows(values, places, length=num_segments + 1)[:num_segments]
    return add_rows(values, normalized_indices(ids, num_segments), length=num_segments)


@operation
def scatter(indices: Any, values: Any, shape: Sequence[int]) -> Tensor:
    """Return zeros with values added at indices.

    Args:
        indices: (..., axes) integers: an index along each of the first axes of the result.
        values: (...) and the rest of the shape.
        shape: of the result.
    """
    places, tensor = as_tensors([indices, values])
    count = int(places.shape[-1])
    lengths, row_shape = [int(n) for n in shape[:count]], tuple(shape[count:])
    number: Any = 0
    for axis, length in enumerate(lengths):
        number = number * length + normalized_indices(places[..., axis], length)
    rows = reshape(tensor, (-1, *row_shape))
    return reshape(add_rows(rows, ravel(number), length=int(np.prod(lengths))), tuple(shape))
