"""Reads numbers as people write them: "1.234,5", "$1,200.00", "12.3%", "(1 200)".

A column has one notation, which says what a comma is, and at most one sign, a currency or %. "12.3%" is 12.3.
"""

import math
import re
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

Notation = Literal["point", "comma"]
"""The decimal mark. Thousands may be grouped by the other mark, by an apostrophe or by a space."""

NOTATIONS: tuple[Notation, ...] = ("point", "comma")

PERCENT = "%"

_CODES = "USD|EUR|GBP|JPY|CHF|CAD|AUD|NZD|CNY|INR|SEK|NOK|DKK|PLN|CZK|BRL|MXN|ZAR|KRW"
_SYMBOL = "\1"  # stands for a currency symbol
_SIGN = rf"(?:{_CODES}|[%{_SYMBOL}])"
_BODY = re.compile(
    rf"(?P<minus>[-+]?)\s*(?P<before>{_SIGN})?\s*(?P<second>[-+]?)\s*(?P<digits>[0-9.,' ]*[0-9][.,]?)"
    rf"(?P<exponent>[eE][-+]?[0-9]{{1,3}})?\s*(?P<after>{_SIGN})?"
)
_SPACES = dict.fromkeys((0x00A0, 0x2007, 0x2009, 0x202F), " ")
_ALIKE = str.maketrans({**_SPACES, 0x2212: "-", 0x2019: "'"})  # the minus sign and the apostrophe of typesetting
_LONGEST = 60


def _digits(group: str, mark: str) -> re.Pattern[str]:
    """Return the pattern of plain digits, or groups of three (India's others have two) that begin without a zero."""
    lakhs = "|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}" if group == "," else ""
    groups = rf"[1-9][0-9]{{0,2}}(?P<mark>[{group}' ])[0-9]{{3}}(?:(?P=mark)[0-9]{{3}})*"
    return re.compile(rf"(?:[0-9]+|{groups}{lakhs})?(?:[{mark}][0-9]*)?")


_MARKS: dict[Notation, tuple[str, str]] = {"point": (",", "."), "comma": (".", ",")}  # of thousands and of decimals
_DIGITS = {notation: _digits(*marks) for notation, marks in _MARKS.items()}


@dataclass(frozen=True)
class Written:
    """A number as it is written."""

    value: float
    sign: str  # a currency or "%"; empty where there is none


@dataclass(frozen=True)
class Style:
    """How a column's numbers are written."""

    notation: Notation
    sign: str = ""

    def read(self, text: str) -> float | None:
        """Return a cell's number; None where it is none, or one of another sign."""
        written = read_number(text, self.notation)
        return written.value if written is not None and written.sign in ("", self.sign) else None


def read_number(text: str, notation: Notation) -> Written | None:
    """Return the number that a text is, None of any other text."""
    if len(text) > _LONGEST:
        return None
    text = text.translate(_ALIKE).strip()
    symbol = next((character for character in text if unicodedata.category(character) == "Sc"), "$")
    text = text.replace(symbol, _SYMBOL)
    is_negative = text[:1] == "(" and text[-1:] == ")"
    match = _BODY.fullmatch(text[1:-1] if is_negative else text)
    if match is None or (match["before"] and match["after"]):
        return None
    signs = [mark for mark in ("(" * is_negative, match["minus"], match["second"]) if mark]
    if len(signs) > 1 or (match["second"] and not match["before"]):
        return None
    digits = match["digits"]
    if not _DIGITS[notation].fullmatch(digits):
        return None
    group, mark = _MARKS[notation]
    plain = digits.replace(group, "").replace("'", "").replace(" ", "").replace(mark, ".")
    value = float(plain + (match["exponent"] or ""))
    if not math.isfinite(value):
        return None
    sign = (match["before"] or match["after"] or "").replace(_SYMBOL, symbol)
    return Written(-value if signs and signs[0] in "(-" else value, sign)


def fitting(texts: Iterable[str]) -> dict[Notation, set[str]]:
    """Return the notations in which all texts are numbers, each with the signs that it finds."""
    signs: dict[Notation, set[str]] = {notation: set() for notation in NOTATIONS}
    for text in texts:
        for notation in [*signs]:
            written = read_number(text, notation)
            if written is None:
                del signs[notation]
            else:
                signs[notation].add(written.sign)
        if not signs:
            break
    return signs


def style_of(texts: Collection[str], preferred: Notation) -> Style | None:
    """Return how texts are written as numbers, `preferred` where both notations fit; None where they are not numbers.

    Nor are they where they have two signs, or % in some and not in others.
    """
    fits = fitting(texts) if texts else {}
    for notation in sorted(fits, key=lambda notation: notation != preferred):
        signs = fits[notation] - {""}
        if len(signs) < 2 and not (PERCENT in signs and "" in fits[notation]):
            return Style(notation, next(iter(signs), ""))
    return None


def is_ambiguous(texts: Iterable[str]) -> bool:
    """Whether both notations fit, and disagree about a text such as "1,234"."""
    return any(
        point is not None and comma is not None and point.value != comma.value
        for text in texts
        for point, comma in [(read_number(text, "point"), read_number(text, "comma"))]
    )
