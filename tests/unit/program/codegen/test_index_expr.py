"""Places as arithmetic: what they say for any number of rows, and that equal ones are found equal."""

import math

import numpy as np
import pytest

from dptrain.program.codegen.index_expr import ZERO_INDEX, Axis, FloorDiv, numel, offset_by, ravel, symbol, unravel
from dptrain.program.dims import Dim

R = Dim.rows(None)


def of(place, values, rows):
    """Return the number that a place is."""
    total = 0
    for (index, power), factor in place.terms.items():
        value = 1
        if isinstance(index, FloorDiv):
            number, exponent = index.divisor
            value = of(index.dividend, values, rows) // (number * rows**exponent)
        elif index is not None:
            value = values[index.name]
        total += factor * rows**power * value
    return total


def at(rows, shape):
    return tuple(n.scale * rows if isinstance(n, Dim) else n for n in shape)


def element(shape, name="i"):
    return symbol(Axis(name, numel(shape)))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("shape", [(R, 3, 4), (3, R, 4), (2, 1, 3, 2, 1), (R.times(2), 3), (1, 1), ()], ids=str)
def test_a_number_is_split_into_places_and_back(shape, rows):
    place = element(shape)
    parts = unravel(place, shape)
    for n in range(math.prod(at(rows, shape))):
        assert tuple(of(part, {"i": n}, rows) for part in parts) == np.unravel_index(n, at(rows, shape))
    for part, n in zip(parts, shape, strict=True):
        assert part.upper_bound == offset_by(numel((n,))) - offset_by((1, 0))
    assert ravel(parts, shape) == place


def quotients(places):
    return [index for place in places for index, _ in place.terms if isinstance(index, FloorDiv)]


@pytest.mark.parametrize(
    ("old", "new"),
    [((R, 3, 4), (R, 12)), ((R, 12), (R, 3, 4)), ((6, R, 2), (2, 3, R, 2)), ((R, 4, 1, 6), (R, 2, 2, 3, 2))],
    ids=str,
)
def test_the_same_element_in_another_shape(old, new):
    """Whether by way of axes or not, and without a division where axes are only put together."""
    axes = [symbol(Axis(f"i{axis}", numel((n,)))) for axis, n in enumerate(old)]
    places = unravel(ravel(axes, old), new)
    assert unravel(ravel(places, new), old) == axes
    assert unravel(element(old), new) == unravel(ravel(unravel(element(old), old), old), new)
    if len(new) < len(old):
        assert not quotients(places)


def test_slices_and_what_lies_behind_them():
    row, column = (symbol(Axis(name, length)) for name, length in (("r", (1, 1)), ("c", (4, 0))))
    inside = column + offset_by((3, 0))  # columns 3 to 6 of 8
    assert unravel(ravel([row, inside], (R, 8)), (R, 8)) == [row, inside]
    beyond = column.times((2, 0)) + offset_by((3, 0))  # up to 9, of which nothing is known to lie in a row of 8
    assert quotients(unravel(ravel([row, beyond], (R, 8)), (R, 8)))
    backwards = offset_by((7, 0)) - column
    for c in range(4):
        parts = unravel(ravel([row, backwards], (R, 8)), (R, 2, 4))
        assert [of(part, {"r": 2, "c": c}, 3) for part in parts] == [2, (7 - c) // 4, (7 - c) % 4]


def test_what_is_certain_of_a_place():
    i, unknown = symbol(Axis("i", (1, 1))), symbol(Axis("k"))
    assert i.is_below((1, 1))
    assert not i.is_below((5, 0)), "of five rows or fewer"
    assert (i.times((3, 0)) + offset_by((2, 0))).is_below((3, 1))
    assert not (i.times((3, 0)) + offset_by((3, 0))).is_below((3, 1))
    assert not unknown.is_below((1, 9))
    assert not (i - offset_by((1, 0))).is_below((1, 1)), "it may be -1"
    assert ZERO_INDEX.is_below((1, 0))
