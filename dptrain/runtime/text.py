"""Values and errors as one line of a message."""

from typing import Any


def short(value: Any) -> str:
    """Return the beginning of a value's text, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def one_line(error: object) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
