"""Special functions, the inverse error function, and complex parts of real numbers."""

import math
from typing import Any

import numpy as np

from dptrain.ops.common import broadcast_shape, elementwise, floating_dtype
from dptrain.ops.elementwise import exp, floating, square, where
from dptrain.ops.manipulation import zeros_like
from dptrain.ops.math.bits import signbit
from dptrain.ops.nn.activation import erf, erf_complement
from dptrain.ops.operation_calls import operation
from dptrain.program.lowering import Element, HostCall
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor, as_tensors

# From here on a continued fraction of this many levels is exact.
_FAR, _LEVELS = 5.0, 40
# Angles in half a circle that integrate finite e^(x cos t) to the last digit.
_ANGLES = 128


def _erfc(x: Array) -> Array:
    """Return 1 - erf(x) in float64, accurate where it is small.

    Beyond 5 it is e^(-x^2) / sqrt(pi) over a continued fraction (Abramowitz and Stegun, 7.1.14).
    """
    difference = np.empty(x.shape)
    erf.compute(x, out=difference)
    distant = np.maximum(x, 1.0)
    fraction = distant
    for level in range(_LEVELS, 0, -1):
        fraction = distant + level / 2 / fraction
    tail = np.exp(-x * x) / (math.sqrt(math.pi) * fraction)
    return np.where(x > _FAR, tail, np.where(x > 0.5, erf_complement(np.clip(x, 0, _FAR)), 1 - difference))


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=floating_dtype,
    lowering=Element("dp_erfc({0})"),
    expensive=True,
)
def erfc_of(x: Array, *, out: Array) -> None:
    """1 - erf(x)."""
    out[...] = _erfc(x.astype(np.float64))


@erfc_of.gradient
def _erfc_of(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * (-2 / math.sqrt(math.pi)) * exp(-square(x))


@operation
def erfc(x: Any) -> Tensor:
    """Return 1 - erf(x), accurate where it is small."""
    return erfc_of(x)


# M. Giles, "Approximating the erfinv function", 2010: in w = -log(1 - x^2), below and from 5.
_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=floating_dtype,
    lowering=HostCall(),
    expensive=True,
)
def erfinv_of(x: Array, *, out: Array) -> None:
    """The y with erf(y) = x: Giles' polynomials, then two Newton steps in float64."""
    wide = x.astype(np.float64)
    w = -np.log((1 - wide) * (1 + wide))
    central = np.polyval(_CENTRAL, w - 2.5)
    tail = np.polyval(_TAIL, np.sqrt(np.maximum(w, 5)) - 3)
    y = np.where(w < 5, central, tail) * wide
    size, complement = np.abs(wide), 1 - np.abs(wide)
    at = np.abs(np.where(size < 1, y, 0))
    for _ in range(2):
        erf_at = np.empty(at.shape)
        erf.compute(at, out=erf_at)
        error = np.where(size < 0.5, erf_at - size, complement - _erfc(at))
        at = at - error / (2 / math.sqrt(math.pi) * np.exp(-at * at))
    out[...] = np.where(size < 1, np.copysign(at, wide), np.where(size == 1, np.copysign(np.inf, wide), np.nan))


@erfinv_of.gradient
def _erfinv_of(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * (math.sqrt(math.pi) / 2) * exp(square(y))


@operation
def erfinv(x: Any) -> Tensor:
    """Return the y with erf(y) = x: infinite at -1 and 1, NaN beyond."""
    return erfinv_of(x)


@op(shape=broadcast_shape, letters=elementwise, dtype=floating_dtype, lowering=HostCall(), expensive=True)
def bessel_of(x: Array, *, order: int, out: Array) -> None:
    """The modified Bessel function of the first kind and integer order: the mean of e^(x cos t) cos(order t)."""
    wide = x.astype(np.float64)[..., None]
    angles = (np.arange(_ANGLES) + 0.5) * (math.pi / _ANGLES)
    size = np.abs(wide)
    averages = (np.exp(wide * np.cos(angles) - size) * np.cos(order * angles)).mean(-1)
    growth = np.exp(size[..., 0])  # infinite long before the averages of so few angles are no good
    out[...] = np.where(np.isinf(growth), growth * np.sign(wide[..., 0]) ** order, averages * growth)


@bessel_of.gradient
def _bessel_of(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    order = y.attributes["order"]
    if order == 0:
        return dy * bessel_of(x, order=1)
    return dy * 0.5 * (bessel_of(x, order=order - 1) + bessel_of(x, order=order + 1))


@operation
def i0(x: Any) -> Tensor:
    """Return the modified Bessel function of the first kind, of order 0."""
    return bessel_of(x, order=0)


# Complex numbers, as far as they are real


@operation
def imag(x: Any) -> Tensor:
    """Return the imaginary part of real numbers: zeros."""
    return zeros_like(x)


@operation
def angle(x: Any) -> Tensor:
    """Return the angle of real numbers in the complex plane: 0, or pi of negative ones and -0."""
    tensor = floating(as_tensors([x])[0])
    return where(tensor != tensor, tensor, where(signbit(tensor), math.pi, zeros_like(tensor)))
