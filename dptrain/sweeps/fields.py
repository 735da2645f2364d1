"""What a sweep has varied, field by field, in words and for axes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.errors import ConfigError
from dptrain.sweeps import formatting
from dptrain.sweeps.records import Trial
from dptrain.sweeps.space import Choice, Floats, Integers, Space

_MOST_LISTED = 12
# Below it Matplotlib has no room for a logarithmic axis' margin.
_LEAST = 1e-290


@dataclass(frozen=True)
class Field:
    """A swept field.

    Attributes:
        name: of the field.
        range: what it was swept over, in words.
        is_log: whether its numbers belong on a logarithmic axis.
        drawn_from: the interval from which its values were drawn; None where they were some of several.
        values: which these are, else none.
    """

    name: str
    range: str
    is_log: bool
    drawn_from: Floats | Integers | None
    values: Sequence[Any] = ()


def swept_fields(space: Mapping[str, Any] | None, trials: Sequence[Trial], names: Sequence[str]) -> list[Field]:
    """Return the fields of a sweep.

    Args:
        space: as `Space.from_dict` reads it; None where it is not known, and the trials' values stand for it.
        trials: of the sweep.
        names: of the fields, in the order to return them.
    """
    try:
        known = Space() if space is None else Space.from_dict(space)
    except ConfigError:  # of another version
        known = Space()
    return [_field(known, trials, name) for name in names]


def is_number(value: Any) -> bool:
    """Return whether a value has a place on an axis of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values are positive and span more than 2 decades."""
    # 0.9 / 0.009 is more than 100 by rounding alone
    return bool(values) and min(values) > _LEAST and max(values) / min(values) > 100 * (1 + 1e-9)


def listed_values(values: Sequence[Any]) -> str:
    """Return '0.1 and 0.2', or how many there are from which to which where they are many numbers."""
    if len(values) > _MOST_LISTED and all(map(is_number, values)):
        low, high = formatting.brief(min(values)), formatting.brief(max(values))
        return f"{len(values)} values from {low} to {high}"
    return formatting.listed([formatting.brief(value) for value in values], _MOST_LISTED)


def _field(space: Space, trials: Sequence[Trial], name: str) -> Field:
    source = space.random.get(name)
    if isinstance(source, Floats | Integers):
        whole = "integers of " if isinstance(source, Integers) else ""
        ends = f"{formatting.brief(source.low)} to {formatting.brief(source.high)}"
        return Field(name, f"{whole}{ends}{', evenly in the logarithm' if source.log else ''}", source.log, source)
    known = source.choices if isinstance(source, Choice) else space.grid.get(name)
    values = known or _values_of(trials, name)
    return Field(name, listed_values(values), _is_geometric(values), None, values)


def _values_of(trials: Sequence[Trial], name: str) -> list[Any]:
    """Return the different values that trials have, in order."""
    return list({formatting.cell(trial.setting.get(name)): trial.setting.get(name) for trial in trials}.values())


def _is_geometric(values: Sequence[Any]) -> bool:
    """Return whether numbers span more than 2 decades, or 1 at least in steps whose ratios are the more even."""
    if not values or not all(map(is_number, values)) or min(values) < _LEAST:
        return False
    numbers = sorted(values)
    if is_wide(numbers) or len(numbers) < 3 or numbers[-1] / numbers[0] < 10:
        return is_wide(numbers)
    steps = [right - left for left, right in itertools.pairwise(numbers)]
    ratios = [math.log(right / left) for left, right in itertools.pairwise(numbers)]
    return bool(max(ratios) / min(ratios) < max(steps) / min(steps))
