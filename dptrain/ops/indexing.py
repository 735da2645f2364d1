"""Gather and scatter rows of a table; one-hot and multi-hot vectors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast, logical_and
from dptrain.ops.elementwise import where as chosen
from dptrain.ops.manipulation import reshape, reshape_to, transpose_to, zeros
from dptrain.ops.operation_calls import operation
from dptrain.ops.products import batch_matmul
from dptrain.ops.reduction import max as max_over
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.dims import Dim, counts_rows
from dptrain.program.lowering import Element, Gather, Scatter
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import op
from dptrain.program.schema import TypeName
from dptrain.program.shapes import Shape, normalized_axes
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.floatx import floatx


def _take_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`Xcd,ab->abcd`: any row of the table may be taken."""
    output_letters, places = names(len(out)), len(shapes[1])
    return f"X{output_letters[places:]},{output_letters[:places]}->{output_letters}"


@op(
    shape=lambda table, places: (*places, *table[1:]),
    letters=_take_letters,
    dtype=lambda table, places: table,
    linear="each",
    linear_in=(0,),
    lowering=Gather(),
    expensive=True,
)
def take_rows(table: Array, places: Array, *, out: Array) -> None:
    """table[places]; IndexError for a place that is not 0 to the table's length - 1."""
    out[...] = table[_from_front(places)]


def _from_front(places: Array) -> Array:
    """Return indices unless one is negative, which NumPy would count from the end."""
    if places.dtype.kind == "i" and places.size and places.min() < 0:
        raise IndexError("negative index")
    return places


@take_rows.gradient
def _take_rows(y: Tensor, dy: Tensor, table: Tensor, places: Tensor) -> tuple[Tensor, None]:
    return add_rows(dy, places, length=table.shape[0]), None


@take_rows.onnx_lowering
def _take_rows_onnx(graph: OnnxGraph, output: Tensor, table: Value, places: Value) -> Value:
    return graph.node("Gather", table, graph.cast(places, np.int64), axis=0)


def _add_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`abcd,ab->Xcd`."""
    values, places = names(len(shapes[0])), len(shapes[1])
    return f"{values},{values[:places]}->X{values[places:]}"


@op(
    shape=lambda values, places, *, length: (length, *values[len(places) :]),
    letters=_add_letters,
    dtype=lambda values, places, *, length: values,
    linear="each",
    linear_in=(0,),
    lowering=Scatter(),
    operator="scatter",
)
def add_rows(values: Array, places: Array, *, length: int, out: Array) -> None:
    """Zeros with the values added at the rows `places`; IndexError for one that is not 0 to length - 1."""
    out.fill(0)
    np.add.at(out, _from_front(places), values)


@add_rows.gradient
def _add_rows(y: Tensor, dy: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, None]:
    return take_rows(dy, places), None


@add_rows.onnx_lowering
def _add_rows_onnx(graph: OnnxGraph, output: Tensor, values: Value, places: Value) -> Value:
    zeros = graph.expand(graph.constant(0, output.dtype), output.shape)
    numbers = graph.node("Unsqueeze", graph.cast(places, np.int64), graph.constant([-1], np.int64))
    return graph.node("ScatterND", zeros, numbers, values, reduction="add")


def row_numbers(rows: Any) -> Tensor:
    """Return each row's index in the global batch (int64); fixes the program to this number of rows."""
    numbers = np.arange(int(rows))
    # A rank's part of the constant is that of its rows.
    shape: Any = (rows,)
    return zeros(shape, np.int64) + numbers if isinstance(rows, Dim) else as_tensors([numbers])[0]


def gather_rows_along(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Make the lengths of axes that count rows of the batch numbers, so that ranks gather them."""
    shape = tuple(int(n) if axis in axes and isinstance(n, Dim) else n for axis, n in enumerate(x.shape))
    return reshape_to(x, shape=shape) if any(isinstance(x.shape[axis], Dim) for axis in axes) else x


def divide_rows(x: Tensor, shape: Shape) -> Tensor:
    """Give x this shape of as many elements, so that ranks keep their rows where it counts rows of the batch."""
    is_same = all(isinstance(n, Dim) == isinstance(wanted, Dim) for n, wanted in zip(x.shape, shape, strict=True))
    return x if is_same else reshape_to(x, shape=shape)


@op(
    shape=lambda table, places: (*places, *table[2:]),
    letters=lambda shapes, out, attributes: _take_each_letters(len(shapes[1]), len(out)),
    dtype=lambda table, places: table,
    linear="each",
    linear_in=(0,),
    lowering=Gather(batch=1),
    expensive=True,
)
def take_each(table: Array, places: Array, *, out: Array) -> None:
    """table[b, places[b]] for each b of the first axis; IndexError for a place that is not 0 to the length - 1."""
    for row, (row_places, row_out) in enumerate(zip(_from_front(places), out, strict=True)):
        row_out[...] = table[row][row_places]


def _take_each_letters(places: int, rank: int) -> str:
    """`aXc,ab->abc`."""
    output_letters = names(rank)
    return f"{output_letters[0]}X{output_letters[places:]},{output_letters[:places]}->{output_letters}"


@take_each.gradient
def _take_each(y: Tensor, dy: Tensor, table: Tensor, places: Tensor) -> tuple[Tensor, None]:
    """A product with one-hot indices: indices times rows of a table multiplications, in a fixed order of sums."""
    rows, length = places.shape[0], table.shape[1]
    flat = reshape(places, (rows, math.prod(places.shape[1:])))
    chosen = transpose_to(one_hot_last(flat, classes=int(length), dtype=dy.dtype.name), axes=(0, 2, 1))
    values = reshape(dy, (rows, flat.shape[1], math.prod(table.shape[2:])))
    return reshape(batch_matmul(chosen, values), table.shape), None


@take_each.onnx_lowering
def _take_each_onnx(graph: OnnxGraph, output: Tensor, table: Value, places: Value) -> Value:
    numbers = graph.node("Unsqueeze", graph.cast(places, np.int64), graph.constant([-1], np.int64))
    return graph.node("GatherND", table, numbers, batch_dims=1)


def normalized_indices(indices: Any, length: int) -> Tensor:
    """Return indices counted from the front; refuse known ones that are out of range."""
    (places,) = as_tensors([indices])
    if places.dtype.kind == "u" or (places.value is not None and not (places.value < 0).any() and counts_rows(length)):
        return places
    if places.dtype.itemsize < 4:  # the length may not fit
        places = cast(places, np.int32)
    if counts_rows(length):
        all_rows = sum_over(zeros((length,), places.dtype) + 1, 0)
        return chosen(places < 0, places + all_rows, places)
    length = int(length)
    if places.value is None:  # one that is out of range stays as it is, for the message
        return chosen(logical_and(places < 0, places >= -length), places + length, places)
    value: Array = places.value
    wrong = value[(value < -length) | (value >= length)]
    if wrong.size:
        raise ConfigError(f"index {wrong.flat[0]} is out of range for a length of {length}")
    return as_tensors([np.where(value < 0, value + length, value)])[0] if (value < 0).any() else places


def take_at_axis(x: Tensor, places: Tensor, axis: int) -> Tensor:
    """Take indices along an axis, which their shape replaces."""
    if axis == 0:
        return take_rows(x, places)
    front = (axis, *(other_axis for other_axis in range(x.ndim) if other_axis != axis))
    rows = take_rows(transpose_to(x, axes=front), places)
    place_axes = tuple(range(places.ndim))
    row_axes = tuple(range(places.ndim, rows.ndim))
    return transpose_to(rows, axes=(*row_axes[:axis], *place_axes, *row_axes[axis:]))


@operation
def take(x: Any, indices: Any, axis: int | None = None) -> Tensor:
    """Return the parts of x at indices along an axis, by default of x as a vector.

    `indices` are integers of any shape, which replaces the axis; negative ones count from the end. ConfigError for
    those out of range, if they are known before the step runs.
    """
    (table,), (places,) = as_tensors([x]), as_tensors([indices])  # a number is an integer, whatever x is
    if places.dtype.kind not in "iu":
        raise ConfigError(f"take: indices of {places.dtype.name}; expected integers")
    if axis is None:
        table, axis = reshape(table, -1), 0
    (place,) = normalized_axes(axis, table.ndim)
    return take_at_axis(table, normalized_indices(places, table.shape[place]), place)


@op(
    shape=lambda shape, *, classes, dtype: (*shape, classes),
    letters=lambda shapes, out, attributes: f"{(labels := names(len(shapes[0])))}->{labels}X",
    dtype=lambda labels, *, classes, dtype: np.dtype(dtype),
    lowering=Element("{0} == {last}"),
)
def one_hot_last(x: Array, *, classes: int, dtype: TypeName, out: Array) -> None:
    """1 at each label along a new last axis, 0 elsewhere; only zeros for labels outside."""
    out[...] = np.equal(x[..., None], np.arange(classes))


@one_hot_last.onnx_lowering
def _one_hot_last_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    labels = graph.node("Unsqueeze", graph.computed(x), graph.constant([-1], np.int64))
    places = graph.constant(np.arange(output.attributes["classes"]), labels.dtype)
    return graph.node("Equal", labels, places, dtype=np.bool_)


@operation
def one_hot(
    x: Any, num_classes: int, axis: int = -1, dtype: npt.DTypeLike | None = None, sparse: bool = False
) -> Tensor:
    """Return labels as one-hot vectors along a new axis; zeros for labels outside 0 to num_classes - 1."""
    if sparse:
        raise ConfigError("not supported: sparse tensors")
    vectors = one_hot_last(x, classes=int(num_classes), dtype=np.dtype(dtype or floatx()).name)
    (place,) = normalized_axes(axis, vectors.ndim)
    order = list(range(vectors.ndim - 1))
    order.insert(place, vectors.ndim - 1)
    return vectors if place == vectors.ndim - 1 else transpose_to(vectors, axes=tuple(order))


def take_along_last(x: Any, indices: Any) -> Tensor:
    """Return x[..., indices[...]], (...): one element of each vector of the last axis of x (..., C)."""
    tensor, places = as_tensors([x, indices])
    chosen = one_hot(places, int(tensor.shape[-1]), dtype=tensor.dtype)
    return sum_over(tensor * chosen, -1)


@operation
def nonzero(x: Any) -> tuple[Tensor, ...]:
    """Return the indices of nonzero elements along each axis (int32); a traced step raises ConfigError."""
    (tensor,) = as_tensors([x])
    if tensor.value is None:
        raise ConfigError(
            f"not supported: nonzero, or where with a condition alone, of {tensor} while a step is traced, as the "
            "number of results depends on values; use ops.where(condition, x1, x2), or compile with run_eagerly=True"
        )
    return tuple(as_tensors([places.astype(np.int32) for places in np.nonzero(tensor.value)]))


@operation
@overload
def where(condition: Any) -> tuple[Tensor, ...]: ...


@operation
@overload
def where(condition: Any, x1: Any, x2: Any) -> Tensor: ...


@operation
def where(condition: Any, x1: Any = None, x2: Any = None) -> Any:
    """Return x1 where the condition is true (not 0), else x2; of a condition alone, `nonzero`."""
    if x1 is None and x2 is None:
        return nonzero(condition)
    if x1 is None or x2 is None:
        raise ConfigError("where: expected both x1 and x2, or neither")
    return chosen(condition, x1, x2)


@operation
def multi_hot(
    inputs: Any,
    num_classes: int | None = None,
    axis: int = -1,
    dtype: npt.DTypeLike | None = None,
    sparse: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Return 1 for each class among a sample's labels, else 0, by default in float32.

    Args:
        inputs: (rows, labels) or (labels,); labels outside 0 to num_classes - 1 do not count.
        num_classes: required.
        axis: of classes in the result.
        dtype: of the result.
        sparse, kwargs: not supported.
    """
    if num_classes is None or kwargs:
        raise ConfigError(f"multi_hot: num_classes={num_classes}{f', {kwargs}' if kwargs else ''}; expected a number")
    vectors = one_hot(inputs, num_classes, axis, dtype, sparse)
    return max_over(vectors, 1 if vectors.ndim > 2 else 0)
