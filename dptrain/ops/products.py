"""Matrix products."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.common import common_dtype, elementwise, unbroadcast
from dptrain.ops.manipulation import expand_dims, reshape, squeeze, transpose_to
from dptrain.ops.operation_calls import operation
from dptrain.program.lowering import Product
from dptrain.program.op import op
from dptrain.program.operand import METHODS
from dptrain.program.shapes import Shape, broadcast, differ, size
from dptrain.program.tensor import Array, Tensor, as_tensors


def _shape(a: Shape, b: Shape) -> Shape:
    if len(a) < 2 or len(b) < 2 or differ(a[-1], b[-2]):
        raise ConfigError(f"matmul: shapes {a} and {b} are incompatible")
    return (*broadcast(a[:-2], b[:-2]), a[-2], b[-1])


def _letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`xy,yz->xz`; of batches of matrices `axy,ayz->axz`."""
    operands, _, result = elementwise([shape[:-2] for shape in shapes], out[:-2], attributes).partition("->")
    a, b = operands.split(",")
    return f"{a}xy,{b}yz->{result}xz"


def _operations(output: Tensor) -> int:
    """Count two operations per multiplication."""
    return 2 * size(output.shape) * int(output.inputs[0].shape[-1])


@op(
    shape=_shape,
    letters=_letters,
    dtype=common_dtype,
    linear="each",
    lowering=Product(),
    operations=_operations,
    operator="@",
    onnx="MatMul",
)
def batch_matmul(x1: Array, x2: Array, *, out: Array) -> None:
    """Matrix products over the last two axes; those before are broadcast."""
    np.matmul(x1, x2, out=out)


@batch_matmul.gradient
def _matmul(y: Tensor, dy: Tensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return unbroadcast(batch_matmul(dy, _transposed(x2)), x1), unbroadcast(batch_matmul(_transposed(x1), dy), x2)


def _transposed(x: Tensor) -> Tensor:
    order = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return transpose_to(x, axes=order)


@operation
def matmul(x1: Any, x2: Any) -> Tensor:
    """Return the matrix product, by NumPy's rules for vectors and batches of matrices."""
    a, b = as_tensors([x1, x2])
    if not a.ndim or not b.ndim:
        raise ConfigError("matmul: expected vectors or matrices, found a scalar")
    product = batch_matmul(expand_dims(a, 0) if a.ndim == 1 else a, expand_dims(b, 1) if b.ndim == 1 else b)
    if b.ndim == 1:
        product = squeeze(product, -1)
    if a.ndim == 1:
        product = squeeze(product, -1 if b.ndim == 1 else -2)
    return product


METHODS["@"] = matmul


def along_axis(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Multiply by a matrix (target, length) along an axis other than the first."""
    target, length = matrix.shape
    before, behind = math.prod(x.shape[1:axis], start=x.shape[0]), math.prod(x.shape[axis + 1 :])
    product = batch_matmul(matrix, reshape(x, (before, length, behind)))
    return reshape(product, (*x.shape[:axis], target, *x.shape[axis + 1 :]))
