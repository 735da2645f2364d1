"""Formats values and errors for one-line messages."""

from collections.abc import Sequence
from typing import Any


def short(value: Any) -> str:
    """Return the first 100 characters of a value's repr, on one line."""
    try:
        text = " ".join(repr(value).split())
    except RecursionError:
        return "something nested too deeply"
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a {type(value).__name__} with too many digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


def one_line(error: object) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def no_formula(text: str) -> str:
    """Return a cell's text, with an apostrophe before anything that a spreadsheet would execute."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def counted(number: int, word: str) -> str:
    """Return "1 run" or "2 runs"."""
    return f"{number} {word}{'' if number == 1 else 's'}"
