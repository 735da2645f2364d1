"""Numbers with the digits of a target: a price of 25,443 is no 2.544e+04."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# The most decimals shown; values that looked for their decimals; digits of what is measured.
_MOST_DECIMALS, _MOST_SAMPLED, _SIGNIFICANT = 6, 1000, 3
# Beyond these a number is shown with an exponent.
_LARGEST, _SMALLEST = 1e15, 1e-6


@dataclass(frozen=True)
class Digits:
    """Formats numbers of one unit with a fixed number of decimals."""

    decimals: int

    def value(self, value: float) -> str:
        """Return a target or a prediction."""
        return _formatted(value, self.decimals)

    def measure(self, value: float) -> str:
        """Return an error in the target's unit, with at least 3 significant digits."""
        return _formatted(value, max(self.decimals, _decimals_for(value)))


def digits_of(targets: npt.NDArray[Any]) -> Digits:
    """Return the digits of targets: the decimals that nearly all have, or else 4 significant ones of the median."""
    values = np.asarray(targets).reshape(-1)
    if values.dtype.kind in "iub" or not len(values):
        return Digits(0)
    values = values[np.isfinite(values)]
    values = values[:: max(len(values) // _MOST_SAMPLED, 1)]
    if not len(values):
        return Digits(0)
    decimals = [len(np.format_float_positional(value, trim="-").partition(".")[2]) for value in values]
    usual = int(np.quantile(decimals, 0.95, method="inverted_cdf"))
    return Digits(usual if usual <= 3 else min(usual, _decimals_for(float(np.median(np.abs(values))), 4)))


def ratio(value: float) -> str:
    """Return a number without a unit, such as R², to 4 decimals at most."""
    return _formatted(value, min(max(_decimals_for(value), 3), 4)) if math.isfinite(value) else _no_number(value)


def percent(part: float) -> str:
    """Return a part of 1 as percent, such as "97.3 %"."""
    return f"{100 * part:.1f} %" if math.isfinite(part) else _no_number(part)


def _formatted(value: float, decimals: int) -> str:
    value = float(value)
    if not math.isfinite(value):
        return _no_number(value)
    if abs(value) >= _LARGEST or 0 < abs(value) < _SMALLEST:
        return f"{value:.4g}"
    text = f"{value:,.{decimals}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text  # no -0


def _decimals_for(value: float, significant: int = _SIGNIFICANT) -> int:
    if not math.isfinite(value) or not value:
        return 0
    return min(max(significant - 1 - math.floor(math.log10(abs(value))), 0), _MOST_DECIMALS)


def _no_number(value: float) -> str:
    return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinity"
