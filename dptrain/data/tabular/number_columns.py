"""Columns of numbers: how they are written, and what among them could be meant in two ways."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.data.tabular.number_texts import NOTATIONS, Notation, Style, is_ambiguous, read_number, style_of
from dptrain.data.tabular.table_codes import BLANKS, identifier, is_row_number, leading_zero
from dptrain.data.tabular.table_options import Mend, TableOptions, option
from dptrain.data.tabular.tables import Table
from dptrain.data.tabular.undecided import UndecidedError
from dptrain.runtime.text import short

FEW = 50
"""Different texts that any column may have; more of them than half of the rows name rows, and are no category."""

_MOST_WORDS = 5
"""Different texts among numbers that may all stand for a missing value."""

_NOTHING = frozenset(["na", "nan", "none", "null", "missing", "unknown", "undefined", "ka"])

_PLAIN = str | bool | int | float | np.generic


def other_cell(series: Any) -> tuple[int, Any] | None:
    """Return the row and value of the first cell that is neither a number nor a text."""
    try:
        if all(isinstance(value, _PLAIN) for value in series.dropna().unique()):
            return None
    except TypeError:  # of values that cannot be compared, such as lists
        pass
    return next(((row, value) for row, value in enumerate(series) if not isinstance(value, _PLAIN)), None)


def distinct_texts(series: Any) -> list[str] | None:
    """Return a column's distinct texts; None where it holds anything else."""
    if series.dtype.kind in "iufbmMc":
        return None
    try:
        distinct = list(series.dropna().unique())
    except TypeError:  # lists
        return None
    return distinct if distinct and all(isinstance(value, str) for value in distinct) else None


def preferred_notation(table: Table, options: TableOptions) -> Notation:
    """Return the notation of numbers such as "1,234": as asked, or by what the file is separated."""
    if options.decimal != "auto":
        return options.decimal
    return "comma" if table.text is not None and table.text.separator == ";" else "point"


def decided_style(table: Table, name: str, options: TableOptions) -> Style | None:
    """Return how a column's texts are numbers; None of other columns.

    Raises:
        UndecidedError: they could be codes or categories as well, or some are no numbers where these were asked for.
    """
    texts = distinct_texts(table.frame[name])
    if texts is None:
        return None
    style = style_of(texts, preferred_notation(table, options))
    if name in options.number_columns:
        if style is None:
            refuse_mixture(table, name, options, of_numbers=True)
            raise UndecidedError(
                f"{table.where}, column {name!r}: not numbers of one unit, such as {short(texts[0])} (--numbers); "
                f"convert them, or use {option('categorical', name)}",
                None,
            )
        return style
    if style is None or leading_zero(texts) is not None:
        return None
    if style.sign or options.decimal == style.notation:
        return style
    raise _numbers_as_text(table, name, texts, style)


def _numbers_as_text(table: Table, name: str, texts: Sequence[str], style: Style) -> UndecidedError:
    as_category = f"or treat them as categories ({option('categorical', name)})"
    with_comma = [text for text in texts if read_number(text, "point") is None]
    if style.notation == "comma" and (with_comma or is_ambiguous(texts)):
        text = next((text for text in texts if "," in text), texts[0])
        doubt = " (though a point fits as well: --decimal point)" if not with_comma else ""
        return UndecidedError(
            f"{_first(table, name, text)}, a number with a comma ({_count(table, name, ',')} in all); read it as a "
            f"decimal comma (--decimal comma){doubt}, {as_category}",
            {"decimal": ("comma",)},
            f"numbers with a decimal comma, such as {short(text)}",
        )
    grouped = next((text for text in texts if not text.strip().lstrip("+-").replace(".", "", 1).isdigit()), None)
    if grouped is not None:
        doubt = ", decimals with a comma (--decimal comma)" if is_ambiguous(texts) else ""
        return UndecidedError(
            f"{_first(table, name, grouped)}, a number with a comma or blanks; read them as thousands "
            f"({option('numbers', name)}){doubt}, {as_category}",
            {"numbers": (name,)},
            f"numbers with thousands, such as {short(grouped)}",
        )
    return UndecidedError(
        f"{table.where}, column {name!r}: holds numbers as text; store them as numbers, or {option('numbers', name)}, "
        f"or {option('categorical', name)}",
        {"numbers": (name,)},
        "numbers, though stored as text",
    )


def _first(table: Table, name: str, text: str) -> str:
    """Return a message's beginning: where a text first stands, and the text."""
    row = int((table.frame[name] == text).to_numpy(dtype=bool, na_value=False).argmax())
    return str(table.fault(row, name, short(text)))


def _count(table: Table, name: str, character: str) -> int:
    return int(table.frame[name].str.contains(character, regex=False).fillna(False).sum())


def number_problem(table: Table, name: str, values: npt.NDArray[np.float64]) -> None:
    """Refuse numbers that look like identifiers or dates."""
    looks = identifier(values)
    if looks is None:
        return
    others = f"{option('numbers', name)}) or a category ({option('categorical', name)})"
    if "dates" in looks:
        raise UndecidedError(
            f"{table.where}, column {name!r}: {looks}; read them as dates ({option('dates', name)}), leave them out "
            f"({option('drop', name)}), or declare them a quantity ({others}",
            {"dates": (name,)},
            f"{looks}: dates, as days since 1970-01-01, month, day and weekday",
        )
    is_name = is_row_number(name, values)
    raise UndecidedError(
        f"{table.where}, column {name!r}: {looks}; leave it out ({option('drop', name)}), or declare it a quantity "
        f"({others}",
        {"drop": (name,)} if is_name else {"numbers": (name,)},
        f"left out, {looks}" if is_name else f"a quantity, though {looks}",
    )


def refuse_infinite(table: Table, name: str, options: TableOptions) -> None:
    """Refuse numbers that are infinite, or too large for float32."""
    series = table.frame[name]
    if series.dtype.kind != "f":
        return
    values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    rows = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if not len(rows):
        return
    row = int(rows[0])
    what = "infinite" if np.isinf(values[row]) else "too large for float32"
    words = sorted({cell_text(table, int(row), name) for row in rows[:1000]} - {""})
    fault = f"{values[row]:g} is {what} ({len(rows)} in all); correct it, or "
    if words and len(words) <= _MOST_WORDS:
        advice, mend = _as_missing(table, name, words, options)
        message = table.fault(row, name, f"{fault}{advice}, or {option('drop', name)}")
        raise UndecidedError(str(message), mend, f"{', '.join(map(short, words))} taken for missing")
    message = table.fault(row, name, fault + option("drop", name))
    raise UndecidedError(str(message), {"drop": (name,)}, f"left out, {values[row]:g} is {what}")


def _as_missing(table: Table, name: str, words: Sequence[str], options: TableOptions) -> tuple[str, Mend]:
    """Return the advice to take words for missing values, and the options that do so."""
    flags, mend = option("na", [*dict.fromkeys([*options.na, *words])]), {"na": words}
    has_gaps = bool(table.frame[name].isna().any())  # then what to do about these is said apart
    if options.missing == "stop" and not has_gaps:
        return f"take it for missing ({flags} --missing indicator)", {**mend, "missing": ("indicator",)}
    return f"take it for missing ({flags})", mend


def cell_text(table: Table, row: int, name: str) -> str:
    """Return a cell as the file has it."""
    if table.text is None:
        return ""
    _, fields = table.text.record(int(table.frame.index[row]))
    place = list(table.frame.columns).index(name)
    return fields[place].strip(BLANKS) if place < len(fields) else ""


def refuse_mixture(table: Table, name: str, options: TableOptions, *, of_numbers: bool = False) -> None:
    """Refuse texts among which some are numbers, unless all are and some start with a zero, as codes do.

    With `of_numbers` they were declared to be numbers, whichever are more.
    """
    present = table.frame[name].dropna()
    places, distinct = present.factorize()  # few long texts may stand in many rows
    read = _read(list(distinct), preferred_notation(table, options))
    is_number = read[places]
    if not is_number.any() and not of_numbers:
        return
    if is_number.all():
        return
    others = [value for value, flag in zip(distinct, read, strict=True) if not flag]
    # Whichever is rare is the mistake, and what stands for nothing always is.
    are_numbers = of_numbers or is_number.mean() >= 0.5 or all(map(_stands_for_nothing, others))
    odd = ~is_number if are_numbers else is_number
    place = int(odd.argmax())
    row = int(np.flatnonzero(table.frame[name].notna().to_numpy())[place])
    what = "a number among texts" if is_number[place] else "text among numbers"
    count = int(odd.sum())
    words = list(dict.fromkeys(str(value).strip(BLANKS) for value, flag in zip(present, odd, strict=True) if flag))
    cell = f"{short(present.iloc[place])}, {what} ({count} in all); correct it, or "
    as_category = option("categorical", name)
    may_be_missing = are_numbers and len(words) <= _MOST_WORDS
    advice, as_missing = _as_missing(table, name, words, options)
    if may_be_missing:
        cell += f"{advice}, or "
    message = str(table.fault(row, name, cell + as_category))
    if may_be_missing and not any(map(str.isdigit, "".join(words))):
        raise UndecidedError(message, as_missing, f"{', '.join(map(short, words))} taken for missing")
    if len(distinct) > max(FEW, len(table) // 2):
        raise UndecidedError(
            f"{message}, or {option('drop', name)}", {"drop": (name,)}, f"left out, {what} and {len(distinct):,} values"
        )
    raise UndecidedError(message, {"categorical": (name,)}, f"a category, {what}")


def _stands_for_nothing(text: object) -> bool:
    """Whether a text is none but marks, such as "?" and "--", or says that a value is not there."""
    word = "".join(character for character in str(text).lower() if character.isalnum())
    return not word or word in _NOTHING


def _read(values: Collection[Any], preferred: Notation) -> npt.NDArray[np.bool_]:
    """Return which values are numbers, in the notation in which most are."""
    flags = {
        notation: np.array(
            [not isinstance(value, str) or read_number(value, notation) is not None for value in values], bool
        )
        for notation in NOTATIONS
    }
    return max(flags.values(), key=lambda flag: (int(flag.sum()), flag is flags[preferred]))
