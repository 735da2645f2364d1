"""Sums, means, extremes and cumulative sums that ignore NaN."""

import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from dptrain.ops.arrays import count_nonzero, cumprod, prod
from dptrain.ops.elementwise import (
    cast,
    equal,
    floating,
    in_float32,
    logical_not,
    square,
    where,
)
from dptrain.ops.manipulation import reshape
from dptrain.ops.math.cumulative import cumsum
from dptrain.ops.math.roots import root_of_squares
from dptrain.ops.math.rounding import isnan
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import argmax, max, sum
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

Axis = int | Sequence[int] | None


def _without_nan(x: Any, instead: float) -> Tensor:
    (tensor,) = as_tensors([x])
    return where(isnan(tensor), instead, tensor) if is_floating(tensor.dtype) else tensor


@operation
def nansum(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over axes, ignoring NaN."""
    return sum(_without_nan(x, 0), axis, keepdims)


@operation
@for_open_shapes
def nanprod(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the product over axes, ignoring NaN."""
    return prod(_without_nan(x, 1), axis, keepdims)


@operation
@in_float32
def nanmean(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over axes, ignoring NaN; NaN of nothing."""
    tensor = floating(x)
    return nansum(tensor, axis, keepdims) / _valid_count(tensor, axis, keepdims)


def _valid_count(x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    return sum(cast(logical_not(isnan(x)), x.dtype), axis, keepdims)


@operation
@in_float32
def nanvar(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the variance over axes, ignoring NaN; NaN of nothing, and with an infinity."""
    tensor = floating(x)
    # Deviations from an infinite mean are NaN as well, and count.
    deviations = where(isnan(tensor), 0, tensor - nanmean(tensor, axis, keepdims=True))
    return sum(square(deviations), axis, keepdims) / _valid_count(tensor, axis, keepdims)


@operation
@in_float32
def nanstd(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the square root of `nanvar`."""
    return root_of_squares(nanvar(x, axis, keepdims))


@operation
def nanmax(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the greatest element over axes, ignoring NaN; NaN where all are."""
    tensor = floating(x)
    valid_count = count_nonzero(logical_not(isnan(tensor)), axis)
    greatest = max(_without_nan(tensor, -math.inf), axis, keepdims)
    if keepdims:
        valid_count = reshape(valid_count, greatest.shape)
    return where(equal(valid_count, 0), math.nan, greatest)


@operation
def nanmin(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the least element over axes, ignoring NaN; NaN where all are."""
    return -nanmax(-floating(x), axis, keepdims)


@operation
def nanargmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the greatest element along an axis, ignoring NaN; -1 where all are."""
    tensor = floating(x)
    valid_count = sum(logical_not(isnan(tensor)), axis, keepdims)
    return where(equal(valid_count, 0), -1, argmax(_without_nan(tensor, -math.inf), axis, keepdims))


@operation
def nanargmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the least element along an axis, ignoring NaN; -1 where all are."""
    return nanargmax(-floating(x), axis, keepdims)


@operation
@for_open_shapes
def nancumsum(x: Any, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return cumulative sums along an axis, NaN as 0."""
    return cumsum(_without_nan(x, 0), axis, dtype)


@operation
@for_open_shapes
def nancumprod(x: Any, axis: int | None = None, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return cumulative products along an axis, NaN as 1."""
    return cumprod(_without_nan(x, 1), axis, dtype)
