"""What holds of every interval: it is as wide as all samples of all runs allow, and covers the truth, in folds too."""

import ast
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")
from scipy import stats

from dptrain.sweeps.analysis.intervals import SampleSize, bounds_of, interval_of, mean_and_interval
from dptrain.sweeps.analysis.statistics import SIGNIFICANCE, compare, summarize
from dptrain.sweeps.records import Ending, Run
from dptrain.sweeps.reporting import pictures
from dptrain.sweeps.result import _test
from tests.conftest import ROOT
from tests.sample import sample
from tests.unit.sweeps.samples import ending, trials

Ends = tuple[float, float]


def endings_of(values_TSF: np.ndarray) -> list[Ending]:
    """Return endings of trials over seeds and folds."""
    folds = values_TSF.shape[2]
    return [
        dataclasses.replace(
            ending(trial, 0, float(value)), run=Run(trial * 1000 + seed * folds + fold, trial, seed, fold, folds)
        )
        for (trial, seed, fold), value in np.ndenumerate(values_TSF)
    ]


def of_summary(values_SF: np.ndarray, metric: str, count: int | None) -> Ends:
    ended = [dataclasses.replace(e, metrics={metric: e.metrics["val_accuracy"]}) for e in endings_of(values_SF[None])]
    [summary] = summarize(trials(1), ended, metric, "max", count)
    return summary.ci_low, summary.ci_high


def of_function(values_SF: np.ndarray, metric: str, count: int | None) -> Ends:
    values, samples = values_SF.ravel().tolist(), None if count is None else SampleSize(count)
    interval = interval_of(values, bounds_of(metric, values), values_SF.shape[1], samples)
    return interval.low, interval.high


def of_seeds_alone(values_SF: np.ndarray, metric: str, count: int | None) -> Ends:
    values = values_SF.ravel().tolist()
    return mean_and_interval(values, bounds_of(metric, values), values_SF.shape[1])[1:]


def of_band(values_SF: np.ndarray, metric: str, count: int | None) -> Ends:
    values = values_SF.ravel().tolist()
    return pictures._band(values, bounds_of(metric, values), values_SF.shape[1])[1:]


def of_test_set(values_SF: np.ndarray, metric: str, count: int | None) -> Ends:
    ended = [dataclasses.replace(e, metrics={metric: e.metrics["val_accuracy"]}) for e in endings_of(values_SF[None])]
    tested = {e.run.number: {metric.removeprefix("val_"): e.metrics[metric]} for e in ended}
    directory: Any = SimpleNamespace(trials=trials(1), endings=ended, tested=tested, draws={})
    plan: Any = SimpleNamespace(metric=metric, mode="max", test_samples=count, folds=values_SF.shape[1])
    result = _test(directory, plan)
    assert result is not None
    return result["ci_low"], result["ci_high"]


# Functions of samples as well as seeds, and of seeds alone; the test set's is over seeds, whose folds it averages.
Intervals = dict[str, Callable[[np.ndarray, str, int | None], Ends]]
OF_BOTH: Intervals = {"summarize": of_summary, "interval_of": of_function}
OF_SEEDS = {"mean_and_interval": of_seeds_alone, "_band": of_band}
EVERY = {**OF_BOTH, **OF_SEEDS}


def test_there_is_no_other_interval():
    """Whoever calls functions of intervals is tested here; `draw_hyperparameters` needs the mean alone."""
    functions, callers = {"interval_of", "mean_and_interval", "confidence_interval", "_wilson", "_band"}, set()
    for path in sorted((ROOT / "dptrain" / "sweeps").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
                callers |= {function.name} if names & functions else set()
    tested = {"interval_of", "mean_and_interval", "_summary", "_test", "_band", "_draw_trial", "_paired_tests"}
    assert callers - tested == {"draw_hyperparameters"}


def wilson(mean: float, count: int) -> Ends:
    """Return the interval of `count` samples, whoever judged them, without any doubt about the deviation."""
    result = stats.binomtest(round(mean * count), count).proportion_ci(method="wilson")
    return result.low, result.high


@pytest.mark.parametrize("name", [*OF_BOTH, "_test"])
@pytest.mark.parametrize(("seeds", "folds"), [(1, 1), (2, 1), (5, 1), (1, 5), (3, 4)])
def test_no_interval_is_narrower_than_that_of_all_samples_of_all_runs(name, seeds, folds):
    rng, work = np.random.default_rng(0), {**OF_BOTH, "_test": of_test_set}[name]
    for count in (1, 10, 36, 1000):
        for accuracy in (0.0, 0.3, 0.97, 1.0):
            alike = np.full((seeds, folds), round(accuracy * count))
            nearly = np.clip(alike + (np.arange(alike.size) == 0).reshape(alike.shape), 0, count)
            for right in (alike, nearly, rng.binomial(count, accuracy, alike.shape)):
                values = right / count
                low, high = work(values, "val_accuracy", count)
                least_low, least_high = wilson(values.mean(), count * values.size)
                assert low <= least_low + 1e-12
                assert high >= least_high - 1e-12


def folded(rng: np.random.Generator, count: int, seeds: int, folds: int) -> np.ndarray:
    """Draw (count, seeds, folds) values of mean 0, of which two correlate by the share held out: 1 / folds.

    It is what Nadeau and Bengio assume; without folds seeds are independent.
    """
    share = 0 if folds == 1 else 1 / folds
    common = rng.standard_normal((count, 1, 1))
    return math.sqrt(share) * common + math.sqrt(1 - share) * rng.standard_normal((count, seeds, folds))


DESIGNS = [(3, 1), (8, 1), (1, 5), (3, 5), (2, 10)]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("seeds", "folds"), sample(DESIGNS, 2))
@pytest.mark.parametrize("metric", ["reward", "val_loss", "val_accuracy"])
def test_95_of_100_intervals_cover_the_truth(name, seeds, folds, metric):
    sweeps = {"reward": 1, "val_loss": 0.02, "val_accuracy": 0.002}[metric] * folded(
        np.random.default_rng(3), 1500, seeds, folds
    ) + 0.9
    ends = [EVERY[name](values, metric, None) for values in sweeps]
    assert 0.935 <= np.mean([low <= 0.9 <= high for low, high in ends]) <= 0.965


@pytest.mark.sample(9)
@pytest.mark.parametrize(("seeds", "folds"), sample(DESIGNS, 2))
def test_comparisons_cover_the_difference_and_claim_it_in_5_of_100(seeds, folds):
    rng, covered, claimed, corrected = np.random.default_rng(4), [], [], []
    for values in 0.9 + 0.002 * folded(rng, 3 * 400, seeds, folds).reshape(400, 3, seeds, folds):
        ended = endings_of(values)
        rows = compare(summarize(trials(3), ended, "val_accuracy", "max"), ended, "val_accuracy", "max")
        assert len(rows) == 3
        covered += [row.ci_low <= 0 <= row.ci_high for row in rows]
        claimed += [row.p <= SIGNIFICANCE for row in rows]
        significant = [row.p_corrected <= SIGNIFICANCE for row in rows]
        assert significant == [not row.ci_low <= 0 <= row.ci_high for row in rows]
        corrected.append(any(significant))
    assert np.mean(covered) >= 0.97  # corrected as the verdicts are
    assert 0.03 <= np.mean(claimed) <= 0.07
    assert np.mean(corrected) <= 0.05
