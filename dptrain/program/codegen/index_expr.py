"""Places: where an element stands, as arithmetic on indices that holds for any number of rows.

A `Place` is a sum of indices, each times a product of lengths. Steps of slices, broadcast axes and reshapes are
arithmetic on it, so that places of the same element are equal, whatever views lie between. Where axes are not what an
index was put together of, a `Quotient` is an index of its own, and what it leaves is `i - 10 (i / 10)`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import comb
from typing import NamedTuple

from dptrain.program.dims import Dim

# A product of lengths on a rank: a number, times the rank's rows to a power.
Extent = tuple[int, int]
NOTHING: Extent = (0, 0)
ONE: Extent = (1, 0)


def extent(shape: Iterable[int]) -> Extent:
    """Return the number of elements."""
    number, power = ONE
    for n in shape:
        number, power = (number * n.scale, power + 1) if isinstance(n, Dim) else (number * int(n), power)
    return number, power if number else 0


def times(*extents: Extent) -> Extent:
    """Return a product."""
    number, power = ONE
    for one in extents:
        number, power = number * one[0], power + one[1]
    return number, power if number else 0


def over(one: Extent, other: Extent) -> Extent | None:
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
    length: Extent | None = None
    depth: int = 0


# The global number of a rank's first row.
FIRST_ROW = Axis("first_row")


class Quotient:
    """How often a length goes into a place.

    Attributes:
        place: which is at least 0.
        by: the length.
        depth: as an `Axis`.
        length: as an `Axis`.
    """

    def __init__(self, place: "Place", by: Extent) -> None:
        self.place, self.by, self.depth = place, by, place.depth

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quotient) and (self.by, self.place) == (other.by, other.place)

    def __hash__(self) -> int:
        return hash((self.place, self.by))

    @cached_property
    def length(self) -> Extent | None:
        """As above."""
        if self.place.most is None or len(found := (self.place.most + _SINGLE).terms) != 1:
            return None
        (((_, power), number),) = found.items()
        if (whole := over((number, power), self.by)) is not None:
            return whole
        return (number // self.by[0] + 1, 0) if power == self.by[1] == 0 else None


Index = Axis | Quotient | None


class Place:
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
        return isinstance(other, Place) and self.terms == other.terms

    def __add__(self, other: "Place") -> "Place":
        if not self.terms or not other.terms:
            return self if self.terms else other
        found = dict(self.terms)
        for key, number in other.terms.items():
            found[key] = found.get(key, 0) + number
        return Place(found)

    def __sub__(self, other: "Place") -> "Place":
        return self + other.times((-1, 0))

    def times(self, by: Extent) -> "Place":
        """Return a multiple."""
        if by == ONE or not self.terms:
            return self
        return Place({(index, power + by[1]): number * by[0] for (index, power), number in self.terms.items()})

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

    def at(self, places: "Sequence[Place]") -> "Place":
        """Return it with places for a view's axes."""
        found = NOWHERE
        for (index, power), number in self.terms.items():
            name = index.name if isinstance(index, Axis) else None
            found += (places[name] if isinstance(name, int) else along(index)).times((number, power))
        return found

    @cached_property
    def most(self) -> "Place | None":
        """The greatest number it can be; None where that is not known, or it may be negative."""
        for (index, power), number in self.terms.items():
            if number < 0:
                return self._without(index, (-number, power)) if isinstance(index, Quotient) else None
        found = NOWHERE
        for (index, power), number in self.terms.items():
            length = ONE if index is None else index.length
            if length is None:
                return None
            found += after(times(length, (number, power)))
            found -= NOWHERE if index is None else after((number, power))
        return found

    def _without(self, quotient: Quotient, factor: Extent) -> "Place | None":
        """Return `most` where a quotient is subtracted: of what it leaves of the place that is divided."""
        own = [index for index, _ in self.terms if isinstance(index, Quotient) and index.place == quotient.place]
        for one in (None, *own):  # the quotient of one that has been divided before is that of the first place
            length = over(quotient.by, ONE if one is None else one.by)
            count = None if length is None or length == ONE else over(factor, length)
            if length is None or count is None:
                continue
            left = (quotient.place if one is None else along(one)) - along(quotient).times(length)
            rest = self - left.times(count)
            most: Place | None = rest.most if len(rest.terms) < len(self.terms) else None
            if most is not None:
                return most + (after(length) - _SINGLE).times(count)
        return None

    def is_below(self, length: Extent) -> bool:
        """Whether it is certainly at least 0 and less than a length, if there are any rows."""
        if self.most is None:
            return False
        left, powers = after(length) - _SINGLE - self.most, dict[int, int]()
        for (_, power), number in left.terms.items():  # of one row and so many more
            for own in range(power + 1):
                powers[own] = powers.get(own, 0) + number * comb(power, own)
        return all(number >= 0 for number in powers.values())


def along(one: Index) -> Place:
    """Return the place at an index."""
    return NOWHERE if isinstance(one, Axis) and one.length == ONE else Place({(one, 0): 1})


def after(one: Extent) -> Place:
    """Return the place behind so many elements."""
    return Place({(None, one[1]): one[0]})


NOWHERE = Place({})
_SINGLE = after(ONE)


def divided(place: Place, by: Extent) -> tuple[Place, Place]:
    """Return how often a length goes into a place, and what it leaves."""
    if by == ONE:
        return place, NOWHERE
    whole, left = dict[tuple[Index, int], int](), dict[tuple[Index, int], int]()
    for (index, power), number in place.terms.items():
        count = over((number, power), by)
        if count is None:
            left[index, power] = number
        else:
            whole[index, count[1]] = count[0]
    found, rest = Place(whole), Place(left)
    if rest.is_below(by):
        return found, rest
    if rest.most is None:
        found, rest = NOWHERE, place
    inner = rest.axis
    one = Quotient(inner.place, times(inner.by, by)) if isinstance(inner, Quotient) else Quotient(rest, by)
    return found + along(one), rest - along(one).times(by)


def split(place: Place, shape: Iterable[int]) -> list[Place]:
    """Return the places along the axes of a shape, whose elements a place numbers through."""
    return dealt(place, [extent((n,)) for n in shape])


def dealt(place: Place, lengths: Sequence[Extent]) -> list[Place]:
    """Return `split` into blocks of so many elements."""
    found, long = [NOWHERE] * len(lengths), [n for n, one in enumerate(lengths) if one != ONE]
    for n in reversed(long[1:]):
        place, found[n] = divided(place, lengths[n])
    for n in long[:1]:
        found[n] = place
    return found


def merged(places: Iterable[Place], shape: Iterable[int]) -> Place:
    """Return the number of an element among all of a shape, from its places along the axes."""
    found = NOWHERE
    for one, n in zip(places, shape, strict=True):
        found = found.times(extent((n,))) + one
    return found
