"""Driving a sweep, whoever asked for it: devices, measuring, training, findings."""

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from dptrain import comm as comms
from dptrain.comm import Communicator
from dptrain.errors import AgreedError, ConfigError
from dptrain.models import Model
from dptrain.runtime.failure import end_job, phase
from dptrain.runtime.files import write_atomically
from dptrain.saving.keras_zip import why_not_saved
from dptrain.sweeps import statistics
from dptrain.sweeps.adaptive import OptunaSource
from dptrain.sweeps.capacity import Capacity, first_that_works, measure, packs_of
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.keeping import Keep, finish
from dptrain.sweeps.options import SweepOptions
from dptrain.sweeps.pareto import decided, objectives_of, require_one
from dptrain.sweeps.records import Run, Setting
from dptrain.sweeps.result import SweepResult, best_trial, conclude
from dptrain.sweeps.scheduler import ListSource, SettingSource, rung_epochs
from dptrain.sweeps.space import Space, parse_seeds
from dptrain.sweeps.sweep import Stop, SweepPlan, run_sweep
from dptrain.sweeps.training import Recipe
from dptrain.train.devices import open_backend
from dptrain.version import __version__

T = TypeVar("T")

# Settings at most that are tried out before a sweep is given up.
_TRIED = 20


@dataclass(frozen=True)
class Request:
    """What a sweep is asked to do, the same on all ranks.

    Attributes:
        options: as the user has given them.
        space: what is varied.
        seeds: every trial is trained with each.
        objectives: of each metric, a key of the logs or of `training.MEASURED`, "max", "min" or "auto"; trials are
            ranked by the first.
        epochs: of a run that goes to its end.
        keep: whose models stay as files.
        further: what decides results beside options and space, as JSON can carry it: data, model, training.
        notes: sentences that belong to the findings.
    """

    options: SweepOptions
    space: Space
    seeds: Sequence[int]
    objectives: Mapping[str, str]
    epochs: int
    keep: Keep = "none"
    further: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def folds(self) -> int:
        """Of cross-validation; 1 for none."""
        return self.options.folds or 1

    @property
    def rungs(self) -> tuple[int, ...]:
        """Numbers of epochs at which trials are judged, rising."""
        one = self.options
        return () if one.halving is None else rung_epochs(one.min_epochs, self.epochs, one.halving)

    @property
    def decides(self) -> dict[str, Any]:
        """Everything that decides results, as `SweepPlan`."""
        one = self.options
        return {
            "seeds": list(self.seeds),
            "space": self.space.to_dict(),
            **{name: getattr(one, name) for name in ("adaptive", "halving", "min_epochs", "folds")},
            **decided(self.objectives),
            **self.further,
        }

    @property
    def runs(self) -> int:
        """How many trainings there will be."""
        return self.trials * len(self.seeds) * self.folds

    @property
    def trials(self) -> int:
        """How many settings there will be."""
        return self.options.adaptive or self.space.size

    def settings_to_try(self) -> Sequence[Setting]:
        """Return some settings that are like the sweep's; where Optuna chooses, draws stand for them."""
        if self.options.adaptive:
            return Space(random=self.space.random, samples=_TRIED, seed=self.space.seed).settings()
        return spread(self.space.settings(), _TRIED)

    def source(self, modes: Sequence[Literal["max", "min"]]) -> SettingSource:
        """Return where the settings come from."""
        if self.options.adaptive:
            return OptunaSource(self.space.random, self.options.adaptive, modes, self.space.seed)
        return ListSource(self.space.settings())


def request(options: SweepOptions, space: Space, epochs: int, *, default: str, sweeps_epochs: bool) -> Request:
    """Return what a sweep is asked to do.

    Args:
        options: as the user has given them.
        space: what is varied.
        epochs: of a run that goes to its end.
        default: the metric where the user names none.
        sweeps_epochs: whether runs differ in their epochs.

    Raises:
        ConfigError: options do not go together.
    """
    objectives = objectives_of([default] if options.metric is None else options.metric, options.mode)
    if options.halving is not None:
        require_one(objectives)
        if sweeps_epochs:
            raise ConfigError("halving: not supported where epochs are swept")
    statistics.check_installed()  # last: SciPy takes longer to import than all the rest
    return Request(options, space, parse_seeds(options.seeds), objectives, epochs)


def agreed(ranks: Communicator, where: str, action: Callable[[], T]) -> T:
    """Run what may find arguments wrong: alone it raises as it is, on N ranks it raises on all."""
    return action() if ranks.size == 1 else ranks.agree(where, action)


def gather(ranks: Communicator, capacity: Capacity) -> list[Capacity]:
    """Return what every rank can train. Collective."""
    return [Capacity(**fact) for fact in ranks.allgather(asdict(capacity))]


def prepare(ranks: Communicator, recipe: Recipe, asked: Request) -> Capacity:
    """Give every rank its device, and find out what it can train there. Collective.

    Raises:
        AgreedError: a device cannot be used, or no setting can be trained.
    """
    settings, seed = asked.settings_to_try(), asked.seeds[0]

    def checked(model: Model) -> Model:
        if asked.keep != "none" and (why := why_not_saved(model)):  # said now, not when all is trained
            raise ConfigError(f"no file can hold the models ({why}); --keep none, or keep='none', trains without files")
        return model

    def options() -> dict[str, Any]:
        with comms.independent():
            return first_that_works(settings, lambda setting: checked(recipe.build(setting, seed))._device_options)

    open_backend(ranks, **agreed(ranks, "model", options)).close()
    most = math.ceil(asked.runs / ranks.size)

    def look() -> Capacity:
        with comms.independent():
            run = Run(0, 0, seed, 0, asked.folds)
            metrics = [*asked.objectives]
            packs = packs_of(asked.options.packing)
            return measure(recipe, settings, run, metrics, asked.options.runs_per_device, most, packs)

    return agreed(ranks, "device", look)


def execute(
    ranks: Communicator,
    recipe: Recipe,
    asked: Request,
    capacity: Capacity,
    out: Path,
    *,
    verbose: str | int,
    facts: Mapping[str, Any] | None = None,
    repeat: Callable[[Setting, Run], str] | None = None,
    files: Mapping[str, str] | None = None,
) -> SweepResult:
    """Train what is not trained yet, and conclude. Collective.

    Args:
        ranks: who trains.
        recipe: what runs train.
        asked: what is to be done.
        capacity: of this rank, as `prepare` found it.
        out: directory, rank 0's.
        verbose: 0 prints nothing, 1 a live table, 2 lines, "auto" the table on a terminal and else lines.
        facts: further ones for the report.
        repeat: returns the command that trains a run alone, for the report.
        files: texts to be written beside the results, by name.

    Raises:
        AgreedError: something of it cannot be done.
    """
    modes = {metric: _mode(metric, mode, capacity) for metric, mode in asked.objectives.items()}
    plan = SweepPlan(
        seeds=asked.seeds,
        modes=modes,
        rungs=asked.rungs,
        eta=asked.options.halving or 3,
        decides=asked.decides,
        fields=asked.space.fields,
        folds=asked.folds,
        keep=asked.keep,
        keeps_states=asked.keep != "none" or recipe.has_test,
        seconds=asked.options.max_time,
        validation_samples=recipe.validation_samples,
        test_samples=recipe.test_samples,
    )
    capacities = gather(ranks, capacity)
    about = {
        "metric": ", ".join(modes),
        "ranks": ranks.size,
        "devices": "; ".join(dict.fromkeys(one.device for one in capacities)),
        "runs at once": ", ".join(str(one.places) for one in capacities),
        "versions": f"dptrain {__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
        **(facts or {}),
    }

    def report(directory: SweepDirectory, models: Sequence[str] = (), stopped: Stop | None = None) -> SweepResult:
        for name, text in (files or {}).items():
            write_atomically(directory.path / name, text.encode())
        return conclude(directory, plan, about, repeat, notes=asked.notes, models=models, stopped=stopped)

    try:
        with comms.independent():
            directory, stopped = run_sweep(
                *(ranks, recipe, plan, lambda: asked.source([*modes.values()]), out, capacity.places, capacity.at_once),
                packs=capacity.packs,
                verbose=verbose,
                report=report,
            )
    except AgreedError:
        raise
    except BaseException as error:
        if ranks.size > 1:
            end_job(error)
        raise

    def end() -> dict[str, Any] | None:
        if directory is None:
            return None
        with directory, comms.independent():
            models: Sequence[str] = ()
            if stopped is None:
                phase.enter("evaluation")
                models = finish(directory, recipe, plan.keep, best_trial(directory, plan), plan.metric)
            return asdict(report(directory, models, stopped))

    found = ranks.agree("output", end)
    return SweepResult(**ranks.broadcast_fact(found))


def spread(settings: Sequence[Setting], most: int) -> Sequence[Setting]:
    """Return at most so many settings, the first among them, evenly over all."""
    count = min(most, len(settings))
    return [settings[number * len(settings) // count] for number in range(count)]


def _mode(metric: str, mode: str, capacity: Capacity) -> Literal["max", "min"]:
    direction = capacity.directions[metric]
    if mode == "max" or (mode == "auto" and direction == "up"):
        return "max"
    if mode == "min" or (mode == "auto" and direction == "down"):
        return "min"
    raise AgreedError(
        "sweep",
        ConfigError.exit_code,
        f"cannot tell whether a high or a low {metric} is good: say mode 'max' or 'min'",
        [],
    )
