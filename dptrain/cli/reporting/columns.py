"""The raw columns of a table behind the columns of x: what a row said, and what a column occupies."""

import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.data.words import FIRST_WORD

Array = npt.NDArray[Any]
_EPOCH = datetime.datetime(1970, 1, 1)


def columns_of(preprocessing: Preprocessing) -> Iterator[tuple[Column, slice]]:
    """Yield each column of a table with its columns of x, in x's order."""
    start = 0
    for column in (*preprocessing.plain_columns, *preprocessing.embedded_columns, *preprocessing.word_columns):
        yield column, slice(start, start + column.width)
        start += column.width


def row_of(preprocessing: Preprocessing, features: Array) -> dict[str, str]:
    """Return a row of x as the table had it, by column in the table's order; words as training knows them."""
    cells = {column.name: _cell(column, features[part]) for column, part in columns_of(preprocessing)}
    return {column.name: cells[column.name] for column in preprocessing.columns}


def _cell(column: Column, features: Array) -> str:
    if column.role == "one-hot":
        return column.values[int(features.argmax())] if features.any() else "(unseen)"
    if column.role == "words":
        ids = features[features > 0].astype(np.int64).tolist()
        return " ".join("…" if index < FIRST_WORD else column.values[index - FIRST_WORD] for index in ids)
    if column.indicator and features[-1]:
        return "(missing)"
    value = float(features[0])
    if column.role == "embedding":
        return column.values[int(value)] if 0 <= value < len(column.values) else "(unseen)"
    return _date(value) if column.date else plain_number(features[0])


def _date(days: float) -> str:
    try:
        moment = _EPOCH + datetime.timedelta(days=days)
    except (OverflowError, ValueError):
        return f"{days:g} days since 1970"
    return moment.strftime("%Y-%m-%d" if moment.time() == datetime.time() else "%Y-%m-%d %H:%M")


def plain_number(value: Any) -> str:
    """Return the shortest text of a number of NumPy's that reads back as it, without ".0"."""
    return str(value).removesuffix(".0")
