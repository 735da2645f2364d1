"""Decides what a table's target is: numbers of a regression, or classes."""

import numpy as np

from dptrain.data.preprocessing import canonical, numbers
from dptrain.data.tabular.categories import categories
from dptrain.data.tabular.dates import formats_of
from dptrain.data.tabular.number_columns import (
    decided_style,
    distinct_texts,
    other_cell,
    refuse_infinite,
    refuse_mixture,
)
from dptrain.data.tabular.number_texts import Style
from dptrain.data.tabular.table_options import TableOptions, option
from dptrain.data.tabular.tables import Table
from dptrain.data.tabular.undecided import UndecidedError
from dptrain.data.tasks import LOSSES, Task
from dptrain.errors import DataError
from dptrain.runtime.text import short

MOST_CLASSES = 20
"""Whole numbers of more values are targets of a regression; of so many or fewer, and five rows a value, classes."""

_ADVICE = "leave the row out, or use --missing drop, or --missing indicator (leaves out rows without a target)"


def task_of(table: Table, options: TableOptions, notes: list[str]) -> tuple[Task, tuple[str, ...], Style | None]:
    """Return the task, the names of the classes, and how texts are numbers; with a note.

    Raises:
        UndecidedError: the target could be meant in two ways, misses values, or is nothing to learn.
    """
    name = str(options.target)
    series = table.frame[name]
    _refuse_target(table, name, options)
    style = None if name in options.categorical else decided_style(table, name, options)
    is_number = style is not None or series.dtype.kind in "iuf"
    if is_number and (options.task == "regression" or style is not None or series.nunique() > 2):
        refuse_infinite(table, name, options)
        values = numbers(series, name, table.fault, _ADVICE, style=style)
        count = len(np.unique(values))
        whole = series.dtype.kind in "iu"
        few = whole and count <= MOST_CLASSES and count * 5 <= len(series)
        if options.task == "regression" or (options.task is None and not few):
            if count == 1:
                raise _constant_target(table, name)
            other = f"; --loss {LOSSES['multiclass'][0]} for classes" if whole else ""
            sign = f" with the sign {style.sign}" if style is not None and style.sign else ""
            notes.append(
                f"target {name!r}: regression, {count:,} values{sign} from {values.min():g} to {values.max():g}{other}"
            )
            return "regression", (), style
    if options.task == "regression":
        refuse_mixture(table, name, options)
        raise UndecidedError(f"{table.where}, column {name!r}: holds {series.dtype}, expected numbers for a regression")
    if not is_number and series.dtype.kind != "b" and options.task is None and name not in options.categorical:
        refuse_mixture(table, name, options)
    return *_classes(table, options, notes, is_number=is_number), None


def _refuse_target(table: Table, name: str, options: TableOptions) -> None:
    series = table.frame[name]
    texts = distinct_texts(series)
    formats = None if texts is None else formats_of(texts)
    if (formats is not None or series.dtype.kind == "M") and name not in options.categorical:
        raise UndecidedError(
            f"{table.where}, column {name!r}: holds dates, such as {short(str(series.dropna().iloc[0]))}; expected "
            f"numbers or texts: choose another --target, convert it to numbers, or use {option('categorical', name)}"
        )
    if (found := other_cell(series)) is not None and series.isna().sum() < len(series):
        row, value = found
        if value is not None and value == value:
            raise table.fault(row, name, f"{short(value)}; expected numbers or texts: choose another --target")
    if (absent := int(series.isna().sum())) == len(series):
        raise UndecidedError(f"{table.where}, column {name!r}: no value in any row; choose another --target")
    elif absent:
        row = int(series.isna().to_numpy().argmax())
        raise UndecidedError(
            str(table.fault(row, name, f"no value ({absent} in all); {_ADVICE}")),
            {"missing": ("indicator",)} if options.missing == "stop" else None,
            f"{absent:,} rows without a target are left out",
        )


def _classes(table: Table, options: TableOptions, notes: list[str], *, is_number: bool) -> tuple[Task, tuple[str, ...]]:
    name = str(options.target)
    rows = len(table)
    classes = categories(table, name, _ADVICE)
    if len(classes) == 1:
        raise _constant_target(table, name)
    if options.task == "binary" and len(classes) > 2:
        raise UndecidedError(f"{table.where}, column {name!r}: {len(classes):,} values, expected two for --task binary")
    if len(classes) > max(MOST_CLASSES, rows // 2):
        raise UndecidedError(
            f"{table.where}, column {name!r}: {len(classes):,} classes in {rows:,} rows; is it the target?"
        )
    if len(classes) == 2 and options.task != "multiclass":
        notes.append(f"target {name!r}: binary, the probability of {classes[1]!r} rather than {classes[0]!r}")
        return "binary", classes
    shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    other = "; --task regression for a number" if is_number else ""
    notes.append(f"target {name!r}: {len(classes)} classes ({shown}){other}")
    return "multiclass", classes


def _constant_target(table: Table, name: str) -> DataError:
    value = canonical(table.frame[name].iloc[0])
    return UndecidedError(f"{table.where}, column {name!r}: every row has {short(value)}; there is nothing to learn")
