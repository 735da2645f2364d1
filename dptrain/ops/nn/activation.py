"""Activation functions; more are in `dptrain.activations`."""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.ops import elementwise, reduction
from dptrain.ops.arrays import moveaxis, split
from dptrain.ops.elementwise import (
    _FUNCTION,
    absolute,
    cast,
    clip,
    divide,
    elu,
    exp,
    floating,
    greater,
    in_float32,
    leaky_relu,
    maximum,
    minimum,
    multiply,
    relu,
    saturate_to,
    silu,
    softplus,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from dptrain.ops.manipulation import expand_dims
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import log_softmax, sum
from dptrain.program.lowering import Element
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor, as_tensors

# From here on erf is 1 in float64.
_ERF_IS_ONE = 6.0


# Below this the terms of erf(x) / x as a polynomial in x^2, highest power first, are summed to the last digit.
_ERF_NEAR = 0.5
_ERF_SERIES = np.array(
    [2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(12, -1, -1)]
)


@functools.cache
def _erf_coefficients(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Coefficients of p in `erf`, highest power first, over u = 2 (t - 1 / 4) / (1 - 1 / 4) - 1 in [-1, 1]."""
    degree = 24 if dtype == np.float64 else 12
    u = np.polynomial.chebyshev.chebpts1(degree + 1)
    t = (u + 1) * 0.375 + 0.25
    p = [math.log(math.erfc(2 / t_node - 2)) + (2 / t_node - 2) ** 2 - math.log(t_node) for t_node in t]
    return np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebfit(u, p, degree))[::-1].astype(dtype)


@op(**_FUNCTION, lowering=Element("dp_erf({0})"), expensive=True, onnx="Erf")
def erf(x: Array, *, out: Array) -> None:
    """The error function: 2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x.

    With t = 1 / (1 + |x| / 2), erf(x) = sign(x) (1 - t exp(-x^2 + p(t))), where p is smooth. Near 0 this difference
    loses its digits: there it is the Taylor series.
    """
    size = np.minimum(np.abs(x.astype(out.dtype)), _ERF_IS_ONE)
    series = size * np.polyval(_ERF_SERIES.astype(out.dtype), np.minimum(size, _ERF_NEAR) ** 2)
    np.copysign(np.where(size < _ERF_NEAR, series, 1 - erf_complement(size)), x, out=out)


def erf_complement(size: Array) -> Array:
    """Return 1 - erf(x) as t exp(-x^2 + p(t)) of `erf`, for x from 0 to 6."""
    t = 1 / (1 + size / 2)
    p = np.polyval(_erf_coefficients(size.dtype), (t - 0.25) / 0.375 - 1)
    return np.asarray(t * np.exp(p - size * size))


@erf.gradient
def _erf(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * (2 / math.sqrt(math.pi)) * exp(-square(x))


@operation
def sigmoid(x: Any) -> Tensor:
    """Return 1 / (1 + e^-x), without overflow; the result remembers x as its `logits`."""
    (tensor,) = as_tensors([x])
    output = elementwise.sigmoid(tensor)
    return _with_logits(output, tensor, "sigmoid")


@operation
def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return e^x over its sum along an axis, without overflow; along the last, it remembers x as its `logits`."""
    (tensor,) = as_tensors([x])
    output = reduction.softmax(tensor, axis)
    return _with_logits(output, tensor, "softmax") if axis in (-1, tensor.ndim - 1) else output


def _with_logits(output: Tensor, logits: Tensor, by: str) -> Tensor:
    """Attach the input to a softmax or sigmoid; eager inputs are detached, or a loop would keep all of them."""
    output.logits = logits.detached() if output.op is None and output.value is not None else logits
    output.squashed_by = by
    return output


@operation
@in_float32
def gelu(x: Any, approximate: bool = True) -> Tensor:
    """Return x Phi(x), Phi the normal distribution function, or its tanh approximation (Hendrycks and Gimpel, 2016)."""
    tensor = floating(x)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (tensor + 0.044715 * tensor * square(tensor))
        return multiply(0.5 * tensor, 1.0 + tanh(inner))
    return multiply(0.5 * tensor, 1.0 + erf(tensor * math.sqrt(0.5)))


@operation
@in_float32
def selu(x: Any) -> Tensor:
    """Return elu, scaled so that mean 0 and variance 1 are a fixed point (Klambauer et al., NIPS 2017)."""
    return 1.0507009873554805 * elu(x, alpha=1.6732632423543772)


@operation
@in_float32
def celu(x: Any, alpha: float = 1.0) -> Tensor:
    """Return max(x, 0) + min(alpha (e^(x / alpha) - 1), 0)."""
    return maximum(x, 0.0) + alpha * elu(minimum(divide(x, alpha), 0.0))


@operation
def relu6(x: Any) -> Tensor:
    """Return x between 0 and 6."""
    return saturate_to(x, 0.0, 6.0)


@operation
@in_float32
def hard_sigmoid(x: Any) -> Tensor:
    """Return x / 6 + 1 / 2 between 0 and 1."""
    return saturate_to(divide(x, 6.0) + 0.5, 0.0, 1.0)


@operation
@in_float32
def hard_silu(x: Any) -> Tensor:
    """Return x hard_sigmoid(x)."""
    return multiply(x, hard_sigmoid(x))


@operation
def hard_tanh(x: Any) -> Tensor:
    """Return x between -1 and 1."""
    return saturate_to(x, -1.0, 1.0)


@operation
def hard_shrink(x: Any, threshold: float = 0.5) -> Tensor:
    """Return x where |x| is above the threshold, else 0."""
    return where(absolute(x) > threshold, x, 0.0)


@operation
@in_float32
def soft_shrink(x: Any, threshold: float = 0.5) -> Tensor:
    """Return x moved towards 0 by the threshold, at most to 0."""
    tensor = floating(x)
    return tensor - clip(tensor, -threshold, threshold)


@operation
@in_float32
def tanh_shrink(x: Any) -> Tensor:
    """Return x - tanh(x)."""
    return subtract(x, tanh(x))


@operation
@in_float32
def softsign(x: Any) -> Tensor:
    """Return x / (1 + |x|)."""
    return divide(x, 1.0 + absolute(x))


@operation
@in_float32
def squareplus(x: Any, b: float = 4.0) -> Tensor:
    """Return (x + sqrt(x^2 + b)) / 2."""
    tensor = floating(x)
    return multiply(tensor + sqrt(square(tensor) + b), 0.5)


@operation
@in_float32
def sparse_plus(x: Any) -> Tensor:
    """Return 0 up to -1, (x + 1)^2 / 4 up to 1, then x."""
    tensor = floating(x)
    return where(tensor <= -1.0, 0.0, where(tensor < 1.0, square(tensor + 1.0) * 0.25, tensor))


@operation
@in_float32
def sparse_sigmoid(x: Any) -> Tensor:
    """Return (x + 1) / 2 between 0 and 1."""
    return saturate_to((floating(x) + 1.0) * 0.5, 0.0, 1.0)


@operation
def threshold(x: Any, threshold: float, default_value: float) -> Tensor:
    """Return x where it is above the threshold, else the default value."""
    return where(greater(x, threshold), x, default_value)


@in_float32
def mish(x: Any) -> Tensor:
    """Return x tanh(softplus(x)). Source: D. Misra, "Mish", BMVC 2020."""
    return multiply(x, tanh(softplus(x)))


@operation
@in_float32
def log_sigmoid(x: Any) -> Tensor:
    """Return log(sigmoid(x)), exact where that is nearly 0."""
    (tensor,) = as_tensors([x])
    return -softplus(-tensor)


__all__ = [
    "celu",
    "elu",
    "erf",
    "gelu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softmax",
    "softplus",
    "softsign",
    "sparse_plus",
    "sparse_sigmoid",
    "squareplus",
    "tanh",
    "tanh_shrink",
    "threshold",
]


@operation
def glu(x: Any, axis: int = -1) -> Tensor:
    """Return the first half of x along an axis times the sigmoid of the second (Dauphin et al., ICML 2017)."""
    first, second = split(x, 2, axis)
    return multiply(first, sigmoid(second))


@operation
def sparsemax(x: Any, axis: int = -1) -> Tensor:
    """Return the nearest point of the simplex: non-negative numbers with sum 1 along the axis, most of them 0.

    An element is above the threshold where 1 + k x exceeds the sum of the k elements that are at least x. All pairs are
    compared: quadratic in the axis' length, but without sorting.

    Source: A. Martins and R. Astudillo, "From softmax to sparsemax", ICML 2016.
    """
    tensor = moveaxis(floating(x), axis, -1)
    mine, theirs = expand_dims(tensor, -1), expand_dims(tensor, -2)
    above = theirs >= mine
    support = 1 + sum(cast(above, tensor.dtype), -1) * tensor > sum(where(above, theirs, 0), -1)
    number = sum(cast(support, tensor.dtype), -1, keepdims=True)
    threshold = (sum(where(support, tensor, 0), -1, keepdims=True) - 1) / number
    return moveaxis(maximum(tensor - threshold, 0), -1, axis)


swish, hard_swish = silu, hard_silu
