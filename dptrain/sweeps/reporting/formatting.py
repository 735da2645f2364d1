"""Settings and numbers as text, for tables, sentences and pictures."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.runtime.text import no_formula


def cell(value: Any) -> str:
    """Return a value as a CSV cell: text as it is, empty for None, else JSON; spreadsheet formulas are escaped."""
    if value is None:
        return ""
    return no_formula(value) if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def described(setting: Mapping[str, Any]) -> str:
    """Return a setting as 'learning_rate=0.001, hidden=[128]'."""
    return ", ".join(f"{name}={brief(value)}" for name, value in setting.items())


def brief(value: Any) -> str:
    """Return a swept value for people: a float to 5 significant digits."""
    if isinstance(value, float):
        return number(value)
    return "none" if value is None else value if isinstance(value, str) else cell(value)


def ends(names: Sequence[str]) -> list[str]:
    """Return the last parts of dotted names, such as 'learning_rate'; whole names where last parts repeat."""
    last = [name.rpartition(".")[2] for name in names]
    return [end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)]


def number(value: float | None) -> str:
    """Return a measured value to 5 significant digits, or a dash where there is none."""
    return "-" if value is None else f"{value:.5g}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as '0.97 to 0.98', with enough digits to show its width; a dash where it has none."""
    if low is None or high is None or low == high:
        return "-"
    digits = next((digits for digits in range(5, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 17)
    return f"{low:.{digits}g} to {high:.{digits}g}"


def mean_interval(low: float | None, high: float | None, n: int, covers: str) -> str:
    """Return the parenthesis after a mean of n runs: its interval, the sources it covers, and n."""
    if low is None or high is None:
        return f"the same with every seed, so no interval; n = {n}" if n > 1 else "one run, so no interval"
    only = ", one run" if covers == "samples alone" else f", n = {n}"
    return f"95 % interval {interval(low, high)} over {covers}{only}"


def shortened(text: str, length: int) -> str:
    """Return a text cut to `length` characters, with an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def listed(items: Sequence[Any], most: int = 12) -> str:
    """Return '1, 2 and 5', or the first `most` and the number left out."""
    words = [str(item) for item in items]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
