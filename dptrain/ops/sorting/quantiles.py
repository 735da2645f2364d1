"""Medians, quantiles and percentiles, from sorted vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import ravel
from dptrain.ops.elementwise import cast, floating, in_float32, logical_and, logical_not, logical_or, where
from dptrain.ops.indexing import gather_rows_along
from dptrain.ops.manipulation import reshape, squeeze, stack, transpose, zeros_like
from dptrain.ops.math.rounding import floor, isnan
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import sum
from dptrain.ops.sorting.sort import along_last, sort_last
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Array, Operand, Tensor, as_tensors

_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


@operation
@for_open_shapes
def median(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the middle element over axes, or the mean of the two middle ones; NaN where any is."""
    return quantile(x, 0.5, axis, "midpoint", keepdims)


@operation
@for_open_shapes
def nanmedian(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the median, ignoring NaN; NaN where all are."""
    return nanquantile(x, 0.5, axis, "midpoint", keepdims)


@operation
@for_open_shapes
def percentile(
    x: Any, q: Any, axis: int | Sequence[int] | None = None, method: str = "linear", keepdims: bool = False
) -> Tensor:
    """Return percentiles over axes: quantiles of q / 100."""
    return quantile(x, _fractions(q, 100), axis, method, keepdims)


@operation
@for_open_shapes
def nanpercentile(
    x: Any, q: Any, axis: int | Sequence[int] | None = None, method: str = "linear", keepdims: bool = False
) -> Tensor:
    """Return percentiles, ignoring NaN."""
    return nanquantile(x, _fractions(q, 100), axis, method, keepdims)


@operation
@for_open_shapes
@in_float32  # halves do not count to the places of many elements
def quantile(
    x: Any, q: Any, axis: int | Sequence[int] | None = None, method: str = "linear", keepdims: bool = False
) -> Tensor:
    """Return the elements below which a fraction of those over axes lies; NaN where any is.

    Args:
        x: a tensor or an array; integers become float32.
        q: a fraction from 0 to 1, or several, along the first axis of the result; NaN for others in a step.
        axis: one, several or all.
        method: between two elements: "linear", "lower", "higher", "midpoint" or "nearest".
        keepdims: keep the axes with length 1.
    """
    last, kept_shape = _axes_to_last(x, axis)
    fractions = _fractions(q)
    ordered, length = sort_last(last), int(last.shape[-1])
    is_nan = isnan(ordered[..., -1])  # NaNs are sorted last
    if isinstance(fractions, Tensor):
        most = zeros_like(ordered[..., :1]) + (length - 1)
        values = [where(is_nan, np.nan, _at(ordered, most, q, method)) for q in _each(fractions)]
        return _stacked_quantiles(values, fractions, kept_shape if keepdims else None)
    values = []
    for fraction in np.ravel(fractions):
        below, above, share = _neighbours(fraction * (length - 1), method)
        low, high = ordered[..., int(below)], ordered[..., int(above)]
        value = low if share == 0 else high if share == 1 else low * (1 - share) + high * share
        values.append(where(is_nan, np.nan, value))
    return _stacked_quantiles(values, fractions, kept_shape if keepdims else None)


@operation
@for_open_shapes
@in_float32
def nanquantile(
    x: Any, q: Any, axis: int | Sequence[int] | None = None, method: str = "linear", keepdims: bool = False
) -> Tensor:
    """`quantile`, ignoring NaN; NaN where all are."""
    last, kept_shape = _axes_to_last(x, axis)
    fractions = _fractions(q)
    ordered = sort_last(last)
    numbers = cast(logical_not(isnan(ordered)), ordered.dtype)
    most = sum(numbers, -1, keepdims=True) - 1
    values = [where(most[..., 0] < 0, np.nan, _at(ordered, most, q, method)) for q in _each(fractions)]
    return _stacked_quantiles(values, fractions, kept_shape if keepdims else None)


def _at(ordered: Tensor, most: Tensor, fraction: Any, method: str) -> Tensor:
    """Return the quantiles of vectors along the last axis, whose last elements to count have the indices `most`."""
    is_valid = logical_and(fraction >= 0, fraction <= 1) if isinstance(fraction, Tensor) else None
    inside = fraction if is_valid is None else where(is_valid, fraction, 0)
    position = where(most < 0, 0, most * inside)
    below = floor(position)
    above = where(position > below, below + 1, below)
    _neighbours(0.0, method)  # raises for unknown methods
    low, high = (along_last(ordered, cast(index, "int32"))[..., 0] for index in (below, above))
    share = (position - below)[..., 0]
    if method == "linear":
        value = low * (1 - share) + high * share
    elif method == "midpoint":
        value = (low + high) / 2
    elif method == "nearest":  # ties go to the even index
        even = (below - 2 * floor(below / 2))[..., 0] == 0
        value = where(logical_or(share < 0.5, logical_and(share == 0.5, even)), low, high)
    else:
        value = low if method == "lower" else high
    return value if is_valid is None else where(is_valid, value, np.nan)


def _each(fractions: Array | Tensor) -> Sequence[Any]:
    """Return the fractions one by one, as numbers if they are known."""
    if not isinstance(fractions, Tensor):
        return np.ravel(fractions).tolist()
    flat = ravel(fractions)
    return [flat[index] for index in range(int(flat.shape[0]))]


def _fractions(q: Any, scale: int = 1) -> Array | Tensor:
    tensor = as_tensors([q])[0] if isinstance(q, Operand) else None
    if tensor is not None and tensor.value is None:
        return floating(tensor) / scale
    fractions = np.asarray(q) if tensor is None else tensor.numpy()
    value: Array = fractions.astype(np.float64) / scale
    if ((value < 0) | (value > 1)).any():
        raise ConfigError(f"quantile: q={q}; expected numbers from 0 to {scale}")
    return value


def _neighbours(place: float, method: str) -> tuple[int, int, float]:
    """Return the elements around a position, and the weight of the second."""
    if method not in _METHODS:
        raise ConfigError(f"quantile: method={method!r}; expected one of {', '.join(map(repr, _METHODS))}")
    below, above = int(np.floor(place)), int(np.ceil(place))
    if method == "linear":
        return below, above, float(place - below)
    if method == "midpoint":
        return below, above, 0.5 if below < above else 0.0
    if method == "nearest":
        return below, above, float(np.round(place) - below)
    return (below, above, 0.0) if method == "lower" else (below, above, 1.0)


def _axes_to_last(x: Any, axis: int | Sequence[int] | None) -> tuple[Tensor, Sequence[int]]:
    """Merge axes into the last one; also return the shape of a reduction with `keepdims`."""
    tensor = floating(x)
    axes = normalized_axes(axis, tensor.ndim)
    tensor = gather_rows_along(tensor, axes)
    kept_shape = [1 if at in axes else n for at, n in enumerate(tensor.shape)]
    batch_axes = [at for at in range(tensor.ndim) if at not in axes]
    moved = transpose(tensor, [*batch_axes, *axes]) if [*batch_axes, *axes] != list(range(tensor.ndim)) else tensor
    if len(axes) == 1:
        return moved, kept_shape
    return (reshape(moved, (*moved.shape[: len(batch_axes)], -1)) if batch_axes else ravel(moved)), kept_shape


def _stacked_quantiles(values: Sequence[Tensor], fractions: Array | Tensor, kept_shape: Sequence[int] | None) -> Tensor:
    parts = values if kept_shape is None else [reshape(value, tuple(kept_shape)) for value in values]
    stacked = stack(parts, 0)
    return squeeze(stacked, 0) if fractions.ndim == 0 else reshape(stacked, (*fractions.shape, *parts[0].shape))
