"""Lengths and shapes. The number of rows of a batch is marked, so that a shape says what ranks share out."""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError

Shape = tuple[int, ...]

# The number of rows of symbolic tensors: a prime, so that no other length is taken for it.
_SYMBOLIC = 10007
# Their name in a `Dim`.
_ROWS = "rows"


class UnknownLengthError(ConfigError):
    """A number is asked for where there is a length alone that is not known yet."""


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
        if isinstance(other, Dim):
            return NotImplemented
        if isinstance(other, int) and not isinstance(other, Rows) and other > 0:
            return Rows(self.rows, self.scale * other)
        return int(self) * other

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            return NotImplemented
        if isinstance(other, int) and not isinstance(other, Rows) and other > 0 and self.scale % other == 0:
            return Rows(self.rows, self.scale // other)
        return int(self) // int(other)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            return NotImplemented
        if isinstance(other, Rows) and other.rows == self.rows:
            return Rows(self.rows, self.scale + other.scale, self.blocks + other.blocks)
        return self if other == 0 else int(self) + other

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            return NotImplemented
        if isinstance(other, Rows) and other.rows == self.rows and self.scale > other.scale:
            return Rows(self.rows, self.scale - other.scale)
        return self if other == 0 else int(self) - other


class Dim:
    """A length of symbolic tensors that only a batch will tell: `scale` times a name, or several names, and `offset`.

    It reads as None, as in Keras. Sums, multiples, exact quotients and products are dims; what is not, such as another
    quotient, is a dim whose name is that expression. `bound` says what a dim is once its names are known.

    Args:
        names: of the lengths that are multiplied: words, or expressions (function, operand, operand).
        scale: as above.
        offset: as above.
        blocks: scales of the parts of which a sum, a concatenation's length, has one behind the other.

    Attributes:
        names: as above.
        scale: as above.
        offset: as above.
        blocks: as above.
    """

    __slots__ = ("blocks", "names", "offset", "scale")

    def __init__(self, *names: Any, scale: int = 1, offset: int = 0, blocks: tuple[int, ...] = ()) -> None:
        self.names, self.scale, self.offset, self.blocks = names, scale, offset, blocks or (scale,)

    def __repr__(self) -> str:
        return "None"

    def __hash__(self) -> int:
        return hash((self.names, self.scale, self.offset))

    def __eq__(self, other: object) -> bool:
        other = _as_dim(other)
        if isinstance(other, Dim):
            return (self.names, self.scale, self.offset) == (other.names, other.scale, other.offset)
        return other is None

    @property
    def name(self) -> str | None:
        """Its name where it is nothing more than that."""
        only = len(self.names) == 1 and isinstance(self.names[0], str) and (self.scale, self.offset) == (1, 0)
        return self.names[0] if only else None

    def bound(self, lengths: Mapping[str, Any]) -> Any:
        """Return the length where names have these: a number, or what other dims make of it.

        Raises:
            KeyError: one of its names is not among them.
        """
        found: Any = self.scale
        for one in self.names:
            if isinstance(one, str):
                found = found * lengths[one]
            else:
                function, *operands = one
                found = found * _FUNCTIONS[function](*(bound(n, lengths) for n in operands))
        return found + self.offset

    # Computing with it

    def __mul__(self, other: Any) -> Any:
        other = _as_dim(other)
        if isinstance(other, Dim):
            if self.offset or other.offset:
                return Dim(("*", self, other))
            return _length((*self.names, *other.names), self.scale * other.scale)
        return _length(self.names, self.scale * other, self.offset * other) if _is_int(other) else NotImplemented

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __add__(self, other: Any) -> Any:
        other = _as_dim(other)
        if isinstance(other, Dim):
            if other.names != self.names:
                return Dim(("+", self, other))
            scale, offset = self.scale + other.scale, self.offset + other.offset
            return _length(self.names, scale, offset, self.blocks + other.blocks)
        return _length(self.names, self.scale, self.offset + other, self.blocks) if _is_int(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        other = _as_dim(other)
        if isinstance(other, Dim):
            found = self + -other
            return _length(found.names, found.scale, found.offset) if isinstance(found, Dim) else found
        return self + -other if _is_int(other) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __floordiv__(self, other: Any) -> Any:
        other = _as_dim(other)
        if isinstance(other, Dim):
            if not self.offset and not other.offset and self.scale % other.scale == 0:
                left = Counter(self.names)
                left.subtract(other.names)
                if min(left.values()) >= 0:
                    return _length(tuple(left.elements()), self.scale // other.scale)
            return Dim(("//", self, other))
        if not _is_int(other):
            return NotImplemented
        if other > 0 and self.scale % other == 0:
            return _length(self.names, self.scale // other, self.offset // other)
        return Dim(("//", self, other))

    def __rfloordiv__(self, other: Any) -> Any:
        return _as_dim(other) // self if isinstance(other, Rows) else Dim(("//", other, self))

    def __mod__(self, other: Any) -> Any:
        if _is_int(other) and other > 0 and self.scale % other == 0:
            return self.offset % other
        return Dim(("%", self, _as_dim(other)))

    # Asking for the number

    def __lt__(self, other: Any) -> bool:
        apart = self - other
        if isinstance(apart, Dim) and (apart.scale < 0 or apart.offset < 0):
            apart = int(self)
        return not isinstance(apart, Dim) and bool(apart < 0)  # no length is below 0

    def __gt__(self, other: Any) -> bool:
        apart = self - other
        if isinstance(apart, Dim) and (apart.scale > 0 or apart.offset > 0):
            apart = int(self)
        return not isinstance(apart, Dim) and bool(apart > 0)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __int__(self) -> int:
        raise UnknownLengthError(
            "a length that is None, such as the number of rows of a batch, is asked for outside of a step, where it is "
            "no number: compute with ops in a layer's `call`, which is run for batches of every size, or say in "
            "`Input(shape, batch_size)` what it is"
        )

    __index__ = __bool__ = __float__ = __int__


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _as_dim(value: Any) -> Any:
    """Return rows of a batch that nobody has yet as a dim."""
    return Dim(_ROWS, scale=value.scale, blocks=value.blocks) if isinstance(value, Rows) else value


def length_of(factors: Sequence[Any], scale: int, offset: int) -> Any:
    """Return a length made of others, of expressions (function, operand, operand), and of None, the rows of a batch.

    Raises:
        ConfigError: it is none.
    """
    found: Any = scale
    for one in factors:
        if isinstance(one, tuple) and not (len(one) == 3 and isinstance(one[0], str) and one[0] in _FUNCTIONS):
            raise ConfigError(f"{str(one)[:80]}: expected a length")
        found = found * (SYMBOLIC_ROWS if one is None else Dim(one) if isinstance(one, tuple) else one)
    if not all(isinstance(one, int | Dim) for one in (scale, offset, found)):
        raise ConfigError(f"{str(found)[:80]}: expected a length")
    return found + offset


def _length(names: tuple[Any, ...], scale: int, offset: int = 0, blocks: tuple[int, ...] = ()) -> Any:
    """Return a dim, or what it is simply."""
    if not names or not scale:
        return scale + offset if not names else offset
    if names == (_ROWS,) and not offset and scale > 0:
        return Rows(_SYMBOLIC, scale, blocks)
    return Dim(*sorted(names, key=repr), scale=scale, offset=offset, blocks=blocks)


# Of expressions that stand in a dim's names.
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "/": lambda product, factor: _exact(product, factor),
    "min": min,
    "max": max,
}
_numbers = itertools.count()


def unknown() -> Any:
    """Return a length of symbolic tensors that is like no other."""
    return Dim(f"length {next(_numbers)}")


def bound(value: Any, lengths: Mapping[str, Any]) -> Any:
    """Return an attribute of an op with numbers, or other dims, for the names of dims in it; as `Dim.bound`."""
    if isinstance(value, tuple):
        return tuple(bound(one, lengths) for one in value)
    if isinstance(value, Rows):
        rows = lengths[_ROWS]
        single = isinstance(rows, Rows) and rows.scale == 1
        return Rows(rows.rows, value.scale, value.blocks) if single else rows * value.scale
    return value.bound(lengths) if isinstance(value, Dim) else value


def learned(lengths: dict[str, Any], symbolic: Iterable[Any], shape: Iterable[Any]) -> None:
    """Note the lengths of a tensor under the names that they have in a symbolic one, but for those known already."""
    for one, n in zip(symbolic, shape, strict=False):
        name = _ROWS if isinstance(one, Rows) and one.scale == 1 else one.name if isinstance(one, Dim) else None
        if name is not None:
            lengths.setdefault(name, n)


def is_number(length: Any) -> bool:
    """Whether a length is known, as rows of a batch at hand are."""
    return not isinstance(length, Dim) and not (isinstance(length, Rows) and length.rows == _SYMBOLIC)


def read(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Return a symbolic tensor's shape as users read it: None for what is not known."""
    return tuple(int(n) if is_number(n) else None for n in shape)


def _exact(product: Any, factor: Any) -> Any:
    if product % factor if factor else product:
        raise ConfigError(f"{product} elements cannot be {factor} times as many as others: no such shape")
    return product // factor if factor else 0


def quotient(product: Any, factor: Any) -> Any:
    """Return the length by which another must be multiplied to give a product."""
    found = product // factor if factor else 0
    exact = math.prod((factor, found)) == product or not is_open((product, factor))
    return found if exact else Dim(("/", product, factor))


def least(one: Any, other: Any) -> Any:
    """Return the lesser of two lengths."""
    try:
        return min(one, other)
    except UnknownLengthError:
        return Dim(("min", one, other))


def greatest(one: Any, other: Any) -> Any:
    """Return the greater of two lengths."""
    try:
        return max(one, other)
    except UnknownLengthError:
        return Dim(("max", one, other))


# What stands for the number of rows where no batch is at hand: users read None.
SYMBOLIC_ROWS = Rows(_SYMBOLIC)


def symbolic(shape: Iterable[Any]) -> Shape:
    """Return the shape of a symbolic tensor that users write: None for the rows of the batch, and for other lengths."""
    lengths: list[Any] = list(shape)
    for axis, n in enumerate(lengths):
        if axis:
            lengths[axis] = unknown() if n is None else n if isinstance(n, Dim) else int(n)
        else:
            lengths[0] = SYMBOLIC_ROWS if n is None else n if isinstance(n, Rows) else Rows(int(n))
    return tuple(lengths)


def without_rows(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Return a shape as users read it: None for what counts rows of the batch, or is not known."""
    return tuple(None if isinstance(n, Rows | Dim) else int(n) for n in shape)


def differ(one: Any, other: Any) -> bool:
    """Whether two lengths cannot be the same: not where one of them is not known."""
    return not isinstance(one, Dim) and not isinstance(other, Dim) and bool(one != other)


def is_open(shape: Iterable[Any]) -> bool:
    """Whether a length in a shape is not known."""
    return Dim in [n.__class__ for n in shape]


def local(shape: Iterable[int], rows: int) -> Shape:
    """Return a shape as a rank sees it that has `rows` rows of the batch."""
    return tuple(n.scale * rows if isinstance(n, Rows) else n for n in shape)


def row_axis(shape: Shape) -> int | None:
    """Return the first axis that counts rows, or None."""
    return next((axis for axis, length in enumerate(shape) if isinstance(length, Rows)), None)


def size(shape: Iterable[int]) -> int:
    """Return the number of elements.

    Raises:
        UnknownLengthError: a length is not known.
    """
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
        long = [n for n in long if not isinstance(n, Dim)] or long[:1]  # what is not known will be what is known
        if len({int(n) for n in long[1:]} - {long[0]}) > 0:
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
