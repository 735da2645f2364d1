"""Reads tables: text with a header (.csv, .tsv, also .gz) and Parquet.

Rows are numbered like an editor's lines: from 1, including the header. Errors name file, row and column.
"""

import csv
import gzip
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dptrain.data.preprocessing import MAX_COLUMNS
from dptrain.data.sources import DEFAULT_MAX_BYTES, GZIP_PADDING, format_bytes, stream_errors
from dptrain.data.tabular.parquet import read_parquet
from dptrain.data.tabular.table_codes import leading_zero, may_have_leading_zeros, pandas_module
from dptrain.errors import DataError
from dptrain.runtime.storage.files import open_regular, read_at_most
from dptrain.runtime.text import one_line

TEXT_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET_ENDINGS = (".parquet", ".pq")
ENDINGS = (*TEXT_ENDINGS, *PARQUET_ENDINGS)


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file name is that of a table."""
    return str(path).lower().endswith(ENDINGS)


@dataclass(frozen=True)
class Table:
    """A table read from a file."""

    where: str  # the file
    frame: Any  # a pandas data frame; its index counts the file's rows from 0
    text: "Text | None" = None  # None for Parquet

    def __len__(self) -> int:
        return len(self.frame)

    def fault(self, row: int, column: str, what: str) -> DataError:
        """Return an error about the cell in `frame`'s row (from 0) and column."""
        number = int(self.frame.index[row])
        if self.text is None:
            return DataError(f"{self.where}, row {number + 1}, column {column!r}: {what}")
        line, _ = self.text.record(number)
        return DataError(f"{self.where}, row {line}, column {column!r}: {what}")

    def without_rows(self, rows: Any) -> "Table":
        """Return the table without the rows that a boolean series selects."""
        return Table(self.where, self.frame[~rows], self.text)


@dataclass(frozen=True)
class Text:
    """A text file's content and field separator."""

    where: str
    content: bytes
    separator: str

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each record's first line, from 1, and its fields; blank lines are skipped."""
        lines = io.TextIOWrapper(io.BytesIO(self.content), encoding="utf-8-sig", errors="replace", newline="")
        reader = csv.reader(lines, delimiter=self.separator, skipinitialspace=True)
        begin = 1
        try:
            for fields in reader:
                if fields:
                    yield begin, fields
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{self.where}, row {begin}: {one_line(error)}") from None

    def record(self, row: int) -> tuple[int, list[str]]:
        """Return the line and the fields of a data row, counted from 0."""
        for number, record in enumerate(self.records(), -1):
            if number == row:
                return record
        return row + 2, []

    def header(self) -> list[str]:
        """Return the column names; refuse a header with numbers, empty or double names."""
        _, names = next(self.records(), (1, []))
        if not names:
            raise DataError(f"{self.where}: empty; expected a header with the names of the columns, and rows")
        if len(names) > MAX_COLUMNS:
            raise DataError(f"{self.where}: {len(names)} columns, at most {MAX_COLUMNS} are read")
        if all(map(_is_number, names)):
            shown = ", ".join(names[:3])
            raise DataError(f"{self.where}, row 1: numbers ({shown}), expected the names of the columns; add a header")
        for place, name in enumerate(names):
            if not name.strip():
                raise DataError(f"{self.where}, row 1: column {place + 1} has no name")
        for previous, other in pairwise(sorted(names)):
            if previous == other:
                raise DataError(
                    f"{self.where}, row 1: {names.count(previous)} columns are called {previous!r}; rename one"
                )
        return names

    def require_even(self, columns: int) -> None:
        """Refuse the first record whose number of fields differs from the header's."""
        begin = 1
        for begin, fields in self.records():
            if len(fields) != columns:
                count = f"{len(fields)} field{'s' * (len(fields) != 1)}"
                raise DataError(
                    f"{self.where}, row {begin}: {count}, the header has {columns}; is there a missing or extra "
                    "separator, or an unquoted text?"
                )


def read_table(
    path: str | os.PathLike[str],
    *,
    text_columns: Sequence[str] = (),
    number_columns: Sequence[str] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Table:
    """Read a table.

    Cells of `text_columns` stay text, so that "7.0" is not 7; numeric text in `number_columns` becomes numbers. Other
    columns with a cell like 007 stay text in every format.
    """
    where = str(path)
    with stream_errors(where), open_regular(Path(path)) as file:
        if where.lower().endswith(PARQUET_ENDINGS):
            table = Table(where, read_parquet(where, file, max_bytes))
        else:
            table = _read_text(where, _content(where, file, max_bytes), text_columns, number_columns)
    _make_numbers(table.frame, number_columns)
    if not len(table):
        raise DataError(f"{where}: no rows; expected at least one below the header")
    return table


def _make_numbers(frame: Any, columns: Sequence[str]) -> None:
    kinds = {str(name): dtype.kind for name, dtype in zip(frame.columns, frame.dtypes, strict=True)}
    for name in columns:
        if kinds.get(name, "f") not in "iufbmMc":
            numbers = pandas_module().to_numeric(frame[name], errors="coerce")
            if numbers.isna().equals(frame[name].isna()):
                frame[name] = numbers


def _content(where: str, file: Any, max_bytes: int) -> bytes:
    content = b""
    compressed = where.lower().endswith(".gz")
    too_large = compressed and os.fstat(file.fileno()).st_size > max_bytes + GZIP_PADDING
    if not too_large:
        content = gzip.GzipFile(fileobj=file).read(max_bytes + 1) if compressed else read_at_most(file, max_bytes)
    if too_large or len(content) > max_bytes:
        raise DataError(f"{where}: more than max_bytes = {format_bytes(max_bytes)}; raise --data.max_bytes")
    first = content[:4]
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{where}: UTF-16 text, expected UTF-8; save it as 'CSV UTF-8'")
    if first == b"PK\x03\x04" or b"\0" in content[:4096]:
        raise DataError(f"{where}: not text: first bytes {first.hex()} (a spreadsheet? save it as 'CSV UTF-8')")
    return content


def _read_text(where: str, content: bytes, text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    separator = _separator(where, content)
    text = Text(where, content, separator)
    names = text.header()
    frame = _parsed(text, names, {name: str for name in text_columns if name in names})
    # Where a row has fewer fields the last are missing; one more that is empty is dropped.
    separators = (len(frame) + 1) * (len(names) - 1)
    if content.count(separator.encode()) != separators or frame.iloc[:, -1].isna().any():
        text.require_even(len(names))
    frame.columns = names
    frame = frame.copy()  # joins columns of one type, which are then read hundreds at a time
    if may_have_leading_zeros(content, separator):
        _restore_leading_zeros(text, frame, number_columns)
    return Table(where, frame, text)


def _separator(where: str, content: bytes) -> str:
    """Return the separator that the file's name suggests, or else one that the header contains."""
    header = content.split(b"\n", 1)[0].decode(errors="replace")
    usual = "\t" if ".tsv" in where.lower() else ","
    return next((character for character in (usual, *",;\t") if character in header), usual)


def _parsed(text: "Text", names: list[str], types: dict[str, Any]) -> Any:
    pandas, where, content = pandas_module(), text.where, text.content
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            return pandas.read_csv(
                io.BytesIO(content),
                sep=text.separator,
                encoding="utf-8",
                skipinitialspace=True,
                low_memory=False,
                index_col=False,  # or fields beyond the header would be an index
                dtype=types,
            )
    except UnicodeDecodeError:
        raise _not_utf8(where, content) from None
    except pandas.errors.EmptyDataError:
        raise DataError(f"{where}: empty; expected a header with the names of the columns, and rows") from None
    except (pandas.errors.ParserError, pandas.errors.ParserWarning, ValueError, OverflowError) as error:
        text.require_even(len(names))
        quote = 'a quote (") opens and does not close: ' if "EOF inside string" in str(error) else ""
        raise DataError(f"{where}: {quote}{one_line(error)}") from None


def _restore_leading_zeros(text: "Text", frame: Any, number_columns: Sequence[str]) -> None:
    """Restore the text of columns with a cell like 007 that were read as numbers."""
    names = list(frame.columns)
    read = [name for name in names if name not in number_columns and frame[name].dtype.kind in "iuf"]
    if not read:
        return
    texts = _parsed(text, names, dict.fromkeys(read, str))
    texts.columns = names
    for name in read:
        if leading_zero(texts[name].unique()):
            frame[name] = texts[name]


def _not_utf8(where: str, content: bytes) -> DataError:
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            wrong = line[error.start : error.start + 1].hex()
            return DataError(f"{where}, row {number}: byte {wrong} is not UTF-8; save the file as 'CSV UTF-8'")
    return DataError(f"{where}: not UTF-8; save the file as 'CSV UTF-8'")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
