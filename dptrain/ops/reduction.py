"""Sums, means and extremes over axes; over the rows of the batch, of the whole batch on all ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.common import common_dtype
from dptrain.ops.elementwise import (
    cast,
    divide,
    equal,
    exp,
    floating,
    in_float32,
    log,
    maximum,
    square,
    stop_gradient,
    where,
)
from dptrain.ops.manipulation import broadcast_to, reshape
from dptrain.ops.math.roots import root_of_squares
from dptrain.ops.math.rounding import isfinite
from dptrain.ops.operation_calls import operation
from dptrain.program.dims import Dim, is_number
from dptrain.program.lowering import Reduction
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import in_one_call, op
from dptrain.program.shapes import Shape, normalized_axes, size
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors, constant
from dptrain.runtime.types import is_floating


def _reduced_shape(shape: Shape, *, axes: tuple[int, ...], keepdims: bool) -> Shape:
    if keepdims:
        return tuple(1 if axis in axes else length for axis, length in enumerate(shape))
    return tuple(length for axis, length in enumerate(shape) if axis not in axes)


def _letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`abc->ac`, or `abc->a1c`."""
    letters, reduced = names(len(shapes[0])), "1" if attributes["keepdims"] else ""
    result = (reduced if axis in attributes["axes"] else letter for axis, letter in enumerate(letters))
    return f"{letters}->{''.join(result)}"


def _operations(output: Tensor) -> int:
    """Count one operation per reduced element."""
    return size(output.inputs[0].shape)


def summed_dtype(dtype: np.dtype[Any], **attributes: Any) -> npt.DTypeLike:
    """The type of a sum: at least 32 bits for integers, as in Keras, against overflow."""
    if dtype.kind == "b":
        return np.int32
    return np.result_type(dtype, np.uint32 if dtype.kind == "u" else np.int32) if dtype.kind in "iu" else dtype


@op(
    shape=_reduced_shape,
    letters=_letters,
    dtype=summed_dtype,
    linear="each",
    lowering=Reduction("sum"),
    operations=_operations,
)
def reduce_sum(x: Array, *, axes: tuple[int, ...], keepdims: bool, out: Array) -> None:
    """The sum over axes."""
    np.add.reduce(x, axis=axes, keepdims=keepdims, dtype=out.dtype, out=out)


@reduce_sum.gradient
def _reduce_sum(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return _broadcast_back(dy, x, y)


@reduce_sum.onnx_lowering
def _reduce_sum_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return _reduced_onnx(graph, "ReduceSum", output, graph.computed(x, output.dtype))


@divide.onnx_lowering
def _divide_onnx(graph: OnnxGraph, output: Tensor, x1: Value, x2: Value) -> Value:
    """Export a sum over its number of elements as a mean, which needs no known lengths."""
    total, count = output.inputs
    source = next((node for node in graph.nodes if x1.name in node.outputs), None)
    is_sum = source is not None and source.kind == "ReduceSum" and total.op is reduce_sum and x1.dtype.kind == "f"
    if source is not None and is_sum and count.value is not None:
        lengths = [total.inputs[0].shape[axis] for axis in total.attributes["axes"]]
        if not count.ndim and all(map(is_number, lengths)) and float(count.numpy()) == math.prod(lengths):
            return graph.node("ReduceMean", *(Value(name, x1.dtype) for name in source.inputs), **source.attributes)
    return graph.elements("Div", output, (x1, x2))


def _reduced_onnx(graph: OnnxGraph, kind: str, output: Tensor, x: Value) -> Value:
    if not output.attributes["axes"]:
        return x
    axes = graph.constant(output.attributes["axes"], np.int64)
    return graph.node(kind, x, axes, keepdims=int(output.attributes["keepdims"]))


@op(
    shape=_reduced_shape,
    letters=_letters,
    partial_reduce="max",
    dtype=common_dtype,
    lowering=Reduction("max"),
    operations=_operations,
)
def reduce_max(x: Array, *, axes: tuple[int, ...], keepdims: bool, out: Array) -> None:
    """The greatest element over axes; of none the type's least number."""
    lowest = -np.inf if is_floating(x.dtype) else np.iinfo(x.dtype).min
    np.maximum.reduce(x, axis=axes, keepdims=keepdims, initial=lowest, out=out)


@reduce_max.gradient
def _reduce_max(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Equal maxima share the gradient, as in JAX and PyTorch's `amax`."""
    axes = y.attributes["axes"]
    is_greatest = equal(x, _broadcast_back(y, x, y))
    count = reduce_sum(cast(is_greatest, dy.dtype), axes=axes, keepdims=y.attributes["keepdims"])
    return where(is_greatest, _broadcast_back(dy, x, y) / _broadcast_back(count, x, y), 0)


@reduce_max.onnx_lowering
def _reduce_max_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return _reduced_onnx(graph, "ReduceMax", output, graph.computed(x))


def _broadcast_back(reduced: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Broadcast a reduction's output, or its gradient, to the shape of x."""
    kept_shape = tuple(1 if axis in y.attributes["axes"] else length for axis, length in enumerate(x.shape))
    return broadcast_to(reduced if y.attributes["keepdims"] else reshape(reduced, kept_shape), x.shape)


@operation
def sum(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the sum over one axis, several, or all (None); over rows, of the whole batch."""
    (tensor,) = as_tensors([x])
    return reduce_sum(tensor, axes=normalized_axes(axis, tensor.ndim), keepdims=bool(keepdims))


@operation
@in_float32
def mean(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the mean over axes, like `sum`; NaN of nothing."""
    tensor = floating(x)
    count = math.prod(
        tensor.shape[position] for position in normalized_axes(axis, tensor.ndim)
    )  # marked if it counts rows
    average: Tensor = sum(tensor, axis, keepdims) / count
    return average


@operation
@in_float32
def var(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the variance (mean squared distance from the mean) over axes, like `sum`."""
    tensor = floating(x)
    return mean(square(tensor - mean(tensor, axis, keepdims=True)), axis, keepdims)


@operation
@in_float32
def std(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the square root of `var`; of equal elements its gradient is 0."""
    return root_of_squares(var(x, axis, keepdims))


@operation
def max(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False, initial: Any = None) -> Tensor:
    """Return the greatest element over axes, like `sum`, and of `initial`, which is required without elements."""
    (tensor,) = as_tensors([x])
    if tensor.dtype.kind == "b":
        return cast(max(cast(tensor, "int32"), axis, keepdims, initial), "bool")
    axes = normalized_axes(axis, tensor.ndim)
    if initial is None and _is_empty(tensor, axes):
        raise ConfigError(f"max or min over axes {axes} of shape {tensor.shape}, which has no elements; pass `initial`")
    greatest = reduce_max(tensor, axes=axes, keepdims=bool(keepdims))
    return greatest if initial is None else maximum(greatest, initial)


def _is_empty(tensor: Tensor, axes: Iterable[int]) -> bool:
    """Return whether an axis is known to be empty."""
    return any(not isinstance(tensor.shape[axis], Dim) and tensor.shape[axis] == 0 for axis in axes)


def order_reversed(x: Tensor) -> Tensor:
    """Return numbers in reverse order, without overflow: -x of floating-point numbers."""
    if is_floating(x.dtype):
        return -x
    if x.dtype.kind == "b":
        return 1 - cast(x, "int32")
    return (int(np.iinfo(x.dtype).max) if x.dtype.kind == "u" else -1) - x


@operation
def min(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False, initial: Any = None) -> Tensor:
    """Return the least element over axes, like `max`."""
    (tensor,) = as_tensors([x])
    if tensor.dtype.kind == "b":
        return cast(min(cast(tensor, "int32"), axis, keepdims, initial), "bool")
    reversed_initial = None if initial is None else order_reversed(constant(initial, tensor.dtype))
    return order_reversed(max(order_reversed(tensor), axis, keepdims, reversed_initial))


def _max_constant(x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Return the maximum over axes without a gradient, to subtract before exponentials."""
    return stop_gradient(reduce_max(x, axes=normalized_axes(axis, x.ndim), keepdims=True))


@operation
@in_float32
def logsumexp(x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(e^x)) over axes, without overflow."""
    tensor = floating(x)
    axes = normalized_axes(axis, tensor.ndim)
    greatest = _max_constant(tensor, axes)
    greatest = where(isfinite(greatest), greatest, 0)
    total = sum(exp(tensor - greatest), axes, keepdims=True)
    is_empty = equal(total, 0)  # all are e^-inf: the logarithm's gradient would be infinite
    result = where(is_empty, -np.inf, log(where(is_empty, 1, total)) + greatest)
    return result if keepdims else reshape(result, _reduced_shape(tensor.shape, axes=axes, keepdims=False))


@in_float32
def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return e^x over its sum along an axis, without overflow."""
    tensor = floating(x)
    axes = normalized_axes(axis, tensor.ndim)
    result = in_one_call(partial(_softmax, axes=axes), tensor)
    if result is not None:
        return result
    powers = exp(tensor - _max_constant(tensor, axes))
    return powers / sum(powers, axes, keepdims=True)


def _softmax(x: Array, axes: tuple[int, ...]) -> Array:
    """Compute `softmax` by NumPy, bit for bit like its ops."""
    powers = x - np.maximum.reduce(x, axis=axes, keepdims=True, initial=-np.inf)
    np.exp(powers, out=powers)
    powers /= np.add.reduce(powers, axis=axes, keepdims=True)
    return powers


@operation
@in_float32
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, exact where that is nearly 0."""
    tensor = floating(x)
    shifted = tensor - _max_constant(tensor, axis)
    return shifted - log(sum(exp(shifted), axis, keepdims=True))


def _argmax_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`aXb->ab`."""
    letters, axis = names(len(out)), attributes["axis"]
    return f"{letters[:axis]}X{letters[axis:]}->{letters}"


@op(
    shape=lambda shape, *, axis: tuple(length for position, length in enumerate(shape) if position != axis),
    letters=_argmax_letters,
    dtype=lambda dtype, *, axis: np.int64,
    lowering=Reduction("argmax"),
)
def argmax_along(x: Array, *, axis: int, out: Array) -> None:
    """The index of the greatest element along an axis, the first of equal ones."""
    np.argmax(x, axis=axis, out=out)


@argmax_along.onnx_lowering
def _argmax_along_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.node("ArgMax", graph.computed(x), dtype=np.int64, axis=output.attributes["axis"], keepdims=0)


@operation
def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the greatest element along an axis (int32), the first of equals; by default in a vector."""
    (tensor,) = as_tensors([x])
    vector = reshape(tensor, (-1,)) if axis is None else tensor
    (place,) = normalized_axes(0 if axis is None else axis, vector.ndim)
    if _is_empty(vector, [place]):
        raise ConfigError(f"argmax or argmin over axis {place} of shape {vector.shape}, which has no elements")
    output = cast(argmax_along(vector, axis=place), np.int32)
    if not keepdims:
        return output
    return reshape(
        output, tuple(1 if axis is None or position == place else n for position, n in enumerate(tensor.shape))
    )


__all__ = ["argmax", "log_softmax", "logsumexp", "max", "mean", "min", "softmax", "std", "sum", "var"]
