"""Cumulative sums and products, computed in blocks.

Results within blocks of length B and the blocks' totals are combined, so that n elements take n B operations and sums
round no worse than pairwise. Later elements are left out, not multiplied by 0: a NaN or an infinity does not spread
back.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.ops.elementwise import cast, where
from dptrain.ops.indexing import gather_rows_along
from dptrain.ops.manipulation import concatenate, expand_dims, full, reshape, transpose
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import sum, summed_dtype
from dptrain.program.dims import counts_rows
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor, as_tensors

# Length of a block: each level computes this many numbers per element, and has this many times fewer elements than the
# level below.
_BLOCK = 16

Join = Callable[[Tensor], Tensor]


@operation
@for_open_shapes
def cumsum(x: Any, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return cumulative sums along an axis; by default of x as a vector, in the type of `sum`."""
    return cumulative(x, axis, dtype, lambda blocks: sum(blocks, -1), 0)


def cumulative(x: Any, axis: int | None, dtype: npt.DTypeLike | None, join: Join, neutral: int) -> Tensor:
    """Return cumulative sums (neutral 0) or products (1); `join` combines over the last axis. See `cumsum`."""
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
    *front, length = x.shape
    if counts_rows(length):
        return reshape(_along_last(gather_rows_along(x, [x.ndim - 1]), join, neutral), x.shape)
    if length <= _BLOCK:
        return _within_blocks(x, join, neutral)
    blocks = -(-length // _BLOCK)
    if length % _BLOCK:
        padding = full(shape=(*front, blocks * _BLOCK - length), value=neutral, dtype=x.dtype.name)
        x = concatenate([x, padding], -1)
    within = _within_blocks(reshape(x, (*front, blocks, _BLOCK)), join, neutral)
    totals = _along_last(within[..., :-1, -1], join, neutral)  # without the last block's total, which is not needed
    first = full(shape=(*front, 1), value=neutral, dtype=x.dtype.name)
    before = expand_dims(concatenate([first, totals], -1), -1)
    joined = within + before if neutral == 0 else within * before
    return reshape(joined, (*front, blocks * _BLOCK))[..., :length]


def _within_blocks(x: Tensor, join: Join, neutral: int) -> Tensor:
    length = int(x.shape[-1])
    return join(where(np.tri(length, dtype=np.bool_), expand_dims(x, -2), neutral))
