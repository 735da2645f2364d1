"""Functions of elements and over axes made of other ops; all have gradients where NumPy's have."""

import math
from collections.abc import Sequence
from typing import Any

from dptrain.ops.arrays import all, isclose, logaddexp, mod, moveaxis
from dptrain.ops.elementwise import (
    absolute,
    all_floating,
    cast,
    divide,
    elu,
    equal,
    exp,
    floating,
    less,
    log,
    log1p,
    maximum,
    minimum,
    multiply,
    power,
    sign,
    sin,
    sqrt,
    square,
    where,
)
from dptrain.ops.math.rounding import ceil, floor, isinf, isnan
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import max, min, sum
from dptrain.program.tensor import Tensor, as_tensors

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
def expm1(x: Any) -> Tensor:
    """Return e^x - 1, exact near 0."""
    tensor = floating(x)
    below = elu(-absolute(tensor))  # e^-|x| - 1
    return where(tensor > 0, -below * exp(absolute(tensor)), below)


@operation
def sinh(x: Any) -> Tensor:
    """Return the hyperbolic sine, exact near 0."""
    tensor = floating(x)
    power_less_1 = expm1(absolute(tensor))
    half = where(isinf(power_less_1), power_less_1, (power_less_1 + power_less_1 / (power_less_1 + 1)) / 2)
    return where(tensor < 0, -half, half)


@operation
def cosh(x: Any) -> Tensor:
    """Return the hyperbolic cosine."""
    tensor = floating(x)
    return (exp(tensor) + exp(-tensor)) / 2


@operation
def arcsinh(x: Any) -> Tensor:
    """Return the inverse of the hyperbolic sine, exact near 0."""
    tensor = floating(x)
    size = absolute(tensor)
    inner = log1p(size + square(size) / (1 + sqrt(square(size) + 1)))
    return where(tensor < 0, -inner, inner)


@operation
def arccosh(x: Any) -> Tensor:
    """Return the inverse of the hyperbolic cosine, for x from 1."""
    tensor = floating(x)
    return log(tensor + sqrt(square(tensor) - 1))


@operation
def arctanh(x: Any) -> Tensor:
    """Return the inverse of the hyperbolic tangent, exact near 0."""
    tensor = floating(x)
    return (log1p(tensor) - log1p(-tensor)) / 2


@operation
def cbrt(x: Any) -> Tensor:
    """Return the cube root, also of negative numbers."""
    tensor = floating(x)
    return sign(tensor) * power(absolute(tensor), 1 / 3)


@operation
def deg2rad(x: Any) -> Tensor:
    """Return degrees in radians."""
    return floating(x) * (math.pi / 180)


@operation
def rad2deg(x: Any) -> Tensor:
    """Return radians in degrees."""
    return floating(x) * (180 / math.pi)


@operation
def hypot(x1: Any, x2: Any) -> Tensor:
    """Return sqrt(x1^2 + x2^2)."""
    a, b = all_floating(x1, x2)
    return sqrt(square(a) + square(b))


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
    return where(less(tensor, 0), ceil(tensor), floor(tensor)) if tensor.dtype.kind in "fV" else tensor


@operation
def fmod(x1: Any, x2: Any) -> Tensor:
    """Return the remainder of x1 / x2, with x1's sign."""
    a, b = as_tensors([x1, x2])
    remainder = mod(absolute(a), absolute(b))
    return where(less(a, 0), -remainder, remainder)


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
def sinc(x: Any) -> Tensor:
    """Return sin(pi x) / (pi x), 1 at 0."""
    angle = floating(x) * math.pi
    is_zero = equal(angle, 0)
    safe = where(is_zero, 1.0, angle)
    return where(is_zero, 1.0, sin(safe) / safe)


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
