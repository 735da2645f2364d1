"""Shapes: reshape, transpose, slices, concatenation; constant tensors; gathering of shards."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.common import broadcast_shape, common_dtype, elementwise, first_dtype, unbroadcast
from dptrain.ops.open_shapes import lengths_of, with_unknown
from dptrain.ops.operation_calls import operation
from dptrain.program.codegen.index_expr import numel
from dptrain.program.codegen.views import IndexMap, aligned_axes, identity, key_maps, marked
from dptrain.program.dims import Dim, is_number, quotient
from dptrain.program.lowering import Element, Insert, Join, ViewMap
from dptrain.program.onnx_graph import OnnxGraph, Value, refusal
from dptrain.program.op import op
from dptrain.program.operand import METHODS
from dptrain.program.schema import TypeName
from dptrain.program.shapes import Shape, broadcast, differ, is_one, is_open, normalized_axes, row_axis, size
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.floatx import floatx

# Made of a shape


@op(
    shape=lambda *, shape, value, dtype: shape,
    letters=elementwise,
    dtype=lambda *, shape, value, dtype: np.dtype(dtype),
    lowering=Element("{value}"),
    operator="fill",
)
def full(*, shape: Shape, value: float, dtype: TypeName, out: Array) -> None:
    """One number everywhere."""
    out.fill(value)


@full.onnx_lowering
def _full_onnx(graph: OnnxGraph, output: Tensor) -> Value:
    return graph.expand(graph.constant(output.attributes["value"], output.dtype), output.shape)


def zeros(shape: Sequence[int] | int, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros, by default float32; a length that counts rows of the batch is sharded over the ranks."""
    lengths = lengths_of(shape)
    return full(shape=lengths, value=0, dtype=np.dtype(dtype or floatx()).name)


def ones(shape: Sequence[int] | int, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return ones, like `zeros`."""
    lengths = lengths_of(shape)
    return full(shape=lengths, value=1, dtype=np.dtype(dtype or floatx()).name)


@operation
def zeros_like(x: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros of x's shape, by default of its type."""
    (tensor,) = as_tensors([x])
    return zeros(tensor.shape, dtype or tensor.dtype)


@operation
def ones_like(x: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return ones of x's shape, by default of its type."""
    (tensor,) = as_tensors([x])
    return ones(tensor.shape, dtype or tensor.dtype)


# The same elements in another shape


def _reshape_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`abX->abXX`: axes stay sharded that keep their length and the number of elements before them.

    An axis that counts rows stays sharded at the same index, however many elements each row has: of `(2, n, 3)` each
    rank's part becomes its part of `(2, 3n)`.
    """

    count: Callable[[Shape], Any] = numel if None not in (row_axis(shapes[0]), row_axis(out)) else size

    def places(shape: Shape) -> list[Any]:
        before = [count(shape[:axis]) for axis in range(len(shape))]
        kinds = ["rows" if isinstance(n, Dim) else n for n in shape]
        return ["1" if kind == 1 else place for kind, place in zip(kinds, zip(before, kinds, strict=True), strict=True)]

    old, new = places(shapes[0]), places(out)
    shared = [place for place in old if old.count(place) == new.count(place) == 1 and place != "1"]
    letter = {"1": "1", **dict(zip(shared, names(len(shared)), strict=True))}
    return "->".join("".join(letter.get(place, "X") for place in axes) for axes in (old, new))


@op(
    shape=lambda old, *, shape: shape,
    letters=_reshape_letters,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(),
    operator="reshape",
)
def reshape_to(x: Array, *, shape: Shape) -> Array:
    """The elements in another shape."""
    return x.reshape(shape)


@reshape_to.gradient
def _reshape_to(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return reshape_to(dy, shape=x.shape)


@reshape_to.onnx_lowering
def _reshape_to_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.reshape(x, output.shape)


@operation
def reshape(x: Any, newshape: Sequence[int] | int) -> Tensor:
    """Return the elements in another shape; -1 is inferred, and counts rows where it takes up the rows of the batch."""
    (tensor,) = as_tensors([x])
    known = with_unknown(newshape, tensor.shape)
    if known is not None:
        return reshape(tensor, known)
    lengths = lengths_of(newshape)
    shape = lengths
    if shape.count(-1) == 1:
        shape = tuple(_missing(tensor.shape, shape) if n == -1 else n for n in shape)
    if not _as_many(shape, tensor.shape) or any(n < 0 for n in shape):
        raise ConfigError(f"cannot reshape {tensor.shape} into {lengths}")
    rows = tensor.shape[0] if tensor.shape else 0
    if isinstance(rows, Dim) and shape and not any(isinstance(n, Dim) for n in shape) and rows == shape[0]:
        shape = (rows, *shape[1:])
    return reshape_to(tensor, shape=shape)


def _as_many(shape: Shape, old: Shape) -> bool:
    if is_open((*shape, *old)) or numel(shape) == numel(old):
        return True
    return math.prod(map(int, shape)) == math.prod(map(int, old))


def _missing(old: Shape, new: Shape) -> Any:
    """Return the length for -1, with the rows of the batch if no other length has them."""
    return quotient(math.prod(old), math.prod(n for n in new if n != -1))


@operation
def expand_dims(x: Any, axis: int | Sequence[int]) -> Tensor:
    """Insert axes of length 1 at these indices of the result."""
    (tensor,) = as_tensors([x])
    number = 1 if isinstance(axis, int) else len(axis)
    places = normalized_axes(axis, tensor.ndim + number)
    lengths = iter(tensor.shape)
    return reshape(tensor, [1 if position in places else next(lengths) for position in range(tensor.ndim + number)])


@operation
def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Remove these axes, which must have length 1; by default all such axes except the rows'."""
    (tensor,) = as_tensors([x])
    single = [position for position, n in enumerate(tensor.shape) if is_one(n)]
    axes = single if axis is None else normalized_axes(axis, tensor.ndim)
    if wrong := set(axes) - set(single):
        raise ConfigError(f"squeeze: axis {min(wrong)} of shape {tensor.shape}; expected an axis of length 1")
    return reshape(tensor, [n for position, n in enumerate(tensor.shape) if position not in axes])


def _transpose_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`abc->cab`."""
    letters = names(len(out))
    return f"{letters}->{''.join(letters[axis] for axis in attributes['axes'])}"


@op(
    shape=lambda shape, *, axes: tuple(shape[axis] for axis in axes),
    letters=_transpose_letters,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(lambda output: [IndexMap(output.attributes["axes"].index(axis)) for axis in range(output.ndim)]),
    operator="transpose",
)
def transpose_to(x: Array, *, axes: tuple[int, ...]) -> Array:
    """The axes in another order."""
    return x.transpose(axes)


@transpose_to.gradient
def _transpose_to(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    axes = y.attributes["axes"]
    return transpose_to(dy, axes=tuple(axes.index(axis) for axis in range(len(axes))))


@transpose_to.onnx_lowering
def _transpose_to_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.transpose(x, output.attributes["axes"])


@operation
def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Permute the axes; by default reverse them."""
    (tensor,) = as_tensors([x])
    order = range(tensor.ndim)[::-1] if axes is None else [axis % tensor.ndim for axis in axes]
    if sorted(order) != list(range(tensor.ndim)):
        raise ConfigError(f"axes = {axes}: expected each of the {tensor.ndim} axes once")
    return transpose_to(tensor, axes=tuple(order))


METHODS["transpose"] = transpose


# Broadcast, slices, concatenation


@op(
    shape=lambda old, *, shape: shape,
    letters=elementwise,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(lambda output: list(map(IndexMap, aligned_axes(output.inputs[0].shape, output.shape)))),
    operator="broadcast",
)
def broadcast_along(x: Array, *, shape: Shape) -> Array:
    """The elements repeated to a shape."""
    return np.broadcast_to(x, shape)


@broadcast_along.gradient
def _broadcast_along(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return unbroadcast(dy, x)


@broadcast_along.onnx_lowering
def _broadcast_along_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return graph.expand(x, output.shape)


@operation
def broadcast_to(x: Any, shape: Sequence[int]) -> Tensor:
    """Broadcast x to a shape, by NumPy's rules."""
    (tensor,) = as_tensors([x])
    known = with_unknown(shape, (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape))
    if known is not None:
        return broadcast_to(tensor, known)
    shape = lengths_of(shape)
    if broadcast(tensor.shape, tuple(shape)) != tuple(shape):
        raise ConfigError(f"shape {tensor.shape} cannot be broadcast to {tuple(shape)}")
    if [type(n) for n in tensor.shape] == [type(n) for n in shape] and tensor.shape == tuple(shape):
        return tensor
    return broadcast_along(tensor, shape=tuple(shape))


Key = tuple[tuple[int, int, int] | int, ...]


def _sliced_shape(shape: Shape, *, key: Key) -> Shape:
    lengths: list[int] = []
    for item in key:
        if isinstance(item, tuple):
            start, stop, step = item
            length = stop - start  # still counts rows if the length does
            lengths.append(length if step == 1 else (length + step - 1) // step)
    return tuple(lengths)


def _key_letters(lengths: Shape, key: Key) -> tuple[str, str]:
    """Return the letters of an input and of its slice: `aXbX`, `abX`; full axes and rows stay sharded."""

    def is_kept(item: tuple[int, int, int] | int, n: int) -> bool:
        if not isinstance(item, tuple) or item[2] != 1:
            return False
        if isinstance(n, Dim):
            return all(isinstance(end, Dim) or end == 0 for end in item[:2])
        return marked(item[:2]) == marked((0, n))

    letters = "".join(
        letter if is_kept(item, n) else "X" for letter, item, n in zip(names(len(key)), key, lengths, strict=True)
    )
    return letters, "".join(letter for letter, item in zip(letters, key, strict=True) if isinstance(item, tuple))


def _slice_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    full_letters, part = _key_letters(shapes[0], attributes["key"])
    return f"{full_letters}->{part}"


def _index(key: Key) -> tuple[Any, ...]:
    """Return NumPy's index; the ellipsis makes a single element a view as well."""
    return (*(slice(*item) if isinstance(item, tuple) else item for item in key), ...)


@op(
    shape=_sliced_shape,
    letters=_slice_letters,
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(lambda output: key_maps(output.attributes["key"])),
)
def getitem(x: Array, *, key: Key) -> Array:
    """A part of x: (start, stop, step) or an index for each axis."""
    return np.asarray(x[_index(key)])


@getitem.gradient
def _getitem(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return put(dy, key=y.attributes["key"], shape=x.shape)


@getitem.onnx_lowering
def _getitem_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    key, lengths = output.attributes["key"], output.inputs[0].shape
    bounds = [item if isinstance(item, tuple) else (item, item + 1, 1) for item in key]
    if any(step < 1 for *_, step in bounds):  # ONNX reads a stop of -1 as the last element
        raise refusal(output, "with a negative step")
    axes = [axis for axis, bound in enumerate(bounds) if bound != (0, lengths[axis], 1)]
    part = x
    if axes:
        starts, stops, steps = zip(*(bounds[axis] for axis in axes), strict=True)
        inputs = (graph.vector(starts), graph.vector(stops), graph.constant(axes, np.int64), graph.vector(steps))
        part = graph.node("Slice", x, *inputs)
    places = [axis for axis, item in enumerate(key) if not isinstance(item, tuple)]
    return graph.node("Squeeze", part, graph.constant(places, np.int64)) if places else part


def _put_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    full_letters, part = _key_letters(out, attributes["key"])
    return f"{part}->{full_letters}"


@op(shape=lambda old, *, key, shape: shape, letters=_put_letters, dtype=first_dtype, linear="each", lowering=Insert())
def put(x: Array, *, key: Key, shape: Shape, out: Array) -> None:
    """Zeros of a shape with x as the part that `getitem` takes."""
    out.fill(0)
    out[_index(key)] = x


@put.gradient
def _put(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return getitem(dy, key=y.attributes["key"])


@put.onnx_lowering
def _put_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    key = output.attributes["key"]
    places = [axis for axis, item in enumerate(key) if not isinstance(item, tuple)]
    bounds = [item if isinstance(item, tuple) else (item, item + 1, 1) for item in key]
    if any(step != 1 for *_, step in bounds):
        raise refusal(output, "with a step other than 1")
    if any(
        isinstance(start, Dim) or isinstance(stop, Dim) != isinstance(n, Dim)
        for (start, stop, _), n in zip(bounds, output.shape, strict=True)
    ):
        raise refusal(output, "along the rows of the batch")
    expanded = graph.node("Unsqueeze", x, graph.constant(places, np.int64)) if places else x
    before = [int(start) for start, *_ in bounds]
    behind = [int(n) - int(stop) for n, (_, stop, _) in zip(output.shape, bounds, strict=True)]
    return graph.node("Pad", graph.computed(expanded), graph.constant([*before, *behind], np.int64))


def _joined_shape(*shapes: Shape, axis: int) -> Shape:
    length = shapes[0][axis]
    for shape in shapes[1:]:
        length = length + shape[axis]
    beside = [_common_length(lengths) for lengths in zip(*shapes, strict=True)]
    return (*beside[:axis], length, *beside[axis + 1 :])


def _common_length(lengths: Sequence[Any]) -> Any:
    """Return the length that tensors share: the batch's rows, else a number, else an unknown length."""
    return min(lengths, key=lambda n: (not is_number(n), not isinstance(n, Dim)))


def _join_letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`aX,aX->aX`; along rows of the batch `ab,ab->ab`: each rank joins its own."""
    axis, letters = attributes["axis"], names(len(out))
    if not isinstance(out[axis], Dim):
        letters = f"{letters[:axis]}X{letters[axis + 1 :]}"
    return f"{','.join([letters] * len(shapes))}->{letters}"


@op(
    shape=_joined_shape,
    letters=_join_letters,
    dtype=common_dtype,
    linear="joint",
    lowering=Join(),
    operator="join",
)
def concatenate_along(*xs: Array, axis: int, out: Array) -> None:
    """The inputs after each other along an axis; along the rows of the batch each rank joins its own."""
    np.concatenate(xs, axis, out=out)


@concatenate_along.gradient
def _concatenate_along(y: Tensor, dy: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    axis, start, parts = y.attributes["axis"], 0, []
    for x in xs:
        stop = start + x.shape[axis]
        key: list[tuple[int, int, int]] = [(0, length, 1) for length in dy.shape]
        key[axis] = (start, stop, 1)
        parts.append(getitem(dy, key=tuple(key)))
        start = stop
    return tuple(parts)


@concatenate_along.onnx_lowering
def _concatenate_along_onnx(graph: OnnxGraph, output: Tensor, *xs: Value) -> Value:
    return graph.node("Concat", *(graph.cast(value, output.dtype) for value in xs), axis=output.attributes["axis"])


@operation
def concatenate(xs: Sequence[Any], axis: int = 0) -> Tensor:
    """Concatenate along an axis; along rows of the batch per rank, so the order between ranks is not promised."""
    tensors = as_tensors(list(xs))
    if not tensors:
        raise ConfigError("concatenate: expected at least one tensor, found none")
    (place,) = normalized_axes(axis, tensors[0].ndim)
    rests = [(*tensor.shape[:place], *tensor.shape[place + 1 :]) for tensor in tensors]
    if any(len(lengths) != len(rests[0]) or any(map(differ, lengths, rests[0])) for lengths in rests):
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        raise ConfigError(f"shapes {shapes} cannot be concatenated along axis {axis}")
    return concatenate_along(*tensors, axis=place)


@operation
def stack(x: Sequence[Any], axis: int = 0) -> Tensor:
    """Stack tensors of one shape along a new axis."""
    return concatenate([expand_dims(tensor, axis) for tensor in x], axis)


# The same tensor, whole on every rank


@op(
    shape=broadcast_shape,
    letters=lambda shapes, out, attributes: f"{'X' * len(out)}->{'X' * len(out)}",
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(identity),
)
def unshard(x: Array) -> Array:
    """x gathered over all axes of the mesh: once, where each reader would gather it again."""
    return x


@unshard.gradient
def _unshard(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return dy


@unshard.onnx_lowering
def _unshard_onnx(graph: OnnxGraph, output: Tensor, x: Value) -> Value:
    return x
