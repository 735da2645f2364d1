"""Index expressions: where an element lies in memory, as arithmetic that holds for any number of rows.

An `IndexExpr` is a sum of indices, each times a product of lengths. Strides of slices, broadcast axes and reshapes are
arithmetic on it, so that expressions for the same element are equal, whatever views lie between. Where an axis splits
an index unevenly, a `FloorDiv` is an index of its own, and the remainder is `i - 10 (i / 10)`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import comb
from typing import NamedTuple

from dptrain.program.dims import Dim

# A product of lengths on a rank: a number, times the rank's rows to a power.
Numel = tuple[int, int]
NOTHING: Numel = (0, 0)
ONE: Numel = (1, 0)


def numel(shape: Iterable[int]) -> Numel:
    """Return the number of elements."""
    number, power = ONE
    for n in shape:
        number, power = (number * n.scale, power + 1) if isinstance(n, Dim) else (number * int(n), power)
    return number, power if number else 0


def numel_product(*factors: Numel) -> Numel:
    """Return a product."""
    number, power = ONE
    for one in factors:
        number, power = number * one[0], power + one[1]
    return number, power if number else 0


def exact_quotient(one: Numel, other: Numel) -> Numel | None:
    """Return a quotient, None where there is none for every number of rows."""
    divides = other[0] and one[0] % other[0] == 0 and one[1] >= other[1]
    return (one[0] // other[0], one[1] - other[1]) if divides else None


class Axis(NamedTuple):
    """An index that counts from 0.

    Attributes:
        name: in the code; of a view, the number of the reader's axis.
        length: below which it stays, None where that is not known.
        depth: of the scope in which it is known.
    """

    name: str | int
    length: Numel | None = None
    depth: int = 0


# The global number of a rank's first row.
FIRST_ROW = Axis("first_row")


class FloorDiv:
    """How often a length goes into a place.

    Attributes:
        place: which is at least 0.
        by: the length.
        depth: as an `Axis`.
        length: as an `Axis`.
    """

    def __init__(self, place: "IndexExpr", by: Numel) -> None:
        self.dividend, self.divisor, self.depth = place, by, place.depth

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FloorDiv) and (self.divisor, self.dividend) == (other.divisor, other.dividend)

    def __hash__(self) -> int:
        return hash((self.dividend, self.divisor))

    @cached_property
    def length(self) -> Numel | None:
        """As above."""
        if self.dividend.upper_bound is None or len(found := (self.dividend.upper_bound + _SINGLE).terms) != 1:
            return None
        (((_, power), number),) = found.items()
        if (whole := exact_quotient((number, power), self.divisor)) is not None:
            return whole
        return (number // self.divisor[0] + 1, 0) if power == self.divisor[1] == 0 else None


Index = Axis | FloorDiv | None


class IndexExpr:
    """A sum of indices times products of lengths.

    Attributes:
        terms: the factor of each index (None: of no index) and power of the rank's rows.
    """

    def __init__(self, terms: Mapping[tuple[Index, int], int]) -> None:
        self.terms = terms if all(terms.values()) else {key: number for key, number in terms.items() if number}

    @cached_property
    def _hash(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexExpr) and self.terms == other.terms

    def __add__(self, other: "IndexExpr") -> "IndexExpr":
        if not self.terms or not other.terms:
            return self if self.terms else other
        found = dict(self.terms)
        for key, number in other.terms.items():
            found[key] = found.get(key, 0) + number
        return IndexExpr(found)

    def __sub__(self, other: "IndexExpr") -> "IndexExpr":
        return self + other.times((-1, 0))

    def times(self, by: Numel) -> "IndexExpr":
        """Return a multiple."""
        if by == ONE or not self.terms:
            return self
        return IndexExpr({(index, power + by[1]): number * by[0] for (index, power), number in self.terms.items()})

    @cached_property
    def depth(self) -> int:
        """Of the scope in which all its indices are known."""
        return max((index.depth for index, _ in self.terms if index is not None), default=0)

    @cached_property
    def axis(self) -> Index:
        """The index that it is, None for others."""
        ((key, number),) = self.terms.items() if len(self.terms) == 1 else [((None, 0), 0)]
        return key[0] if key[1] == 0 and number == 1 else None

    def number(self, rows: int, first_row: int) -> int:
        """Return what it is where no index but that of a rank's first row is in it."""
        return sum(
            int(count * rows**power) * (1 if index is None else first_row)
            for (index, power), count in self.terms.items()
        )

    def at(self, places: "Sequence[IndexExpr]") -> "IndexExpr":
        """Return it with places for a view's axes."""
        found = ZERO_INDEX
        for (index, power), number in self.terms.items():
            name = index.name if isinstance(index, Axis) else None
            found += (places[name] if isinstance(name, int) else symbol(index)).times((number, power))
        return found

    @cached_property
    def upper_bound(self) -> "IndexExpr | None":
        """The greatest number it can be; None where that is not known, or it may be negative."""
        for (index, power), number in self.terms.items():
            if number < 0:
                return self._remainder_bound(index, (-number, power)) if isinstance(index, FloorDiv) else None
        found = ZERO_INDEX
        for (index, power), number in self.terms.items():
            length = ONE if index is None else index.length
            if length is None:
                return None
            found += offset_by(numel_product(length, (number, power)))
            found -= ZERO_INDEX if index is None else offset_by((number, power))
        return found

    def _remainder_bound(self, quotient: FloorDiv, factor: Numel) -> "IndexExpr | None":
        """Return `upper_bound` where a quotient is subtracted: of what it leaves of the place that is divided."""
        own = [index for index, _ in self.terms if isinstance(index, FloorDiv) and index.dividend == quotient.dividend]
        for one in (None, *own):  # the quotient of one that has been divided before is that of the first place
            length = exact_quotient(quotient.divisor, ONE if one is None else one.divisor)
            count = None if length is None or length == ONE else exact_quotient(factor, length)
            if length is None or count is None:
                continue
            left = (quotient.dividend if one is None else symbol(one)) - symbol(quotient).times(length)
            rest = self - left.times(count)
            most: IndexExpr | None = rest.upper_bound if len(rest.terms) < len(self.terms) else None
            if most is not None:
                return most + (offset_by(length) - _SINGLE).times(count)
        return None

    def is_below(self, length: Numel) -> bool:
        """Whether it is certainly at least 0 and less than a length, if there are any rows."""
        if self.upper_bound is None:
            return False
        left, powers = offset_by(length) - _SINGLE - self.upper_bound, dict[int, int]()
        for (_, power), number in left.terms.items():  # of one row and so many more
            for own in range(power + 1):
                powers[own] = powers.get(own, 0) + number * comb(power, own)
        return all(number >= 0 for number in powers.values())


def symbol(one: Index) -> IndexExpr:
    """Return the place at an index."""
    return ZERO_INDEX if isinstance(one, Axis) and one.length == ONE else IndexExpr({(one, 0): 1})


def offset_by(one: Numel) -> IndexExpr:
    """Return the place behind so many elements."""
    return IndexExpr({(None, one[1]): one[0]})


ZERO_INDEX = IndexExpr({})
_SINGLE = offset_by(ONE)


def divide(place: IndexExpr, by: Numel) -> tuple[IndexExpr, IndexExpr]:
    """Return how often a length goes into a place, and what it leaves."""
    if by == ONE:
        return place, ZERO_INDEX
    whole, left = dict[tuple[Index, int], int](), dict[tuple[Index, int], int]()
    for (index, power), number in place.terms.items():
        count = exact_quotient((number, power), by)
        if count is None:
            left[index, power] = number
        else:
            whole[index, count[1]] = count[0]
    found, rest = IndexExpr(whole), IndexExpr(left)
    if rest.is_below(by):
        return found, rest
    if rest.upper_bound is None:
        found, rest = ZERO_INDEX, place
    inner = rest.axis
    one = (
        FloorDiv(inner.dividend, numel_product(inner.divisor, by))
        if isinstance(inner, FloorDiv)
        else FloorDiv(rest, by)
    )
    return found + symbol(one), rest - symbol(one).times(by)


def unravel(place: IndexExpr, shape: Iterable[int]) -> list[IndexExpr]:
    """Return the places along the axes of a shape, whose elements a place numbers through."""
    return unravel_blocks(place, [numel((n,)) for n in shape])


def unravel_blocks(place: IndexExpr, lengths: Sequence[Numel]) -> list[IndexExpr]:
    """Return `unravel` into blocks of so many elements."""
    found, long = [ZERO_INDEX] * len(lengths), [n for n, one in enumerate(lengths) if one != ONE]
    for n in reversed(long[1:]):
        place, found[n] = divide(place, lengths[n])
    for n in long[:1]:
        found[n] = place
    return found


def ravel(places: Iterable[IndexExpr], shape: Iterable[int]) -> IndexExpr:
    """Return the number of an element among all of a shape, from its places along the axes."""
    found = ZERO_INDEX
    for one, n in zip(places, shape, strict=True):
        found = found.times(numel((n,))) + one
    return found
