"""Inverse trigonometric functions."""

import math
from typing import Any

import numpy as np

from dptrain.ops.elementwise import (
    _FUNCTION,
    _as_float,
    absolute,
    all_floating,
    divide,
    equal,
    maximum,
    minimum,
    sqrt,
    square,
    where,
)
from dptrain.ops.operation_calls import operation
from dptrain.program.lowering import Element
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


@operation
def arctan2(x1: Any, x2: Any) -> Tensor:
    """Return the angle in radians, from -pi to pi, of the point with x = x2 and y = x1; 0 of the origin.

    Signs of zeros are ignored: on the negative x axis it is pi.
    """
    y, x = all_floating(x1, x2)
    height, width = absolute(y), absolute(x)
    lesser, greater = minimum(height, width), maximum(height, width)
    origin, both_infinite = equal(greater, 0), equal(lesser, math.inf)
    ratio = where(both_infinite, 1.0, divide(where(origin, 0.0, lesser), where(origin, 1.0, greater)))
    acute = arctan(ratio)
    first = where(height > width, math.pi / 2 - acute, acute)
    upper = where(x < 0, math.pi - first, first)
    return where(y < 0, -upper, upper)
