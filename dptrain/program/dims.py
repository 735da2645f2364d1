"""Lengths as data: a number, or a `Dim`, which is a name with a scale and an offset.

In a trace a dim is bound to the present size and counts rows of the batch. Lengths proportional to it are dims too, so
that shapes tell what ranks share, and one program serves every number of rows. Code may ask for the number, but then
the program holds for that size alone. Dims of symbolic tensors are unbound and have no number.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dptrain.errors import ConfigError

# The name of the rows of a batch.
_ROWS = "rows"


class UnknownLengthError(ConfigError):
    """An unknown length was used as a number."""


class Size:
    """What the name of a dim is bound to; once it is `asked` for, later results may hold for this number alone."""

    __slots__ = ("asked", "number")

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, False


class Dim:
    """A length: `scale` times a name, or several names, and `offset`.

    Sums, multiples, exact quotients and products are dims. Any other quotient is a dim whose name is that expression,
    or a number if the dim is bound. Divided by or multiplied with anything but integers it becomes a tensor. Unbound it
    reads as None, as in Keras; `bound` substitutes the lengths of its names.

    Args:
        names: of the lengths that are multiplied: words, or expressions (function, operand, operand).
        blocks: scales of the consecutive parts of a sum, a concatenation's length.
        size: that its single name is bound to, or None.
    """

    __slots__ = ("blocks", "names", "offset", "scale", "size")
    __array_ufunc__ = None  # NumPy leaves `array * dim` to the dim

    # Converts a dim to a tensor; set by the tensors' module.
    to_tensor: ClassVar[Callable[[Any], Any]]

    def __init__(
        self, *names: Any, scale: int = 1, offset: int = 0, blocks: tuple[int, ...] = (), size: Size | None = None
    ) -> None:
        self.names, self.scale, self.offset, self.blocks = names, scale, offset, blocks or (scale,)
        self.size = size

    @classmethod
    def rows(cls, number: int | None = None, scale: int = 1, blocks: tuple[int, ...] = ()) -> "Dim":
        """Return a multiple of a global batch's rows; `number` None if unknown."""
        return cls(_ROWS, scale=scale, blocks=blocks, size=None if number is None else Size(number))

    def times(self, scale: int) -> "Dim":
        """Return a multiple of its name."""
        return Dim(*self.names, scale=scale, size=self.size)

    def counting(self, length: Any) -> "Dim":
        """Return a length of this batch as a dim of its rows."""
        size = 0 if self.size is None else self.size.number
        return self.times(number_of(length) // size) if size else self

    def __repr__(self) -> str:
        return "None" if self.size is None else str(self.number)

    def __hash__(self) -> int:
        return hash((self.names, self.scale, self.offset))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            has_same_name = (self.names, self.scale, self.offset) == (other.names, other.scale, other.offset)
            return has_same_name and (self.size is None or other.size is None or self.size.number == other.size.number)
        if other is None:
            return self.size is None
        if not _is_int(other):
            return NotImplemented
        return self.size is not None and other >= 0 and int(self) == other  # type: ignore[operator]

    @property
    def name(self) -> str | None:
        """The name if the dim is nothing more, else None."""
        is_plain_name = len(self.names) == 1 and isinstance(self.names[0], str) and (self.scale, self.offset) == (1, 0)
        return self.names[0] if is_plain_name else None

    @property
    def number(self) -> int:
        """Its number, for messages and executions, not to influence programs; UnknownLengthError if unbound."""
        if self.size is None:
            raise UnknownLengthError(
                "a length that is None, such as the number of rows of a batch, is not known outside a step: compute "
                "with ops in a layer's `call`, which is run for batches of every size, or set it in `Input(shape, "
                "batch_size)`"
            )
        return self.scale * self.size.number + self.offset

    def bound(self, lengths: Mapping[str, Any]) -> Any:
        """Return the length for these lengths of names, a number or a dim; KeyError if a name is missing."""
        if self.names == (_ROWS,) and isinstance(lengths[_ROWS], Dim) and lengths[_ROWS].name and not self.offset:
            return Dim(_ROWS, scale=self.scale, blocks=self.blocks, size=lengths[_ROWS].size)
        product: Any = self.scale
        for factor in self.names:
            if isinstance(factor, str):
                product = product * lengths[factor]
            else:
                function, *operands = factor
                product = product * _FUNCTIONS[function](*(bound(n, lengths) for n in operands))
        return product + self.offset

    def _is_like(self, other: "Dim") -> bool:
        """Whether another dim has the same names with the same sizes."""
        return self.names == other.names and (
            self.size is other.size or (self.size and self.size.number) == (other.size and other.size.number)
        )

    # Computing with it

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            if self.size or other.size:
                return int(self) * int(other)
            if self.offset or other.offset:
                return Dim(("*", self, other))
            return _length((*self.names, *other.names), self.scale * other.scale)
        if not _is_int(other):
            return self._as_tensor(other, operator.mul)
        return _length(self.names, self.scale * other, self.offset * other, size=self.size)

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            if not self._is_like(other):
                return int(self) + int(other) if self.size or other.size else Dim(("+", self, other))
            scale, offset = self.scale + other.scale, self.offset + other.offset
            return _length(self.names, scale, offset, self.blocks + other.blocks, self.size)
        if not _is_int(other):
            return self._as_tensor(other, operator.add)
        return _length(self.names, self.scale, self.offset + other, self.blocks, self.size)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            if not self._is_like(other):
                return int(self) - int(other) if self.size or other.size else self + -other
            return _length(self.names, self.scale - other.scale, self.offset - other.offset, size=self.size)
        return self + -other if _is_int(other) else self._as_tensor(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        if _is_int(other):
            return other - int(self) if self.size else -self + other
        return self._as_tensor(other, operator.sub, reflected=True)

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Dim):
            if not self.offset and not other.offset and self.scale % other.scale == 0:
                factors = Counter(self.names)
                factors.subtract(other.names)
                if min(factors.values()) >= 0:
                    return _length(tuple(factors.elements()), self.scale // other.scale)
            return int(self) // int(other) if self.size or other.size else Dim(("//", self, other))
        if not _is_int(other):
            return self._as_tensor(other, operator.floordiv)
        if other > 0 and self.scale % other == 0:
            return _length(self.names, self.scale // other, self.offset // other, size=self.size)
        return int(self) // other if self.size else Dim(("//", self, other))

    def __rfloordiv__(self, other: Any) -> Any:
        if _is_int(other):
            return other // int(self) if self.size else Dim(("//", other, self))
        return self._as_tensor(other, operator.floordiv, reflected=True)

    def __mod__(self, other: Any) -> Any:
        if _is_int(other) and other > 0 and self.scale % other == 0:
            return self.offset % other
        return int(self) % int(other) if self.size else Dim(("%", self, other))

    def __rmod__(self, other: Any) -> Any:
        if _is_int(other):
            return other % int(self) if self.size else Dim(("%", other, self))
        return NotImplemented

    def __truediv__(self, other: Any) -> Any:
        return self._as_tensor(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Any:
        return self._as_tensor(other, operator.truediv, reflected=True)

    def _as_tensor(self, other: Any, function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Any:
        if not isinstance(other, int | float | np.generic | np.ndarray | Dim):
            return NotImplemented
        tensor = Dim.to_tensor(self)
        return function(other, tensor) if reflected else function(tensor, other)

    # Asking for the number

    def __lt__(self, other: Any) -> bool:
        if self.size is None:
            difference = self - other
            if isinstance(difference, Dim) and (difference.scale < 0 or difference.offset < 0):
                difference = int(self)
            return not isinstance(difference, Dim) and bool(difference < 0)  # no length is below 0
        if isinstance(other, Dim) and self._is_like(other):
            return self.scale < other.scale
        return bool(other > 0) and int(self) < int(other)

    def __gt__(self, other: Any) -> bool:
        if self.size is None:
            difference = self - other
            if isinstance(difference, Dim) and (difference.scale > 0 or difference.offset > 0):
                difference = int(self)
            return not isinstance(difference, Dim) and bool(difference > 0)
        if isinstance(other, Dim) and self._is_like(other):
            return self.scale > other.scale
        return bool(other < 0) or int(self) > int(other)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __int__(self) -> int:
        """Return the number, and record that it was asked for; UnknownLengthError if unbound."""
        number = self.number
        assert self.size is not None
        self.size.asked = True
        return number

    __index__ = __int__

    def __bool__(self) -> bool:
        return int(self) != 0

    def __float__(self) -> float:
        return float(int(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(int(self), dtype)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _length(
    names: tuple[Any, ...], scale: int, offset: int = 0, blocks: tuple[int, ...] = (), size: Size | None = None
) -> Any:
    """Return a dim, or an int if it is one."""
    if not names or not scale:
        return scale + offset if not names else offset
    dim = Dim(*sorted(names, key=repr), scale=scale, offset=offset, blocks=blocks, size=size)
    return dim if size is None or (scale > 0 and not offset) else int(dim)


def length_of(factors: Sequence[Any], scale: int, offset: int) -> Any:
    """Return a length from factors (lengths, expressions, None for rows of a batch), or raise ConfigError."""
    product: Any = scale
    for factor in factors:
        if isinstance(factor, tuple) and not (
            len(factor) == 3 and isinstance(factor[0], str) and factor[0] in _FUNCTIONS
        ):
            raise ConfigError(f"{str(factor)[:80]}: expected a length")
        product = product * (Dim.rows() if factor is None else Dim(factor) if isinstance(factor, tuple) else factor)
    if not all(isinstance(part, int | Dim) for part in (scale, offset, product)):
        raise ConfigError(f"{str(product)[:80]}: expected a length")
    return product + offset


# Functions in the expressions of a dim's names.
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
    """Return a new length of symbolic tensors, equal to no other."""
    return Dim(f"length {next(_numbers)}")


def bound(value: Any, lengths: Mapping[str, Any]) -> Any:
    """Substitute lengths for names in an op's attribute; see `Dim.bound`."""
    if isinstance(value, tuple):
        return tuple(bound(part, lengths) for part in value)
    return value.bound(lengths) if isinstance(value, Dim) else value


def learned(lengths: dict[str, Any], symbolic: Iterable[Any], shape: Iterable[Any]) -> None:
    """Record the lengths of a tensor under the names in its symbolic shape, unless known."""
    for dim, n in zip(symbolic, shape, strict=False):
        name = dim.name if isinstance(dim, Dim) else None
        if name is not None:
            lengths.setdefault(name, n)


def counting(rows: Dim, length: Any) -> Dim:
    """Return a length of the batch of `rows` as a dim, with the same parts if it is as long."""
    counted = length if isinstance(length, Dim) else rows.counting(length)
    return rows if counted == rows else counted


def is_number(length: Any) -> bool:
    """Whether a length is known, as the rows of an actual batch."""
    return not isinstance(length, Dim) or length.size is not None


def counts_rows(length: Any) -> bool:
    """Whether a length is the number of rows, or a multiple."""
    return isinstance(length, Dim) and length.names == (_ROWS,)


def number_of(length: Any) -> int:
    """Return a length's number without recording the use, see `Dim.number`; UnknownLengthError if unknown."""
    return length.number if isinstance(length, Dim) else int(length)


def read(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Return a symbolic shape as users see it: None for unknown lengths."""
    return tuple(number_of(n) if is_number(n) else None for n in shape)


def _exact(product: Any, factor: Any) -> Any:
    if product % factor if factor else product:
        raise ConfigError(f"{product} elements cannot be divided by {factor}: impossible shape")
    return product // factor if factor else 0


def quotient(product: Any, factor: Any) -> Any:
    """Return the factor by which a length must be multiplied to give a product."""
    factor_wanted = product // factor if isinstance(factor, Dim) or factor else 0
    exact = is_number(product) or math.prod((factor, factor_wanted)) == product
    return factor_wanted if exact else Dim(("/", product, factor))


def least(a: Any, b: Any) -> Any:
    """Return the minimum of two lengths."""
    try:
        return min(a, b)
    except UnknownLengthError:
        return Dim(("min", a, b))


def greatest(a: Any, b: Any) -> Any:
    """Return the maximum of two lengths."""
    try:
        return max(a, b)
    except UnknownLengthError:
        return Dim(("max", a, b))


def symbolic(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Return the symbolic shape of one that users write: None for the rows of the batch, and for other lengths."""
    lengths: list[Any] = list(shape)
    for axis, n in enumerate(lengths):
        if axis:
            lengths[axis] = unknown() if n is None else n if isinstance(n, Dim) else int(n)
        else:
            lengths[0] = n if isinstance(n, Dim) else Dim.rows(None if n is None else int(n))
    return tuple(lengths)
