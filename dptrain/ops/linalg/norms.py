"""Norms of vectors and of matrices."""

import math
from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import (
    absolute,
    cast,
    divide,
    equal,
    floating,
    in_float32,
    maximum,
    not_equal,
    power,
    sqrt,
    square,
    where,
)
from dptrain.ops.linalg.decompositions import singular_values
from dptrain.ops.manipulation import reshape, transpose
from dptrain.ops.math.roots import root_of_squares
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import max, min, sum
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor

_MATRIX_ORDERS = "expected None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf for matrices"
_VECTOR_ORDERS = "expected None or a number for vectors"
# Keras' epsilon, the least divisor.
_EPSILON = 1e-7


@operation
@in_float32
def norm(
    x: Any, ord: float | str | None = None, axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the norm of the vectors over one axis or of the matrices over two, like `numpy.linalg.norm`.

    Args:
        x: a tensor or an array; integers become float32.
        ord: of vectors any p, sum(|x|^p)^(1/p): infinity is the greatest absolute value, -infinity the least, 0 counts
            nonzero elements. Of matrices "fro" is the root of the sum of squares, 1 and -1 the greatest and least
            absolute sum of a column, infinity and -infinity of a row, 2 and -2 the greatest and least singular value,
            "nuc" their sum. None is 2 of vectors and "fro" of matrices; without an axis, the root of the sum of all
            squares.
        axis: one, two (rows, columns), or None for a whole vector or matrix.
        keepdims: keep the axes with length 1.

    The gradient of the norm of zeros is 0.
    """
    tensor = floating(x)
    if ord is None:
        return root_of_squares(sum(square(tensor), axis, keepdims))
    axes = (axis,) if isinstance(axis, int) else tuple(range(tensor.ndim) if axis is None else axis)
    normalized_axes(axes, tensor.ndim)  # refuses repeated axes
    if len(axes) == 1:
        return _vector_norm(absolute(tensor), ord, axes[0], keepdims)
    if len(axes) == 2:
        first, second = (position % tensor.ndim for position in axes)
        return _matrix_norm(tensor, ord, first, second, keepdims)
    raise ConfigError(f"norm: ord={ord!r} over {len(axes)} axes; expected one axis or two")


def _vector_norm(size: Tensor, ord: float | str, axis: int, keepdims: bool) -> Tensor:
    if isinstance(ord, str):
        raise ConfigError(f"norm: ord={ord!r}; {_VECTOR_ORDERS}")
    if ord == math.inf:
        return max(size, axis, keepdims)
    if ord == -math.inf:
        return min(size, axis, keepdims)
    if ord == 0:
        return cast(sum(not_equal(size, 0), axis, keepdims), size.dtype)
    if ord == 1:
        return sum(size, axis, keepdims)
    if ord == 2:
        return root_of_squares(sum(square(size), axis, keepdims))
    if ord >= 1:
        powers = power(size, float(ord))
    else:  # the power's gradient is infinite at 0
        powers = where(
            equal(size, 0), 0.0 if ord > 0 else math.inf, power(where(equal(size, 0), 1.0, size), float(ord))
        )
    total = sum(powers, axis, keepdims)
    if ord < 0:
        return power(total, 1 / ord)
    is_zero = equal(total, 0)
    return where(is_zero, 0.0, power(where(is_zero, 1.0, total), 1 / ord))


def _matrix_norm(x: Tensor, ord: float | str, rows: int, columns: int, keepdims: bool) -> Tensor:
    if ord == "fro":
        return root_of_squares(sum(square(x), (rows, columns), keepdims))
    if ord in (2, -2, "nuc"):
        batch_axes = [axis for axis in range(x.ndim) if axis not in (rows, columns)]
        values = singular_values(transpose(x, [*batch_axes, rows, columns]))
        join = sum if ord == "nuc" else max if ord == 2 else min
        joined = join(values, -1)
        kept_shape = [1 if axis in (rows, columns) else n for axis, n in enumerate(x.shape)]
        return reshape(joined, kept_shape) if keepdims else joined
    if ord not in (1, -1, math.inf, -math.inf):
        raise ConfigError(f"norm: ord={ord!r}; {_MATRIX_ORDERS}")
    summed, over = (rows, columns) if abs(float(ord)) == 1 else (columns, rows)
    sums = sum(absolute(x), summed, keepdims=True)
    norms = max(sums, over, keepdims=True) if float(ord) > 0 else min(sums, over, keepdims=True)
    if keepdims:
        return norms
    return reshape(norms, [n for axis, n in enumerate(x.shape) if axis not in (rows, columns)])


@operation
@in_float32
def normalize(x: Any, axis: int | Sequence[int] = -1, order: int = 2, epsilon: float | None = None) -> Tensor:
    """Divide x by its norm over axes, or by epsilon (1e-7) where that is greater; `order` is an integer from 1."""
    if not isinstance(order, int) or order < 1:
        raise ConfigError(f"Argument `order` must be an int >= 1. Received: order={order}")
    tensor = floating(x)
    tensor = tensor if tensor.ndim else reshape(tensor, (1,))
    least = _EPSILON if epsilon is None else epsilon
    if order == 2:
        return divide(tensor, sqrt(maximum(sum(square(tensor), axis, keepdims=True), least**2)))
    return divide(tensor, maximum(norm(tensor, order, axis, keepdims=True), least))
