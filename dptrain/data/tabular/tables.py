"""Reads tables: text with a header (.csv, .tsv, also .gz) and Parquet.

Rows are numbered like an editor's lines: from 1, including the header. Errors name file, row and column.
"""

import csv
import gzip
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptrain.data.preprocessing import MAX_COLUMNS
from dptrain.data.sources import DEFAULT_MAX_BYTES, GZIP_PADDING, format_bytes, stream_errors
from dptrain.data.tabular.number_texts import style_of
from dptrain.data.tabular.parquet import read_parquet
from dptrain.data.tabular.table_codes import (
    BLANKS,
    DEFAULT_NA,
    LITERAL_NA,
    leading_zero,
    may_have_leading_zeros,
    pandas_module,
)
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
class Reading:
    """How a file's cells become values.

    Attributes:
        text_columns: their cells stay text, so that "7.0" is not 7.
        number_columns: their numeric texts become numbers. Others with a cell like 007 stay text in every format.
        literal_columns: words such as NA are values there.
        na: words that stand for a missing value, beside those that files of text have by default.
        default_na: these stand for one, too.
        decimal_comma: numbers of a text file may have one; such columns stay text.
        repairs_header: columns without a name, or with another's, are named by their place; else they are refused.
    """

    text_columns: Collection[str] = ()
    number_columns: Collection[str] = ()
    literal_columns: Collection[str] = ()
    na: Sequence[str] = ()
    default_na: bool = True
    decimal_comma: bool = False
    repairs_header: bool = False

    def missing_words(self, name: str) -> set[str]:
        """Return the words that stand for a missing value in a column of a text file."""
        usual = set(DEFAULT_NA) if self.default_na else set()
        return {"", *self.na, *(usual - LITERAL_NA if name in self.literal_columns else usual)}


@dataclass(frozen=True)
class Table:
    """A table read from a file."""

    where: str  # the file
    frame: Any  # a pandas data frame; its index counts the file's rows from 0
    text: "Text | None" = None  # None for Parquet
    repairs: Sequence[str] = ()  # of the header

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
        return replace(self, frame=self.frame[~rows])


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

    def header(self) -> tuple[list[str], list[str]]:
        """Return the column names, and which had to be repaired; refuse a header with numbers."""
        _, names = next(self.records(), (1, []))
        if not names:
            raise DataError(f"{self.where}: empty; expected a header with the names of the columns, and rows")
        if len(names) > MAX_COLUMNS:
            raise DataError(f"{self.where}: {len(names)} columns, at most {MAX_COLUMNS} are read")
        if all(map(_is_number, names)):
            shown = ", ".join(names[:3])
            raise DataError(f"{self.where}, row 1: numbers ({shown}), expected the names of the columns; add a header")
        return repaired([name.strip(BLANKS) for name in names])

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
    path: str | os.PathLike[str], reading: Reading | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Table:
    """Read a table; a header that needs repairs is refused unless `reading` asks for them."""
    where = str(path)
    reading = reading or Reading()
    with stream_errors(where), open_regular(Path(path)) as file:
        if where.lower().endswith(PARQUET_ENDINGS):
            table = _without_words(Table(where, read_parquet(where, file, max_bytes)), reading)
        else:
            table = _read_text(where, _content(where, file, max_bytes), reading)
    _make_numbers(table.frame, reading.number_columns)
    if not len(table):
        raise DataError(f"{where}: no rows; expected at least one below the header")
    return table


def _without_words(table: Table, reading: Reading) -> Table:
    """Return a table of another program's types without the words that `reading` names."""
    words = set(reading.na)
    for name, dtype in zip(table.frame.columns, table.frame.dtypes, strict=True) if words else ():
        if dtype.kind not in "iufbmM":
            series = table.frame[name]
            is_word = [isinstance(value, str) and value.strip(BLANKS) in words for value in series]
            if any(is_word):
                table.frame[name] = series.mask(is_word, None)
    return table


def repaired(names: list[str]) -> tuple[list[str], list[str]]:
    """Return names of which none is empty or another's, and what is wrong with those that had to be changed."""
    counts = Counter(names)
    taken = set(names)
    changed: list[str] = []
    wrong = [f"{count} columns are called {name!r}" for name, count in counts.items() if name and count > 1]
    seen: Counter[str] = Counter()
    for place, name in enumerate(names, 1):
        seen[name] += 1
        if not name:
            wrong.append(f"column {place} has no name")
        if not name or seen[name] > 1:
            name = f"column {place}" if not name else f"{name} ({seen[name]})"
            while name in taken:
                name += "'"
            taken.add(name)
        changed.append(name)
    return changed, wrong


def _make_numbers(frame: Any, columns: Collection[str]) -> None:
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


def _read_text(where: str, content: bytes, reading: Reading) -> Table:
    separator = _separator(where, content)
    text = Text(where, content, separator)
    names, repairs = text.header()
    if repairs and not reading.repairs_header:
        raise DataError(f"{where}, row 1: {repairs[0]}; rename {'one' if 'called' in repairs[0] else 'it'}")
    frame = _parsed(text, names, dict.fromkeys(set(names) & set(reading.text_columns), str), reading)
    # Where a row has fewer fields the last are missing; one more that is empty is dropped.
    separators = (len(frame) + 1) * (len(names) - 1)
    if content.count(separator.encode()) != separators or frame.iloc[:, -1].isna().any():
        text.require_even(len(names))
    frame = frame.copy()  # joins columns of one type, which are then read hundreds at a time
    if _may_have_blanks(content, separator):
        _strip_blanks(frame, reading)
    if may_have_leading_zeros(content, separator):
        _restore_texts(text, frame, reading, lambda texts: leading_zero(texts) is not None)
    if reading.decimal_comma:
        _restore_texts(text, frame, reading, _has_decimal_commas)
    return Table(where, frame, text, repairs)


def _has_decimal_commas(texts: Sequence[Any]) -> bool:
    present = [text for text in texts if isinstance(text, str)]
    style = style_of(present, "comma")
    return style is not None and style.notation == "comma" and any("." in text for text in present)


def _may_have_blanks(content: bytes, separator: str) -> bool:
    """Whether blanks may end a cell."""
    end = rb'"?[ \t]*(?:[\r\n]|$|%s)' % re.escape(separator.encode())
    return re.search(rb"(?:[ \t]|\xc2\xa0)" + end, content) is not None


def _strip_blanks(frame: Any, reading: Reading) -> None:
    """Strip texts, and take those for missing that then stand for it."""
    for name, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if dtype.kind not in "iufb":
            places, distinct = frame[name].factorize()
            stripped = [text.strip(BLANKS) if isinstance(text, str) else text for text in distinct]
            missing = reading.missing_words(name)
            if any(text is not cell for text, cell in zip(stripped, distinct, strict=True)):
                cells = [*(None if text in missing else text for text in stripped), None]
                column = pandas_module().Series([cells[place] for place in places], frame.index, frame[name].dtype)
                frame[name] = column
                if name not in reading.text_columns and leading_zero(stripped) is None:
                    _make_numbers(frame, [name])


def _separator(where: str, content: bytes) -> str:
    """Return the separator that the file's name suggests, or else one that the header contains."""
    header = content.split(b"\n", 1)[0].decode(errors="replace")
    usual = "\t" if ".tsv" in where.lower() else ","
    return next((character for character in (usual, *",;\t") if character in header), usual)


def _parsed(text: "Text", names: list[str], types: dict[str, Any], reading: Reading) -> Any:
    pandas, where, content = pandas_module(), text.where, text.content
    words: dict[str, Any] = {}
    if reading.na or not reading.default_na or reading.literal_columns:
        words = {
            "keep_default_na": False,
            "na_values": {place: [*reading.missing_words(name)] for place, name in enumerate(names)},
        }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                io.BytesIO(content),
                sep=text.separator,
                encoding="utf-8",
                skipinitialspace=True,
                low_memory=False,
                index_col=False,  # or fields beyond the header would be an index
                header=0,
                names=range(len(names)),
                dtype={place: types[name] for place, name in enumerate(names) if name in types},
                **words,
            )
    except UnicodeDecodeError:
        raise _not_utf8(where, content) from None
    except pandas.errors.EmptyDataError:
        raise DataError(f"{where}: empty; expected a header with the names of the columns, and rows") from None
    except (pandas.errors.ParserError, pandas.errors.ParserWarning, ValueError, OverflowError) as error:
        text.require_even(len(names))
        quote = 'a quote (") opens and does not close: ' if "EOF inside string" in str(error) else ""
        raise DataError(f"{where}: {quote}{one_line(error)}") from None
    frame.columns = names
    return frame


def _restore_texts(text: "Text", frame: Any, reading: Reading, are_texts: Callable[[Sequence[Any]], bool]) -> None:
    """Restore the text of columns that were read as numbers but are none, by their distinct cells."""
    names = list(frame.columns)
    read = [name for name in names if name not in reading.number_columns and frame[name].dtype.kind in "iuf"]
    if not read:
        return
    texts = _parsed(text, names, dict.fromkeys(read, str), reading)
    for name in read:
        if are_texts(texts[name].unique()):
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
