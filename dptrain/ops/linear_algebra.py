"""Matrix products."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.manipulation import expand_dims, squeeze, transpose_to
from dptrain.ops.sharing import Axes, common_dtype, unbroadcast
from dptrain.program.lowering import Product
from dptrain.program.op import Sharing, op
from dptrain.program.shapes import Rows, Shape, broadcast, size
from dptrain.program.tensor import Array, Tensor, as_tensors


def _shape(a: Shape, b: Shape) -> Shape:
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        raise ConfigError(f"shapes {a} and {b} have no matrix product")
    return (*broadcast(a[:-2], b[:-2]), a[-2], b[-1])


def _sharing(shapes: Sequence[Shape], axes: Axes, out: Shape, attributes: Mapping[str, Any]) -> Sharing:
    (a, b), (of_a, of_b) = shapes, axes
    if of_a is None and of_b is None:
        return Sharing((None, None), None)
    if of_a == len(a) - 1 or of_b == len(b) - 2:  # summed over: each rank has a summand
        return Sharing((len(a) - 1, len(b) - 2), "sum")
    if of_a == len(a) - 2 and of_b is None:
        return Sharing((of_a, None), len(out) - 2)
    if of_b == len(b) - 1 and of_a is None:
        return Sharing((None, of_b), len(out) - 1)
    # Rows of a batch of matrices.
    place = max(axis + len(out) - len(shape) for axis, shape in zip(axes, shapes, strict=True) if axis is not None)
    if place >= len(out) - 2:
        return Sharing((None, None), None)
    needed = []
    for shape in shapes:
        own = place - (len(out) - len(shape))
        needed.append(None if own < 0 or (shape[own] == 1 and not isinstance(shape[own], Rows)) else own)
    return Sharing(tuple(needed), place)


def _operations(made: Tensor) -> int:
    """Return two for each multiplication."""
    return 2 * size(made.shape) * int(made.inputs[0].shape[-1])


@op(
    shape=_shape,
    sharing=_sharing,
    dtype=common_dtype,
    linear="each",
    lowering=Product(),
    operations=_operations,
    operator="@",
    onnx="MatMul",
)
def batch_matmul(x1: Array, x2: Array, *, out: Array) -> None:
    """Products of matrices: the last two axes; those before are broadcast."""
    np.matmul(x1, x2, out=out)


@batch_matmul.gradient
def _matmul(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(batch_matmul(dy, _transposed(x2)), x1), unbroadcast(batch_matmul(_transposed(x1), dy), x2)


def _transposed(x: Tensor) -> Tensor:
    """Return x with its last two axes exchanged."""
    order = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return transpose_to(x, axes=order)


def matmul(x1: Any, x2: Any) -> Tensor:
    """Return the matrix product, by NumPy's rules for vectors and for batches of matrices.

    Raises:
        ConfigError: the shapes do not go together.
    """
    a, b = as_tensors([x1, x2])
    if not a.ndim or not b.ndim:
        raise ConfigError("matmul: expected vectors or matrices, found a single number")
    product = batch_matmul(expand_dims(a, 0) if a.ndim == 1 else a, expand_dims(b, 1) if b.ndim == 1 else b)
    if b.ndim == 1:
        product = squeeze(product, -1)
    if a.ndim == 1:
        product = squeeze(product, -1 if b.ndim == 1 else -2)
    return product
