"""Shapes: tuples of lengths, see `dptrain.program.dims`."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.program.context import TRACE
from dptrain.program.dims import Dim, counts_rows, is_number, number_of, read

# Numbers and dims; schemas of attributes treat dims as numbers.
if TYPE_CHECKING:
    Shape = tuple[Any, ...]
else:
    Shape = tuple[int, ...]


def is_one(length: Any) -> bool:
    """Whether a length is 1 for every batch."""
    return not isinstance(length, Dim) and bool(length == 1)


def without_rows(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Return a shape as users see it: None for rows and unknown lengths."""
    return tuple(None if isinstance(n, Dim) else int(n) for n in shape)


def differ(a: Any, b: Any) -> bool:
    """Whether two lengths are known to differ; bound to numbers, those of two inputs differ if the numbers do."""
    if not (is_number(a) and is_number(b)) or a == b:
        return False
    both_unknown = isinstance(a, Dim) and isinstance(b, Dim) and not (counts_rows(a) or counts_rows(b))
    return not both_unknown or number_of(a) != number_of(b)


def is_open(shape: Iterable[Any]) -> bool:
    """Whether a shape has an unknown length."""
    return any(isinstance(n, Dim) and n.size is None for n in shape)


class OpenShape(tuple[Any, ...]):
    """Shape of a symbolic tensor, with unknown lengths.

    Whoever reads it decides what these are. dptrain's modules, and all code in a step, compute with the dims; a user's
    code reads None where it makes a model, as in Keras: `x.shape[0] is None` must be true there, and no other object is
    None. For that code it is the plain tuple that it equals, in every operation of tuples.
    """

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        part = tuple.__getitem__(self, key)
        names = sys._getframe(1).f_globals
        return _as_read(part, names) if isinstance(part, tuple) else _as_read((part,), names)[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(_as_read(tuple.__iter__(self), sys._getframe(1).f_globals))

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return _as_read(tuple.__add__(self, other), sys._getframe(1).f_globals)

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return _as_read(other + tuple(tuple.__iter__(self)), sys._getframe(1).f_globals)

    def __mul__(self, times: Any) -> tuple[Any, ...]:
        return _as_read(tuple.__mul__(self, times), sys._getframe(1).f_globals)

    __rmul__ = __mul__

    def __hash__(self) -> int:
        return hash(read(tuple.__iter__(self)))


def _as_read(lengths: Iterable[Any], names: dict[str, Any]) -> tuple[Any, ...]:
    """Return lengths for code with these global names: None for unknown ones to a user's, outside of a step."""
    is_users = TRACE.get() is None and names.get("__name__", "").partition(".")[0] != "dptrain"
    return read(lengths) if is_users else tuple(lengths)


def local(shape: Iterable[int], rows: int | None) -> Shape:
    """Return a rank's shape, with `rows` rows of the batch; None for all."""
    if rows is None:
        return tuple(map(number_of, shape))
    return tuple(n.scale * rows if isinstance(n, Dim) else n for n in shape)


def row_axis(shape: Shape) -> int | None:
    """Return the first axis that counts rows, or None."""
    return next((axis for axis, length in enumerate(shape) if isinstance(length, Dim)), None)


def size(shape: Iterable[int]) -> int:
    """Return the number of elements; UnknownLengthError if a length is unknown."""
    return math.prod(map(number_of, shape))


def axis_of_one(shape: Shape, expected: Sequence[int | None]) -> Shape | None:
    """Return the shape for samples that lack a last axis of length 1 or have one too many, as in Keras.

    None if the sample's shape and the model's differ otherwise.
    """
    if len(shape) == len(expected) - 1 and expected[-1] == 1:
        return (*shape, 1)
    if len(shape) == len(expected) + 1 and shape[-1] == 1:
        return tuple(shape[:-1])
    return None


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which NumPy broadcasts, with row counts kept as dims; ConfigError if shapes do not match."""
    if len(shapes) == 1:
        return shapes[0]
    if len(shapes) == 2 and not (shapes[0] and shapes[1]):
        return shapes[0] or shapes[1]
    rank = max(map(len, shapes), default=0)
    result: list[int] = []
    for axis in range(-rank, 0):
        length, dim = 1, None
        for shape in shapes:
            n: Any = shape[axis] if len(shape) >= -axis else 1
            if isinstance(n, Dim):
                fits = dim is None or not differ(n, dim)
                dim = n if dim is None or dim.size is None else dim
            else:
                fits = length == 1 or n in (1, length)
                length = n if n != 1 else length
            if not fits:
                raise ConfigError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
        if length != 1 and dim is not None:
            if differ(dim, length):
                raise ConfigError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
            dim = dim if is_number(dim) else None  # an unknown length takes the known one
        result.append(length if dim is None else dim)  # type: ignore[arg-type]
    return tuple(result)


def normalized_axes(axis: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return axes as increasing numbers from 0 (None: all); ConfigError if one is missing or repeated."""
    if axis is None:
        return tuple(range(rank))
    axes_given = [axis] if isinstance(axis, int) else list(axis)
    axes = sorted(number + rank if number < 0 else number for number in axes_given)
    wrong = [number for number in axes_given if not -rank <= number < rank]
    if wrong:
        raise ConfigError(f"axis {wrong[0]} is out of bounds for {rank} dimensions")
    if len(set(axes)) < len(axes):
        raise ConfigError(f"axis = {axis}: expected different axes of {rank} dimensions")
    return tuple(axes)
