"""`dptrain.sweep`: sweeps from Python, in Keras' words."""

import inspect
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dptrain import comm as comms
from dptrain.batches.inputs import as_array, is_array
from dptrain.callbacks import Callback, Logs
from dptrain.data.holdout import fold_rows
from dptrain.errors import ConfigError, ExitCode, PreemptedError
from dptrain.models import Model
from dptrain.program import tree
from dptrain.runtime.checked import NotValidError, checked
from dptrain.runtime.failure import leave, phase
from dptrain.runtime.text import short
from dptrain.sweeps.analysis.pareto import require_free
from dptrain.sweeps.arguments import Builder, facts, require_array, require_function
from dptrain.sweeps.driver import Request, agreed, execute, make_request, prepare
from dptrain.sweeps.keeping import Keep, keeps_models
from dptrain.sweeps.options import SweepOptions
from dptrain.sweeps.records import Run, Setting
from dptrain.sweeps.result import RESERVED, SweepResult
from dptrain.sweeps.scheduling.training import Recipe
from dptrain.sweeps.space import Space
from dptrain.train.trainer import StepIterator

# A sweep uses all of the process.
_SWEEPING = threading.RLock()
_FIT = inspect.signature(Model.fit).parameters
# Arguments of `fit` that a sweep names differently, or that each run needs anew.
_OWN = ("self", "x", "y", "callbacks", "verbose", "initial_epoch")


def sweep(
    build_model: Callable[..., Model],
    space: Space | Mapping[str, Any],
    *,
    seeds: str | int | Iterable[str | int],
    x: Any,
    y: Any = None,
    metric: str | Sequence[str] | None = None,
    mode: Literal["auto", "max", "min"] | Sequence[Literal["auto", "max", "min"]] = "auto",
    samples: int = 0,
    adaptive: int = 0,
    search_seed: int = 0,
    halving: int | None = None,
    min_epochs: int = 1,
    runs_per_device: int | None = None,
    packing: bool | int = True,
    folds: int | None = None,
    test_data: Any = None,
    keep: Keep | None = None,
    max_time: float | str | None = None,
    out: str | Path | None = None,
    callbacks: Callable[[], Sequence[Callback]] | None = None,
    verbose: str | int = "auto",
    **fit: Any,
) -> SweepResult:
    """Train a model for every setting of `space` with every seed. Collective.

    Every rank trains several independent runs at once; a run has the same bits as when trained alone. A sweep started
    by another thread waits for this one.

    Args:
        build_model: returns a new compiled model; called with the swept fields that are its parameters. The model's
            seed is the run's, unless it sets its own.
        space: values by name: a list is a grid; "0.1..0.5", "log:1e-5..1e-1", "16..512" or "a,b" is drawn from. A name
            is a parameter of `build_model`, or of `fit` ("batch_size").
        seeds: such as range(16) or "0-15".
        x: as in `fit`, an array.
        y: as in `fit`.
        metric: log key that trials are compared by, at the end of a run; by default "val_loss" with validation data,
            else "loss". "parameters" (elements of a model's weights), "seconds" (of its run) and "sparsity" (the
            fraction of zeros in its kernels) are metrics too. With several, the first ranks the trials, and the trials
            that no other beats in all are the Pareto front, `SweepResult.front`; `adaptive` then optimizes all, and
            `halving` is refused.
        mode: "max" or "min"; "auto" to infer it from the metric. With several metrics, one for each, or "auto" for all.
        samples: number of random settings; each is combined with the whole grid.
        adaptive: number of settings that Optuna chooses from earlier results; instead of `samples`, and without a grid.
        search_seed: seed of the random settings.
        halving: one trial in this many continues from a rung (ASHA), by the mean over its seeds; None trains all fully.
        min_epochs: the first rung; the next are `halving` times as long.
        runs_per_device: runs that a rank trains at once; measured by default.
        packing: on a GPU, runs that differ only in numbers share launches, as a pack; a number: split into this many
            packs, which run concurrently; False: each run has its own stream.
        folds: cross-validation: every trial and seed is trained this many times, each time without a different part of
            x and y, on which it is validated. Folds of integer labels are stratified, and each seed has its own.
            Intervals allow for the samples that trainings share, see `dptrain.sweeps.analysis.intervals.widening`.
        test_data: (x, y), evaluated once at the end by the best trial's final models; plays no part in the choice.
        keep: models kept in `out` as `.keras` files: "best" for the best trial's, "all" or "none"; None for the
            best trial's if h5py is installed.
        max_time: seconds after which the sweep stops, or a string such as "2h"; with the same `out` it resumes.
        out: directory of the results, resumed if it contains the same sweep, or one with fewer seeds, settings or
            epochs; None keeps no files.
        callbacks: returns new callbacks for a run.
        verbose: 0 prints nothing, 1 a live table, 2 lines, "auto" the table on a terminal and else lines.
        fit: further arguments of `fit`, such as epochs, batch_size and validation_data or validation_split (which takes
            the last samples, as in Keras).

    Returns:
        Trials and runs, on every rank. After Ctrl-C the results so far are written, and KeyboardInterrupt is raised;
        SIGTERM and SIGUSR1 end the script with exit code 75.

    Raises:
        ConfigError: an argument is wrong, or no setting makes a model.
        OutputError: `out` cannot be used.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    ranks = comms.current()
    phase.enter("sweep")

    def check() -> tuple[Request, _Recipe]:
        arguments = {
            **dict(seeds=seeds, metric=metric, mode=mode, samples=samples, adaptive=adaptive),
            **dict(search_seed=search_seed, halving=halving, min_epochs=min_epochs, runs_per_device=runs_per_device),
            **dict(packing=packing, folds=folds, keep=keep, max_time=max_time),
        }
        options = _options(arguments)
        _check_whole("epochs", fit.get("epochs"), 0)
        require_array("sweep", x)
        if verbose not in ("auto", 0, 1, 2):
            raise ConfigError(f"verbose = {verbose!r}: expected 'auto', 0, 1 or 2")
        chosen = space if isinstance(space, Space) else _space(space, samples, adaptive, search_seed)
        recipe = _Recipe(build_model, chosen, x, y, callbacks, fit, folds or 1, test_data)
        if halving is not None and callbacks is not None:
            raise ConfigError("not supported: callbacks with halving, which pauses and resumes runs")
        return _checked_request(options, chosen, fit), recipe

    request, recipe = agreed(ranks, "sweep", check)
    models, _ = agreed(ranks, "sweep", lambda: keeps_models("none" if out is None else keep))
    # Callbacks may depend on the number of epochs; with them, another number is another sweep.
    length = {} if callbacks is not None or "epochs" in request.space.fields else {"epochs": request.epochs}
    options = {name: value for name, value in fit.items() if name not in length}
    further = {"data": facts([x, y]), **length, **_decisive(test_data, options, build_model)}
    request = replace(request, keep=models, further=further)
    ranks.require_same("the ranks sweep differently", request.decides)
    with ExitStack() as stack:
        stack.enter_context(_SWEEPING)
        folder = Path() if out is None else Path(out)
        if out is None and ranks.rank == 0:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-"))) / "sweep"
        result = execute(ranks, recipe, request, prepare(ranks, recipe, request), folder, verbose=verbose)
        phase.enter("user code")
    if result.signal:
        _leave(result, out)
    return result


def _options(arguments: Mapping[str, Any]) -> SweepOptions:
    try:
        return checked(SweepOptions, arguments)
    except NotValidError as error:
        raise ConfigError(f"{error.place[0]} = {short(error.value)}: {error}") from None


def _decisive(test_data: Any, fit: Mapping[str, Any], build_model: Any) -> dict[str, Any]:
    """Return, as JSON, the test data, model and arguments of `fit` that decide results."""
    return {
        "test_data": facts(test_data),
        "fit": {name: facts(value) for name, value in fit.items()},
        "build_model": getattr(build_model, "__qualname__", type(build_model).__name__),
    }


def _checked_request(options: SweepOptions, space: Space, fit: Mapping[str, Any]) -> Request:
    """Return the request, with metrics that `fit` can log."""
    validation = {"validation_data", "validation_split"}
    validated = fit.get("validation_data") is not None or bool(fit.get("validation_split"))
    validated = validated or options.folds is not None or not validation.isdisjoint(space.fields)
    default, epochs = "val_loss" if validated else "loss", fit.get("epochs", 1)
    request = make_request(options, space, epochs, default=default, sweeps_epochs="epochs" in space.fields)
    for key in request.objectives:
        if key.startswith("val_") and not validated:
            raise ConfigError(
                f"metric = {key!r}: there is no validation data; pass validation_data or validation_split"
            )
    require_free(space.fields, [*request.objectives])
    return request


def _leave(result: SweepResult, out: str | Path | None) -> None:
    """End the script, or raise KeyboardInterrupt, after a signal."""
    code = ExitCode.INTERRUPTED if result.signal == "SIGINT" else ExitCode.PREEMPTED
    advice = "" if out is None else f"; start again with out={str(out)!r} to continue"
    leave(PreemptedError("sweep", code, f"{result.stopped}{advice}", []))


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least):
        raise ConfigError(f"{name} = {value!r}: expected an integer >= {least}")


def _space(values: Mapping[str, Any], samples: int, adaptive: int, seed: int) -> Space:
    """Return the space of a mapping: lists are grids, texts and distributions are drawn from."""
    grid: dict[str, Any] = {
        name: list(value) if isinstance(value, range) else value
        for name, value in values.items()
        if isinstance(value, list | tuple | range | np.ndarray)
    }
    random = {name: value for name, value in values.items() if name not in grid}
    if adaptive and (grid or samples):
        raise ConfigError(
            "adaptive: expected a range to draw from for every field ('0.1..0.5', 'a,b'), no grid and no samples"
        )
    return Space(grid=grid, random=random, samples=adaptive or samples, seed=seed)


class _Recipe(Recipe):
    def __init__(
        self,
        build_model: Callable[..., Model],
        space: Space,
        x: Any,
        y: Any,
        callbacks: Callable[[], Sequence[Callback]] | None,
        fit: Mapping[str, Any],
        folds: int = 1,
        test: Any = None,
    ) -> None:
        self._test, self.has_test = test, test is not None
        if self.has_test and not (isinstance(test, tuple | list) and len(test) == 2):
            raise ConfigError(f"test_data: expected (x, y), found {type(test).__name__}")
        if folds > 1:
            _check_folded(folds, x, y, {*fit, *space.fields})
        self.test_samples = _rows(test[0]) if self.has_test else None
        if folds > 1:
            self.validation_samples = _rows(x)
        elif "validation_split" not in space.fields:
            self.validation_samples = _validation_rows(x, fit)
        self._builder, self._x, self._y, self._fit = Builder(build_model), x, y, dict(fit)
        self._callbacks = callbacks or (lambda: ())
        require_function("callbacks", self._callbacks)
        parameters = self._builder.takes
        anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in fit:
            if name not in _FIT or name in _OWN:
                raise ConfigError(f"sweep: {name!r} is neither an argument of sweep nor one that it passes to fit")
        self._of_fit = [name for name in space.fields if name not in parameters and name in _FIT and name not in _OWN]
        for name in space.fields:
            if name in RESERVED:
                raise ConfigError(f"swept {name!r}: results already have a column of that name; rename it")
            if name not in parameters and name not in self._of_fit and not anything:
                raise ConfigError(f"swept {name!r} is a parameter of neither build_model nor fit")

    def build(self, setting: Setting, seed: int, run: Run | None = None) -> Model:
        return self._builder.build(seed, **{name: value for name, value in setting.items() if name not in self._of_fit})

    def train(self, model: Model, setting: Setting, callbacks: Sequence[Callback], run: Run) -> StepIterator[None]:
        """Call `fit`; in cross-validation on copies of the fold's rows."""
        arguments = self._fit | {name: setting[name] for name in self._of_fit}
        x, y = self._x, self._y
        if run.folds > 1:
            everything, targets = as_array(x, "x"), as_array(y, "y")
            rows, validation_rows = fold_rows(targets, run.fold, run.folds, run.seed)
            x, y = everything[rows], targets[rows]
            arguments["validation_data"] = (everything[validation_rows], targets[validation_rows])
        all_callbacks = [*self._callbacks(), *callbacks]
        return model._fit_in_steps(x, y, callbacks=all_callbacks, verbose=0, **arguments)

    def test(self, model: Model) -> Logs:
        logs = model.evaluate(x=self._test[0], y=self._test[1], verbose=0, return_dict=True)
        assert isinstance(logs, dict)
        return logs

    def test_arrays(self) -> tuple[Any, Any]:
        return self._test[0], self._test[1]


def _rows(x: Any) -> int | None:
    """Return the number of samples; None where only reading the data would tell."""
    arrays = tree.leaves(x)
    return len(arrays[0]) if arrays and all(map(is_array, arrays)) else None


def _validation_rows(x: Any, fit: Mapping[str, Any]) -> int | None:
    """Return the number of samples that `fit` validates on; None where only reading the data would tell."""
    validation_data = fit.get("validation_data")
    if isinstance(validation_data, tuple | list) and validation_data:
        return _rows(validation_data[0])
    rows, fraction = _rows(x), fit.get("validation_split")
    return rows - int(rows * (1 - fraction)) if rows and isinstance(fraction, float) and 0 < fraction < 1 else None


def _check_folded(folds: int, x: Any, y: Any, arguments: Collection[str]) -> None:
    if not is_array(x) or not is_array(y):
        raise ConfigError("folds: expected x and y to be arrays, whose rows can be selected")
    if len(as_array(x, "x")) != len(as_array(y, "y")) or len(as_array(y, "y")) < folds:
        raise ConfigError(
            f"folds = {folds}: x has {len(x)} rows, y {len(y)}: expected equal numbers, and at least one row per fold"
        )
    for name in ("validation_data", "validation_split", "sample_weight"):
        if name in arguments:
            raise ConfigError(f"not supported: {name} with folds, which select the validation samples")
