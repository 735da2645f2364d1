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
    """Return the number of elements of a shape."""
    number, power = ONE
    for n in shape:
        number, power = (number * n.scale, power + 1) if isinstance(n, Dim) else (number * int(n), power)
    return number, power if number else 0


def numel_product(*factors: Numel) -> Numel:
    """Multiply numbers of elements."""
    number, power = ONE
    for factor in factors:
        number, power = number * factor[0], power + factor[1]
    return number, power if number else 0


def exact_quotient(dividend: Numel, divisor: Numel) -> Numel | None:
    """Divide numbers of elements; None if that is not exact for every number of rows."""
    divides = divisor[0] and dividend[0] % divisor[0] == 0 and dividend[1] >= divisor[1]
    return (dividend[0] // divisor[0], dividend[1] - divisor[1]) if divides else None


class Axis(NamedTuple):
    """A loop index from 0: its name (in a view the number of the reader's axis), exclusive bound and scope depth."""

    name: str | int
    length: Numel | None = None
    depth: int = 0


# The global number of a rank's first row.
FIRST_ROW = Axis("first_row")


class FloorDiv:
    """The integer quotient of a non-negative index expression and a length; has `depth` and `length` as an `Axis`."""

    def __init__(self, place: "IndexExpr", by: Numel) -> None:
        self.dividend, self.divisor, self.depth = place, by, place.depth

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FloorDiv) and (self.divisor, self.dividend) == (other.divisor, other.dividend)

    def __hash__(self) -> int:
        return hash((self.dividend, self.divisor))

    @cached_property
    def length(self) -> Numel | None:
        """Exclusive bound, None if unknown."""
        if self.dividend.upper_bound is None or len(count_terms := (self.dividend.upper_bound + _SINGLE).terms) != 1:
            return None
        (((_, power), number),) = count_terms.items()
        if (quotient := exact_quotient((number, power), self.divisor)) is not None:
            return quotient
        return (number // self.divisor[0] + 1, 0) if power == self.divisor[1] == 0 else None


Index = Axis | FloorDiv | None


class IndexExpr:
    """A sum of terms: a factor for each index (None for the constant) and power of the rank's rows."""

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
        terms = dict(self.terms)
        for key, number in other.terms.items():
            terms[key] = terms.get(key, 0) + number
        return IndexExpr(terms)

    def __sub__(self, other: "IndexExpr") -> "IndexExpr":
        return self + other.times((-1, 0))

    def times(self, by: Numel) -> "IndexExpr":
        """Multiply by a number of elements."""
        if by == ONE or not self.terms:
            return self
        return IndexExpr({(index, power + by[1]): number * by[0] for (index, power), number in self.terms.items()})

    @cached_property
    def depth(self) -> int:
        """Depth of the scope that knows all its indices."""
        return max((index.depth for index, _ in self.terms if index is not None), default=0)

    @cached_property
    def axis(self) -> Index:
        """The index that this is, None if it is a compound."""
        ((key, number),) = self.terms.items() if len(self.terms) == 1 else [((None, 0), 0)]
        return key[0] if key[1] == 0 and number == 1 else None

    def number(self, rows: int, first_row: int) -> int:
        """Evaluate an expression without indices other than the rank's first row."""
        return sum(
            int(count * rows**power) * (1 if index is None else first_row)
            for (index, power), count in self.terms.items()
        )

    def at(self, places: "Sequence[IndexExpr]") -> "IndexExpr":
        """Substitute expressions for the axes of a view."""
        result = ZERO_INDEX
        for (index, power), number in self.terms.items():
            name = index.name if isinstance(index, Axis) else None
            result += (places[name] if isinstance(name, int) else symbol(index)).times((number, power))
        return result

    @cached_property
    def upper_bound(self) -> "IndexExpr | None":
        """Greatest possible value; None if unknown, or if the value may be negative."""
        for (index, power), number in self.terms.items():
            if number < 0:
                return self._remainder_bound(index, (-number, power)) if isinstance(index, FloorDiv) else None
        bound = ZERO_INDEX
        for (index, power), number in self.terms.items():
            length = ONE if index is None else index.length
            if length is None:
                return None
            bound += offset_by(numel_product(length, (number, power)))
            bound -= ZERO_INDEX if index is None else offset_by((number, power))
        return bound

    def _remainder_bound(self, quotient: FloorDiv, factor: Numel) -> "IndexExpr | None":
        """Bound an expression that subtracts a quotient, as a remainder does."""
        floor_divs = [
            index for index, _ in self.terms if isinstance(index, FloorDiv) and index.dividend == quotient.dividend
        ]
        for inner in (None, *floor_divs):  # dividing a quotient again divides the original index
            length = exact_quotient(quotient.divisor, ONE if inner is None else inner.divisor)
            count = None if length is None or length == ONE else exact_quotient(factor, length)
            if length is None or count is None:
                continue
            remainder = (quotient.dividend if inner is None else symbol(inner)) - symbol(quotient).times(length)
            others = self - remainder.times(count)
            most: IndexExpr | None = others.upper_bound if len(others.terms) < len(self.terms) else None
            if most is not None:
                return most + (offset_by(length) - _SINGLE).times(count)
        return None

    def is_below(self, length: Numel) -> bool:
        """Whether 0 <= value < length is certain for any positive number of rows."""
        if self.upper_bound is None:
            return False
        slack, powers = offset_by(length) - _SINGLE - self.upper_bound, dict[int, int]()
        for (_, power), number in slack.terms.items():  # in powers of the rows beyond the first
            for exponent in range(power + 1):
                powers[exponent] = powers.get(exponent, 0) + number * comb(power, exponent)
        return all(number >= 0 for number in powers.values())


def symbol(index: Index) -> IndexExpr:
    """Return the expression of a single index."""
    return ZERO_INDEX if isinstance(index, Axis) and index.length == ONE else IndexExpr({(index, 0): 1})


def offset_by(count: Numel) -> IndexExpr:
    """Return a constant expression."""
    return IndexExpr({(None, count[1]): count[0]})


ZERO_INDEX = IndexExpr({})
_SINGLE = offset_by(ONE)


def divide(place: IndexExpr, by: Numel) -> tuple[IndexExpr, IndexExpr]:
    """Return quotient and remainder."""
    if by == ONE:
        return place, ZERO_INDEX
    quotient_terms, remainder_terms = dict[tuple[Index, int], int](), dict[tuple[Index, int], int]()
    for (index, power), number in place.terms.items():
        count = exact_quotient((number, power), by)
        if count is None:
            remainder_terms[index, power] = number
        else:
            quotient_terms[index, count[1]] = count[0]
    quotient, remainder = IndexExpr(quotient_terms), IndexExpr(remainder_terms)
    if remainder.is_below(by):
        return quotient, remainder
    if remainder.upper_bound is None:
        quotient, remainder = ZERO_INDEX, place
    inner = remainder.axis
    floor_div = (
        FloorDiv(inner.dividend, numel_product(inner.divisor, by))
        if isinstance(inner, FloorDiv)
        else FloorDiv(remainder, by)
    )
    return quotient + symbol(floor_div), remainder - symbol(floor_div).times(by)


def unravel(place: IndexExpr, shape: Iterable[int]) -> list[IndexExpr]:
    """Split a flat index into indices along the axes of a shape, as `np.unravel_index`."""
    return unravel_blocks(place, [numel((n,)) for n in shape])


def unravel_blocks(place: IndexExpr, lengths: Sequence[Numel]) -> list[IndexExpr]:
    """`unravel` for blocks of so many elements."""
    indices, axes = [ZERO_INDEX] * len(lengths), [n for n, length in enumerate(lengths) if length != ONE]
    for n in reversed(axes[1:]):
        place, indices[n] = divide(place, lengths[n])
    for n in axes[:1]:
        indices[n] = place
    return indices


def ravel(places: Iterable[IndexExpr], shape: Iterable[int]) -> IndexExpr:
    """Combine indices along the axes of a shape into a flat one, as `np.ravel_multi_index`."""
    index = ZERO_INDEX
    for place, n in zip(places, shape, strict=True):
        index = index.times(numel((n,))) + place
    return index
