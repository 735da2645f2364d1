"""Decides what each column of a training table is, with a note, or refuses it with the option that settles it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.preprocessing import (
    MAX_TEXT,
    Column,
    Preprocessing,
    Unseen,
    canonical,
    column_numbers,
    numbers,
    texts_of,
)
from dptrain.data.tabular.column_blocks import blocks, plain_numbers
from dptrain.data.tabular.table_codes import decimal_comma, holds_dates, identifier, leading_zero
from dptrain.data.tabular.tables import Table
from dptrain.data.tasks import LOSSES, Task
from dptrain.data.words import learn_vocabulary, split_words
from dptrain.errors import ConfigError, DataError
from dptrain.registry.names import suggestion
from dptrain.runtime.text import short

MOST_ONE_HOT = 16
"""A category of more values is embedded."""

MOST_CLASSES = 20
"""Whole numbers of more values are targets of a regression; of so many or fewer, and five rows a value, classes."""

MISSING = "(missing)"
"""The category that stands for missing values, where these are asked for."""

OTHER = "(other)"
"""The category that stands for those that training has not seen, where it is asked for."""

_FEW = 50
"""Different texts that any column may have; more of them than half of the rows name rows, and are no category."""


@dataclass(frozen=True)
class TableOptions:
    """The command line's options for a table."""

    target: str | None = None  # the column to predict
    columns: Sequence[str] = ()  # used ones; empty for all
    drop: Sequence[str] = ()
    categorical: Sequence[str] = ()  # categories, whatever they look like
    number_columns: Sequence[str] = ()  # numbers, and dates as days, whatever they look like
    texts: Sequence[str] = ()  # columns whose words count
    words: int = 10_000  # of a text's vocabulary at most
    text_length: int = 200  # words of a text that count, at most
    unseen: Unseen | None = None  # as `Preprocessing.encode`
    # "stop" at a missing value, "drop" the row, or fill in the "mean" and a category for missing values
    missing: str = "stop"
    test: str | None = None  # a file of the test part; None splits the table
    test_split: float = 0.2
    task: Task | None = None  # None for what the target looks like


def learn(table: Table, options: TableOptions) -> tuple[Preprocessing, list[str]]:
    """Return how a training table becomes arrays, and a note on each decision."""
    names = used_columns(table, options)
    notes: list[str] = []
    named = {*options.categorical, *options.number_columns, *options.texts}
    plain = plain_numbers(table.frame, set(names) - named)
    columns = [
        column
        for name in names
        if (column := Column(name, "number") if name in plain else _column(table, name, options, notes)) is not None
    ]
    if not columns:
        raise DataError(f"{table.where}: no column is left to predict {options.target!r} from")
    task, classes = _task(table, options, notes)
    notes.insert(0, _described(columns))
    return Preprocessing(task, tuple(columns), options.target, classes, unseen=options.unseen or "error"), notes


def used_columns(table: Table, options: TableOptions) -> list[str]:
    """Return the names of the input columns, in the table's order."""
    there = dict.fromkeys(str(column) for column in table.frame.columns)
    if options.target is None:
        raise ConfigError(
            f"{table.where}: which column is to be predicted? --target NAME, one of {', '.join([*there][:20])}"
        )
    for option, names in (
        ("target", [options.target]),
        *(("columns", options.columns), ("drop", options.drop)),
        *(("categorical", options.categorical), ("numbers", options.number_columns), ("text", options.texts)),
    ):
        for name in names:
            if name not in there:
                hint = suggestion(name, [*there]) or f"; found {', '.join([*there][:20])}"
                raise DataError(f"{table.where}: no column {name!r} (--{option}){hint}")
    used = {*options.columns, options.target}
    if both := [name for name in options.drop if name in used]:
        raise ConfigError(f"--drop {both[0]}: the column is used; leave it out of --columns and --target")
    if both := [name for name in options.number_columns if name in options.categorical]:
        raise ConfigError(f"--numbers {both[0]}: --categorical names the column too; leave it out of one of them")
    if both := [name for name in options.texts if name in (*options.number_columns, *options.categorical)]:
        raise ConfigError(f"--text {both[0]}: another option names the column too; leave it out of one of them")
    if (longest := max(map(len, there), default=0)) > MAX_TEXT:
        raise DataError(f"{table.where}: a column's name has {longest:,} characters, at most {MAX_TEXT:,}; rename it")
    selected = set(options.columns or there) - {options.target, *options.drop}
    if unused := [name for name in options.texts if name not in selected]:
        raise ConfigError(f"--text {unused[0]}: the column is not used; leave it out, or see --columns and --drop")
    return [name for name in there if name in selected]


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


def _column(table: Table, name: str, options: TableOptions, notes: list[str]) -> Column | None:
    series = table.frame[name]
    if name in options.texts:
        return text_column(table, name, options, notes)
    is_asked_for = name in options.number_columns
    are_dates = holds_dates(series)
    if are_dates and not is_asked_for and name not in options.categorical:
        raise _dates(table, name, f"--drop {name}, or take their days as numbers (--numbers {name})")
    if not (are_dates and is_asked_for):
        _refuse_other_types(table, name, f"--drop {name}")
    if series.isna().all():
        raise DataError(f"{table.where}, column {name!r}: no value in any row; --drop {name}")
    absent = int(series.isna().sum())
    is_filled = absent > 0 and options.missing == "mean"
    is_number = is_asked_for or (series.dtype.kind in "iuf" and name not in options.categorical)
    if series.nunique() == 1 and (not absent or (is_filled and is_number)):
        notes.append(f"column {name!r} is left out: every row has {short(canonical(series.iloc[0]))}")
        return None
    if is_filled:
        instead = "replaced by the mean of the training part" if is_number else "a separate category"
        notes.append(f"column {name!r}: {absent:,} of {len(table):,} values are missing; {instead}")
    if is_number:
        column = Column(name, "number", date=are_dates)
        present = series.dropna()
        quantities = column_numbers(present, column, Table(table.where, present, table.text).fault, "")
        if not is_asked_for and (looks := identifier(quantities)):
            raise DataError(
                f"{table.where}, column {name!r}: {looks}; leave it out (--drop {name}), or declare it a quantity "
                f"(--numbers {name}) or a category (--categorical {name})"
            )
        if are_dates:
            notes.append(f"column {name!r}: dates, as days since 1970-01-01")
        _note_precision(name, quantities, notes)
        return column
    if name not in options.categorical and series.dtype.kind != "b":
        _refuse_mixture(table, name)
        if (code := leading_zero(series.unique())) is not None:
            notes.append(
                f"column {name!r}: a category, because of codes such as {short(code)}; --numbers {name} otherwise"
            )
    advice = f"fill it in, or use --drop {name}, --missing drop (leaves out such rows) or --missing mean"
    values = _categories(table, name, advice, missing=is_filled)
    if len(values) > max(_FEW, len(table) // 2) and name not in options.categorical:
        raise DataError(
            f"{table.where}, column {name!r}: {len(values):,} distinct texts in {len(table):,} rows; leave it out "
            f"(--drop {name}), or declare it a text (--text {name}) or a category (--categorical {name})"
            f"{f' or numbers (--numbers {name})' if leading_zero(values) else ''}"
        )
    other = OTHER if options.unseen == "other" else None
    if other is not None:
        if OTHER in values:
            raise DataError(f"{table.where}, column {name!r}: {OTHER!r} is a value, but is reserved for unseen ones")
        values = (*values, OTHER)
    role = "one-hot" if len(values) <= MOST_ONE_HOT else "embedding"
    is_text = series.dtype.kind not in "iufb"
    missing = MISSING if is_filled else None
    return Column(name, "one-hot" if role == "one-hot" else "embedding", values, is_text, missing=missing, other=other)


def text_column(table: Table, name: str, options: TableOptions, notes: list[str]) -> Column:
    """Return a text's vocabulary and length; refuse a column without words."""
    advice = f"fill it in, or use --drop {name} or --missing drop (leaves out such rows)"
    texts = texts_of(table.frame[name], table.fault, advice)
    vocabulary = learn_vocabulary(texts, options.words)
    if not vocabulary:
        raise DataError(f"{table.where}, column {name!r}: no words in any row; --drop {name}")
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
    return Column(name, "words", vocabulary, text=True, length=length)


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
                raise DataError(
                    f"{table.where}, column {column.name!r}: no value in the training part; --drop {column.name}"
                )
            column = dataclasses.replace(column, mean=float(values[present].mean()))
        columns.append(column)
    return dataclasses.replace(preprocessing, columns=tuple(columns))


def _categories(table: Table, name: str, advice: str, missing: bool = False) -> tuple[str, ...]:
    """Return a column's values, numbers by size and texts alphabetically, the stand-in for missing ones last."""
    series = table.frame[name]
    if missing:
        if (series == MISSING).any():
            raise DataError(f"{table.where}, column {name!r}: {MISSING!r} is a value, but is reserved for missing ones")
        return (*_categories(Table(table.where, table.frame[series.notna()], table.text), name, advice), MISSING)
    if series.isna().any():
        row = int(series.isna().to_numpy().argmax())
        raise table.fault(row, name, f"no value ({int(series.isna().sum())} in all); {advice}")
    distinct = list(series.unique())
    longest = max((len(text) for text in distinct if isinstance(text, str)), default=0)
    if longest > MAX_TEXT:
        raise DataError(
            f"{table.where}, column {name!r}: a text of {longest:,} characters, at most {MAX_TEXT:,} are a category; "
            f"--drop {name}"
        )
    if not all(isinstance(value, str) for value in distinct):
        distinct = sorted(distinct, key=lambda value: (isinstance(value, str), value))
        return tuple(dict.fromkeys(map(canonical, distinct)))
    return tuple(sorted(distinct))


def _refuse_other_types(table: Table, name: str, advice: str) -> None:
    series = table.frame[name]
    if series.dtype.kind in "mMc":
        raise DataError(
            f"{table.where}, column {name!r}: holds {series.dtype}; expected numbers or texts: convert it to numbers, "
            f"or {advice}"
        )
    plain = str | bool | int | float | np.generic
    try:
        if all(isinstance(value, plain) for value in series.dropna().unique()):
            return
    except TypeError:  # of values that cannot be compared, such as lists
        pass
    for row, value in enumerate(series):
        if not isinstance(value, plain):
            raise table.fault(row, name, f"{short(value)}; expected numbers or texts: {advice}")


def _dates(table: Table, name: str, advice: str) -> DataError:
    series = table.frame[name].dropna()
    kind = "" if series.dtype.kind == "O" or isinstance(series.iloc[0], str) else f" ({series.dtype})"
    return DataError(
        f"{table.where}, column {name!r}: holds dates{kind}, such as {short(str(series.iloc[0]))}; expected numbers or "
        f"texts: {advice}"
    )


def _refuse_mixture(table: Table, name: str) -> None:
    """Refuse texts among which some are numbers, unless all are and some start with a zero, as codes do."""
    import pandas

    present = table.frame[name].dropna()
    places, distinct = present.factorize()  # few long texts may stand in many rows
    of_distinct = pandas.to_numeric(pandas.Series(list(map(str, distinct))), errors="coerce").notna().to_numpy()
    is_number = of_distinct[places]
    others = [text for text, is_one in zip(distinct, of_distinct, strict=True) if not is_one]
    if others and all(decimal_comma([text]) for text in others):
        comma = others[0]
        first = int((~is_number).argmax())
        row = int(np.flatnonzero(table.frame[name].notna().to_numpy())[first])
        count = int((~is_number).sum())
        raise table.fault(
            row,
            name,
            f"{short(comma)}, a number with a comma ({count} in all); write decimals with a point and thousands "
            f"without a comma, or --categorical {name}",
        )
    if not is_number.any():
        return
    if is_number.all():
        if leading_zero(present.unique()) is not None:
            return
        raise DataError(
            f"{table.where}, column {name!r}: holds numbers as text; store them as numbers, or --numbers {name}, or "
            f"--categorical {name}"
        )
    # Whichever is rare is the mistake.
    odd = is_number if is_number.mean() < 0.5 else ~is_number
    place = int(odd.argmax())
    row = int(np.flatnonzero(table.frame[name].notna().to_numpy())[place])
    what = "a number among texts" if is_number[place] else "text among numbers"
    count = int(odd.sum())
    raise table.fault(
        row, name, f"{short(present.iloc[place])}, {what} ({count} in all); correct it, or --categorical {name}"
    )


def _note_precision(name: str, values: npt.NDArray[np.float64], notes: list[str]) -> None:
    """Note numbers that float32 does not tell apart."""
    largest = float(np.abs(values).max())
    step, deviation = float(np.spacing(np.float32(largest))), float(values.std())
    if step > 0.01 * deviation > 0:
        notes.append(
            f"column {name!r}: near {largest:g} float32 has steps of {step:g}, and the values deviate by "
            f"{deviation:.3g}; subtract a constant from the column"
        )


def _task(table: Table, options: TableOptions, notes: list[str]) -> tuple[Task, tuple[str, ...]]:
    name = str(options.target)
    series = table.frame[name]
    if holds_dates(series) and name not in options.categorical:
        raise _dates(table, name, f"choose another --target, convert it to numbers, or use --categorical {name}")
    _refuse_other_types(table, name, "choose another --target")
    is_number = series.dtype.kind in "iuf"
    if is_number and (options.task == "regression" or series.nunique() > 2):
        values = numbers(series, name, table.fault, "leave the row out, or --missing drop")
        count = len(np.unique(values))
        whole = series.dtype.kind in "iu"
        few = whole and count <= MOST_CLASSES and count * 5 <= len(series)
        if options.task == "regression" or (options.task is None and not few):
            if count == 1:
                raise _constant_target(table, name)
            other = f"; --loss {LOSSES['multiclass'][0]} for classes" if whole else ""
            notes.append(
                f"target {name!r}: regression, {count:,} values from {values.min():g} to {values.max():g}{other}"
            )
            return "regression", ()
    if options.task == "regression":
        _refuse_mixture(table, name)
        raise DataError(f"{table.where}, column {name!r}: holds {series.dtype}, expected numbers for a regression")
    if not is_number and series.dtype.kind != "b" and options.task is None and name not in options.categorical:
        _refuse_mixture(table, name)
    classes = _categories(table, name, "leave the row out, or --missing drop")
    if len(classes) == 1:
        raise _constant_target(table, name)
    if options.task == "binary" and len(classes) > 2:
        raise DataError(f"{table.where}, column {name!r}: {len(classes):,} values, expected two for --task binary")
    if len(classes) > max(MOST_CLASSES, len(series) // 2):
        raise DataError(
            f"{table.where}, column {name!r}: {len(classes):,} classes in {len(series):,} rows; is it the target?"
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
    return DataError(f"{table.where}, column {name!r}: every row has {short(value)}; there is nothing to learn")


def _described(columns: Sequence[Column]) -> str:
    parts = []
    for role, text in (("number", "numbers"), ("one-hot", "one-hot"), ("embedding", "embedded"), ("words", "texts")):
        matching = [column for column in columns if column.role == role]
        named = [column.name if role == "number" else f"{column.name} ({len(column.values)})" for column in matching]
        if matching:
            parts.append(f"{text}: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}")
    return f"{len(columns)} columns; {'; '.join(parts)}"
