"""Roots of sums of squares, and cube roots."""

import numpy as np

from dptrain.ops.common import unbroadcast
from dptrain.ops.elementwise import _FUNCTION, _as_float, divide, square
from dptrain.ops.math.division import divide_no_nan
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor


@op(**_FUNCTION, lowering=Element("dp_sqrt({0})"), onnx="Sqrt", expensive=True)
def root_of_squares(x: Array, *, out: Array) -> None:
    """The square root of a sum of squares; unlike that of `sqrt` its gradient is 0 at 0, where the squares' is."""
    np.sqrt(_as_float(x), out=out)


@root_of_squares.gradient
def _root_of_squares(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return divide_no_nan(dy * 0.5, y)


@op(**_FUNCTION, lowering=Element("dp_cbrt({0})"), expensive=True)
def cbrt(x: Array, *, out: Array) -> None:
    """The cube root, also of negative numbers."""
    np.cbrt(_as_float(x), out=out)


@cbrt.gradient
def _cbrt(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return divide(dy, square(y) * 3)


@cbrt.onnx_lowering
def _cbrt_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    value, third = graph.computed(x, output.dtype), graph.constant(1 / 3, output.dtype)
    return graph.node("Mul", graph.node("Sign", value), graph.node("Pow", graph.node("Abs", value), third))


@op(**_FUNCTION, lowering=Element("dp_hypot({0}, {1})"), expensive=True)
def hypot(x1: Array, x2: Array, *, out: Array) -> None:
    """sqrt(x1^2 + x2^2), without overflow."""
    np.hypot(_as_float(x1), _as_float(x2), out=out)


@hypot.gradient
def _hypot(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient, 0 at the origin."""
    return unbroadcast(dy * divide_no_nan(x1, y), x1), unbroadcast(dy * divide_no_nan(x2, y), x2)


@hypot.onnx_lowering
def _hypot_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    squares = [graph.node("Mul", value, value) for value in (graph.computed(x, output.dtype) for x in (x1, x2))]
    return graph.node("Sqrt", graph.node("Add", *squares))
