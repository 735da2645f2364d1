"""Pruning masks as functions of weights alone: the same on every rank, ties broken by index.

Axes: W elements of a weight, C its cells (elements, or blocks of them).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Pooling = Literal["AVG", "MAX"]


def largest(scores_C: Array, count: int) -> Mask:
    """Return the mask of the `count` highest scores; the first of equal ones."""
    if count <= 0 or count >= scores_C.size:
        return np.full(scores_C.shape, count > 0)
    threshold = np.partition(scores_C, scores_C.size - count)[scores_C.size - count]
    chosen_C: Mask = scores_C > threshold
    chosen_C[np.flatnonzero(scores_C == threshold)[: count - np.count_nonzero(chosen_C)]] = True
    return chosen_C


def magnitude_mask(scores_C: Array, sparsity: float) -> Mask:
    """Return the mask of the cells with the highest scores, at least one."""
    return largest(scores_C, _count(scores_C, sparsity))


def regrown(scores_C: Array, sparsity: float, mask_C: Mask, growth_C: Array, fraction: float) -> Mask:
    """Return the mask of the cells that stay, with a fraction of them regrown.

    That fraction is chosen by growth among all other cells, the rest by score among those that stayed so far. None is
    regrown before the first cell has gone. Source: U. Evci et al., "Rigging the lottery: making all tickets winners",
    ICML 2020.
    """
    count = _count(scores_C, sparsity)
    if mask_C.all():
        return largest(scores_C, count)
    stays = min(count - round(fraction * count), int(np.count_nonzero(mask_C)))
    kept_C = largest(np.where(mask_C, scores_C, -1.0), stays)
    mask: Mask = kept_C | largest(np.where(kept_C, -1.0, growth_C), count - stays)
    return mask


def _count(scores_C: Array, sparsity: float) -> int:
    return max(round(scores_C.size * (1 - sparsity)), 1)


def m_by_n(weight: Array, m: int, n: int) -> Mask:
    """Return the mask with the m smallest of every n elements along the inputs, the last axis but one, set to zero.

    Source: A. Mishra et al., "Accelerating sparse deep neural networks", 2021.
    """
    inputs_last = np.abs(weight.astype(np.float64)).swapaxes(-1, -2)
    order = np.argsort(-inputs_last.reshape(-1, n), axis=1, kind="stable")
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order[:, : n - m], True, axis=1)
    return np.ascontiguousarray(mask.reshape(inputs_last.shape).swapaxes(-1, -2))


def pooled(values: Array, block_size: tuple[int, int], pooling: Pooling = "AVG") -> Array:
    """Return (C,) mean or maximum of each block of a weight's magnitudes, as a matrix (inputs, outputs)."""
    matrix = np.abs(values.astype(np.float64)).reshape(-1, values.shape[-1])
    if block_size == (1, 1):
        return matrix.reshape(-1)
    starts = [np.arange(0, length, step) for length, step in zip(matrix.shape, block_size, strict=True)]
    if pooling == "MAX":
        return np.maximum.reduceat(np.maximum.reduceat(matrix, starts[0]), starts[1], axis=1).reshape(-1)
    sums = np.add.reduceat(np.add.reduceat(matrix, starts[0]), starts[1], axis=1)
    rows, columns = (
        np.diff([*start, length]).astype(np.float64) for start, length in zip(starts, matrix.shape, strict=True)
    )
    return (sums / np.outer(rows, columns)).reshape(-1)


def spread(mask_C: Mask, shape: Sequence[int], block_size: tuple[int, int]) -> Mask:
    """Return the mask (*shape) of a weight from its blocks' mask."""
    if block_size == (1, 1):
        return mask_C.reshape(shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    blocks = mask_C.reshape(-(-rows // block_size[0]), -(-columns // block_size[1]))
    whole = blocks.repeat(block_size[0], 0)[:rows].repeat(block_size[1], 1)[:, :columns]
    return np.ascontiguousarray(whole).reshape(shape)
