"""Retention of finished runs: states while a sweep runs, then model files and test values."""

from collections import defaultdict
from contextlib import closing
from typing import Literal

from dptrain.errors import ConfigError
from dptrain.saving import keras_zip
from dptrain.saving.keras_h5 import h5py_module
from dptrain.saving.state import decode, restore
from dptrain.sweeps.analysis.resampling import resampled
from dptrain.sweeps.analysis.statistics import Mode, Summary, last_endings, rank, summarize
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial
from dptrain.sweeps.scheduling.training import Recipe, Slot

# Which trials' models stay as files.
Keep = Literal["best", "all", "none"]


def keeps_models(keep: Keep | None) -> tuple[Keep, str]:
    """Return whose models are kept, by default the best trial's, and why none can be."""
    if keep == "none":
        return "none", ""
    try:
        h5py_module()
    except ConfigError as error:
        if keep is not None:
            raise ConfigError(f"keep = {keep!r}: {error}") from None
        return "none", f"No models are kept: {error}."
    return keep or "best", ""


class Retention:
    """Decides which states stay while a sweep runs: the best trial's, and those of trials that may become it."""

    def __init__(self, directory: SweepDirectory, metric: str, mode: Mode, runs: int, everything: bool) -> None:
        self._directory, self._metric, self._mode, self._runs = directory, metric, mode, runs
        self._everything = everything
        self._best: Summary | None = None
        self._endings: dict[int, dict[int, Ending]] = defaultdict(dict)
        for ending in directory.endings:
            self.ended(ending)

    def ended(self, ending: Ending) -> None:
        """Register a segment's ending; after a trial's last one, release the states of the worse of two trials."""
        trial = ending.run.trial
        self._endings[trial][ending.run.number] = ending
        endings = list(self._endings[trial].values())
        if self._everything or len(endings) < self._runs or not all(ending.status.is_final for ending in endings):
            return
        [summary] = summarize([Trial(trial, {})], endings, self._metric, self._mode)
        before = self._best
        ranked = rank([summary] if before is None else [before, summary], self._mode)
        self._best = ranked[0] if ranked[0].complete else None
        for candidate in (summary, *([] if before is None else [before])):
            if candidate is not self._best:
                for other in self._endings[candidate.trial].values():
                    self._directory.release(other.run)


def finish(directory: SweepDirectory, recipe: Recipe, keep: Keep, best: int | None, metric: str) -> list[str]:
    """Write the models of finished runs, test those of the best trial, and return the model files; each once."""
    completed = [ending.run for ending in last_endings(directory.endings) if ending.status is Status.DONE]
    models_of: list[Run] = []
    with closing(Slot()) as slot:
        for run in completed:
            is_kept = keep == "all" or (keep == "best" and run.trial == best)
            is_tested = not recipe.has_test or run.trial != best or run.number in directory.tested
            if is_kept:
                models_of.append(run)
            if directory.has_state(run) and (is_kept or not is_tested):
                _finish_run(directory, recipe, run, slot, is_tested, is_kept, metric.removeprefix("val_"))
            if not is_kept:
                directory.release(run)
    return directory.keep_models(models_of)


def _finish_run(
    directory: SweepDirectory, recipe: Recipe, run: Run, slot: Slot, tested: bool, writes: bool, metric: str
) -> None:
    """Rebuild a run's model from its state; write and test it where that is not done yet."""
    is_to_write = writes and not directory.has_model(run)
    if tested and not is_to_write:
        return
    model = recipe.build(directory.trials[run.trial].setting, run.seed, run)
    model._put_on(slot.backend(model._device_options))
    try:
        restore(model, decode(directory.state(run), f"the state of run {run.number}")[1])
        if not tested:
            logs = recipe.test(model)
            draws = resampled(model, *recipe.test_arrays(), metric) if metric in logs else []
            directory.add_test(run, logs, draws)
        if is_to_write:
            model._require_weights()
            directory.add_model(run, keras_zip.encode(model))
    finally:
        model._release_device()
