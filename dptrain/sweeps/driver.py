"""Runs a sweep for the CLI and the Python API: devices, capacity, training, findings."""

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
from dptrain.runtime.failure import end_job, ending_by_signals, phase
from dptrain.runtime.storage.files import write_atomically
from dptrain.saving.keras_zip import why_not_saved
from dptrain.sweeps.adaptive import OptunaSource
from dptrain.sweeps.analysis import statistics
from dptrain.sweeps.analysis.pareto import decided, objectives_of, require_single_metric
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.keeping import Keep, finish
from dptrain.sweeps.options import SweepOptions
from dptrain.sweeps.records import Run, Setting
from dptrain.sweeps.result import SweepResult, best_trial, conclude
from dptrain.sweeps.scheduling.capacity import Capacity, first_that_works, measure, packs_of
from dptrain.sweeps.scheduling.scheduler import ListSource, SettingSource, rung_epochs
from dptrain.sweeps.scheduling.training import Recipe
from dptrain.sweeps.space import Space, parse_seeds
from dptrain.sweeps.sweep import Stop, SweepPlan, run_sweep
from dptrain.train.devices import open_backend
from dptrain.version import __version__

T = TypeVar("T")

# The most settings tried before a sweep is refused.
_TRIED = 20


@dataclass(frozen=True)
class Request:
    """The checked request for a sweep, the same on all ranks."""

    options: SweepOptions  # as the user gave them
    space: Space
    seeds: Sequence[int]  # of every trial
    # log key or `training.MEASURED` -> "max", "min" or "auto"; the first ranks the trials
    objectives: Mapping[str, str]
    epochs: int  # of a full run
    keep: Keep = "none"
    further: Mapping[str, Any] = field(default_factory=dict)  # JSON: data, model and training, which decide results too
    notes: Sequence[str] = ()  # extra sentences of the findings

    @property
    def folds(self) -> int:
        """Number of folds; 1 without cross-validation."""
        return self.options.folds or 1

    @property
    def rungs(self) -> tuple[int, ...]:
        """Rising numbers of epochs at which trials are judged."""
        options = self.options
        return () if options.halving is None else rung_epochs(options.min_epochs, self.epochs, options.halving)

    @property
    def decides(self) -> dict[str, Any]:
        """Everything that decides results, as `SweepPlan.decides`."""
        options = self.options
        return {
            "seeds": list(self.seeds),
            "space": self.space.to_dict(),
            **{name: getattr(options, name) for name in ("adaptive", "halving", "min_epochs", "folds")},
            **decided(self.objectives),
            **self.further,
        }

    @property
    def runs(self) -> int:
        """Number of trainings."""
        return self.trials * len(self.seeds) * self.folds

    @property
    def trials(self) -> int:
        """Number of settings."""
        return self.options.adaptive or self.space.size

    def settings_to_try(self) -> Sequence[Setting]:
        """Return some settings like the sweep's; random draws in place of Optuna's choices."""
        if self.options.adaptive:
            return Space(random=self.space.random, samples=_TRIED, seed=self.space.seed).settings()
        return spread(self.space.settings(), _TRIED)

    def source(self, modes: Sequence[Literal["max", "min"]]) -> SettingSource:
        """Return the source of the settings."""
        if self.options.adaptive:
            return OptunaSource(self.space.random, self.options.adaptive, modes, self.space.seed)
        return ListSource(self.space.settings())


def make_request(options: SweepOptions, space: Space, epochs: int, *, default: str, sweeps_epochs: bool) -> Request:
    """Check the options together and return the request; `default` is the metric if none is named."""
    objectives = objectives_of([default] if options.metric is None else options.metric, options.mode)
    if options.halving is not None:
        require_single_metric(objectives)
        if sweeps_epochs:
            raise ConfigError("halving: not supported when epochs are swept")
    statistics.check_installed()  # last: SciPy takes longer to import than all the rest
    return Request(options, space, parse_seeds(options.seeds), objectives, epochs)


def agreed(ranks: Communicator, where: str, action: Callable[[], T]) -> T:
    """Run a check that may raise; on N ranks it raises on all of them."""
    return action() if ranks.size == 1 else ranks.agree(where, action)


def gather(ranks: Communicator, capacity: Capacity) -> list[Capacity]:
    """Return the capacity of every rank. Collective."""
    return [Capacity(**fact) for fact in ranks.allgather(asdict(capacity))]


def prepare(ranks: Communicator, recipe: Recipe, request: Request) -> Capacity:
    """Open every rank's device and measure its capacity. Collective."""
    settings, seed = request.settings_to_try(), request.seeds[0]

    def checked(model: Model) -> Model:
        if request.keep != "none" and (why := why_not_saved(model)):  # reported before the training, not after it
            raise ConfigError(f"the models cannot be saved ({why}); use --keep none, or keep='none'")
        return model

    def options() -> dict[str, Any]:
        with comms.independent():
            return first_that_works(settings, lambda setting: checked(recipe.build(setting, seed))._device_options)

    most = math.ceil(request.runs / ranks.size)

    def look() -> Capacity:
        with comms.independent():
            run = Run(0, 0, seed, 0, request.folds)
            metrics = [*request.objectives]
            packs = packs_of(request.options.packing)
            return measure(recipe, settings, run, metrics, request.options.runs_per_device, most, packs)

    with ending_by_signals():  # which a sweep that has begun notes, to stop in order
        open_backend(ranks, **agreed(ranks, "model", options)).close()
        return agreed(ranks, "device", look)


def execute(
    ranks: Communicator,
    recipe: Recipe,
    request: Request,
    capacity: Capacity,
    out: Path,
    *,
    verbose: str | int,
    facts: Mapping[str, Any] | None = None,
    repeat: Callable[[Setting, Run], str] | None = None,
    files: Mapping[str, str] | None = None,
    writes_report: bool = True,
) -> SweepResult:
    """Train what is missing, write the results and, where wanted, the report, and return the result. Collective."""
    modes = {metric: _mode(metric, mode, capacity) for metric, mode in request.objectives.items()}
    plan = _plan(request, recipe, modes)
    report_facts = _report_facts(ranks, modes, gather(ranks, capacity)) | dict(facts or {})

    def report(directory: SweepDirectory, models: Sequence[str] = (), stopped: Stop | None = None) -> SweepResult:
        for name, text in (files or {}).items():
            write_atomically(directory.path / name, text.encode())
        options = {"notes": request.notes, "models": models, "stopped": stopped, "writes_report": writes_report}
        return conclude(directory, plan, report_facts, repeat, **options)  # type: ignore[arg-type]

    try:
        with comms.independent():
            directory, stopped = run_sweep(
                *(
                    ranks,
                    recipe,
                    plan,
                    lambda: request.source([*modes.values()]),
                    out,
                    capacity.places,
                    capacity.at_once,
                ),
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

    result = ranks.agree("output", end)
    return SweepResult(**ranks.broadcast_fact(result))


def spread(settings: Sequence[Setting], most: int) -> Sequence[Setting]:
    """Return at most `most` settings, evenly spread, with the first among them."""
    count = min(most, len(settings))
    return [settings[number * len(settings) // count] for number in range(count)]


def _plan(request: Request, recipe: Recipe, modes: Mapping[str, Literal["max", "min"]]) -> SweepPlan:
    return SweepPlan(
        seeds=request.seeds,
        modes=modes,
        rungs=request.rungs,
        eta=request.options.halving or 3,
        decides=request.decides,
        fields=request.space.fields,
        folds=request.folds,
        keep=request.keep,
        keeps_states=request.keep != "none" or recipe.has_test,
        seconds=request.options.max_time,
        validation_samples=recipe.validation_samples,
        test_samples=recipe.test_samples,
    )


def _report_facts(ranks: Communicator, modes: Mapping[str, str], capacities: Sequence[Capacity]) -> dict[str, Any]:
    return {
        "metric": ", ".join(modes),
        "ranks": ranks.size,
        "devices": "; ".join(dict.fromkeys(capacity.device for capacity in capacities)),
        "runs at once": ", ".join(str(capacity.places) for capacity in capacities),
        "versions": f"dptrain {__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
    }


def _mode(metric: str, mode: str, capacity: Capacity) -> Literal["max", "min"]:
    direction = capacity.directions[metric]
    if mode == "max" or (mode == "auto" and direction == "up"):
        return "max"
    if mode == "min" or (mode == "auto" and direction == "down"):
        return "min"
    raise AgreedError(
        "sweep",
        ConfigError.exit_code,
        f"cannot tell whether a high or a low {metric} is better: set mode 'max' or 'min'",
        [],
    )
