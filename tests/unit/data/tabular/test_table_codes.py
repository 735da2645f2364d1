"""Which cells of a text file look like codes."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data.tabular.table_codes import leading_zero, may_have_leading_zeros

CELLS = st.text('0123456789.,;-+"\t eE\n', max_size=8)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=4), max_size=5), st.sampled_from(",;\t"))
def test_no_cell_with_a_leading_zero_is_missed(rows, separator):
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        text = io.StringIO()
        csv.writer(text, delimiter=separator, quoting=quoting).writerows(rows)
        if not may_have_leading_zeros(text.getvalue().encode(), separator):
            assert leading_zero(cell.strip("\n\t ") for row in rows for cell in row if "\n" not in cell) is None


@pytest.mark.parametrize("cell", ["007", "+007", "-01", ' "00"', "\t01", "1,05"])
def test_cells_that_begin_with_a_zero(cell):
    assert may_have_leading_zeros(f"a,b\n1,{cell}\n".encode(), ",")


@pytest.mark.parametrize("cell", ["0", "0.05", "100", "1.005", "2020-01-05", "1e05", "x007"])
def test_cells_that_do_not(cell):
    assert not may_have_leading_zeros(f"a,b\n1,{cell}\n{cell},2".encode(), ",")
