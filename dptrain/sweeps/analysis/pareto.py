"""Several metrics at once: their modes and the Pareto front of trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.errors import ConfigError
from dptrain.runtime.text import counted
from dptrain.sweeps.analysis.statistics import Mode, rank, summarize
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.reporting import formatting

# Trials of a front that a sentence names.
_NAMED = 12


def objectives_of(metrics: Sequence[str], modes: Sequence[str]) -> dict[str, str]:
    """Return metric -> "max", "min" or "auto"; one "auto" stands for all, and the first metric ranks the trials."""
    if not metrics or len(set(metrics)) < len(metrics) or not all(isinstance(name, str) for name in metrics):
        raise ConfigError(f"metric = {list(metrics)}: expected one or more names, none twice")
    if list(modes) == ["auto"]:
        modes = ["auto"] * len(metrics)
    if len(modes) != len(metrics):
        raise ConfigError(
            f"mode = {', '.join(modes)}: expected min, max or auto for each of {counted(len(metrics), 'metric')} "
            f"({', '.join(metrics)})"
        )
    return dict(zip(metrics, modes, strict=True))


def decided(objectives: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Return metric and mode of a sweep's plan: texts of a single metric, else lists."""
    metrics, modes = list(objectives), list(objectives.values())
    return {"metric": metrics, "mode": modes} if len(metrics) > 1 else {"metric": metrics[0], "mode": modes[0]}


def require_single_metric(objectives: Mapping[str, str]) -> None:
    """Refuse halving by several metrics."""
    if len(objectives) > 1:
        raise ConfigError(
            f"halving: compares trials by one metric, but there are {len(objectives)} ({', '.join(objectives)}); use "
            "one metric, or leave halving out"
        )


def mean_column(metric: str) -> str:
    """Return the column of a further metric's mean in trials.csv and in results."""
    return f"mean_{metric}"


def columns_of(metrics: Sequence[str]) -> list[str]:
    """Return the columns that several metrics add to trials.csv and results."""
    return [*map(mean_column, metrics[1:]), "pareto"]


def require_free(fields: Sequence[str], metrics: Sequence[str]) -> None:
    """Refuse swept fields named like a column that several metrics add."""
    if len(metrics) > 1:
        for name in filter(columns_of(metrics).__contains__, fields):
            raise ConfigError(f"swept {name!r}: results already have a column of that name; rename it")


def on_front(values_TM: np.ndarray, modes: Sequence[Mode]) -> list[bool]:
    """Return which rows of (trials, metrics) no other dominates; equal rows do not dominate each other."""
    better_TM = values_TM * np.array([1.0 if mode == "max" else -1.0 for mode in modes])
    return [not np.any(np.all(better_TM >= row_M, axis=1) & np.any(better_TM > row_M, axis=1)) for row_M in better_TM]


@dataclass(frozen=True)
class Front:
    """The Pareto front of a sweep's means over the seeds, among complete trials that lost the fewest runs."""

    modes: Mapping[str, Mode]  # by metric; the first ranks the trials
    means: Mapping[int, Sequence[float | None]]  # trial -> mean of each metric
    compared: Sequence[int]  # trials
    trials: Sequence[int]  # those on the front, the best of the first metric first

    @property
    def names(self) -> list[str]:
        """Columns that several metrics add to trials.csv."""
        return columns_of(list(self.modes))

    def columns(self, trial: int) -> dict[str, float | bool | None]:
        """Return a trial's cells of these columns."""
        return dict(zip(self.names, (*self.means[trial][1:], trial in self.trials), strict=True))

    def values(self, trials: Sequence[int]) -> np.ndarray:
        """Return the means of compared trials, float64, (trials, metrics)."""
        return np.array([self.means[trial] for trial in trials], np.float64).reshape(len(trials), len(self.modes))

    def sentence(self) -> str:
        """Return the trials on the front and their means."""
        metrics = [f"{name} ({'more' if mode == 'max' else 'less'} is better)" for name, mode in self.modes.items()]
        front = f"Pareto front of {formatting.listed(metrics)}"
        if not self.trials:
            return f"No trial is complete, so there is no {front}."
        shown = []
        for trial in self.trials[:_NAMED]:
            values = [
                f"{name} {formatting.number(mean)}" for name, mean in zip(self.modes, self.means[trial], strict=True)
            ]
            shown.append(f"trial {trial} ({', '.join(values)})")
        left = len(self.trials) - len(shown)
        return (
            f"{front}: {', '.join(shown)}{f' and {left} more' if left else ''}. No other complete trial is at least as "
            "good in every metric and better in one. The front is that of means over the seeds: other seeds may change "
            "it."
        )


def front_of(trials: Sequence[Trial], endings: Sequence[Ending], modes: Mapping[str, Mode]) -> Front | None:
    """Return the Pareto front of a sweep; None with a single metric."""
    if len(modes) == 1:
        return None
    of_metric = [summarize(trials, endings, metric, mode) for metric, mode in modes.items()]
    of_trial = {summaries[0].trial: summaries for summaries in zip(*of_metric, strict=True)}
    failed = {
        trial: max(summary.failed for summary in summaries)
        for trial, summaries in of_trial.items()
        if all(summary.complete for summary in summaries)
    }
    fewest = min(failed.values(), default=0)
    ranked = [summary.trial for summary in rank(of_metric[0], next(iter(modes.values())))]
    compared = [trial for trial in ranked if failed.get(trial) == fewest]
    means = {trial: tuple(summary.mean for summary in summaries) for trial, summaries in of_trial.items()}
    every = Front(modes, means, compared, [])
    on = on_front(every.values(compared), list(modes.values()))
    return Front(modes, means, compared, [trial for trial, is_on in zip(compared, on, strict=True) if is_on])
