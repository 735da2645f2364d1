"""Reading tables: bounded, and every fault with its row as an editor counts it."""

import csv
import gzip
import io
import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.sources import DEFAULT_MAX_BYTES, GZIP_PADDING
from dptrain.data.tabular.tables import Reading, is_table, read_table
from dptrain.errors import DataError
from tests.sample import examples

GOOD = "n,c\n1,a\n2,b\n"


def written(folder, content, name="t.csv"):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder, content, name="t.csv", **options):
    max_bytes = options.pop("max_bytes", DEFAULT_MAX_BYTES)
    return read_table(written(folder, content, name), Reading(**options), max_bytes=max_bytes)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (GOOD, "t.csv"),
        (GOOD, "T.CSV"),
        (GOOD.replace(",", "\t"), "t.tsv"),
        (GOOD.replace(",", ";"), "t.csv"),
        (GOOD.replace(",", "\t"), "t.csv"),
        (GOOD, "t.tsv"),
        (GOOD.replace(",", ", "), "t.csv"),
        (GOOD.replace("\n", "\r\n"), "t.csv"),
        ("\ufeff" + GOOD, "t.csv"),
        ("\n" + GOOD + "\n\n", "t.csv"),
        (gzip.compress(GOOD.encode(), mtime=0), "t.csv.gz"),
    ],
)
def test_text(tmp_path, content, name):
    table = read(tmp_path, content, name)
    assert is_table(name)
    assert list(table.frame.columns) == ["n", "c"]
    assert table.frame["n"].tolist() == [1, 2]
    assert table.frame["c"].tolist() == ["a", "b"]


def test_parquet(tmp_path):
    pd.DataFrame({"n": [1, 2], "c": ["a", "b"]}).to_parquet(tmp_path / "t.parquet")
    frame = read_table(tmp_path / "t.parquet").frame
    assert frame["n"].tolist() == [1, 2]
    assert frame["c"].tolist() == ["a", "b"]


def test_an_index_with_a_name_is_a_column(tmp_path):
    pd.DataFrame({"n": [1, 2]}, index=pd.Index(["a", "b"], name="c")).to_parquet(tmp_path / "t.parquet")
    assert list(read_table(tmp_path / "t.parquet").frame.columns) == ["c", "n"]


def test_text_columns_keep_their_zeros(tmp_path):
    assert read(tmp_path, "zip\n007\n", text_columns=["zip"]).frame["zip"].tolist() == ["007"]


@pytest.mark.parametrize("cells", [["001", "12"], ["12", "001"], ['"007"', "1"], [" -01", "3"], ["", "03"]])
def test_codes_keep_their_zeros_without_a_word(tmp_path, cells):
    frame = read(tmp_path, "zip,n\n" + "".join(f"{cell},{n + 1}\n" for n, cell in enumerate(cells))).frame
    expected = [cell.strip('" ') for cell in cells]
    assert frame["zip"].fillna("").tolist() == expected
    assert frame["n"].tolist() == [1, 2]
    read_as_numbers = read(tmp_path, "zip,n\n" + "".join(f"{cell},1\n" for cell in cells), number_columns=["zip"]).frame
    assert read_as_numbers["zip"].dropna().tolist() == [float(cell) for cell in expected if cell]


def test_zeros_of_decimals_are_no_codes(tmp_path):
    assert read(tmp_path, "n,c\n0.5,01\n0,02\n").frame["n"].tolist() == [0.5, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.csv: empty; expected a header"),
        ("\n\n", "t.csv: empty; expected a header"),
        ("n,c\n", "t.csv: no rows"),
        ("1,2\n3,4\n", r"row 1: numbers \(1, 2\), expected the names"),
        ("n,,c\n1,2,3\n", "row 1: column 2 has no name"),
        ("n,c,n\n1,2,3\n", "row 1: 2 columns are called 'n'; rename one"),
        ("n,c\n1,a\n\n2,b,c\n", "row 4: 3 fields, the header has 2"),
        ("n,c\n1,a\n2,b,\n", "row 3: 3 fields, the header has 2"),
        ("n,c\n1,a,x\n2,b,y\n", "row 2: 3 fields, the header has 2"),
        ("n,c\n1,a\n2\n3,c\n", "row 3: 1 field, the header has 2"),
        ('n,c\n1,"a\nb"\n2\n', "row 4: 1 field, the header has 2"),
        ('n,c\n1,a\n2,"b\n', "row 3|opens and does not close"),
        (b"n,c\n1,a\n2,\xe9\n", "row 3: byte e9 is not UTF-8"),
        ("n,c\n1,a\n".encode("utf-16"), "UTF-16 text, expected UTF-8"),
        (b"PK\x03\x04rest", "a spreadsheet"),
        (b"n,c\n1,\0\n", "not text"),
    ],
)
def test_text_that_is_no_table(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"<html>"])
def test_a_file_that_is_no_parquet(tmp_path, content):
    with pytest.raises(DataError, match=r"t\.parquet: not a Parquet file, or damaged"):
        read(tmp_path, content, "t.parquet")


def test_parquet_of_lists_is_refused(tmp_path):
    pd.DataFrame({"n": [[1], [2]]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 'n': holds list"):
        read_table(tmp_path / "t.parquet")


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="not found"):
        read_table(tmp_path / "none.csv")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_no_more_is_read_than_allowed(tmp_path, compress):
    name = "t.csv.gz" if compress is gzip.compress else "t.csv"
    assert len(read(tmp_path, compress(GOOD.encode()), name, max_bytes=len(GOOD))) == 2
    with pytest.raises(DataError, match=r"more than max_bytes = 11 bytes; raise --data\.max_bytes"):
        read(tmp_path, compress(GOOD.encode()), name, max_bytes=len(GOOD) - 1)


def test_parquet_declares_what_it_becomes(tmp_path):
    pd.DataFrame({"n": np.zeros(100_000, np.int64)}).to_parquet(path := tmp_path / "t.parquet")  # some hundred bytes
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"declared 800\.0 kB > max_bytes = 700\.0 kB"):
        read_table(path, max_bytes=700_000)


def test_damaged_gzip(tmp_path):
    with pytest.raises(DataError, match="ends early"):
        read(tmp_path, gzip.compress(GOOD.encode())[:-6], "t.csv.gz")


@pytest.mark.parametrize("more", [0, 1])
def test_zeros_behind_gzip_count(tmp_path, more):
    """Readers skip them, however many there are."""
    path = written(tmp_path, gzip.compress(GOOD.encode()), "t.csv.gz")
    os.truncate(path, 1000 + GZIP_PADDING + more)
    if more:
        with pytest.raises(DataError, match=r"more than max_bytes = 1\.0 kB"):
            read_table(path, max_bytes=1000)
    else:
        assert len(read_table(path, max_bytes=1000).frame) == 2


def test_rows_are_counted_as_an_editor_does(tmp_path):
    table = read(tmp_path, 'n,c\n\n1,"a\nb"\n2,c\n')
    assert str(table.fault(1, "c", "is wrong")).endswith("t.csv, row 5, column 'c': is wrong")
    assert "row 5" in str(table.without_rows(table.frame["n"] == 1).fault(0, "c", "is wrong"))


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=4) | st.integers().map(str)


@settings(max_examples=examples(150), deadline=None)
@given(rows=st.lists(st.lists(CELL, min_size=2, max_size=4), min_size=1, max_size=6), separator=st.sampled_from(",;\t"))
def test_any_records_are_read_or_refused_in_one_line(tmp_path_factory, rows, separator):
    """A writer of CSV quotes what needs it, so that even rows come back as they were, and uneven ones are named."""
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\n").writerows([["first", "second"], *rows])
    path = written(tmp_path_factory.mktemp("csv"), text.getvalue(), "t.tsv" if separator == "\t" else "t.csv")
    even = all(len(row) == 2 for row in rows)
    try:
        frame = read_table(path, Reading(text_columns=["first", "second"])).frame
    except DataError:
        assert not even
        return
    assert even
    read_rows = [[str(cell) for cell in row] for row in frame.to_numpy()]
    for row, cells in zip(rows, read_rows, strict=True):
        for cell, other in zip(row, cells, strict=True):
            assert cell.lstrip(" ") == other or other == "nan"
