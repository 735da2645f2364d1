"""Reads dates: their formats, as days since 1970-01-01 in UTC, and as parts of a calendar."""

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.data.tabular.table_codes import pandas_module
from dptrain.errors import DataError
from dptrain.runtime.text import short

Array = npt.NDArray[Any]

ISO = "ISO8601"
"""The format of 2020-12-31, with or without a time."""

COMPACT = "%Y%m%d"
"""The format of 20201231, which a number is too."""

Part = Literal["month", "day", "weekday", "hour"]

_TIME = r"([T ]\d{1,2}:\d{2}.*)?"
_ISO_DATE = re.compile(rf"\s*\d{{4}}-\d{{1,2}}-\d{{1,2}}{_TIME}\s*")
_MONTH = r"[A-Za-z]{3,9}\.?"
_LOOKS = re.compile(
    rf"\s*(\d{{4}}([-/.])\d{{1,2}}\2\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\3(\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[ -]{_MONTH}[ -]\d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}){_TIME}\s*"
)
# Formats by what separates day, month and year; of two that both fit the first is taken.
_FORMATS: dict[str, Sequence[str]] = {
    "-": ("%d-%m-%Y", "%m-%d-%Y", "%d-%m-%y", "%m-%d-%y", "%d-%b-%Y", "%d-%B-%Y"),
    ".": ("%Y.%m.%d", "%d.%m.%Y", "%d.%m.%y"),
    "/": ("%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%m/%d/%y", "%d/%m/%y"),
    " ": ("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
}
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p", "T%H:%M:%S")
# What a missing date's parts are: the middle of the year, of the month, of the week and of the day.
_MIDDLE: dict[Part, float] = {"month": 6.5, "day": 16, "weekday": 3, "hour": 12}


@dataclass(frozen=True)
class Formats:
    """The formats of a column's dates.

    Attributes:
        formats: tried in this order.
        others: those that fit as well, with day and month exchanged; empty where the dates are clear.
    """

    formats: tuple[str, ...]
    others: tuple[str, ...] = ()


def looks_like_date(text: str) -> bool:
    """Whether a text is written like a date."""
    return _LOOKS.fullmatch(text) is not None


def formats_of(texts: Sequence[str]) -> Formats | None:
    """Return the formats of distinct texts, by which each is a date; None where some are no dates."""
    if not texts or not all(map(looks_like_date, texts)):
        return None
    iso = [text for text in texts if _ISO_DATE.fullmatch(text)]
    groups: dict[str, list[str]] = {}
    for text in texts:
        if not _ISO_DATE.fullmatch(text):
            separator = next(mark for mark in "./ -" if mark in text.strip().split(":")[0])
            groups.setdefault(_separator(text, separator), []).append(text)
    if iso and not _all_read(iso, ISO):
        return None
    formats, others = [ISO] * bool(iso), list[str]()
    for separator, members in groups.items():
        fits = _fits(members, separator)
        if fits is None:
            return None
        formats += fits.formats
        others += fits.others
    return Formats(tuple(formats), tuple(others))


def _separator(text: str, otherwise: str) -> str:
    match = re.match(r"\s*(?:\d+|[A-Za-z.]+)([-/. ])", text)
    return match[1] if match else otherwise


def _fits(texts: Sequence[str], separator: str) -> Formats | None:
    """Return formats that together read all texts of a separator; few, and those of one order of day and month."""
    candidates = [date + time for time in _TIMES for date in _FORMATS[separator]]
    left, formats, others = list(texts), [], []
    while left:
        counts = {form: sum(_is_read(left, form)) for form in candidates}
        best = max(candidates, key=lambda form: counts[form])
        if not counts[best]:
            return None
        swapped = best.replace("%m", "%\0").replace("%d", "%m").replace("%\0", "%d")
        if swapped != best and counts.get(swapped) == counts[best]:
            others.append(swapped)
        elif swapped in formats:
            return None  # days first in some cells, and months first in others
        formats.append(best)
        left = [text for text, is_read in zip(left, _is_read(left, best), strict=True) if not is_read]
    return Formats(tuple(formats), tuple(others))


def _is_read(texts: Sequence[str], form: str) -> list[bool]:
    pandas = pandas_module()
    stripped = pandas.Series([text.strip() for text in texts], dtype=object)
    first = pandas.to_datetime(stripped[:1], format=form, errors="coerce", utc=True)
    if len(texts) > 1000 and first.isna().all():  # mostly a format of others
        return [False] * len(texts)
    read: list[bool] = pandas.to_datetime(stripped, format=form, errors="coerce", utc=True).notna().tolist()
    return read


def _all_read(texts: Sequence[str], form: str) -> bool:
    return all(_is_read(texts, form))


def days(
    series: Any, name: str, fault: Callable[[int, str, str], DataError], formats: Sequence[str] = ()
) -> npt.NDArray[np.float64]:
    """Return dates as days since 1970-01-01 in UTC, (rows,); NaN where a value is missing.

    Without `formats` they are ISO's, as they are in models of earlier versions.
    """
    pandas = pandas_module()
    if series.dtype.kind in "iufb" and COMPACT in formats:
        series = pandas.Series([None if value != value else f"{value:.0f}" for value in series.tolist()], dtype=object)
    if series.dtype.kind in "iufb":  # missing ones alone are numbers too
        numbers = np.flatnonzero(series.notna().to_numpy())
        if not len(numbers):
            return np.full(len(series), np.nan)
        row = int(numbers[0])
        raise fault(row, name, f"{short(series.tolist()[row])}, expected a date such as {_example(formats)}")
    if series.dtype.kind != "M":
        places, distinct = series.factorize()
        values: npt.NDArray[np.float64] = np.append(_days_of(distinct, formats), np.nan)[places]
        wrong = np.isnan(values) & (places >= 0)
        if wrong.any():
            row = int(wrong.argmax())
            raise fault(row, name, f"{short(series.iloc[row])}, expected a date such as {_example(formats)}")
        return values
    try:
        return _since_1970(pandas.to_datetime(series, utc=True))
    except (ValueError, OverflowError) as error:
        raise DataError(f"{name!r}: {short(str(error))}; expected dates such as 2020-12-31") from None


def _days_of(values: Sequence[Any], formats: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return distinct values as days, NaN of what is no date."""
    pandas = pandas_module()
    result = np.full(len(values), np.nan)
    for form in formats or (ISO,):
        left = [
            place
            for place, value in enumerate(values)
            if np.isnan(result[place])
            and (isinstance(value, datetime.date) or (isinstance(value, str) and _may_be(value, form)))
        ]
        if left:
            cells = [value.strip() if isinstance(value := values[place], str) else value for place in left]
            try:
                times = pandas.to_datetime(pandas.Series(cells, dtype=object), utc=True, format=form, errors="coerce")
                result[left] = _since_1970(times)
            except (ValueError, OverflowError):  # beyond the years that pandas counts
                if len(cells) > 1:
                    result[left] = [_days_of([cell], (form,))[0] for cell in cells]
    return result


def _may_be(text: str, form: str) -> bool:
    return form != ISO or _ISO_DATE.fullmatch(text) is not None


def _since_1970(times: Any) -> npt.NDArray[np.float64]:
    pandas = pandas_module()
    values: npt.NDArray[np.float64] = ((times - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)).to_numpy(
        dtype=np.float64
    )
    return values


def _example(formats: Sequence[str]) -> str:
    last = datetime.datetime(2020, 12, 31)
    return last.strftime("%Y-%m-%d" if not formats or formats[0] == ISO else formats[0])


def parts_of(values: npt.NDArray[np.float64], parts: Sequence[Part]) -> npt.NDArray[np.float64]:
    """Return the month (1 to 12), day (1 to 31), weekday (Monday 0) and hour (0 to 24) of days, (rows, parts).

    Those of NaN are in the middle.
    """
    present = np.where(np.isnan(values), 0, values)
    day_numbers = np.floor(present).astype(np.int64)
    dates = day_numbers.astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    result = np.empty((len(values), len(parts)))
    for place, part in enumerate(parts):
        if part == "month":
            result[:, place] = months.astype(np.int64) % 12 + 1
        elif part == "day":
            result[:, place] = (dates - months.astype("datetime64[D]")).astype(np.int64) + 1
        elif part == "weekday":
            result[:, place] = (day_numbers + 3) % 7  # 1970 began on a Thursday
        else:
            result[:, place] = (present - day_numbers) * 24
        result[np.isnan(values), place] = _MIDDLE[part]
    return result
