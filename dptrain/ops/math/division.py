"""Safe division."""

import numpy as np

from dptrain.ops.common import broadcast_shape, elementwise, floating_dtype, unbroadcast
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.tensor import Array, Tensor


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
