"""Statistics of a sweep: means with intervals, a ranking, and significant differences.

Tests and corrections are SciPy's, means and deviations those of Python's exact `statistics`, so the order in which runs
end does not matter. What counts:

- A run is judged by its last ending, with the metric of its last epoch.
- A trial counts with its runs that are done. If none is, it counts with the runs trained for most epochs (those at the
  highest rung, of a trial that was stopped early), and is not complete.
- A run that diverged or failed, or whose metric is not finite, has no value. Leaving it out flatters the mean of the
  others, so a trial ranks behind all complete trials that lost fewer runs.
"""

import itertools
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from dptrain.errors import ConfigError
from dptrain.sweeps.analysis.intervals import (
    CONFIDENCE,
    Bounds,
    Covers,
    SampleSize,
    bounds_of,
    counts_samples,
    interval_of,
    scipy_stats,
    widening,
)
from dptrain.sweeps.records import Ending, Status, Trial

Mode = Literal["max", "min"]

SIGNIFICANCE = 0.05
# Hedges' g from which an effect has this name; below the first it is negligible.
EFFECTS = {0.2: "small", 0.5: "medium", 0.8: "large", 1.2: "very large", 2.0: "huge"}
# With more pairs of trials than this, trials are compared with the best one only.
MOST_PAIRS = 10_000
# More seeds than this are not advised.
_MOST_MISSING = 1000


@dataclass(frozen=True)
class Summary:
    """A trial over its seeds."""

    trial: int  # number
    n: int  # runs with a value
    mean: float | None  # None if n is 0, as median and best
    std: float | None  # with n - 1 in the denominator; None if n < 2
    ci_low: float | None  # 95 % confidence interval of the mean, within the metric's bounds; None if no width is known
    ci_high: float | None
    median: float | None
    best: float | None  # of a single run
    seconds: float  # of all runs, failed ones included
    failed: int  # runs that diverged, failed or ended with a non-finite metric; not in n
    epochs_trained: int  # maximum of the runs in n, or of all if n is 0
    complete: bool  # every seed's run is done or failed, and at least one has a value
    pruned: bool  # halving stopped it
    covers: Covers = ""


@dataclass(frozen=True)
class Comparison:
    """Two trials over the seeds that both have."""

    a: int  # the smaller number
    b: int
    n: int  # shared seeds
    difference: float  # mean of a's value minus b's
    # Interval by Student's t, corrected for all comparisons as `p_corrected` is, so that it excludes 0 if and only if
    # the difference is significant; cut at the metric's bounds; None if all differences are alike
    ci_low: float | None
    ci_high: float | None
    # Hedges' g (L. Hedges, "Distribution theory for Glass's estimator of effect size and related estimators", Journal
    # of Educational Statistics 6, 1981): the difference over the root mean square of both deviations, corrected for
    # small n; None if neither deviates
    effect: float | None
    p: float  # two-sided paired t-test; where all differences are alike the sign test: 2 ** (1 - n), or 1 if they are 0
    p_corrected: float  # for all comparisons
    # Seeds that are missing at least for significance if difference and deviation stay as they are; None if it is
    # significant, or no such number would do
    missing: int | None = None


def check_installed() -> None:
    """Raise ConfigError if SciPy is missing, before hours of training."""
    scipy_stats()


def last_endings(endings: Iterable[Ending]) -> list[Ending]:
    """Return the last ending of each run, by the run's number."""
    last = {ending.run.number: ending for ending in endings}
    return [last[run] for run in sorted(last)]


def failure(ending: Ending, metric: str) -> str | None:
    """Return why a run has no value; None if nothing went wrong."""
    if not ending.status.is_success:
        return ending.reason or ending.status.value
    if ending.metrics and _value(ending, metric) is None:
        return f"{metric} is {ending.metrics[metric]} at the end"
    return None


def values_by_seed(endings: Iterable[Ending], metric: str) -> dict[int, dict[tuple[int, int], float]]:
    """Return the values that count: trial -> (seed, fold) -> value, for every trial with an ending."""
    trials = defaultdict(list)
    for ending in last_endings(endings):
        trials[ending.run.trial].append(ending)
    return {trial: _values(runs, metric) for trial, runs in trials.items()}


def summarize(
    trials: Sequence[Trial], endings: Sequence[Ending], metric: str, mode: Mode, samples: int | None = None
) -> list[Summary]:
    """Return each trial's summary, in order; `samples` that runs were judged on widen accuracies' intervals."""
    judged_on = SampleSize(samples) if samples and counts_samples(metric) else None
    runs = defaultdict(list)
    for ending in last_endings(endings):
        runs[ending.run.trial].append(ending)
    replicates = {ending.run.replicate for ending in endings}
    values = {trial.number: list(_values(runs[trial.number], metric).values()) for trial in trials}
    bounds = bounds_of(metric, itertools.chain.from_iterable(values.values()))
    return [
        _summary(trial.number, runs[trial.number], values[trial.number], bounds, replicates, metric, mode, judged_on)
        for trial in trials
    ]


def rank(summaries: Iterable[Summary], mode: Mode) -> list[Summary]:
    """Return summaries with the best trial first.

    Complete trials come first: by lost runs (no trial rises by losing its bad seeds), mean, deviation, number. Trials
    that were stopped early follow, longer ones first; those without values are last.
    """
    sign = -1.0 if mode == "max" else 1.0

    def place(summary: Summary) -> tuple[float, ...]:
        if summary.mean is None:
            return (2, summary.trial)
        length = 0 if summary.complete else -summary.epochs_trained
        deviation = math.inf if summary.std is None else summary.std
        return (not summary.complete, length, summary.failed, sign * summary.mean, deviation, summary.trial)

    return sorted(summaries, key=place)


def compare(summaries: Sequence[Summary], endings: Sequence[Ending], metric: str, mode: Mode) -> list[Comparison]:
    """Compare all pairs of complete trials that share at least 2 seeds by Student's paired t-test.

    In cross-validation the pairs are those of seeds and folds, and `widening` corrects the test. p-values are corrected
    by Benjamini and Yekutieli, "The control of the false discovery rate in multiple testing under dependency", Annals
    of Statistics 29 (2001), which holds under any dependence, such as a trial that pairs share. Beyond `MOST_PAIRS`
    pairs only those with the best trial are compared, corrected as if all others had p = 1: valid although the best
    trial was picked by its results, and strict.

    Intervals are corrected likewise: of those of significant differences at most 5 % are expected to miss the truth (Y.
    Benjamini and D. Yekutieli, "False discovery rate-adjusted multiple confidence intervals for selected parameters",
    JASA 100, 2005).
    """
    values = values_by_seed(endings, metric)
    folds = max((ending.run.folds for ending in endings), default=1)
    complete = [summary.trial for summary in rank(summaries, mode) if summary.complete]
    total = math.comb(len(complete), 2)
    pairs: Iterable[tuple[int, int]] = itertools.combinations(sorted(complete), 2)
    if total > MOST_PAIRS:
        pairs = sorted((min(complete[0], other), max(complete[0], other)) for other in complete[1:])
    # Pairs with the same seeds are tested in one call.
    groups = defaultdict(list)
    for a, b in pairs:
        seeds = tuple(sorted(values[a].keys() & values[b].keys()))
        if len(seeds) >= 2:
            groups[seeds].append((a, b))
    bounds = bounds_of(metric, (value for of_trial in values.values() for value in of_trial.values()))
    widest = bounds[1] - bounds[0]
    tested = []
    for seeds, group in groups.items():
        tested += _paired_tests(values, seeds, group, folds)
    if not tested:
        return []
    tested.sort(key=lambda row: row[:2])
    ps = [row[-1] for row in tested]
    untested = total - len(tested) if total > MOST_PAIRS else 0
    corrected = scipy_stats().false_discovery_control(ps + [1.0] * untested, method="by")
    significant, count = sum(p <= SIGNIFICANCE for p in corrected), len(corrected)
    share = SIGNIFICANCE / sum(count / place for place in range(1, count + 1))
    rows = []
    for row, p in zip(tested, corrected, strict=False):
        comparison = Comparison(*row, float(p))
        missing = None if p <= SIGNIFICANCE else _missing_seeds(comparison, share * (significant + 1), folds)
        rows.append(replace(_widened(comparison, share * max(significant, 1), widest), missing=missing))
    return rows


def _widened(row: Comparison, level: float, widest: float) -> Comparison:
    """Return a comparison with its 95 % interval turned into one of confidence 1 - `level`."""
    if row.ci_low is None or row.ci_high is None:
        return row
    factor = _t_quantile(level, row.n) / _t_quantile(1 - CONFIDENCE, row.n)
    low, high = (row.difference + factor * (end - row.difference) for end in (row.ci_low, row.ci_high))
    return replace(row, ci_low=max(low, -widest), ci_high=min(high, widest))


def _missing_seeds(row: Comparison, level: float, folds: int) -> int | None:
    """Return how many more seeds give p <= `level` with the same difference and deviation; None beyond 1,000."""
    if not row.difference:
        return None
    if row.ci_low is None or row.ci_high is None:  # the sign test
        return max(math.ceil((1 - math.log2(level) - row.n) / folds), 1)
    error = (row.ci_high - row.difference) / _t_quantile(1 - CONFIDENCE, row.n)
    deviation = error * math.sqrt(row.n) / widening(row.n, folds)
    for n in range(row.n + folds, row.n + _MOST_MISSING * folds + 1, folds):
        if abs(row.difference) >= _t_quantile(level, n) * deviation / math.sqrt(n) * widening(n, folds):
            return (n - row.n) // folds
    return None


@lru_cache(maxsize=4096)
def _t_quantile(level: float, n: int) -> float:
    """Return the end of Student's interval of confidence 1 - `level` for n values, in standard errors."""
    return float(scipy_stats().t.isf(level / 2, n - 1))


def effect_in_words(effect: float | None) -> str:
    """Return the word for a Hedges' g, "negligible" to "huge", whatever its sign.

    J. Cohen, "Statistical Power Analysis for the Behavioral Sciences" (1988); S. Sawilowsky, "New effect size rules of
    thumb", Journal of Modern Applied Statistical Methods 8 (2009).
    """
    if effect is None:
        return "not known"
    return next((word for least, word in reversed(EFFECTS.items()) if abs(effect) >= least), "negligible")


def _summary(
    trial: int,
    runs: Sequence[Ending],
    values: Sequence[float],
    bounds: Bounds,
    replicates: set[tuple[int, int]],
    metric: str,
    mode: Mode,
    samples: SampleSize | None,
) -> Summary:
    folds = runs[0].run.folds if runs else 1
    interval = interval_of(values, bounds, folds, samples) if values else None
    ended = {run.run.replicate for run in runs if run.status is Status.DONE or not run.status.is_success}
    return Summary(
        trial=trial,
        n=len(values),
        mean=interval.mean if interval else None,
        std=statistics.stdev(values) if len(values) > 1 else None,
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        median=statistics.median(values) if values else None,
        best=(max(values) if mode == "max" else min(values)) if values else None,
        seconds=round(math.fsum(run.seconds for run in runs), 3),
        failed=sum(failure(run, metric) is not None for run in runs),
        epochs_trained=max((run.epochs for run in _counted(runs) or runs), default=0),
        complete=bool(values) and ended == replicates,
        pruned=any(run.status is Status.PRUNED for run in runs),
        covers=interval.covers if interval else "",
    )


def _counted(runs: Sequence[Ending]) -> list[Ending]:
    completed = [run for run in runs if run.status is Status.DONE]
    if completed:
        return completed
    early = [run for run in runs if run.status.is_success]
    return [run for run in early if run.epochs == max(other.epochs for other in early)]


def _values(runs: Sequence[Ending], metric: str) -> dict[tuple[int, int], float]:
    """Return (seed, fold) -> value of a trial's runs that count."""
    by_replicate = {run.run.replicate: _value(run, metric) for run in _counted(runs)}
    return {seed: value for seed, value in by_replicate.items() if value is not None}


def _value(ending: Ending, metric: str) -> float | None:
    """Return a run's value; None before the first epoch or if it is not finite."""
    if not ending.metrics:
        return None
    if metric not in ending.metrics:
        keys = ", ".join(sorted(ending.metrics))
        raise ConfigError(f"no metric {metric!r} in the logs of run {ending.run.number}; expected one of {keys}")
    value: float | None = ending.metrics[metric]  # None is JSON's form of non-finite values
    return float(value) if value is not None and math.isfinite(value) else None


def _paired_tests(
    values: Mapping[int, Mapping[tuple[int, int], float]],
    seeds: Sequence[tuple[int, int]],
    pairs: Sequence[tuple[int, int]],
    folds: int,
) -> list[tuple[int, int, int, float, float | None, float | None, float | None, float]]:
    """Return (a, b, n, difference, low and high of its 95 % interval, effect, p) for pairs that share these seeds."""
    a_PS, b_PS = (np.array([[values[pair[side]][seed] for seed in seeds] for pair in pairs]) for side in (0, 1))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # SciPy's about differences that are all alike, which are answered below
        result = scipy_stats().ttest_rel(a_PS, b_PS, axis=1)
        interval = result.confidence_interval(CONFIDENCE)
        difference_PS = a_PS - b_PS
        difference_P = difference_PS.mean(axis=1)
        low_P, high_P, p_P = interval.low, interval.high, result.pvalue
        if folds > 1:
            wider = widening(len(seeds), folds)
            low_P, high_P = (difference_P + wider * (end - difference_P) for end in (low_P, high_P))
            p_P = 2 * scipy_stats().t.sf(np.abs(result.statistic) / wider, len(seeds) - 1)
        p_P = np.nan_to_num(p_P, nan=1.0)
        # Deviations by rounding alone mean equal differences, which no test can use.
        rounding_P = 4 * np.finfo(np.float64).eps * np.maximum(np.abs(a_PS), np.abs(b_PS)).max(axis=1)
        alike_P = np.ptp(difference_PS, axis=1) <= rounding_P
        zero_P = alike_P & (np.abs(difference_P) <= rounding_P)
        spread_P = np.sqrt((a_PS.var(axis=1, ddof=1) + b_PS.var(axis=1, ddof=1)) / 2)
        freedom = 2 * (len(seeds) - 1)
        effect_P = difference_P / spread_P * (1 - 3 / (4 * freedom - 1))
    difference_P[zero_P] = effect_P[zero_P] = 0.0
    p_P[alike_P] = 2.0 ** (1 - len(seeds))
    p_P[zero_P] = 1.0
    ends = [np.where(alike_P, np.nan, end) for end in (low_P, high_P)]
    effect_P[spread_P <= rounding_P] = np.nan
    maybe = [[None if math.isnan(x) else x for x in column.tolist()] for column in (*ends, effect_P)]
    columns = zip(difference_P.tolist(), *maybe, p_P.tolist(), strict=True)
    return [(*pair, len(seeds), *row) for pair, row in zip(pairs, columns, strict=True)]
