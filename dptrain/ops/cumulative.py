"""Sums and products of each element and all before it along an axis.

An axis is cut into blocks. Within a block each result is joined from the elements up to its own; the blocks' totals are
joined in the same way, and each block takes up what comes before it. So n elements take n B operations, B the length of
a block, and sums round no worse than by pairs. Elements that a result must not see are left out, not multiplied by 0:
a NaN or an infinity stays behind its place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast, where
from dptrain.ops.manipulation import concatenate, expand_dims, full, reshape, transpose
from dptrain.ops.reduction import sum, summed_dtype
from dptrain.program.dims import counts_rows
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor, as_tensors

# How many elements are joined at once. Each level computes so many numbers for every element, and has so many times
# fewer than the level below.
_BLOCK = 16

Join = Callable[[Tensor], Tensor]


def cumsum(x: Any, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return the sums of each element and all before it along an axis, of x as a vector by default.

    Args:
        x: a tensor or an array.
        axis: one, which must not count the rows of the batch, or None.
        dtype: of the sums; by default that of `sum`.

    Raises:
        ConfigError: there is no such axis, or it counts rows.
    """
    return cumulative(x, axis, dtype, lambda blocks: sum(blocks, -1), 0)


def cumulative(x: Any, axis: int | None, dtype: npt.DTypeLike | None, join: Join, neutral: int) -> Tensor:
    """Return cumulative sums or products; see `cumsum`.

    Args:
        x: a tensor or an array.
        axis: one, or None.
        dtype: of the result.
        join: sums (neutral 0) or products (1) over the last axis.
        neutral: what changes nothing.

    Raises:
        ConfigError: see `cumsum`.
    """
    (tensor,) = as_tensors([x])
    tensor = cast(tensor, dtype or summed_dtype(tensor.dtype))
    if axis is None:
        return _along_last(reshape(tensor, -1), join, neutral)
    (place,) = normalized_axes(axis, tensor.ndim)
    if place == tensor.ndim - 1:
        return _along_last(tensor, join, neutral)
    order = [other_axis for other_axis in range(tensor.ndim) if other_axis != place] + [place]
    back = [order.index(original) for original in range(tensor.ndim)]
    return transpose(_along_last(transpose(tensor, order), join, neutral), back)


def _along_last(x: Tensor, join: Join, neutral: int) -> Tensor:
    """Return cumulative results along the last axis."""
    *front, length = x.shape
    if counts_rows(length) and x.value is None:
        raise ConfigError(f"not supported: cumulative sums and products along the rows of a batch, of {x}")
    if length <= _BLOCK:
        return _within_blocks(x, join, neutral)
    blocks = -(-length // _BLOCK)
    if length % _BLOCK:
        padding = full(shape=(*front, blocks * _BLOCK - length), value=neutral, dtype=x.dtype.name)
        x = concatenate([x, padding], -1)
    within = _within_blocks(reshape(x, (*front, blocks, _BLOCK)), join, neutral)
    totals = _along_last(within[..., :-1, -1], join, neutral)  # of all blocks but the last, whose total nobody needs
    first = full(shape=(*front, 1), value=neutral, dtype=x.dtype.name)
    before = expand_dims(concatenate([first, totals], -1), -1)
    joined = within + before if neutral == 0 else within * before
    return reshape(joined, (*front, blocks * _BLOCK))[..., :length]


def _within_blocks(x: Tensor, join: Join, neutral: int) -> Tensor:
    """Return cumulative results within each block, which is short."""
    length = int(x.shape[-1])
    return join(where(np.tri(length, dtype=np.bool_), expand_dims(x, -2), neutral))
