"""Dates in any of the known formats are the same days, and their parts those of the calendar."""

import datetime

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.tabular.dates import COMPACT, ISO, Formats, days, formats_of, looks_like_date, parts_of
from dptrain.errors import DataError
from tests.sample import examples

DATES = st.dates(datetime.date(1970, 1, 1), datetime.date(2060, 12, 31))
FORMATS = ["%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%d %b %Y", "%B %d, %Y"]
EPOCH = datetime.date(1970, 1, 1)


def fault(row, column, what):
    return DataError(f"row {row}, {column}: {what}")


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(DATES, min_size=1, max_size=6), st.sampled_from(FORMATS))
def test_dates_are_read_as_they_were_written(dates, form):
    texts = [date.strftime(form) for date in dates]
    assert all(map(looks_like_date, texts))
    found = formats_of(list(dict.fromkeys(texts)))
    assert found is not None
    expected = [(date - EPOCH).days for date in dates]
    readings = [days(pd.Series(texts), "c", fault, [chosen]).tolist() for chosen in (*found.formats[:1], *found.others)]
    assert expected in readings
    if not found.others:
        assert days(pd.Series(texts), "c", fault, found.formats).tolist() == expected


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=12) | st.text(st.sampled_from("0123456789-./: JanT"), max_size=12))
def test_any_text_is_a_date_or_none(text):
    found = formats_of([text])
    if found is not None:
        assert np.isfinite(days(pd.Series([text]), "c", fault, found.formats)).all()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2020-12-31", "2020-01-31 10:00"], Formats((ISO,))),
        (["31.12.2020", "1.2.2020"], Formats(("%d.%m.%Y",))),
        (["12/31/2020", "1/2/2020"], Formats(("%m/%d/%Y",))),
        (["31/12/2020", "1/2/2020"], Formats(("%d/%m/%Y",))),
        (["1/2/2020", "3/4/2020"], Formats(("%m/%d/%Y",), ("%d/%m/%Y",))),
        (["31/12/2020", "12/31/2020"], None),
        (["2020-12-31", "31.12.2020"], Formats((ISO, "%d.%m.%Y"))),
        (["31.12.2020 10:30", "1.2.2020 00:00"], Formats(("%d.%m.%Y %H:%M",))),
        (["Dec 31, 2020"], Formats(("%b %d, %Y",))),
        (["99.99.2020"], None),
        (["2020-02-30"], None),
        (["1.2.20"], Formats(("%d.%m.%y",))),
        (["2020-12-31", "x"], None),
        ([], None),
    ],
)
def test_formats(texts, expected):
    assert formats_of(texts) == expected


@settings(max_examples=examples(200))
@given(DATES, st.integers(0, 23))
def test_parts_are_those_of_the_calendar(date, hour):
    (parts,) = parts_of(np.array([(date - EPOCH).days + hour / 24]), ("month", "day", "weekday", "hour"))
    assert parts[:3].tolist() == [date.month, date.day, date.weekday()]
    assert parts[3] == pytest.approx(hour, abs=1e-6)


def test_the_parts_of_no_date_are_in_the_middle():
    assert parts_of(np.array([np.nan]), ("month", "day", "weekday", "hour")).tolist() == [[6.5, 16, 3, 12]]


def test_dates_may_be_numbers_texts_times_and_missing():
    expected = [18627.0, np.nan]
    for values in ([20201231, None], ["20201231", None], [datetime.date(2020, 12, 31), None]):
        np.testing.assert_array_equal(days(pd.Series(values), "c", fault, [COMPACT]), expected)
    with pytest.raises(DataError, match=r"row 1, c: '2020-12-31', expected a date such as 31\.12\.2020"):
        days(pd.Series(["31.12.2020", "2020-12-31"]), "c", fault, ["%d.%m.%Y"])
    with pytest.raises(DataError, match=r"row 0, c: 7, expected a date such as 2020-12-31"):
        days(pd.Series([7]), "c", fault)
