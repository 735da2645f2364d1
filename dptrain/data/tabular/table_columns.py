"""Decides what each column of a training table is, with a note, or refuses it with the option that settles it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.preprocessing import (
    MAX_TEXT,
    Column,
    Preprocessing,
    canonical,
    column_numbers,
    texts_of,
)
from dptrain.data.tabular.categories import MISSING, MOST_ONE_HOT, OTHER, category_column, too_many
from dptrain.data.tabular.column_blocks import blocks, plain_numbers
from dptrain.data.tabular.dates import COMPACT, Formats, Part, days, formats_of, parts_of
from dptrain.data.tabular.number_columns import (
    cell_text,
    decided_style,
    distinct_texts,
    number_problem,
    other_cell,
    refuse_infinite,
    refuse_mixture,
)
from dptrain.data.tabular.number_texts import Style, style_of
from dptrain.data.tabular.table_codes import LITERAL_NA, are_days, leading_zero
from dptrain.data.tabular.table_options import TableOptions, option
from dptrain.data.tabular.table_target import MOST_CLASSES, task_of
from dptrain.data.tabular.tables import Table
from dptrain.data.tabular.undecided import Problem, UndecidedError, UndecidedTableError
from dptrain.data.tasks import Task
from dptrain.data.words import learn_vocabulary, split_words
from dptrain.errors import ConfigError, DataError
from dptrain.registry.names import suggestion
from dptrain.runtime.text import counted, short

__all__ = [
    "MISSING",
    "MOST_CLASSES",
    "MOST_ONE_HOT",
    "OTHER",
    "TableOptions",
    "learn",
    "text_column",
    "used_columns",
    "with_means",
    "without_missing",
]


def learn(table: Table, options: TableOptions) -> tuple[Preprocessing, list[str]]:
    """Return how a training table becomes arrays, and a note on each decision.

    Raises:
        UndecidedTableError: all problems of all columns.
    """
    names = used_columns(table, options)
    notes: list[str] = []
    problems = _problems_of_header(table, options)
    named = {*options.categorical, *options.number_columns, *options.texts, *options.date_formats}
    plain = plain_numbers(table.frame, set(names) - named)
    columns = []
    for name in names:
        if name in plain:
            columns.append(Column(name, "number"))
            continue
        column = None
        try:
            column = _column(table, name, options, notes)
        except UndecidedError as error:
            problems.append(Problem(name, error))
            if error.mend is None or "drop" in error.mend:
                continue
        else:
            if column is None:
                continue
            columns.append(column)
        problems += _gaps(table, name, options)
    task: Task = "regression"
    classes: tuple[str, ...] = ()
    style: Style | None = None
    try:
        task, classes, style = task_of(table, options, notes)
    except UndecidedError as error:
        problems.append(Problem(str(options.target), error))
    if problems:
        raise UndecidedTableError(table.where, problems, options)
    if not columns:
        raise DataError(f"{table.where}: no column is left to predict {options.target!r} from")
    notes.insert(0, _described(columns))
    preprocessing = Preprocessing(
        task,
        tuple(columns),
        options.target,
        classes,
        unseen=options.unseen or ("other" if options.auto else "error"),
        na=tuple(options.na_words),
        default_na=options.reading().default_na,
        repaired_header=bool(table.repairs),
        target_notation=None if style is None else style.notation,
        target_sign="" if style is None else style.sign,
    )
    return preprocessing, notes


def used_columns(table: Table, options: TableOptions) -> list[str]:
    """Return the names of the input columns, in the table's order."""
    there = dict.fromkeys(str(column) for column in table.frame.columns)
    if options.target is None:
        raise ConfigError(
            f"{table.where}: which column is to be predicted? --target NAME, one of {', '.join([*there][:20])}"
        )
    for flag, names in (
        ("target", [options.target]),
        *(("columns", options.columns), ("drop", options.drop), ("dates", options.date_formats)),
        *(("categorical", options.categorical), ("numbers", options.number_columns), ("text", options.texts)),
    ):
        for name in names:
            if name not in there:
                hint = suggestion(name, [*there]) or f"; found {', '.join([*there][:20])}"
                raise DataError(f"{table.where}: no column {name!r} (--{flag}){hint}")
    if options.target in options.drop:
        raise ConfigError(f"--drop {options.target}: the column is used; leave it out of --drop or --target")
    _refuse_contradictions(options)
    if (longest := max(map(len, there), default=0)) > MAX_TEXT:
        raise DataError(f"{table.where}: a column's name has {longest:,} characters, at most {MAX_TEXT:,}; rename it")
    selected = set(options.columns or there) - {options.target, *options.drop}
    if unused := [name for name in options.texts if name not in selected]:
        raise ConfigError(f"--text {unused[0]}: the column is not used; leave it out, or see --columns and --drop")
    return [name for name in there if name in selected]


def _refuse_contradictions(options: TableOptions) -> None:
    of_options = {
        "numbers": options.number_columns,
        "dates": options.date_formats,
        "text": options.texts,
        "categorical": options.categorical,
    }
    flags = [*of_options]
    for place, flag in enumerate(flags):
        for other in flags[place + 1 :]:
            if both := [name for name in of_options[flag] if name in of_options[other]]:
                raise ConfigError(f"--{flag} {both[0]}: --{other} names the column too; leave it out of one of them")


def without_missing(table: Table, names: Sequence[str]) -> tuple[Table, list[str]]:
    """Return a table without the rows that miss a value of the columns, and a note on how many."""
    absent = table.frame[list(names)].isna().any(axis=1)
    count = int(absent.sum())
    if count == len(table):
        raise DataError(f"{table.where}: every row misses a value; --drop the columns that are empty")
    if not count:
        return table, []
    return table.without_rows(absent), [
        f"{table.where}: {count:,} of {len(table):,} rows miss a value and are left out"
    ]


def _problems_of_header(table: Table, options: TableOptions) -> list[Problem]:
    if not table.repairs or options.repair_header:
        return []
    error = UndecidedError(
        f"{table.where}, row 1: {'; '.join(table.repairs[:5])}; rename them, or --repair-header (names them by their "
        "place)",
        {"repair-header": ()},
        f"header: {'; '.join(table.repairs[:5])}; named by their place",
    )
    return [Problem("", error)]


def _gaps(table: Table, name: str, options: TableOptions) -> list[Problem]:
    """Return the problem of a column's missing values, if it has any."""
    series = table.frame[name]
    absent = int(series.isna().sum())
    if options.missing != "stop" or not absent:
        return []
    row = int(series.isna().to_numpy().argmax())
    advice = (
        f"fill it in, or use {option('drop', name)}, --missing drop (leaves out such rows), --missing mean or "
        "--missing indicator"
    )
    if name in options.texts:
        advice += " (an empty text)"
    has_words = series.dtype.kind not in "iufbmM" and cell_text(table, row, name) in LITERAL_NA
    if has_words:
        advice += f"; {option('categorical', name)} keeps words such as NA as values"
    where = table.fault(row, name, f"no value ({absent} in all); {advice}")
    return [Problem(name, UndecidedError(str(where), {"missing": ("indicator",)}), absent, has_words)]


def _column(table: Table, name: str, options: TableOptions, notes: list[str]) -> Column | None:
    series = table.frame[name]
    if name in options.texts:
        return text_column(table, name, options, notes)
    is_category = name in options.categorical
    formats = None if is_category else _formats(table, name, options)
    if formats is not None and name not in (*options.number_columns, *options.date_formats):
        raise _dates(table, name, formats)
    if formats is None:
        _refuse_other_types(table, name)
    if series.isna().all():
        raise UndecidedError(
            f"{table.where}, column {name!r}: no value in any row; {option('drop', name)}",
            {"drop": (name,)},
            "left out, no row has a value",
        )
    absent = int(series.isna().sum())
    is_filled = absent > 0 and options.missing in ("mean", "indicator")
    style = None if formats is not None or is_category else decided_style(table, name, options)
    is_number = not is_category and (formats is not None or style is not None or series.dtype.kind in "iuf")
    has_indicator = is_number and is_filled and options.missing == "indicator"
    if series.nunique() == 1 and not has_indicator and (not absent or (is_filled and is_number)):
        notes.append(f"column {name!r} is left out: every row has {short(canonical(series.dropna().iloc[0]))}")
        return None
    if is_filled:
        instead = "replaced by the mean of the training part" if is_number else "a separate category"
        beside = ", with a feature that says so" if has_indicator else ""
        notes.append(f"column {name!r}: {absent:,} of {len(table):,} values are missing; {instead}{beside}")
    if formats is not None:
        return _date_column(table, name, formats, options, notes, indicator=has_indicator)
    if is_number:
        return _number_column(table, name, style, options, notes, indicator=has_indicator)
    if not is_category and series.dtype.kind != "b":
        refuse_mixture(table, name, options)
        if (code := leading_zero(series.unique())) is not None and style_of(distinct_texts(series) or (), "point"):
            notes.append(
                f"column {name!r}: a category, because of codes such as {short(code)}; {option('numbers', name)} "
                "otherwise"
            )
        too_many(table, name)
    return category_column(table, name, options, notes, missing=is_filled)


def _number_column(
    table: Table, name: str, style: Style | None, options: TableOptions, notes: list[str], *, indicator: bool
) -> Column:
    column = Column(
        name,
        "number",
        notation=None if style is None else style.notation,
        sign="" if style is None else style.sign,
        indicator=indicator,
    )
    present = table.frame[name].dropna()
    refuse_infinite(table, name, options)
    quantities = column_numbers(present, column, dataclasses.replace(table, frame=present).fault, "")
    if name not in options.number_columns:
        number_problem(table, name, quantities)
    if style is not None:
        sign = f", with the sign {style.sign}" if style.sign else ""
        notes.append(f"column {name!r}: numbers with a decimal {style.notation}{sign}")
    _note_precision(name, quantities, notes)
    return column


def _formats(table: Table, name: str, options: TableOptions) -> Formats | None:
    """Return the formats of a column of dates; None where it has none."""
    series = table.frame[name]
    is_asked_for = name in options.date_formats
    form = options.date_formats.get(name)
    present = series.dropna()
    if form is not None or (is_asked_for and series.dtype.kind in "iuf" and are_days(present.unique())):
        formats = Formats((form or COMPACT,))
        days(series, name, table.fault, formats.formats)
        return formats
    if series.dtype.kind == "M":
        return Formats(())
    texts = distinct_texts(present)
    learned = None if texts is None else formats_of(texts)
    if learned is None and is_asked_for:
        raise UndecidedError(
            f"{table.where}, column {name!r}: not dates of one known format, such as {short(present.iloc[0])}; name "
            f"it: {option('dates', f'{name}=%d.%m.%Y')} for 31.12.2020"
        )
    return learned


def _dates(table: Table, name: str, formats: Formats) -> UndecidedError:
    series = table.frame[name].dropna()
    of_type = "" if series.dtype.kind == "O" or isinstance(series.iloc[0], str) else f" ({series.dtype})"
    shown, asked = f"dates{of_type}, such as {short(str(series.iloc[0]))}", option("dates", name)
    as_dates = f"{asked} (days since 1970, month, day and weekday as numbers)"
    if formats.others:
        as_dates = (
            f"{option('dates', f'{name}={formats.formats[0]}')} or "
            f"{option('dates', f'{name}={formats.others[0]}')} (numbers: days since 1970, month, day and weekday)"
        )
    order = f" in the format {formats.formats[0]}, though {formats.others[0]} fits as well" if formats.others else ""
    return UndecidedError(
        f"{table.where}, column {name!r}: holds {shown}; expected numbers or texts: {as_dates}, their days alone "
        f"({option('numbers', name)}), or leave them out ({option('drop', name)})",
        {"dates": (f"{name}={formats.formats[0]}" if order and len(formats.formats) == 1 else name,)},
        f"dates, such as {short(str(series.iloc[0]))}{order}, as days since 1970-01-01, month, day and weekday",
    )


def _date_column(
    table: Table, name: str, formats: Formats, options: TableOptions, notes: list[str], *, indicator: bool
) -> Column:
    parts: list[Part] = []
    values = days(table.frame[name].dropna(), name, table.fault, formats.formats)
    if name in options.date_formats:
        parts = ["month", "day", "weekday"]
        if (parts_of(values, ("hour",)) != 0).any():
            parts.append("hour")
    else:
        notes.append(f"column {name!r}: dates, as days since 1970-01-01")
    if formats.others:
        notes.append(
            f"column {name!r}: dates in the format {formats.formats[0]}, though {formats.others[0]} fits as well"
        )
    _note_precision(name, values, notes)
    return Column(
        *(name, "number"),
        date=True,
        formats=() if all(form == "ISO8601" for form in formats.formats) else formats.formats,
        parts=tuple(parts),
        indicator=indicator,
    )


def text_column(table: Table, name: str, options: TableOptions, notes: list[str]) -> Column:
    """Return a text's vocabulary and length; refuse a column without words."""
    advice = f"fill it in, or use {option('drop', name)} or --missing drop (leaves out such rows)"
    series = table.frame[name]
    absent = int(series.isna().sum())
    is_filled = absent > 0 and options.missing in ("mean", "indicator")
    if absent and options.missing == "stop":  # reported apart
        series = series.fillna("")
    elif is_filled:
        notes.append(f"column {name!r}: {absent:,} of {len(table):,} texts are missing; read as empty")
        series = series.fillna("")
    texts = texts_of(series, table.fault, advice)
    vocabulary = learn_vocabulary(texts, options.words)
    if not vocabulary:
        instead = " in place of --text" if name in options.texts else ""
        raise UndecidedError(
            f"{table.where}, column {name!r}: no words in any row; {option('drop', name)}{instead}",
            {"drop": (name,)},
            "left out, no row has a word",
        )
    if (most := max(map(len, vocabulary))) > MAX_TEXT:
        row = next(row for row, text in enumerate(texts) if max(map(len, split_words(text)), default=0) == most)
        raise table.fault(
            row,
            name,
            f"a word of {most:,} characters, at most {MAX_TEXT:,} are read; shorten it, or leave the text out",
        )
    longest = max(len(split_words(text)) for text in texts)
    length = min(longest, options.text_length)
    notes.append(
        f"column {name!r}: texts of up to {longest:,} words, of which the first {length:,} are used; "
        f"the vocabulary has {len(vocabulary):,} words"
    )
    missing = "" if is_filled else None
    return Column(name, "words", vocabulary, text=True, length=length, missing=missing, literal=True)


def with_means(preprocessing: Preprocessing, table: Table, rows: npt.NDArray[np.int64]) -> Preprocessing:
    """Return preprocessing that fills missing numbers with the mean of the given rows."""
    means: dict[str, float] = {}
    for names, values in blocks(table.frame, preprocessing.number_columns):
        chosen = values[:, rows]
        present = ~np.isnan(chosen)
        is_sound: Any = present.any(axis=1) & ~(np.abs(values) > np.finfo(np.float32).max).any(axis=1)
        means |= {
            name: float(chosen[place, present[place]].mean()) for place, name in enumerate(names) if is_sound[place]
        }
    columns = []
    for column in preprocessing.columns:
        if column.name in means:
            column = dataclasses.replace(column, mean=means[column.name])
        elif column.role == "number":
            filled = dataclasses.replace(column, mean=0.0)
            values = column_numbers(table.frame[column.name], filled, table.fault, "")[rows]
            present = table.frame[column.name].notna().to_numpy()[rows]
            if not present.any():
                raise UndecidedError(
                    f"{table.where}, column {column.name!r}: no value in the training part; "
                    f"{option('drop', column.name)}",
                    {"drop": (column.name,)},
                    "left out, no row of the training part has a value",
                )
            column = dataclasses.replace(column, mean=float(values[present].mean()))
        columns.append(column)
    return dataclasses.replace(preprocessing, columns=tuple(columns))


def _refuse_other_types(table: Table, name: str) -> None:
    series, advice, mend = table.frame[name], option("drop", name), {"drop": (name,)}
    if series.dtype.kind in "mMc":
        raise UndecidedError(
            f"{table.where}, column {name!r}: holds {series.dtype}; expected numbers or texts: convert it to numbers, "
            f"or {advice}",
            mend,
            f"left out, it holds {series.dtype}",
        )
    if (found := other_cell(series)) is not None:
        row, value = found
        message = str(table.fault(row, name, f"{short(value)}; expected numbers or texts: {advice}"))
        raise UndecidedError(message, mend, f"left out, it holds {short(value)}")


def _note_precision(name: str, values: npt.NDArray[np.float64], notes: list[str]) -> None:
    """Note numbers that float32 does not tell apart."""
    largest = float(np.abs(values).max())
    step, deviation = float(np.spacing(np.float32(largest))), float(values.std())
    if step > 0.01 * deviation > 0:
        notes.append(
            f"column {name!r}: near {largest:g} float32 has steps of {step:g}, and the values deviate by "
            f"{deviation:.3g}; subtract a constant from the column"
        )


def _described(columns: Sequence[Column]) -> str:
    parts = []
    for role, text in (("number", "numbers"), ("one-hot", "one-hot"), ("embedding", "embedded"), ("words", "texts")):
        matching = [column for column in columns if column.role == role]
        named = [column.name if role == "number" else f"{column.name} ({len(column.values)})" for column in matching]
        if matching:
            parts.append(f"{text}: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}")
    return f"{counted(len(columns), 'column')}; {'; '.join(parts)}"
