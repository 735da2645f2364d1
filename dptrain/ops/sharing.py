"""How ops are shared out by rows: the rules that several families have in common, and shapes and types beside them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.program.op import Sharing
from dptrain.program.shapes import Rows, Shape, broadcast, row_axis, size
from dptrain.program.tensor import FLOATX, OPS, DType, Tensor

Axes = Sequence[int | None]


def elementwise(shapes: Sequence[Shape], axes: Axes, out: Shape, attributes: Mapping[str, Any]) -> Sharing:
    """Inputs that are broadcast together: all along the same axis, and those of length 1 there whole.

    Raises:
        ConfigError: inputs are sharded along different axes.
    """
    missing = [len(out) - len(shape) for shape in shapes]
    found = {before + axis for before, axis in zip(missing, axes, strict=True) if axis is not None}
    if not found:
        return Sharing((None,) * len(shapes), None)
    if len(found) > 1:
        raise ConfigError(f"not supported: rows of the batch meet along different axes {sorted(found)} of shape {out}")
    (axis,) = found
    needed = []
    for before, shape in zip(missing, shapes, strict=True):
        own = axis - before
        spread = own < 0 or (shape[own] == 1 and not isinstance(shape[own], Rows))
        needed.append(None if spread else own)
    return Sharing(tuple(needed), axis)


def made_of_nothing(shapes: Sequence[Shape], axes: Axes, out: Shape, attributes: Mapping[str, Any]) -> Sharing:
    """No input: a shape that counts rows is sharded."""
    return Sharing((), row_axis(out))


def broadcast_shape(*shapes: Shape, **attributes: Any) -> Shape:
    """The shape to which the inputs are broadcast."""
    return broadcast(*shapes)


@functools.cache
def _promoted(*dtypes: DType) -> DType:
    """Return the type to which types are promoted; integers take a floating-point type as it is."""
    floats = [one for one in dtypes if one.kind == "f"]
    return np.result_type(*(floats or dtypes))


def common_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """The type to which the inputs' types are promoted; integers take a floating-point type as it is, as in Keras."""
    return dtypes[0] if len(dtypes) == 1 else _promoted(*dtypes)


def floating_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """As `common_dtype`; integers become float32, as in Keras."""
    common = dtypes[0] if len(dtypes) == 1 else _promoted(*dtypes)
    return common if common.kind == "f" else FLOATX


def numeric_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """As `common_dtype`; truth values become int32, as in Keras."""
    common = _promoted(*dtypes)
    return np.int32 if common.kind == "b" else common


def boolean(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """Booleans."""
    return np.bool_


def first_dtype(*dtypes: DType, **attributes: Any) -> npt.DTypeLike:
    """The first input's type."""
    return dtypes[0]


def unbroadcast(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in an input of one in what it was broadcast to: its sum over the axes that were spread."""
    extra = len(dy.shape) - len(x.shape)
    spread = [
        axis + extra
        for axis, length in enumerate(x.shape)
        if length == 1 and not isinstance(length, Rows) and (dy.shape[axis + extra] != 1 or _is_rows(dy, axis + extra))
    ]
    axes = (*range(extra), *spread)
    if axes:
        dy = OPS["reduce_sum"](dy, axes=axes, keepdims=False)
        if size(dy.shape) == size(x.shape) and dy.shape != x.shape:
            dy = OPS["reshape_to"](dy, shape=x.shape)
    return dy if dy.dtype == x.dtype else OPS["cast_to"](dy, dtype=x.dtype.name)


def _is_rows(tensor: Tensor, axis: int) -> bool:
    return isinstance(tensor.shape[axis], Rows)
