"""Several metrics at once: what each is to be, and which trials no other beats (the Pareto front)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.errors import ConfigError
from dptrain.sweeps import formatting
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.statistics import Mode, rank, summarize

# Trials of a front that a sentence names.
_NAMED = 12


def objectives_of(metrics: Sequence[str], modes: Sequence[str]) -> dict[str, str]:
    """Return the mode of each metric, the one that trials are ranked by first.

    Args:
        metrics: keys of the logs, or such as "parameters".
        modes: "max", "min" or "auto": one for each metric, or "auto" alone for all.

    Raises:
        ConfigError: no metric, one twice, or another number of modes.
    """
    if not metrics or len(set(metrics)) < len(metrics) or not all(isinstance(one, str) for one in metrics):
        raise ConfigError(f"metric = {list(metrics)}: expected names of at least one, and none twice")
    if list(modes) == ["auto"]:
        modes = ["auto"] * len(metrics)
    if len(modes) != len(metrics):
        raise ConfigError(
            f"mode = {', '.join(modes)}: expected one for each of {formatting.counted(len(metrics), 'metric')} "
            f"({', '.join(metrics)}), auto among them"
        )
    return dict(zip(metrics, modes, strict=True))


def decided(objectives: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Return what a sweep's plan says of its metrics: texts of a single one, else lists."""
    metrics, modes = list(objectives), list(objectives.values())
    return {"metric": metrics, "mode": modes} if len(metrics) > 1 else {"metric": metrics[0], "mode": modes[0]}


def require_one(objectives: Mapping[str, str]) -> None:
    """Check that there is one metric, for halving.

    Raises:
        ConfigError: there are several.
    """
    if len(objectives) > 1:
        raise ConfigError(
            f"halving: judges trials by one number, and there are {len(objectives)} metrics ({', '.join(objectives)}); "
            "leave it out, or give one metric"
        )


def mean_column(metric: str) -> str:
    """Return what the mean of a further metric is called in trials.csv and in results."""
    return f"mean_{metric}"


def columns_of(metrics: Sequence[str]) -> list[str]:
    """Return the columns that several metrics bring to trials.csv and results."""
    return [*map(mean_column, metrics[1:]), "pareto"]


def require_free(fields: Sequence[str], metrics: Sequence[str]) -> None:
    """Check that no swept field has the name of a column that several metrics bring.

    Raises:
        ConfigError: one has.
    """
    if len(metrics) > 1:
        for name in filter(columns_of(metrics).__contains__, fields):
            raise ConfigError(f"swept {name!r}: results have another column of that name; rename it")


def on_front(values_TM: np.ndarray, modes: Sequence[Mode]) -> list[bool]:
    """Return which rows are not dominated: no other is at least as good in every column and better in one.

    Equal rows do not dominate each other.

    Args:
        values_TM: finite float64, trials x metrics.
        modes: whether more ("max") or less ("min") of each column is better.
    """
    better_TM = values_TM * np.array([1.0 if mode == "max" else -1.0 for mode in modes])
    return [not np.any(np.all(better_TM >= row_M, axis=1) & np.any(better_TM > row_M, axis=1)) for row_M in better_TM]


@dataclass(frozen=True)
class Front:
    """The Pareto front of a sweep, on means over the seeds.

    Only trials that are complete and lost the fewest runs are compared, as for the best trial: none must win by losing
    its bad seeds.

    Attributes:
        modes: of each metric, the one that trials are ranked by first.
        means: of every trial, for each metric; None where it has no value.
        compared: numbers of the trials that are.
        trials: numbers of those on the front, the best of the first metric first.
    """

    modes: Mapping[str, Mode]
    means: Mapping[int, Sequence[float | None]]
    compared: Sequence[int]
    trials: Sequence[int]

    @property
    def names(self) -> list[str]:
        """The columns of trials.csv that several metrics bring."""
        return columns_of(list(self.modes))

    def columns(self, trial: int) -> dict[str, float | bool | None]:
        """Return what trials.csv says of a trial: the means of the further metrics, and whether it is on the front."""
        return dict(zip(self.names, (*self.means[trial][1:], trial in self.trials), strict=True))

    def values(self, trials: Sequence[int]) -> np.ndarray:
        """Return the means of compared trials, float64, trials x metrics."""
        return np.array([self.means[trial] for trial in trials], np.float64).reshape(len(trials), len(self.modes))

    def sentence(self) -> str:
        """Return which trials are on the front, and their means."""
        metrics = [f"{name} ({'more' if mode == 'max' else 'less'} is better)" for name, mode in self.modes.items()]
        front = f"Pareto front of {formatting.listed(metrics)}"
        if not self.trials:
            return f"No trial is complete, so nothing can be said of the {front}."
        said = []
        for trial in self.trials[:_NAMED]:
            values = [
                f"{name} {formatting.number(mean)}" for name, mean in zip(self.modes, self.means[trial], strict=True)
            ]
            said.append(f"trial {trial} ({', '.join(values)})")
        left = len(self.trials) - len(said)
        return (
            f"{front}: {', '.join(said)}{f' and {left} more' if left else ''}. No other complete trial is at least as "
            "good in every metric and better in one. It is of means over the seeds: other seeds may change it."
        )


def front_of(trials: Sequence[Trial], endings: Sequence[Ending], modes: Mapping[str, Mode]) -> Front | None:
    """Return the Pareto front of a sweep; None where it has a single metric.

    Args:
        trials: the sweep's trials.
        endings: of their runs, oldest first.
        modes: of each metric, the one that trials are ranked by first.

    Raises:
        ConfigError: a run's logs have no such metric.
    """
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
