"""Numbers as people write them are read back, and texts that are none are not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.data.tabular.number_texts import NOTATIONS, Style, Written, is_ambiguous, read_number, style_of
from tests.sample import examples

SIGNS = ["", "$", "€", "£", "%", "EUR", "CHF"]


@st.composite
def written(draw):
    """A number, and its text in a notation."""
    notation = draw(st.sampled_from(NOTATIONS))
    digits = draw(st.integers(0, 4))
    whole, part = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**digits - 1))
    mark, thousands = ("." if notation == "point" else ","), draw(st.sampled_from([",.'", ". ", ""]))
    group = next((sign for sign in thousands if sign != mark), "")
    text = f"{whole:,}".replace(",", group) + (f"{mark}{part:0{digits}}" if digits else "")
    value = float(f"{whole}.{part:0{digits}}" if digits else whole)
    sign, gap = draw(st.sampled_from(SIGNS)), draw(st.sampled_from(["", " ", "\u00a0", "\u202f"]))
    if sign:
        text = f"{text}{gap}{sign}" if sign == "%" or draw(st.booleans()) else f"{sign}{gap}{text}"
    minus = draw(st.sampled_from(["", "-", "\u2212", "("]))
    text = f"({text})" if minus == "(" else minus + text
    return f" {text} " if draw(st.booleans()) else text, notation, -value if minus else value, sign


@settings(max_examples=examples(500))
@given(written())
def test_what_is_written_is_read(case):
    text, notation, value, sign = case
    assert read_number(text, notation) == Written(value, sign)
    assert Style(notation, sign).read(text) == value
    style = style_of([text], notation)
    assert style == Style(notation, sign)


@settings(max_examples=examples(500))
@given(st.text(st.sampled_from("0123456789.,'-+()$€%eE \u00a0xEUR"), max_size=12) | st.text(max_size=8))
def test_any_text_is_a_finite_number_or_none(text):
    for notation in NOTATIONS:
        read = read_number(text, notation)
        assert read is None or math.isfinite(read.value)
    if text.isascii() and text.strip(" ").isdigit():
        assert read_number(text, "point") == read_number(text, "comma") == Written(float(text), "")


@settings(max_examples=examples(200))
@given(st.floats(allow_nan=False, allow_infinity=False).map(repr))
def test_a_number_of_python_is_itself(text):
    assert read_number(text, "point") == Written(float(text), "")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "-",
            "$",
            "%",
            ".",
            ",",
            "'",
            "()",
            "31.12.2020",
            "1-2",
            "1,2,3",
            "1.2.3",
            "12,34.5",
            "1 23",
            "0x1",
            "1_0",
        ),
        *("--5", "(-5)", "5-", "$5%", "$$5", "$€5", "nan", "inf", "1e999", "٣", "1,2345", "0,123.4", "5 kg", "007,000"),
        "9" * 100,
    ],
)
def test_what_is_no_number(text):
    assert read_number(text, "point") is None


@pytest.mark.parametrize(
    ("texts", "preferred", "expected"),
    [
        (["1,234"], "point", Style("point")),
        (["1,234"], "comma", Style("comma")),
        (["1,234", "1,5"], "point", Style("comma")),
        (["1.234", "1.234.567"], "point", Style("comma")),
        (["1,23,456"], "comma", Style("point")),
        (["$5", "6"], "point", Style("point", "$")),
        (["$5", "€6"], "point", None),
        (["5%", "6"], "point", None),
        (["1,5", "1.5.0"], "point", None),
        (["1,5", "2.5"], "point", None),
        ([], "point", None),
    ],
)
def test_a_column_has_one_notation_and_one_sign(texts, preferred, expected):
    assert style_of(texts, preferred) == expected


def test_a_group_of_three_may_be_decimals():
    assert is_ambiguous(["1,234"])
    assert not is_ambiguous(["1,23", "5"])


def test_a_sign_that_training_has_not_seen_is_no_number():
    assert Style("point", "$").read("$1,200.50") == 1200.5
    assert Style("point", "$").read("1200.5") == 1200.5
    assert Style("point", "$").read("€5") is None
    assert Style("point").read("5%") is None
