"""Options of a sweep: arguments of `dptrain.sweep`, of `python -m dptrain sweep` and of plan files."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from annotated_types import Interval

from dptrain.runtime.checked import Before, Checked
from dptrain.sweeps.keeping import Keep


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smh])", value.strip())
    if match is None:
        raise ValueError("expected a number with a unit, such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _packing(value: object) -> bool | int:
    word = str(value).strip().lower()
    if word in ("on", "off", "true", "false"):
        return word in ("on", "true")
    if word.isdecimal():
        return int(word)
    raise ValueError("expected on, off or a number of packs")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class SweepOptions(Checked):
    """Options of a sweep, without its space; `dptrain.sweep` documents them."""

    seeds: Any = "0-4"  # as `parse_seeds`
    samples: Annotated[int, Interval(ge=0)] = 0
    adaptive: Annotated[int, Interval(ge=0)] = 0
    search_seed: Annotated[int, Interval(ge=0, lt=2**63)] = 0
    # None for the validation's loss, accuracy or mean absolute error
    metric: Annotated[list[str], Before(_listed)] | None = None
    mode: Annotated[list[Literal["auto", "max", "min"]], Before(_listed)] = dataclasses.field(
        default_factory=lambda: ["auto"]
    )
    halving: Annotated[int, Interval(ge=2)] | None = None
    min_epochs: Annotated[int, Interval(ge=1)] = 1
    runs_per_device: Annotated[int, Interval(ge=1)] | None = None  # None to measure it
    packing: Annotated[bool | int, Before(_packing)] = True
    folds: Annotated[int, Interval(ge=2)] | None = None
    keep: Keep | None = None  # None for the best trial's models
    # seconds, or a text such as 2h
    max_time: Annotated[Annotated[float, Interval(ge=0)] | None, Before(_seconds)] = None
