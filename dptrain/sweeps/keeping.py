"""What a sweep keeps of runs that have ended: states while they are wanted, then models as files, and test values."""

from collections import defaultdict
from contextlib import closing
from typing import Literal

from dptrain.errors import ConfigError
from dptrain.saving import keras_zip
from dptrain.saving.keras_h5 import h5py_module
from dptrain.saving.state import decode, restore
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial
from dptrain.sweeps.resampling import resampled
from dptrain.sweeps.statistics import Mode, Summary, last_endings, rank, summarize
from dptrain.sweeps.training import Recipe, Slot

# Which trials' models stay as files.
Keep = Literal["best", "all", "none"]


def keeps_models(keep: Keep | None) -> tuple[Keep, str]:
    """Return whose models are kept, by default the best trial's, and why there are none where they cannot be.

    Args:
        keep: as asked for; None where nobody has.

    Raises:
        ConfigError: models were asked for, and h5py is not installed.
    """
    if keep == "none":
        return "none", ""
    try:
        h5py_module()
    except ConfigError as error:
        if keep is not None:
            raise ConfigError(f"keep = {keep!r}: {error}") from None
        return "none", f"No models are kept: {error}."
    return keep or "best", ""


class Keeping:
    """Decides which states stay while a sweep goes on: the best trial's, and those of trials that may become it.

    Args:
        directory: of the sweep, which holds the states; those of trials that have ended are judged at once.
        metric: log key that trials are judged by.
        mode: "max" or "min".
        runs: of a trial.
        everything: no state goes.
    """

    def __init__(self, directory: SweepDirectory, metric: str, mode: Mode, runs: int, everything: bool) -> None:
        self._directory, self._metric, self._mode, self._runs = directory, metric, mode, runs
        self._everything = everything
        self._best: Summary | None = None
        self._endings: dict[int, dict[int, Ending]] = defaultdict(dict)
        for ending in directory.endings:
            self.ended(ending)

    def ended(self, ending: Ending) -> None:
        """Learn how a segment ended; where it was the last of its trial, one of two trials' states go."""
        trial = ending.run.trial
        self._endings[trial][ending.run.number] = ending
        endings = list(self._endings[trial].values())
        if self._everything or len(endings) < self._runs or not all(one.status.is_final for one in endings):
            return
        [summary] = summarize([Trial(trial, {})], endings, self._metric, self._mode)
        before = self._best
        ranked = rank([summary] if before is None else [before, summary], self._mode)
        self._best = ranked[0] if ranked[0].complete else None
        for one in (summary, *([] if before is None else [before])):
            if one is not self._best:
                for other in self._endings[one.trial].values():
                    self._directory.release(other.run)


def finish(directory: SweepDirectory, recipe: Recipe, keep: Keep, best: int | None, metric: str) -> list[str]:
    """Write models of runs that are done, and evaluate those of the best trial on the test set, each once.

    Args:
        directory: of the sweep.
        recipe: that the runs were trained by.
        keep: whose models are written; the states of the others go.
        best: the best trial's number; None where no trial has come to its end.
        metric: log key that trials are judged by.

    Returns:
        The files of models that there are, relative to the directory.

    Raises:
        DataError: a state is damaged.
        OutputError: a file cannot be written.
    """
    done = [ending.run for ending in last_endings(directory.endings) if ending.status is Status.DONE]
    kept: list[Run] = []
    with closing(Slot()) as slot:
        for run in done:
            is_kept = keep == "all" or (keep == "best" and run.trial == best)
            is_tested = not recipe.has_test or run.trial != best or run.number in directory.tested
            if is_kept:
                kept.append(run)
            if directory.has_state(run) and (is_kept or not is_tested):
                _finish_run(directory, recipe, run, slot, is_tested, is_kept, metric.removeprefix("val_"))
            if not is_kept:
                directory.release(run)
    return directory.keep_models(kept)


def _finish_run(
    directory: SweepDirectory, recipe: Recipe, run: Run, slot: Slot, tested: bool, kept: bool, metric: str
) -> None:
    """Make a run's model of its state; write and evaluate it where that is not done yet."""
    is_to_write = kept and not directory.has_model(run)
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
