"""Rows of a table as Python values: records (a dict a row) or a dict of columns, as JSON and scripts have them.

`Records` has the face of a data frame that encoding needs. The functions encode plain cells without pandas, which takes
a fifth of a millisecond a column however few the rows; they return None where a cell needs a closer look, so that every
rule about odd cells stands once, with the code for series.
"""

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.data.tabular.number_texts import Style
from dptrain.data.tabular.table_codes import BLANKS, pandas_module
from dptrain.errors import DataError
from dptrain.registry.names import suggestion
from dptrain.runtime.text import short

FEW = 64
"""Rows of a data frame up to which cells are encoded one by one."""

_LARGEST = float(np.finfo(np.float32).max)
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_YEARS = range(1700, 2200)  # pandas counts nanoseconds, which reach this far
_CELLS = (str, bool, int, float, type(None), np.generic, datetime.date)


def are_records(x: Any) -> bool:
    """Whether `x` is a record, a sequence of records or a dict of columns."""
    return isinstance(x, Mapping) or (isinstance(x, list | tuple) and bool(x) and isinstance(x[0], Mapping))


class Records:
    """Rows of a table by column.

    Args:
        rows: a mapping of cells (one row), a sequence of such mappings, or a mapping of columns.
        names: of the columns that are needed; others are kept where the first row has them.
        where: begins messages.

    Raises:
        DataError: a row lacks a needed column, columns differ in length, or a cell is no scalar.
    """

    def __init__(self, rows: Any, names: Sequence[str], where: str) -> None:
        if isinstance(rows, Mapping):
            columns = {str(name): _column(value) for name, value in rows.items()}
            if all(column is None for column in columns.values()):
                columns = {str(name): [value] for name, value in rows.items()}
        else:
            for index, row in enumerate(rows):
                if not isinstance(row, Mapping):
                    raise DataError(
                        f"{where}, row {index} (counted from 0): {short(row)}; expected a record, as a dict"
                    )
                for name in names:
                    if name not in row:
                        near = suggestion(name, [*map(str, row)])
                        hint = near if "mean" in near else "; null (None) stands for a missing value"
                        raise DataError(f"{where}, row {index} (counted from 0): no column {name!r}{hint}")
            optional = [name for name in rows[0] if name not in names and all(name in row for row in rows)]
            columns = {str(name): [row[name] for row in rows] for name in (*names, *optional)}
        self._cells: dict[str, list[Any]] = {name: [] if column is None else column for name, column in columns.items()}
        lengths = {name: len(self._cells[name]) for name in names if name in self._cells}
        for name, column in columns.items():
            if name in names and (column is None or lengths[name] != max(lengths.values())):
                length = "one value" if column is None else f"{lengths[name]} values"
                raise DataError(f"{where}, column {name!r}: {length}, other columns have {max(lengths.values())}")
        self._rows = max(lengths.values(), default=0)
        self.columns = list(columns)

    def __len__(self) -> int:
        return self._rows

    def cells(self, name: str) -> list[Any]:
        """Return a column's values."""
        return self._cells[name]

    def series(self, name: str, fault: Callable[[int, str, str], DataError]) -> Any:
        """Return a column as pandas has it; refuse cells that are lists or the like."""
        for row, value in enumerate(self._cells[name]):
            if not isinstance(value, _CELLS):
                raise fault(row, name, f"{short(value)}; expected a number, a text or null")
        return pandas_module().Series(self._cells[name], name=name)


def _column(value: Any) -> list[Any] | None:
    """Return a column as a list; None for a scalar."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return None
    return list(value.tolist() if hasattr(value, "tolist") else value)


def without_words(cells: Sequence[Any], words: Collection[str]) -> Sequence[Any]:
    """Return cells with None in place of words that stand for a missing value."""
    if not words:
        return cells
    return [None if type(cell) is str and cell.strip(BLANKS) in words else cell for cell in cells]


def plain_numbers(cells: Sequence[Any], mean: float | None, style: Style | None = None) -> list[float] | None:
    """Return finite float32 numbers, missing ones as `mean`, texts by `style`; or None."""
    numbers = []
    for value in cells:
        value = math.nan if value is None else value
        if style is not None and type(value) is str:
            value = style.read(value)
        if type(value) not in (float, int, bool):
            return None
        if value != value:
            if mean is None:
                return None
            value = mean
        elif not -_LARGEST <= value <= _LARGEST:
            return None
        numbers.append(float(value))
    return numbers


def plain_days(cells: Sequence[Any]) -> list[float] | None:
    """Return dates such as 2020-12-31 as days since 1970-01-01; or None."""
    numbers = []
    for value in cells:
        if type(value) is not str or len(value) != 10 or value[4] != "-" or not value.isascii():
            return None
        try:
            date = datetime.date.fromisoformat(value)
        except ValueError:
            return None
        if date.year not in _YEARS:
            return None
        numbers.append(float(date.toordinal() - _EPOCH))
    return numbers


def plain_codes(
    cells: Sequence[Any],
    code_of: Mapping[str, int],
    missing: int | None,
    unseen: int | None,
    text_of: Callable[[Any], str],
) -> list[int] | None:
    """Return the codes of categories, or None; `missing` and `unseen` as in `encode_categories`."""
    codes = []
    for value in cells:
        if value is None:
            if missing is None:
                return None
            code = missing
        elif type(value) is str or (type(value) in (int, bool, float) and value == value):
            text = text_of(value)
            known = code_of[text] if text in code_of else code_of.get(text.strip(BLANKS), unseen)
            if known is None:
                return None
            code = known
        else:
            return None
        codes.append(code)
    return codes
