"""The swept fields of a sweep, described for tables and axes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.errors import ConfigError
from dptrain.sweeps.records import Trial
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.space import Choice, Floats, Integers, Space

_MOST_LISTED = 12
# Below it Matplotlib has no room for a logarithmic axis' margin.
_LEAST = 1e-290


@dataclass(frozen=True)
class Field:
    """A swept field."""

    name: str
    range: str  # description of the swept values
    is_log: bool  # whether its numbers belong on a logarithmic axis
    drawn_from: Floats | Integers | None  # None for a list of values
    values: Sequence[Any] = ()  # empty for an interval


def swept_fields(space: Mapping[str, Any] | None, trials: Sequence[Trial], names: Sequence[str]) -> list[Field]:
    """Return the named fields of a sweep; without a known space, the trials' values stand for it."""
    try:
        known_space = Space() if space is None else Space.from_dict(space)
    except ConfigError:  # of another version
        known_space = Space()
    return [_field(known_space, trials, name) for name in names]


def is_number(value: Any) -> bool:
    """Return whether a value can be placed on an axis of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values are positive and span more than 2 decades."""
    # 0.9 / 0.009 is more than 100 by rounding alone
    return bool(values) and min(values) > _LEAST and max(values) / min(values) > 100 * (1 + 1e-9)


def listed_values(values: Sequence[Any]) -> str:
    """Return '0.1 and 0.2', or count and range of many numbers."""
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
    listed = source.choices if isinstance(source, Choice) else space.grid.get(name)
    values = listed or _values_of(trials, name)
    return Field(name, listed_values(values), _is_geometric(values), None, values)


def _values_of(trials: Sequence[Trial], name: str) -> list[Any]:
    return list({formatting.cell(trial.setting.get(name)): trial.setting.get(name) for trial in trials}.values())


def _is_geometric(values: Sequence[Any]) -> bool:
    """Return whether numbers span more than 2 decades, or at least 1 with ratios more even than differences."""
    if not values or not all(map(is_number, values)) or min(values) < _LEAST:
        return False
    numbers = sorted(values)
    if is_wide(numbers) or len(numbers) < 3 or numbers[-1] / numbers[0] < 10:
        return is_wide(numbers)
    steps = [right - left for left, right in itertools.pairwise(numbers)]
    ratios = [math.log(right / left) for left, right in itertools.pairwise(numbers)]
    return bool(max(ratios) / min(ratios) < max(steps) / min(steps))
