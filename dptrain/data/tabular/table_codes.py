"""Finds numbers that are codes, identifiers or dates; the words and characters that are no values."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install

_LEADING_ZERO = re.compile(r"\s*[+-]?0[0-9]")
# A zero before a digit, not within a number: found ten times as fast as a cell's beginning.
_INNER_ZERO = re.compile(rb"0(?<![0-9.]0)[0-9]")

# Words in the names of columns that name rows, and how many times their number of rows their span may be.
_NAMING = frozenset(
    ("id", "ids", "identifier", "uid", "uuid", "guid", "key", "index", "idx", "no", "nr", "row", "serial")
)
_DENSE = 2

BLANKS = " \t\u00a0"
"""Characters around a cell or a name that do not belong to it."""

DEFAULT_NA = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Words of text files that stand for a missing value by default, as in pandas; an empty cell always does."""

LITERAL_NA = frozenset(("NA", "NULL", "None", "null"))
"""Those that are values in columns of `--categorical` and `--text`: a country, a name."""


def pandas_module() -> Any:
    """Return `pandas`, or raise a ConfigError where it is missing."""
    try:
        import pandas
    except ImportError:
        raise ConfigError(f"tables need pandas: {pip_install('tables')}") from None
    return pandas


def leading_zero(texts: Iterable[Any]) -> str | None:
    """Return the first text that starts like 007: a code, not the number 7."""
    return next((text for text in texts if isinstance(text, str) and _LEADING_ZERO.match(text)), None)


def may_have_leading_zeros(content: bytes, separator: str) -> bool:
    """Whether a cell of a text file may start like 007; a quick check that may say True wrongly, never False."""
    if _INNER_ZERO.search(content) is None:
        return False
    return re.search(rb'(?:^|[\r\n%s])[ \t]*"?[ \t]*[+-]?0[0-9]' % re.escape(separator.encode()), content) is not None


def identifier(values: npt.NDArray[np.float64]) -> str | None:
    """Return, in words, why numbers (rows,) look like identifiers or dates; None where they do not."""
    distinct = np.unique(values)
    if len(distinct) <= 2 or (distinct != np.floor(distinct)).any():
        return None
    span = f"from {distinct[0]:.15g} to {distinct[-1]:.15g}"
    if are_days(distinct):
        return f"integers that look like dates, {span}"
    if len(distinct) == len(values):
        return f"{len(values):,} distinct integers, {span}, which look like identifiers"
    steps = np.diff(values)
    if (steps >= 0).all() or (steps <= 0).all():
        return f"integers in order, {span}, which look like identifiers"
    return None


def is_row_number(name: str, values: npt.NDArray[np.float64]) -> bool:
    """Whether distinct integers (rows,) name rows rather than measure them: by the column's name, or as a count."""
    if len(np.unique(values)) < len(values):
        return False
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return bool(np.ptp(values) < _DENSE * len(values)) or not _NAMING.isdisjoint(word.lower() for word in words)


def are_days(distinct: npt.NDArray[np.float64]) -> bool:
    """Whether all integers are dates such as 20201231."""
    year, month, day = distinct // 10_000, distinct // 100 % 100, distinct % 100
    is_day = (year >= 1900) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    return bool(is_day.all())
