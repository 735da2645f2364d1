"""Finds cells that look like numbers but are codes, identifiers, dates, or decimals with a comma."""

import datetime
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError, DataError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.text import short

_LEADING_ZERO = re.compile(r"\s*[+-]?0[0-9]")
# A zero before a digit, not within a number: found ten times as fast as a cell's beginning.
_INNER_ZERO = re.compile(rb"0(?<![0-9.]0)[0-9]")
_DECIMAL_COMMA = re.compile(r"\s*[+-]?(\d{1,3}(\.\d{3})+|\d+|),\d+\s*")
_TIME = r"([T ]\d{1,2}:\d{2}.*)?"
_ISO_DATE = re.compile(rf"\s*\d{{4}}-\d{{1,2}}-\d{{1,2}}{_TIME}\s*")
_DATE = re.compile(rf"\s*(\d{{4}}([-/.])\d{{1,2}}\2\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\3(\d{{4}}|\d{{2}})){_TIME}\s*")


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


def decimal_comma(texts: Iterable[Any]) -> str | None:
    """Return the first text that is a number with a decimal comma."""
    return next((text for text in texts if isinstance(text, str) and _DECIMAL_COMMA.fullmatch(text)), None)


def identifier(values: npt.NDArray[np.float64]) -> str | None:
    """Return, in words, why numbers (rows,) look like identifiers or dates; None where they do not."""
    distinct = np.unique(values)
    if len(distinct) <= 2 or (distinct != np.floor(distinct)).any():
        return None
    span = f"from {distinct[0]:.15g} to {distinct[-1]:.15g}"
    if _are_days(distinct):
        return f"integers that look like dates, {span}"
    if len(distinct) == len(values):
        return f"{len(values):,} distinct integers, {span}, which look like identifiers"
    steps = np.diff(values)
    if (steps >= 0).all() or (steps <= 0).all():
        return f"integers in order, {span}, which look like identifiers"
    return None


def _are_days(distinct: npt.NDArray[np.float64]) -> bool:
    year, month, day = distinct // 10_000, distinct // 100 % 100, distinct % 100
    is_day = (year >= 1900) & (year <= 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    return bool(is_day.all())


def holds_dates(series: Any) -> bool:
    """Whether all values of a column, missing ones aside, are dates or look like dates."""
    if series.dtype.kind != "O" and not _is_text(series):
        return bool(series.dtype.kind == "M")
    values = iter(series.dropna().unique() if _is_text(series) else series.dropna())
    first = next(values, None)
    return _is_date(first) and all(map(_is_date, values))


def _is_text(series: Any) -> bool:
    return getattr(series.dtype, "name", "") in ("str", "string", "category")


def _is_date(value: Any) -> bool:
    return isinstance(value, datetime.date) or (isinstance(value, str) and _DATE.fullmatch(value) is not None)


def days(series: Any, name: str, fault: Any) -> Any:
    """Return a column of dates or ISO texts as days since 1970-01-01 in UTC; NaN where a value is missing."""
    import pandas

    if series.dtype.kind in "iufb":
        raise fault(0, name, f"{short(series.iloc[0])}, expected a date such as 2020-12-31")
    if series.dtype.kind != "M":
        for row, value in enumerate(series):
            is_iso = isinstance(value, str) and _ISO_DATE.fullmatch(value)
            if not (is_iso or isinstance(value, datetime.date) or pandas.isna(value)):
                raise fault(row, name, f"{short(value)}, expected a date such as 2020-12-31")
    try:
        times = pandas.to_datetime(series, utc=True, format=None if series.dtype.kind == "M" else "ISO8601")
        return (times - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{name!r}: {short(str(error))}; expected dates such as 2020-12-31") from None
