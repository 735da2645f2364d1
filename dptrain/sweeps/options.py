"""Options of a sweep: arguments of `dptrain.sweep`, of `python -m dptrain sweep` and of plan files."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from annotated_types import Interval

from dptrain.runtime.checked import Before, Checked
from dptrain.sweeps.keeping import Keep


def _seconds(value: object) -> object:
    """Return the seconds of "90s", "30m" or "2h"."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smh])", value.strip())
    if match is None:
        raise ValueError("expected a number with a unit, such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _packing(value: object) -> bool | int:
    """Return what on, off or a number says."""
    word = str(value).strip().lower()
    if word in ("on", "off", "true", "false"):
        return word in ("on", "true")
    if word.isdecimal():
        return int(word)
    raise ValueError("expected on, off or a number of packs")


def _listed(value: object) -> object:
    """Return a text as a list of it."""
    return [value] if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class SweepOptions(Checked):
    """What a sweep is asked to do, but for what it varies.

    Attributes:
        seeds: as `parse_seeds`.
        samples: how many settings are drawn at random; each meets the whole grid.
        adaptive: how many settings Optuna chooses as results come; 0 for those of the space.
        search_seed: of the draws.
        metric: keys of the logs, or `training.MEASURED`, that trials are compared by; the first ranks them. If not set,
            the validation's loss, accuracy or mean absolute error.
        mode: whether a high or a low value is good, of each, or "auto" of all.
        halving: one trial in so many goes on from a rung.
        min_epochs: the first rung.
        runs_per_device: runs that a rank trains at once; None to find out.
        packing: on a GPU, runs that differ in numbers alone share launches, as a pack; a number: as so many packs;
            False: each run has a stream of its own.
        folds: of cross-validation; none for none.
        keep: whose models stay as files; the best trial's where it is none.
        max_time: seconds after which the sweep stops, to be continued; as a text with a unit, such as 2h.
    """

    seeds: Any = "0-4"
    samples: Annotated[int, Interval(ge=0)] = 0
    adaptive: Annotated[int, Interval(ge=0)] = 0
    search_seed: Annotated[int, Interval(ge=0, lt=2**63)] = 0
    metric: Annotated[list[str], Before(_listed)] | None = None
    mode: Annotated[list[Literal["auto", "max", "min"]], Before(_listed)] = dataclasses.field(
        default_factory=lambda: ["auto"]
    )
    halving: Annotated[int, Interval(ge=2)] | None = None
    min_epochs: Annotated[int, Interval(ge=1)] = 1
    runs_per_device: Annotated[int, Interval(ge=1)] | None = None
    packing: Annotated[bool | int, Before(_packing)] = True
    folds: Annotated[int, Interval(ge=2)] | None = None
    keep: Keep | None = None
    max_time: Annotated[Annotated[float, Interval(ge=0)] | None, Before(_seconds)] = None
