"""Reordering and splitting, made of slices and gathers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import diagonal, flip, moveaxis, ravel, split, tensordot
from dptrain.ops.elementwise import cast, power, where
from dptrain.ops.indexing import divide_rows
from dptrain.ops.manipulation import broadcast_to, concatenate, expand_dims, put, reshape, stack, transpose
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import sum
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor, as_tensors


def _tensor(x: Any) -> Tensor:
    return as_tensors([x])[0]


@operation
def append(x1: Any, x2: Any, axis: int | None = None) -> Tensor:
    """Return x2 after x1 along an axis, by default both as vectors."""
    return concatenate([ravel(x1), ravel(x2)] if axis is None else [x1, x2], axis or 0)


@operation
@for_open_shapes
def array_split(x: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Return parts of x along an axis like `split`; where they cannot be equal, the first ones are longer by 1."""
    tensor = _tensor(x)
    (place,) = normalized_axes(axis, tensor.ndim)
    if not isinstance(indices_or_sections, int):
        return split(tensor, indices_or_sections, axis)
    length, remainder = divmod(int(tensor.shape[place]), indices_or_sections)
    if not remainder:
        return split(tensor, indices_or_sections, axis)
    sizes = [length + 1] * remainder + [length] * (indices_or_sections - remainder)
    return split(tensor, [int(n) for n in np.cumsum(sizes)[:-1]], axis)


@operation
@for_open_shapes
def hsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Split along the second axis; vectors along the first."""
    return split(x, indices_or_sections, 0 if _tensor(x).ndim == 1 else 1)


@operation
@for_open_shapes
def vsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Split along the first axis."""
    return split(x, indices_or_sections, 0)


@operation
def dstack(xs: Sequence[Any]) -> Tensor:
    """Concatenate along the third axis; vectors count as rows, matrices as pages."""
    tensors = [_tensor(x) for x in xs]
    pages = [
        tensor if tensor.ndim > 2 else expand_dims(tensor if tensor.ndim == 2 else reshape(tensor, (1, -1)), 2)
        for tensor in tensors
    ]
    return concatenate(pages, 2)


@operation
@for_open_shapes
def roll(x: Any, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Shift x along axes; what leaves at one end comes in at the other. By default x is a vector."""
    tensor = _tensor(x)
    if axis is None:
        if not isinstance(shift, int):
            raise ConfigError(f"roll: shift={shift} without an axis; expected one integer, or an axis for each shift")
        return reshape(roll(ravel(tensor), shift, 0), tensor.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(axes) != len(shifts):
        raise ConfigError(f"roll: shift={shift}, axis={axis}; expected one shift for each axis")
    for number, roll_axis in zip(shifts, axes, strict=True):
        (place,) = normalized_axes(roll_axis, tensor.ndim)
        length = int(tensor.shape[place])
        if length and number % length:
            before = (slice(None),) * place
            cut = length - number % length
            ends = tensor[(*before, slice(cut, None))], tensor[(*before, slice(None, cut))]
            tensor = divide_rows(concatenate(ends, place), tensor.shape)
    return tensor


@operation
@for_open_shapes
def fliplr(x: Any) -> Tensor:
    """Reverse the second axis."""
    return flip(x, 1)


@operation
@for_open_shapes
def flipud(x: Any) -> Tensor:
    """Reverse the first axis."""
    return flip(x, 0)


@operation
@for_open_shapes
def rot90(array: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Tensor:
    """Turn by k right angles from the first of two axes to the second."""
    tensor = _tensor(array)
    if len(axes) != 2 or len({axis % max(tensor.ndim, 1) for axis in axes}) != 2:
        raise ConfigError(f"Invalid axes: {axes}. Axes must be a tuple of two different dimensions.")
    first, second = (axis % tensor.ndim for axis in axes)
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    if k % 4 == 1:
        return transpose(flip(tensor, second), order)
    if k % 4 == 2:
        return flip(flip(tensor, first), second)
    return flip(transpose(tensor, order), second) if k % 4 == 3 else tensor


@operation
@for_open_shapes
def diag(x: Any, k: int = 0) -> Tensor:
    """Return the k-th diagonal of a matrix, or the matrix with a vector as its k-th diagonal."""
    tensor = _tensor(x)
    if tensor.ndim == 2:
        return diagonal(tensor, k)
    if tensor.ndim != 1:
        raise ConfigError(f"diag: a tensor of shape {tensor.shape}; expected a vector or a matrix")
    length = int(tensor.shape[0]) + abs(k)
    return where(np.eye(length, k=k, dtype=np.bool_), _as_columns(tensor, length, k), 0)


def _as_columns(x: Tensor, length: int, k: int) -> Tensor:
    """Return a vector as a row whose columns are those of the k-th diagonal of a matrix."""
    start = max(k, 0)
    row = put(x, key=((start, start + int(x.shape[0]), 1),), shape=(length,))
    return expand_dims(row, 0)


@operation
@for_open_shapes
def diagflat(x: Any, k: int = 0) -> Tensor:
    """Return the matrix with all elements of x on its k-th diagonal."""
    return diag(ravel(x), k)


@operation
@for_open_shapes
def vander(x: Any, N: int | None = None, increasing: bool = False) -> Tensor:
    """Return the powers of a vector in N columns, by default as many as rows, from the highest."""
    tensor = _tensor(x)
    count = int(tensor.shape[0]) if N is None else N
    exponents = np.arange(count) if increasing else np.arange(count)[::-1]
    return power(expand_dims(tensor, 1), cast(exponents, tensor.dtype))


@operation
@for_open_shapes
def kron(x1: Any, x2: Any) -> Tensor:
    """Return the Kronecker product: blocks of x2 times each element of x1."""
    a, b = as_tensors([x1, x2])
    rank = max(a.ndim, b.ndim)
    a, b = (reshape(factor, (*(1,) * (rank - factor.ndim), *factor.shape)) for factor in (a, b))
    pairs = list(zip(a.shape, b.shape, strict=True))
    blocks = reshape(a, [n for length, _ in pairs for n in (length, 1)]) * reshape(
        b, [n for _, length in pairs for n in (1, length)]
    )
    return reshape(blocks, [a_length * b_length for a_length, b_length in pairs])


@operation
@for_open_shapes
def cross(x1: Any, x2: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Tensor:
    """Return cross products of vectors of length 2 or 3 along an axis; of two of length 2, the third component alone.

    `axisa`, `axisb` and `axisc` are the axes of x1, x2 and the result; `axis` replaces all three.
    """
    axes = (axisa, axisb, axisc) if axis is None else (axis,) * 3
    a, b = (moveaxis(vectors, place, -1) for vectors, place in zip(as_tensors([x1, x2]), axes, strict=False))
    lengths = [int(vectors.shape[-1]) for vectors in (a, b)]
    if not set(lengths) <= {2, 3}:
        raise ConfigError(f"cross: vectors of lengths {lengths[0]} and {lengths[1]}; expected 2 or 3")
    third = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    if lengths == [2, 2]:
        return third
    a2, b2 = (vectors[..., 2] if vectors.shape[-1] == 3 else vectors[..., 0] * 0 for vectors in (a, b))
    first, second = a[..., 1] * b2 - a2 * b[..., 1], a2 * b[..., 0] - a[..., 0] * b2
    return moveaxis(stack([first, second, third], -1), -1, axes[2])


@operation
@for_open_shapes
def dsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Split along the third axis."""
    return split(x, indices_or_sections, 2)


@operation
@for_open_shapes
def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Return the sums of the diagonals of the matrices over two axes."""
    return sum(diagonal(x, offset, axis1, axis2), -1)


@operation
def diff(a: Any, n: int = 1, axis: int = -1) -> Tensor:
    """Return the n-th differences of neighbours along an axis."""
    tensor = _tensor(a)
    (place,) = normalized_axes(axis, tensor.ndim)
    before = (slice(None),) * place
    for _ in range(n):
        tensor = tensor[(*before, slice(1, None))] - tensor[(*before, slice(None, -1))]
    return tensor


@operation
def inner(x1: Any, x2: Any) -> Tensor:
    """Return the sums of products over the last axes."""
    a, b = as_tensors([x1, x2])
    return tensordot(a, b, [[a.ndim - 1], [b.ndim - 1]]) if a.ndim and b.ndim else a * b


@operation
def meshgrid(*x: Any, indexing: str = "xy") -> list[Tensor]:
    """Return the coordinates of a grid of vectors; `indexing` "xy" exchanges the first two, "ij" does not."""
    if indexing not in ("xy", "ij"):
        raise ConfigError(f"meshgrid: indexing={indexing!r}; expected 'xy' or 'ij'")
    vectors = [ravel(coordinates) for coordinates in x]
    order = list(range(len(vectors)))
    if indexing == "xy" and len(vectors) > 1:
        order[:2] = [1, 0]
    lengths = [vectors[number].shape[0] for number in order]
    grids = []
    for number, vector in enumerate(vectors):
        place = order.index(number)
        grids.append(broadcast_to(reshape(vector, [n if at == place else 1 for at, n in enumerate(lengths)]), lengths))
    return grids
