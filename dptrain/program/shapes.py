"""Lengths and shapes. The number of rows of a batch is marked, so that a shape says what ranks share out."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dptrain.errors import ConfigError

Shape = tuple[int, ...]

# The number of rows of symbolic tensors: a prime, so that no other length is taken for it.
_SYMBOLIC = 10007


class Rows(int):
    """A length that counts rows of the global batch: `scale` for each of them.

    It computes as the int that it is. Sums and multiples of it are still marked, so that `ones((2 * n, 1))` is shared
    out among the ranks as the rows are; what is not proportional to the rows any more, such as `n + 1`, is a plain int.

    Args:
        rows: of the global batch.
        scale: how many elements each row stands for.
        blocks: scales of the parts of which a sum, a concatenation's length, has one behind the other.

    Attributes:
        scale: as above.
        blocks: as above.
    """

    scale: int
    blocks: tuple[int, ...]

    def __new__(cls, rows: int, scale: int = 1, blocks: tuple[int, ...] = ()) -> "Rows":
        """Return the length; an int is made here, not in `__init__`."""
        made = super().__new__(cls, rows * scale)
        made.scale, made.blocks = scale, blocks or (scale,)
        return made

    def __repr__(self) -> str:
        if self.rows != _SYMBOLIC:
            return int.__repr__(self)
        return "None" if self.scale == 1 else f"{self.scale} * None"

    @property
    def rows(self) -> int:
        """The rows of the global batch."""
        return int(self) // self.scale if self.scale else 0

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, Rows) and other > 0:
            return Rows(self.rows, self.scale * other)
        return int(self) * other

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, Rows) and other > 0 and self.scale % other == 0:
            return Rows(self.rows, self.scale // other)
        return int(self) // int(other)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Rows) and other.rows == self.rows:
            return Rows(self.rows, self.scale + other.scale, self.blocks + other.blocks)
        return self if other == 0 else int(self) + other

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Rows) and other.rows == self.rows and self.scale > other.scale:
            return Rows(self.rows, self.scale - other.scale)
        return self if other == 0 else int(self) - other


# What stands for the number of rows where no batch is at hand: users read None.
SYMBOLIC_ROWS = Rows(_SYMBOLIC)


def without_rows(shape: Iterable[int]) -> tuple[int | None, ...]:
    """Return a shape as users read it: None for what counts rows of the batch."""
    return tuple(None if isinstance(n, Rows) else int(n) for n in shape)


def local(shape: Iterable[int], rows: int) -> Shape:
    """Return a shape as a rank sees it that has `rows` rows of the batch."""
    return tuple(n.scale * rows if isinstance(n, Rows) else n for n in shape)


def row_axis(shape: Shape) -> int | None:
    """Return the first axis that counts rows, or None."""
    return next((axis for axis, length in enumerate(shape) if isinstance(length, Rows)), None)


def size(shape: Iterable[int]) -> int:
    """Return the number of elements."""
    return math.prod(int(n) for n in shape)


def axis_of_one(shape: Shape, expected: Sequence[int | None]) -> Shape | None:
    """Return the shape that samples get, as in Keras, which lack a last axis of length 1 or have one too many.

    Args:
        shape: of a sample.
        expected: by the model.

    Returns:
        The shape with that axis, or without; None where it is not this that distinguishes the two.
    """
    if len(shape) == len(expected) - 1 and expected[-1] == 1:
        return (*shape, 1)
    if len(shape) == len(expected) + 1 and shape[-1] == 1:
        return tuple(shape[:-1])
    return None


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which NumPy broadcasts; a length that counts rows stays marked.

    Raises:
        ConfigError: the shapes do not go together.
    """
    if len(shapes) == 1:
        return shapes[0]
    if len(shapes) == 2:
        a, b = shapes
        if a == b and not any(isinstance(n, Rows) for n in b):
            return a
        if not a or not b:
            return a or b
    rank = max(map(len, shapes), default=0)
    result = []
    for axis in range(-rank, 0):
        lengths = [shape[axis] for shape in shapes if len(shape) >= -axis]
        long = [n for n in lengths if n != 1 or isinstance(n, Rows)] or lengths
        if len({int(n) for n in long}) > 1:
            raise ConfigError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
        result.append(next((n for n in lengths if isinstance(n, Rows) and n == long[0]), long[0]))
    return tuple(result)


def normalized_axes(axis: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return axes as rising numbers from 0; None means all.

    Raises:
        ConfigError: there is no such axis, or one is named twice.
    """
    if axis is None:
        return tuple(range(rank))
    given = [axis] if isinstance(axis, int) else list(axis)
    axes = sorted(one + rank if one < 0 else one for one in given)
    if any(not 0 <= one < rank for one in axes) or len(set(axes)) < len(axes):
        raise ConfigError(f"axis = {axis}: expected different axes of {rank} dimensions")
    return tuple(axes)
