"""Lengths that count rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import ConfigError
from dptrain.program.shapes import Rows, broadcast, local, normalized_axes, row_axis


def test_what_stays_marked():
    n = Rows(7)
    assert [type(one) for one in (2 * n, n * 2, n + n, 2 * n - n, (4 * n) // 2, sum([n, n]))] == [Rows] * 6
    assert local((2 * n, 3, n + n, 4 * n // 2 - n), 5) == (10, 3, 10, 5)
    assert [type(one) for one in (n + 1, n - 1, n // 2, n * 0, 1 - n)] == [int] * 5
    assert row_axis((3, n)) == 1
    assert row_axis((3, 7)) is None


@given(rows=st.integers(0, 50), scale=st.integers(1, 9), other=st.integers(-9, 9))
def test_it_computes_as_an_int(rows, scale, other):
    marked, plain = Rows(rows, scale), rows * scale
    assert (marked + other, other + marked, marked - other) == (plain + other, other + plain, plain - other)
    assert (marked * other, other * marked) == (plain * other, other * plain)
    if other:
        assert marked // other == plain // other
    assert marked + marked == 2 * plain
    assert marked == plain


def test_rows_of_another_batch_are_not_added_up():
    assert type(Rows(7) + Rows(8)) is int


def test_broadcast():
    n = Rows(1)
    assert broadcast((3, 1), (4,), ()) == (3, 4)
    assert isinstance(broadcast((Rows(3), 1), (3, 4))[0], Rows)
    assert isinstance(broadcast((1, 4), (n, 4))[0], Rows)
    with pytest.raises(ConfigError, match="cannot be broadcast together"):
        broadcast((2,), (3,))
    # One row of a batch is not a length of 1 to be spread: with more ranks than rows some would have none.
    with pytest.raises(ConfigError, match="cannot be broadcast together"):
        broadcast((n, 4), (3, 4))


def test_axes():
    assert normalized_axes(None, 3) == (0, 1, 2)
    assert normalized_axes((-1, 0), 3) == (0, 2)
    for wrong in (3, -4, (0, -3)):
        with pytest.raises(ConfigError, match="expected different axes of 3 dimensions"):
            normalized_axes(wrong, 3)
