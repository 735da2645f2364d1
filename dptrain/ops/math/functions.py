"""Functions of elements and over axes made of other ops; all have gradients where NumPy's have."""

import math
from collections.abc import Sequence
from typing import Any

from dptrain.ops.arrays import all, isclose, logaddexp, moveaxis
from dptrain.ops.elementwise import (
    absolute,
    all_floating,
    cast,
    divide,
    equal,
    exp,
    floating,
    less,
    maximum,
    minimum,
    multiply,
    where,
)
from dptrain.ops.math.rounding import ceil, floor, isnan
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import max, min, sum
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

Axis = int | Sequence[int] | None

true_divide = divide


# Of single elements


@operation
def fabs(x: Any) -> Tensor:
    """Return |x| as a floating-point number."""
    return absolute(floating(x))


@operation
def exp2(x: Any) -> Tensor:
    """Return 2 to the power of x."""
    return exp(multiply(floating(x), math.log(2)))


@operation
def deg2rad(x: Any) -> Tensor:
    """Return degrees in radians."""
    return floating(x) * (math.pi / 180)


@operation
def rad2deg(x: Any) -> Tensor:
    """Return radians in degrees."""
    return floating(x) * (180 / math.pi)


@operation
def logaddexp2(x1: Any, x2: Any) -> Tensor:
    """Return log2(2^x1 + 2^x2), without overflow."""
    a, b = (scaled * math.log(2) for scaled in all_floating(x1, x2))
    return logaddexp(a, b) * (1 / math.log(2))


@operation
def heaviside(x1: Any, x2: Any) -> Tensor:
    """Return 0 where x1 is below 0, x2 where it is 0, 1 above; NaN stays NaN."""
    a, b = all_floating(x1, x2)
    return where(isnan(a), a, where(equal(a, 0), b, cast(where(a < 0, 0.0, 1.0), a.dtype)))


@operation
def trunc(x: Any) -> Tensor:
    """Round towards 0; the gradient is 0."""
    (tensor,) = as_tensors([x])
    return where(less(tensor, 0), ceil(tensor), floor(tensor)) if is_floating(tensor.dtype) else tensor


@operation
def fmax(x1: Any, x2: Any) -> Tensor:
    """Return the greater of x1 and x2, ignoring NaN."""
    a, b = as_tensors([x1, x2])
    return where(isnan(a), b, where(isnan(b), a, maximum(a, b)))


@operation
def fmin(x1: Any, x2: Any) -> Tensor:
    """Return the lesser of x1 and x2, ignoring NaN."""
    a, b = as_tensors([x1, x2])
    return where(isnan(a), b, where(isnan(b), a, minimum(a, b)))


@operation
def isneginf(x: Any) -> Tensor:
    """Return where x is -infinity."""
    return equal(floating(x), -math.inf)


@operation
def isposinf(x: Any) -> Tensor:
    """Return where x is infinity."""
    return equal(floating(x), math.inf)


@operation
def allclose(x1: Any, x2: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Return whether all elements are close, as in `isclose`."""
    return all(isclose(x1, x2, rtol, atol, equal_nan))


# Over axes


@operation
def amax(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the greatest element over axes, like `max`."""
    return max(x, axis, keepdims)


@operation
def amin(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the least element over axes, like `min`."""
    return min(x, axis, keepdims)


@operation
def ptp(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the greatest element minus the least over axes."""
    return max(x, axis, keepdims) - min(x, axis, keepdims)


@operation
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Return the integral over an axis by the trapezoidal rule, between points x or with spacing dx."""
    tensor = moveaxis(floating(y), axis, -1)
    (width,) = as_tensors([dx if x is None else x])
    if x is not None:
        along = width if width.ndim == 1 else moveaxis(width, axis, -1)
        width = along[..., 1:] - along[..., :-1]
    return sum((tensor[..., 1:] + tensor[..., :-1]) * width, -1) / 2
