"""Columns of categories: their values, and those that stand for others."""

from typing import Any

from dptrain.data.preprocessing import MAX_TEXT, Column, canonical
from dptrain.data.tabular.number_columns import FEW
from dptrain.data.tabular.number_texts import style_of
from dptrain.data.tabular.table_codes import BLANKS, leading_zero
from dptrain.data.tabular.table_options import FEW_ROWS, TableOptions, option
from dptrain.data.tabular.tables import Table
from dptrain.data.tabular.undecided import UndecidedError
from dptrain.data.words import split_words
from dptrain.errors import DataError

MOST_ONE_HOT = 16
"""A category of more values is embedded."""

MISSING = "(missing)"
"""The category that stands for missing values, where these are asked for."""

OTHER = "(other)"
"""The category that stands for those that training has not seen, and for rare ones, where it is asked for."""

_WORDS_OF_TEXT = 3
"""Texts of more words on average are read as texts, not as names."""


def category_column(
    table: Table, name: str, options: TableOptions, notes: list[str], *, missing: bool
) -> Column | None:
    """Return a column of categories; None where rare ones are all that it has."""
    series = table.frame[name]
    values = categories(table, name, f"fill it in, or use {option('drop', name)}", missing=missing)
    rare = _rare(series, options, values)
    kept = tuple(value for value in values if value not in rare)
    if not set(kept) - {MISSING if missing else None}:
        notes.append(f"column {name!r} is left out: every value has fewer than {_least(options)} rows")
        return None
    # A one-hot category needs no other for values that training has not seen: none of its columns is set.
    is_kept_for_unseen = (options.unseen == "other" or options.auto) and len(kept) > MOST_ONE_HOT
    other = OTHER if rare or is_kept_for_unseen else None
    if other is not None:
        if other in values:
            raise DataError(f"{table.where}, column {name!r}: {other!r} is a value, but is reserved for unseen ones")
        kept = (*kept, other)
    if rare:
        notes.append(
            f"column {name!r}: {len(rare):,} categories of fewer than {_least(options)} rows are joined as {other!r}"
        )
    return Column(
        name,
        "one-hot" if len(kept) <= MOST_ONE_HOT else "embedding",
        kept,
        series.dtype.kind not in "iufb",
        missing=MISSING if missing else None,
        other=other,
        literal=name in options.literal_columns,
        rare=rare,
    )


def _least(options: TableOptions) -> int:
    return options.rare if options.rare is not None else FEW_ROWS if options.auto else 0


def _rare(series: Any, options: TableOptions, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the categories of too few rows, in order; none where it is a single one, which stays what it is."""
    counts: dict[str, int] = {}
    for value, count in series.value_counts().items() if _least(options) else ():
        text = _plain(value)
        counts[text] = counts.get(text, 0) + int(count)
    rare = tuple(value for value in values if counts.get(value, _least(options)) < _least(options))
    return rare if len(rare) > 1 else ()


def _plain(value: Any) -> str:
    return value.strip(BLANKS) if isinstance(value, str) else canonical(value)


def categories(table: Table, name: str, advice: str, missing: bool = False) -> tuple[str, ...]:
    """Return a column's values, numbers by size and texts alphabetically, the stand-in for missing ones last."""
    series = table.frame[name]
    if missing:
        if (series == MISSING).any():
            raise DataError(f"{table.where}, column {name!r}: {MISSING!r} is a value, but is reserved for missing ones")
        present = Table(table.where, table.frame[series.notna()], table.text)
        return (*categories(present, name, advice), MISSING)
    distinct = list(series.dropna().unique())
    longest = max((len(text) for text in distinct if isinstance(text, str)), default=0)
    if longest > MAX_TEXT:
        raise UndecidedError(
            f"{table.where}, column {name!r}: a text of {longest:,} characters, at most {MAX_TEXT:,} are a category; "
            f"{option('drop', name)}",
            {"drop": (name,)},
            f"left out, it has a text of {longest:,} characters",
        )
    if not all(isinstance(value, str) for value in distinct):
        distinct = sorted(distinct, key=lambda value: (isinstance(value, str), value))
    else:
        distinct = sorted(distinct)
    return tuple(dict.fromkeys(map(_plain, distinct)))


def too_many(table: Table, name: str) -> None:
    """Refuse almost as many distinct texts as rows."""
    present = table.frame[name].dropna()
    distinct = list(present.unique())
    if len(distinct) <= max(FEW, len(table) // 2):
        return
    texts = [text for text in distinct if isinstance(text, str)]
    words = sum(len(split_words(text)) for text in texts) / max(1, len(texts))
    are_texts = words > _WORDS_OF_TEXT
    are_codes = leading_zero(texts) is not None and style_of(texts, "point") is not None
    as_numbers = f" or numbers ({option('numbers', name)})" if are_codes else ""
    raise UndecidedError(
        f"{table.where}, column {name!r}: {len(distinct):,} distinct texts in {len(table):,} rows; leave it out "
        f"({option('drop', name)}), or declare it a text ({option('text', name)}) or a category "
        f"({option('categorical', name)}){as_numbers}",
        {"text": (name,)} if are_texts else {"drop": (name,)},
        f"texts, of which the words count, {words:.0f} a row on average"
        if are_texts
        else f"left out, {len(distinct):,} distinct texts in {len(table):,} rows, which look like identifiers",
    )
