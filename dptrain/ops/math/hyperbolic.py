"""Hyperbolic functions and their inverses."""

import math

import numpy as np

from dptrain.ops.elementwise import _FUNCTION, _as_float, _expm1_onnx, _log1p_onnx, divide, log1p, sqrt, square
from dptrain.ops.elementwise import floating as as_floating
from dptrain.ops.operation_calls import operation
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor


@op(**_FUNCTION, lowering=Element("dp_sinh({0})"), expensive=True)
def sinh(x: Array, *, out: Array) -> None:
    """The hyperbolic sine, exact near 0."""
    np.sinh(_as_float(x), out=out)


@sinh.gradient
def _sinh(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * cosh(x)


@sinh.onnx_lowering
def _sinh_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    value, unit = graph.computed(x, output.dtype), graph.constant(1, output.dtype)
    e = _expm1_onnx(graph, output, graph.node("Abs", value))
    double = graph.node("Add", e, graph.node("Div", e, graph.node("Add", e, unit)))
    is_infinite = graph.node("IsInf", e, dtype=np.bool_)
    half = graph.node("Mul", double, graph.constant(0.5, output.dtype))
    return graph.node("Mul", graph.node("Sign", value), graph.node("Where", is_infinite, e, half, dtype=e.dtype))


@op(**_FUNCTION, lowering=Element("dp_cosh({0})"), expensive=True)
def cosh(x: Array, *, out: Array) -> None:
    """The hyperbolic cosine."""
    np.cosh(_as_float(x), out=out)


@cosh.gradient
def _cosh(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy * sinh(x)


@cosh.onnx_lowering
def _cosh_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    value = graph.computed(x, output.dtype)
    double = graph.node("Add", graph.node("Exp", value), graph.node("Exp", graph.node("Neg", value)))
    return graph.node("Mul", double, graph.constant(0.5, output.dtype))


@op(**_FUNCTION, lowering=Element("dp_asinh({0})"), expensive=True)
def arcsinh(x: Array, *, out: Array) -> None:
    """The inverse of the hyperbolic sine, exact near 0."""
    np.arcsinh(_as_float(x), out=out)


@arcsinh.gradient
def _arcsinh(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return divide(dy, sqrt(square(x) + 1))


@arcsinh.onnx_lowering
def _arcsinh_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    """The sign of x times log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))), from 10^4 on log(|x|) + log(2)."""
    value, unit = graph.computed(x, output.dtype), graph.constant(1, output.dtype)
    size = graph.node("Abs", value)
    squared = graph.node("Mul", value, value)
    root = graph.node("Sqrt", graph.node("Add", squared, unit))
    quotient = graph.node("Div", squared, graph.node("Add", unit, root))
    near = _log1p_onnx(graph, output, graph.node("Add", size, quotient))
    far = graph.node("Add", graph.node("Log", size), graph.constant(math.log(2), output.dtype))
    is_far = graph.node("Greater", size, graph.constant(1e4, output.dtype), dtype=np.bool_)
    return graph.node("Mul", graph.node("Sign", value), graph.node("Where", is_far, far, near, dtype=near.dtype))


@op(**_FUNCTION, lowering=Element("dp_acosh({0})"), expensive=True)
def arccosh(x: Array, *, out: Array) -> None:
    """The inverse of the hyperbolic cosine, for x from 1; NaN below."""
    np.arccosh(_as_float(x), out=out)


@arccosh.gradient
def _arccosh(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return divide(dy, sqrt(square(x) - 1))


@arccosh.onnx_lowering
def _arccosh_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    """log(x + sqrt(x^2 - 1))."""
    value = graph.computed(x, output.dtype)
    less = graph.node("Sub", graph.node("Mul", value, value), graph.constant(1, output.dtype))
    return graph.node("Log", graph.node("Add", value, graph.node("Sqrt", less)))


@operation
def arctanh(x: object) -> Tensor:
    """Return the inverse of the hyperbolic tangent, exact near 0."""
    tensor = as_floating(x)
    return (log1p(tensor) - log1p(-tensor)) / 2
