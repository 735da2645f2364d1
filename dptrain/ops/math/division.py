"""Safe division, and remainders."""

import numpy as np

from dptrain.ops.common import broadcast_shape, elementwise, floating_dtype, unbroadcast
from dptrain.ops.elementwise import _COUNTING, floor_divide, where
from dptrain.ops.math.rounding import ceil, floor
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.operand import METHODS
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import is_floating


@op(
    shape=broadcast_shape,
    letters=elementwise,
    dtype=floating_dtype,
    linear="each",
    linear_in=(0,),
    lowering=Element("{1} == 0 ? 0 : {0} / {1}"),
    expensive=True,
    quotient=0.0,
)
def divide_no_nan(x1: Array, x2: Array, *, out: Array) -> None:
    """x1 / x2, and 0 where x2 is 0."""
    zero = np.equal(x2, 0)
    np.divide(x1, np.where(zero, x2.dtype.type(1), x2), out=out)
    np.copyto(out, 0, where=zero)


@divide_no_nan.gradient
def _divide_no_nan(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(divide_no_nan(dy, x2), x1), unbroadcast(-divide_no_nan(dy * y, x2), x2)


@divide_no_nan.onnx_lowering
def _divide_no_nan_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    a, b = (graph.computed(value, output.dtype) for value in (x1, x2))
    zero = graph.constant(0, output.dtype)
    by_zero = graph.node("Equal", b, zero, dtype=np.bool_)
    return graph.node("Where", by_zero, zero, graph.node("Div", a, b), dtype=output.dtype)


@op(**_COUNTING, lowering=Element("dp_mod({0}, {1})"), expensive=True)
def mod(x1: Array, x2: Array, *, out: Array) -> None:
    """The remainder of x1 / x2, with x2's sign; 0 where integers are divided by 0."""
    np.mod(x1, x2, out=out)


METHODS["%"] = mod


@mod.gradient
def _mod(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(dy, x1), unbroadcast(-(dy * floor_divide(x1, x2)), x2)


@mod.onnx_lowering
def _mod_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    a, b = (graph.computed(value, output.dtype) for value in (x1, x2))
    if not is_floating(a.dtype):
        return graph.node("Mod", a, b)
    zero = graph.constant(0, a.dtype)
    remainder = graph.node("Mod", a, b, fmod=1)
    signs = [graph.node("Less", number, zero, dtype=np.bool_) for number in (remainder, b)]
    is_whole = graph.node("Equal", remainder, zero, dtype=np.bool_)
    is_other = graph.node("And", graph.node("Not", is_whole), graph.node("Xor", *signs))
    return graph.node("Where", is_other, graph.node("Add", remainder, b), remainder, dtype=a.dtype)


@op(**_COUNTING, lowering=Element("dp_fmod({0}, {1})"), expensive=True)
def fmod(x1: Array, x2: Array, *, out: Array) -> None:
    """The remainder of x1 / x2, with x1's sign; 0 where integers are divided by 0."""
    np.fmod(x1, x2, out=out)


@fmod.gradient
def _fmod(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    quotient = x1 / x2
    whole = where(quotient < 0, ceil(quotient), floor(quotient))
    return unbroadcast(dy, x1), unbroadcast(-(dy * whole), x2)


@fmod.onnx_lowering
def _fmod_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    a, b = (graph.computed(value, output.dtype) for value in (x1, x2))
    return graph.node("Mod", a, b, fmod=1)
