"""Elements in another order, and parts of tensors: what else Keras has of NumPy's, made of slices and gathers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import flip, moveaxis, ravel, split, tensordot
from dptrain.ops.elementwise import cast, power, where
from dptrain.ops.indexing import take
from dptrain.ops.manipulation import broadcast_to, concatenate, expand_dims, put, reshape, stack, transpose
from dptrain.ops.reduction import sum
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor, as_tensors


def _tensor(x: Any) -> Tensor:
    return as_tensors([x])[0]


def append(x1: Any, x2: Any, axis: int | None = None) -> Tensor:
    """Return x2 behind x1 along an axis, by default both as vectors."""
    return concatenate([ravel(x1), ravel(x2)] if axis is None else [x1, x2], axis or 0)


def array_split(x: Any, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Return parts of x along an axis as `split`; where they cannot be equal, the first ones are longer by 1."""
    found = _tensor(x)
    (place,) = normalized_axes(axis, found.ndim)
    if not isinstance(indices_or_sections, int):
        return split(found, indices_or_sections, axis)
    length, rest = divmod(int(found.shape[place]), indices_or_sections)
    if not rest:
        return split(found, indices_or_sections, axis)
    sizes = [length + 1] * rest + [length] * (indices_or_sections - rest)
    return split(found, [int(n) for n in np.cumsum(sizes)[:-1]], axis)


def hsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Return parts along the second axis, of vectors along the first."""
    return split(x, indices_or_sections, 0 if _tensor(x).ndim == 1 else 1)


def vsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Return parts along the first axis."""
    return split(x, indices_or_sections, 0)


def dstack(xs: Sequence[Any]) -> Tensor:
    """Return tensors behind each other along the third axis, vectors as rows and matrices as pages."""
    found = [_tensor(one) for one in xs]
    pages = [one if one.ndim > 2 else expand_dims(one if one.ndim == 2 else reshape(one, (1, -1)), 2) for one in found]
    return concatenate(pages, 2)


def roll(x: Any, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Return x moved along axes, what leaves at one end coming in at the other; by default as a vector."""
    found = _tensor(x)
    if axis is None:
        if not isinstance(shift, int):
            raise ConfigError(f"roll: shift={shift} without axes; expected one number")
        return reshape(roll(ravel(found), shift, 0), found.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(axes) != len(shifts):
        raise ConfigError(f"roll: shift={shift}, axis={axis}; expected as many of each")
    for number, one in zip(shifts, axes, strict=True):
        (place,) = normalized_axes(one, found.ndim)
        length = int(found.shape[place])
        if length and number % length:
            before = (slice(None),) * place
            cut = length - number % length
            found = concatenate([found[(*before, slice(cut, None))], found[(*before, slice(None, cut))]], place)
    return found


def fliplr(x: Any) -> Tensor:
    """Return x with its second axis in reverse order."""
    return flip(x, 1)


def flipud(x: Any) -> Tensor:
    """Return x with its first axis in reverse order."""
    return flip(x, 0)


def rot90(array: Any, k: int = 1, axes: Sequence[int] = (0, 1)) -> Tensor:
    """Return a tensor turned k times by a right angle, from the first of two axes to the second.

    Raises:
        ConfigError: other than two different axes.
    """
    found = _tensor(array)
    if len(axes) != 2 or len({one % max(found.ndim, 1) for one in axes}) != 2:
        raise ConfigError(f"Invalid axes: {axes}. Axes must be a tuple of two different dimensions.")
    first, second = (one % found.ndim for one in axes)
    order = list(range(found.ndim))
    order[first], order[second] = order[second], order[first]
    if k % 4 == 1:
        return transpose(flip(found, second), order)
    if k % 4 == 2:
        return flip(flip(found, first), second)
    return flip(transpose(found, order), second) if k % 4 == 3 else found


def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Return the diagonals of the matrices over two axes, along the last axis."""
    found = _tensor(x)
    first, second = (one % found.ndim for one in (axis1, axis2))
    rest = [one for one in range(found.ndim) if one not in (first, second)]
    rows, columns = int(found.shape[first]), int(found.shape[second])
    number = np.arange(max(0, min(rows + min(offset, 0), columns - max(offset, 0))))
    flat = reshape(transpose(found, [*rest, first, second]), (*(found.shape[one] for one in rest), rows * columns))
    return take(flat, (number + max(-offset, 0)) * columns + number + max(offset, 0), -1)


def diag(x: Any, k: int = 0) -> Tensor:
    """Return the k-th diagonal of a matrix, or of a vector the matrix that has it there."""
    found = _tensor(x)
    if found.ndim == 2:
        return diagonal(found, k)
    if found.ndim != 1:
        raise ConfigError(f"diag: a tensor of shape {found.shape}; expected a vector or a matrix")
    length = int(found.shape[0]) + abs(k)
    return where(np.eye(length, k=k, dtype=np.bool_), _as_columns(found, length, k), 0)


def _as_columns(x: Tensor, length: int, k: int) -> Tensor:
    """Return a vector as a row in which the k-th diagonal of a matrix stands in its columns."""
    start = max(k, 0)
    row = put(x, key=((start, start + int(x.shape[0]), 1),), shape=(length,))
    return expand_dims(row, 0)


def diagflat(x: Any, k: int = 0) -> Tensor:
    """Return the matrix that has all elements on its k-th diagonal."""
    return diag(ravel(x), k)


def vander(x: Any, N: int | None = None, increasing: bool = False) -> Tensor:
    """Return the powers of a vector, N columns; by default as many as rows, from the highest."""
    found = _tensor(x)
    count = int(found.shape[0]) if N is None else N
    exponents = np.arange(count) if increasing else np.arange(count)[::-1]
    return power(expand_dims(found, 1), cast(exponents, found.dtype))


def kron(x1: Any, x2: Any) -> Tensor:
    """Return the Kronecker product: x2 times each element of x1, as blocks."""
    a, b = as_tensors([x1, x2])
    rank = max(a.ndim, b.ndim)
    a, b = (reshape(one, (*(1,) * (rank - one.ndim), *one.shape)) for one in (a, b))
    pairs = list(zip(a.shape, b.shape, strict=True))
    blocks = reshape(a, [n for one, _ in pairs for n in (one, 1)]) * reshape(
        b, [n for _, one in pairs for n in (1, one)]
    )
    return reshape(blocks, [one * other for one, other in pairs])


def cross(x1: Any, x2: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Tensor:
    """Return the cross products of vectors along an axis of each; of vectors of length 2, the third component alone.

    Args:
        x1: vectors of length 2 or 3.
        x2: as x1; both are broadcast together.
        axisa: of x1.
        axisb: of x2.
        axisc: of the result.
        axis: all three of them.

    Raises:
        ConfigError: vectors of another length.
    """
    axes = (axisa, axisb, axisc) if axis is None else (axis,) * 3
    a, b = (moveaxis(one, place, -1) for one, place in zip(as_tensors([x1, x2]), axes, strict=False))
    lengths = [int(one.shape[-1]) for one in (a, b)]
    if not set(lengths) <= {2, 3}:
        raise ConfigError(f"cross: vectors of lengths {lengths[0]} and {lengths[1]}; expected 2 or 3")
    third = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    if lengths == [2, 2]:
        return third
    a2, b2 = (one[..., 2] if one.shape[-1] == 3 else one[..., 0] * 0 for one in (a, b))
    first, second = a[..., 1] * b2 - a2 * b[..., 1], a2 * b[..., 0] - a[..., 0] * b2
    return moveaxis(stack([first, second, third], -1), -1, axes[2])


def dsplit(x: Any, indices_or_sections: int | Sequence[int]) -> list[Tensor]:
    """Return parts along the third axis."""
    return split(x, indices_or_sections, 2)


def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Return the sums of the diagonals of the matrices over two axes."""
    return sum(diagonal(x, offset, axis1, axis2), -1)


def diff(a: Any, n: int = 1, axis: int = -1) -> Tensor:
    """Return the differences of neighbours along an axis, n times."""
    found = _tensor(a)
    (place,) = normalized_axes(axis, found.ndim)
    before = (slice(None),) * place
    for _ in range(n):
        found = found[(*before, slice(1, None))] - found[(*before, slice(None, -1))]
    return found


def inner(x1: Any, x2: Any) -> Tensor:
    """Return the sums of products over the last axis of both."""
    a, b = as_tensors([x1, x2])
    return tensordot(a, b, [[a.ndim - 1], [b.ndim - 1]]) if a.ndim and b.ndim else a * b


def meshgrid(*x: Any, indexing: str = "xy") -> list[Tensor]:
    """Return the coordinates of a grid of vectors; with "xy" the first two are exchanged, as in pictures.

    Raises:
        ConfigError: another word.
    """
    if indexing not in ("xy", "ij"):
        raise ConfigError(f"meshgrid: indexing={indexing!r}; expected 'xy' or 'ij'")
    found = [ravel(one) for one in x]
    order = list(range(len(found)))
    if indexing == "xy" and len(found) > 1:
        order[:2] = [1, 0]
    lengths = [found[one].shape[0] for one in order]
    made = []
    for number, one in enumerate(found):
        place = order.index(number)
        made.append(broadcast_to(reshape(one, [n if at == place else 1 for at, n in enumerate(lengths)]), lengths))
    return made


def get_item(x: Any, key: Any) -> Tensor:
    """Return x[key]."""
    return _tensor(x)[key]


def slice_update(inputs: Any, start_indices: Sequence[int], updates: Any) -> Tensor:
    """Return inputs with a block, which begins at known places, replaced."""
    found, block = as_tensors([inputs, updates])
    key = tuple((int(a), int(a) + int(n), 1) for a, n in zip(start_indices, block.shape, strict=True))
    inside = np.zeros(tuple(map(int, found.shape)), np.bool_)
    inside[tuple(slice(*one) for one in key)] = True
    return where(inside, put(cast(block, found.dtype), key=key, shape=found.shape), found)
