"""Conducting a sweep, whoever asked for it: devices, measuring, training, conclusions."""

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dptrain import comm as comms
from dptrain.comm import Communicator
from dptrain.devices import open_backend
from dptrain.errors import AgreedError, ConfigError
from dptrain.failure import end_job
from dptrain.runs.files import write_atomically
from dptrain.sweeps.adaptive import OptunaSource
from dptrain.sweeps.capacity import Capacity, measure
from dptrain.sweeps.records import Setting
from dptrain.sweeps.result import SweepResult, conclude
from dptrain.sweeps.scheduler import ListSource, SettingSource
from dptrain.sweeps.space import Space
from dptrain.sweeps.sweep import Plan, run_sweep
from dptrain.sweeps.training import Recipe
from dptrain.version import __version__

T = TypeVar("T")

# Settings at most that are tried out before a sweep is given up.
_TRIED = 20


def agreed(ranks: Communicator, where: str, action: Callable[[], T]) -> T:
    """Run what may find arguments wrong: alone it raises as it is, on N ranks it raises on all."""
    return action() if ranks.size == 1 else ranks.agree(where, action)


def gather(ranks: Communicator, capacity: Capacity) -> list[Capacity]:
    """Return what every rank can train. Collective."""
    return [Capacity(**fact) for fact in ranks.allgather(asdict(capacity))]


def prepare(
    ranks: Communicator,
    recipe: Recipe,
    space: Space,
    seeds: Sequence[int],
    metric: str,
    adaptive: int,
    runs_per_gpu: int | None,
) -> Capacity:
    """Give every rank its device, and find out what it can train there. Collective.

    Raises:
        AgreedError: a device cannot be used, or no setting can be trained.
    """
    settings = _first_settings(space, adaptive)

    def options() -> dict[str, Any]:
        problem: Exception | None = None
        for setting in settings:
            try:
                with comms.independent():
                    return recipe.build(setting, seeds[0]).device_options
            except Exception as error:
                problem = problem or error
        assert problem is not None
        raise problem

    open_backend(ranks, **agreed(ranks, "model", options)).close()
    total = (adaptive or space.size) * len(seeds)

    def look() -> Capacity:
        with comms.independent():
            return measure(recipe, settings, seeds[0], metric, runs_per_gpu, math.ceil(total / ranks.size))

    return agreed(ranks, "device", look)


def carry_out(
    ranks: Communicator,
    recipe: Recipe,
    capacity: Capacity,
    space: Space,
    seeds: Sequence[int],
    metric: str,
    mode: str,
    out: Path,
    *,
    rungs: Sequence[int],
    eta: int,
    adaptive: int,
    decides: Mapping[str, Any],
    verbose: str | int,
    facts: Mapping[str, Any] | None = None,
    repeat: str = "",
    files: Mapping[str, str] | None = None,
) -> SweepResult:
    """Train what is not trained yet, and conclude. Collective.

    Args:
        ranks: who trains.
        recipe: what runs train.
        capacity: of this rank, as `prepare` found it.
        space: what is swept.
        seeds: every trial is trained with each.
        metric: key of the logs that trials are compared by.
        mode: "max", "min" or "auto".
        out: directory, rank 0's.
        rungs: as `Plan`.
        eta: as `Plan`.
        adaptive: how many settings Optuna chooses; 0 for those of the space.
        decides: as `Plan`.
        verbose: 0 prints nothing, 1 a live table, 2 lines, "auto" the table on a terminal and else lines.
        facts: further ones for the report.
        repeat: as `conclude`.
        files: texts to be written beside the results, by name.

    Raises:
        AgreedError: something of it cannot be done.
    """
    better = {"auto": {"up": "max", "down": "min"}.get(capacity.direction or "")}.get(mode, mode)
    if better is None:
        raise AgreedError(
            "sweep",
            ConfigError.exit_code,
            f"nobody knows whether a high or a low {metric} is good: say mode 'max' or 'min'",
            [],
        )
    plan = Plan(seeds, metric, "max" if better == "max" else "min", rungs, eta, decides, space.fields)
    capacities = gather(ranks, capacity)

    def source() -> SettingSource:
        if adaptive:
            return OptunaSource(space.random, adaptive, plan.mode, space.seed)
        return ListSource(space.settings())

    try:
        with comms.independent():
            directory = run_sweep(ranks, recipe, plan, source, out, capacity.places, verbose=verbose)
    except AgreedError:
        raise
    except BaseException as error:
        if ranks.size > 1:
            end_job(error)
        raise
    about = {
        "metric": metric,
        "ranks": ranks.size,
        "devices": "; ".join(dict.fromkeys(one.device for one in capacities)),
        "runs at once": ", ".join(str(one.places) for one in capacities),
        "versions": f"dptrain {__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
        **(facts or {}),
    }

    def finish() -> dict[str, Any] | None:
        if directory is None:
            return None
        with directory:
            for name, text in (files or {}).items():
                write_atomically(directory.path / name, text.encode())
            return asdict(conclude(directory, plan, about, repeat))

    found = ranks.agree("output", finish)
    return SweepResult(**ranks.broadcast_fact(found))


def spread(settings: Sequence[Setting], most: int) -> Sequence[Setting]:
    """Return at most so many settings, the first among them, evenly over all."""
    count = min(most, len(settings))
    return [settings[number * len(settings) // count] for number in range(count)]


def _first_settings(space: Space, adaptive: int) -> Sequence[Setting]:
    """Return settings to try out; where Optuna chooses, draws stand for them."""
    if adaptive:
        return Space(random=space.random, samples=5, seed=space.seed).settings()
    return spread(space.settings(), _TRIED)
