"""`dptrain.sweep`: sweeps from Python, in Keras' words."""

import inspect
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dptrain import comm as comms
from dptrain.batches.inputs import as_array, is_array
from dptrain.callbacks import Callback
from dptrain.data.loading import fingerprint
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.runtime.failure import phase
from dptrain.sweeps import statistics
from dptrain.sweeps.driver import Request, agreed, execute, prepare
from dptrain.sweeps.records import Setting
from dptrain.sweeps.result import RESERVED, SweepResult
from dptrain.sweeps.scheduler import rung_epochs
from dptrain.sweeps.space import Space, parse_seeds
from dptrain.sweeps.training import Recipe
from dptrain.train.trainer import StepIterator
from dptrain.utils import PyDataset, default_seed, set_random_seed

_FIT = inspect.signature(Model.fit).parameters
# Arguments of `fit` that a sweep has its own word for, or that each run needs afresh.
_OWN = ("self", "x", "y", "callbacks", "verbose", "initial_epoch")


def sweep(
    build_model: Callable[..., Model],
    space: Space | Mapping[str, Any],
    *,
    seeds: str | int | Iterable[str | int],
    x: Any,
    y: Any = None,
    metric: str | None = None,
    mode: Literal["auto", "max", "min"] = "auto",
    samples: int = 0,
    adaptive: int = 0,
    search_seed: int = 0,
    halving: int | None = None,
    min_epochs: int = 1,
    runs_per_gpu: int | None = None,
    out: str | Path | None = None,
    callbacks: Callable[[], Sequence[Callback]] | None = None,
    verbose: str | int = "auto",
    **fit: Any,
) -> SweepResult:
    """Train a model for every setting of `space` with every seed. Collective.

    Every rank trains several runs at once, each for itself; a run has the bits of the same training alone.

    Args:
        build_model: returns a new compiled model; called with the swept fields that are its parameters. Its seed is
            the run's, unless it gives itself another.
        space: values by name: a list is a grid; "0.1..0.5", "log:1e-5..1e-1", "16..512" or "a,b" is drawn from. A name
            is a parameter of `build_model`, or of `fit` ("batch_size").
        seeds: such as range(16) or "0-15".
        x: as in `fit`, an array.
        y: as in `fit`.
        metric: key of the logs that trials are compared by, at the end of a run; by default "val_loss" where there is
            validation data, else "loss".
        mode: whether a high or a low value is good; "auto" to conclude it from the metric.
        samples: how many settings are drawn at random; each meets the whole grid.
        adaptive: how many settings Optuna chooses as results come; instead of `samples`, and without a grid.
        search_seed: of the draws.
        halving: one trial in so many goes on from a rung (ASHA), judged by the mean over its seeds; None trains all to
            their end.
        min_epochs: the first rung; the next are `halving` times as long.
        runs_per_gpu: runs that a rank trains at once; by default found out by measuring.
        out: directory of the results, to be continued if it holds the same sweep; None keeps no files.
        callbacks: returns new callbacks for a run.
        verbose: 0 prints nothing, 1 a live table, 2 lines, "auto" the table on a terminal and else lines.
        fit: further arguments of `fit`, such as epochs, batch_size and validation_data.

    Returns:
        Trials and runs, on every rank.

    Raises:
        ConfigError: an argument is wrong, or no setting makes a model.
        OutputError: `out` cannot be used.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    ranks = comms.current()
    phase.enter("sweep")

    def check() -> tuple[Space, _Recipe, tuple[int, ...], str, tuple[int, ...]]:
        statistics.check_installed()
        for name, value in (("halving", halving), ("runs_per_gpu", runs_per_gpu)):
            _check_whole(name, value, 1)
        for name, value in (("adaptive", adaptive), ("samples", samples), ("epochs", fit.get("epochs"))):
            _check_whole(name, value, 0)
        _check_whole("min_epochs", min_epochs, 1)
        if not (isinstance(x, PyDataset) or is_array(x)):
            raise ConfigError(f"sweep: x is a {type(x).__name__}: expected an array, which every run reads anew")
        if verbose not in ("auto", 0, 1, 2):
            raise ConfigError(f"verbose = {verbose!r}: expected 'auto', 0, 1 or 2")
        chosen = space if isinstance(space, Space) else _space(space, samples, adaptive, search_seed)
        recipe = _Recipe(build_model, chosen, x, y, callbacks, fit)
        if mode not in ("auto", "max", "min"):
            raise ConfigError(f"mode = {mode!r}: expected 'auto', 'max' or 'min'")
        if halving is not None and callbacks is not None:
            raise ConfigError("not supported: callbacks with halving, which takes runs up again")
        if halving is not None and "epochs" in chosen.fields:
            raise ConfigError("not supported: halving where epochs are swept")
        rungs = () if halving is None else rung_epochs(min_epochs, fit.get("epochs", 1), halving)
        validated = fit.get("validation_data") is not None or bool(fit.get("validation_split"))
        validated = validated or not {"validation_data", "validation_split"}.isdisjoint(chosen.fields)
        if metric is not None and metric.startswith("val_") and not validated:
            raise ConfigError(f"metric = {metric!r}: there is no validation; give validation_data or validation_split")
        return chosen, recipe, parse_seeds(seeds), metric or ("val_loss" if validated else "loss"), rungs

    chosen, recipe, all_seeds, key, rungs = agreed(ranks, "sweep", check)
    decides = {
        "space": chosen.to_dict(),
        "adaptive": adaptive,
        "seeds": list(all_seeds),
        "metric": key,
        "mode": mode,
        "halving": halving,
        "min_epochs": min_epochs,
        "data": _facts([x, y]),
        "fit": {name: _facts(value) for name, value in fit.items()},
        "build_model": getattr(build_model, "__qualname__", type(build_model).__name__),
    }
    ranks.require_same("the ranks sweep differently", decides)
    with ExitStack() as stack:
        folder = Path() if out is None else Path(out)
        if out is None and ranks.rank == 0:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-"))) / "sweep"
        asked = Request(chosen, all_seeds, key, mode, rungs, halving or 3, adaptive, runs_per_gpu, decides)
        result = execute(ranks, recipe, asked, prepare(ranks, recipe, asked), folder, verbose=verbose)
        phase.enter("user code")
        return result


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least):
        raise ConfigError(f"{name} = {value!r}: expected an integer >= {least}")


def _facts(value: Any) -> Any:
    """Return what tells an argument of `fit` from another one, of what JSON can carry."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _facts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_facts(one) for one in value]
    if is_array(value):
        array = as_array(value, "x")
        return fingerprint(array, array if array.ndim == 1 else array[:0])
    return type(value).__name__


def _space(values: Mapping[str, Any], samples: int, adaptive: int, seed: int) -> Space:
    """Return the space of a mapping: lists are grids, texts and distributions are drawn from."""
    grid: dict[str, Any] = {
        name: list(value) if isinstance(value, range) else value
        for name, value in values.items()
        if isinstance(value, list | tuple | range | np.ndarray)
    }
    random = {name: value for name, value in values.items() if name not in grid}
    if adaptive and (grid or samples):
        raise ConfigError("adaptive: every field is to be drawn ('0.1..0.5', 'a,b'), no grid and no samples")
    return Space(grid=grid, random=random, samples=adaptive or samples, seed=seed)


class _Recipe(Recipe):
    """Models of a function, trained by `fit`.

    Raises:
        ConfigError: a swept field is a parameter of neither; or an argument is not one of `fit`.
    """

    def __init__(
        self,
        build_model: Callable[..., Model],
        space: Space,
        x: Any,
        y: Any,
        callbacks: Callable[[], Sequence[Callback]] | None,
        fit: Mapping[str, Any],
    ) -> None:
        self._build_model, self._x, self._y, self._fit = build_model, x, y, dict(fit)
        self._callbacks = callbacks or (lambda: ())
        for name, given in (("build_model", build_model), ("callbacks", self._callbacks)):
            if not callable(given):
                raise ConfigError(f"{name}: expected a function that returns new ones, found {type(given).__name__}")
        self._built: weakref.WeakSet[Model] = weakref.WeakSet()
        taken = inspect.signature(build_model).parameters
        anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
        self._passes_seed = "seed" in taken
        for name in fit:
            if name not in _FIT or name in _OWN:
                raise ConfigError(f"sweep: {name!r} is no argument of it, nor one of fit that it takes")
        self._of_fit = [name for name in space.fields if name not in taken and name in _FIT and name not in _OWN]
        for name in space.fields:
            if name in RESERVED:
                raise ConfigError(f"swept {name!r}: results have something else of that name; call it otherwise")
            if name not in taken and name not in self._of_fit and not anything:
                raise ConfigError(f"swept {name!r} is a parameter of neither build_model nor fit")

    def build(self, setting: Setting, seed: int) -> Model:
        """Call the user's function, with the run's seed as the default of new models."""
        chosen = {name: value for name, value in setting.items() if name not in self._of_fit}
        before = default_seed()
        set_random_seed(seed)
        try:
            model = self._build_model(**chosen, **({"seed": seed} if self._passes_seed else {}))
        finally:
            set_random_seed(before)
        if not isinstance(model, Model) or not model.compiled:
            raise ConfigError(f"build_model: expected a compiled model, found {type(model).__name__}")
        if model in self._built:
            raise ConfigError(
                "build_model: returned the same model twice; expected a new one each time, for a run each"
            )
        self._built.add(model)
        return model

    def train(self, model: Model, setting: Setting, callbacks: Sequence[Callback]) -> StepIterator[None]:
        """Call `fit`."""
        arguments = self._fit | {name: setting[name] for name in self._of_fit}
        all_callbacks = [*self._callbacks(), *callbacks]
        return model.fit_steps(self._x, self._y, callbacks=all_callbacks, verbose=0, **arguments)
