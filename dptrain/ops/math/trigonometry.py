"""Inverse trigonometric functions, and sinc."""

import math
from typing import Any

import numpy as np

from dptrain.ops.common import unbroadcast
from dptrain.ops.elementwise import (
    _FUNCTION,
    _as_float,
    absolute,
    cos,
    equal,
    logical_or,
    maximum,
    sqrt,
    square,
    stop_gradient,
    where,
)
from dptrain.ops.math.division import divide_no_nan
from dptrain.ops.math.rounding import isinf
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor


@op(**_FUNCTION, lowering=Element("dp_atan({0})"), expensive=True, onnx="Atan")
def arctan(x: Array, *, out: Array) -> None:
    """The angle in radians, from -pi/2 to pi/2, whose tangent is x."""
    np.arctan(_as_float(x), out=out)


@arctan.gradient
def _arctan(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy / (1 + square(x))


@op(**_FUNCTION, lowering=Element("dp_asin({0})"), expensive=True, onnx="Asin")
def arcsin(x: Array, *, out: Array) -> None:
    """The angle in radians, from -pi/2 to pi/2, whose sine is x."""
    np.arcsin(_as_float(x), out=out)


@arcsin.gradient
def _arcsin(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy / sqrt(1 - square(x))


@op(**_FUNCTION, lowering=Element("dp_acos({0})"), expensive=True, onnx="Acos")
def arccos(x: Array, *, out: Array) -> None:
    """The angle in radians, from 0 to pi, whose cosine is x."""
    np.arccos(_as_float(x), out=out)


@arccos.gradient
def _arccos(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return -dy / sqrt(1 - square(x))


@op(**_FUNCTION, lowering=Element("dp_atan2({0}, {1})"), expensive=True)
def arctan2(x1: Array, x2: Array, *, out: Array) -> None:
    """The angle in radians, from -pi to pi, of the point with x = x2 and y = x1; signs of zeros count, as in NumPy."""
    np.arctan2(_as_float(x1), _as_float(x2), out=out)


@arctan2.gradient
def _arctan2(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Return x2 / r^2 and -x1 / r^2, without overflow of r^2; 0 at the origin and where r is infinite."""
    size = stop_gradient(maximum(absolute(x1), absolute(x2)))  # any: it cancels out
    scale = where(logical_or(equal(size, 0), isinf(size)), 1.0, size)
    a, b = x1 / scale, x2 / scale
    squares = (square(a) + square(b)) * scale
    slopes = (where(isinf(size), 0.0, divide_no_nan(part, squares)) for part in (b, -a))
    first, second = (dy * slope for slope in slopes)
    return unbroadcast(first, x1), unbroadcast(second, x2)


@arctan2.onnx_lowering
def _arctan2_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    """The arc tangent of the lesser over the greater side, moved to the point's octant."""
    dtype = output.dtype
    y, x = (graph.computed(value, dtype) for value in (x1, x2))
    zero, unit = graph.constant(0, dtype), graph.constant(1, dtype)
    height, width = graph.node("Abs", y), graph.node("Abs", x)
    lesser, greater = graph.node("Min", height, width), graph.node("Max", height, width)
    is_origin = graph.node("Equal", greater, zero, dtype=np.bool_)
    are_infinite = graph.node("IsInf", lesser, dtype=np.bool_)
    quotient = graph.node("Div", lesser, graph.node("Where", is_origin, unit, greater, dtype=dtype))
    acute = graph.node("Atan", graph.node("Where", are_infinite, unit, quotient, dtype=dtype))
    is_steep = graph.node("Greater", height, width, dtype=np.bool_)
    steep = graph.node("Sub", graph.constant(math.pi / 2, dtype), acute)
    first = graph.node("Where", is_steep, steep, acute, dtype=dtype)
    is_left = graph.node("Less", x, zero, dtype=np.bool_)
    left = graph.node("Sub", graph.constant(math.pi, dtype), first)
    upper = graph.node("Where", is_left, left, first, dtype=dtype)
    is_below = graph.node("Less", y, zero, dtype=np.bool_)
    return graph.node("Where", is_below, graph.node("Neg", upper), upper, dtype=dtype)


# Up to here sin(a) / a is its Taylor series, whose gradient loses no digits.
_NEAR = 0.3


@op(**_FUNCTION, lowering=Element("dp_sinc({0})"), expensive=True)
def sinc(x: Array, *, out: Array) -> None:
    """sin(pi x) / (pi x), 1 at 0."""
    angle = _as_float(x) * math.pi
    is_zero = angle == 0
    safe = np.where(is_zero, angle.dtype.type(1), angle)
    out[...] = np.where(is_zero, 1, np.sin(safe) / safe)


@sinc.gradient
def _sinc(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Return (cos(pi x) - sinc(x)) / x, near 0 its series."""
    angle = x * math.pi
    is_near = absolute(angle) < _NEAR
    squares = square(where(is_near, angle, 0.0))
    series: Any = 1.0
    for n in (11, 9, 7, 5):
        series = 1.0 - squares * series / ((n - 3) * n)
    near = series * where(is_near, angle, 0.0) * (-math.pi / 3)
    distant = where(is_near, 1.0, x)
    return dy * where(is_near, near, (cos(distant * math.pi) - sinc(distant)) / distant)


@sinc.onnx_lowering
def _sinc_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    unit = graph.constant(1, output.dtype)
    angle = graph.node("Mul", graph.computed(x, output.dtype), graph.constant(math.pi, output.dtype))
    is_zero = graph.node("Equal", angle, graph.constant(0, output.dtype), dtype=np.bool_)
    safe = graph.node("Where", is_zero, unit, angle, dtype=angle.dtype)
    return graph.node("Where", is_zero, unit, graph.node("Div", graph.node("Sin", safe), safe), dtype=angle.dtype)
