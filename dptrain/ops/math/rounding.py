"""Functions of elements without a gradient: rounding, and tests for NaN and infinity."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.ops.common import boolean, broadcast_shape, elementwise, floating_dtype
from dptrain.program.lowering import Element
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op, op
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import is_floating


def _op_without_gradient(
    name: str, function: Callable[..., Any], c: str, dtype: Any = floating_dtype, onnx: str | None = None
) -> Op:
    """Return an op from a NumPy function; its gradient is 0."""

    def compute(x: Array, *, out: Array) -> None:
        function(x, out=out)

    compute.__name__, compute.__doc__ = name, f"numpy.{function.__name__}."
    record = op(shape=broadcast_shape, letters=elementwise, dtype=dtype, lowering=Element(c), onnx=onnx)(compute)
    record.gradient(lambda y, dy, x: None)
    return record


ceil = _op_without_gradient("ceil", np.ceil, "ceil({0})", onnx="Ceil")
floor = _op_without_gradient("floor", np.floor, "floor({0})", onnx="Floor")
rint = _op_without_gradient("rint", np.rint, "rint({0})", onnx="Round")
isfinite = _op_without_gradient("isfinite", np.isfinite, "{0} - {0} == 0", boolean)
isinf = _op_without_gradient("isinf", np.isinf, "{0} == {0} && {0} - {0} != 0", boolean)
isnan = _op_without_gradient("isnan", np.isnan, "{0} != {0}", boolean)


def _floating(graph: OnnxGraph, x: Value) -> Value:
    return graph.computed(x, x.dtype if is_floating(x.dtype) else np.float32)


@isnan.onnx_lowering
def _isnan_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.node("IsNaN", _floating(graph, x), dtype=np.bool_)


@isinf.onnx_lowering
def _isinf_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.node("IsInf", _floating(graph, x), dtype=np.bool_)


@isfinite.onnx_lowering
def _isfinite_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.node("Not", graph.node("Or", _isnan_onnx(graph, output, x), _isinf_onnx(graph, output, x)))
