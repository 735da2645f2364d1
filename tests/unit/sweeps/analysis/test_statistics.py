"""Summaries, ranking and comparisons against SciPy and against numbers computed by hand."""

import dataclasses
import itertools
import math
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")
from scipy import stats

from dptrain.errors import ConfigError
from dptrain.sweeps.analysis import intervals, statistics
from dptrain.sweeps.analysis.intervals import mean_and_interval
from dptrain.sweeps.analysis.statistics import compare, rank, summarize
from dptrain.sweeps.records import Ending, Run, Status
from tests.unit.sweeps.samples import ending, endings, trials

FINITE = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


def summaries_of(values, mode="max"):
    return summarize(trials(len(values)), endings(values), "val_accuracy", mode)


def comparisons_of(values, mode="max"):
    return compare(summaries_of(values, mode), endings(values), "val_accuracy", mode)


# --- summaries ---


def test_summary_by_hand():
    # mean 0.84, deviations -.04 -.02 0 .02 .04: variance 0.004 / 4; t(4 degrees of freedom) = 2.7764451 at 97.5 %.
    # The logit of the mean is log(84 / 16), and its derivative 1 / (0.84 * 0.16).
    [summary] = summaries_of({0: [0.80, 0.88, 0.82, 0.86, 0.84]})
    half = 2.7764451 * math.sqrt(0.001) / math.sqrt(5) / (0.84 * 0.16)
    assert summary.mean == pytest.approx(0.84, rel=1e-15)
    assert summary.std == pytest.approx(math.sqrt(0.001), rel=1e-12)
    assert summary.ci_low == pytest.approx(1 / (1 + math.exp(half) * 16 / 84), rel=1e-7)
    assert summary.ci_high == pytest.approx(1 / (1 + math.exp(-half) * 16 / 84), rel=1e-7)
    assert (summary.n, summary.median, summary.best, summary.seconds) == (5, 0.84, 0.88, 10.0)
    assert (summary.trial, summary.failed, summary.epochs_trained, summary.complete) == (0, 0, 5, True)
    assert summaries_of({0: [0.80, 0.88, 0.82, 0.86, 0.84]}, "min")[0].best == 0.80


def test_one_value_has_no_interval_and_no_value_nothing():
    single, none = summarize(trials(2), [ending(0, 0, 0.5)], "val_accuracy", "max")
    assert (single.n, single.mean, single.median, single.best, single.complete) == (1, 0.5, 0.5, 0.5, True)
    assert single.std is single.ci_low is single.ci_high is None
    assert (none.n, none.seconds, none.failed, none.epochs_trained, none.complete) == (0, 0.0, 0, 0, False)
    assert none.mean is none.std is none.ci_low is none.ci_high is none.median is none.best is None


def test_equal_values_alone_show_no_interval():
    [summary] = summaries_of({0: [0.1, 0.1, 0.1]})
    assert (summary.mean, summary.std, summary.ci_low, summary.ci_high) == (0.1, 0.0, None, None)
    assert summary.covers == ""


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_interval_is_scipys_and_contains_the_mean(values):
    mean, low, high = mean_and_interval(values)
    if len(set(values)) == 1:
        assert low is high is None
    else:
        assert low <= mean <= high
        expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        assert [low, high] == pytest.approx(list(expected), rel=1e-9, abs=1e-9 * max(map(abs, values)))


@given(st.lists(FINITE, min_size=2, max_size=8), st.floats(-100, 100), st.sampled_from([-8.0, -0.5, 0.25, 4.0]))
def test_summary_follows_shift_and_scale(values, shift, scale):
    # An accuracy that goes beyond 1 is none, and has no bounds.
    [before, _] = summaries_of({0: values, 1: [2.0]})
    [after, _] = summaries_of({0: [scale * value + shift for value in values], 1: [2.0]})
    low, high = (before.ci_low, before.ci_high) if scale > 0 else (before.ci_high, before.ci_low)
    size = {"rel": 1e-9, "abs": 1e-9 * (1 + max(abs(scale * value) + abs(shift) for value in values))}
    assert after.mean == pytest.approx(scale * before.mean + shift, **size)
    assert after.std == pytest.approx(abs(scale) * before.std, **size)
    if after.std and before.std:
        assert [after.ci_low, after.ci_high] == pytest.approx([scale * low + shift, scale * high + shift], **size)


def test_intervals_are_corrected_as_the_verdicts_are():
    source = random.Random(5)
    values = {trial: [source.gauss(0.5 + 0.03 * trial, 0.02) for _ in range(6)] for trial in range(5)}
    rows = comparisons_of(values, "reward")
    significant = [row.p_corrected <= 0.05 for row in rows]
    assert 0 < sum(significant) < len(rows)
    # of 10 pairs, R of them significant: the confidence is 1 - R q / (m (1 + 1/2 + ... + 1/m))
    level = 0.05 * sum(significant) / (10 * sum(1 / i for i in range(1, 11)))
    for row, is_significant in zip(rows, significant, strict=True):
        low, high = stats.ttest_rel(values[row.a], values[row.b]).confidence_interval(1 - level)
        assert (row.ci_low, row.ci_high) == pytest.approx((low, high))
        assert is_significant == (not low <= 0 <= high)
        assert (row.missing is None) == is_significant


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_order_in_which_runs_ended_changes_no_bit(values, shuffler):
    ended = endings(dict(enumerate(values)))
    shuffled = shuffler.sample(ended, len(ended))
    summaries = [summarize(trials(len(values)), order, "val_accuracy", "max") for order in (ended, shuffled)]
    assert summaries[0] == summaries[1]
    pairs = [
        compare(summary, order, "val_accuracy", "max")
        for summary, order in zip(summaries, (ended, shuffled), strict=True)
    ]
    assert pairs[0] == pairs[1]


def test_only_the_last_ending_of_a_run_counts():
    ended = [
        ending(0, 0, 0.1, Status.PAUSED, epochs=1),
        ending(0, 1, 0.2, Status.PAUSED, epochs=1),
        ending(0, 0, 0.9),
        dataclasses.replace(ending(0, 1, 0.7), seconds=5.0),
    ]
    [summary] = summarize(trials(1), ended, "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.seconds, summary.epochs_trained) == (2, pytest.approx(0.8), 7.0, 5)
    assert summary.complete


def test_trials_that_were_stopped_early_count_with_what_they_reached():
    early = [ending(0, seed, 0.5 + seed / 10, Status.PRUNED, epochs=2) for seed in range(2)]
    [summary] = summarize(trials(1), early, "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.epochs_trained, summary.complete) == (2, pytest.approx(0.55), 2, False)
    # one run is at a higher rung already: what is compared is what was trained for as long
    [summary] = summarize(trials(1), [*early, ending(0, 0, 0.9, Status.PAUSED, epochs=4)], "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.epochs_trained, summary.complete) == (1, 0.9, 4, False)
    [summary] = summarize(trials(1), [*early, ending(0, 0, 0.95, Status.DONE, epochs=6)], "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.epochs_trained, summary.complete) == (1, 0.95, 6, False)


def test_a_trial_whose_seeds_are_not_all_trained_is_not_complete():
    ended = [*endings({0: [0.5, 0.6]}), ending(1, 0, 0.9)]
    assert [s.complete for s in summarize(trials(2), ended, "val_accuracy", "max")] == [True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_metric_that_is_not_finite_is_a_failure(bad):
    ended = [*endings({0: [0.5, 0.7]}), ending(0, 2, bad), ending(0, 3, status=Status.DIVERGED, epochs=9)]
    [summary] = summarize(trials(1), ended, "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.failed, summary.seconds) == (2, pytest.approx(0.6), 2, 8.0)
    assert (summary.epochs_trained, summary.complete) == (5, True)
    assert statistics.failure(ended[2], "val_accuracy") == f"val_accuracy is {bad} at the end"
    assert statistics.failure(ended[3], "val_accuracy") == "loss is nan at step 7"
    assert statistics.failure(ended[0], "val_accuracy") is None


def test_all_runs_failed():
    ended = [ending(0, seed, status=Status.FAILED, epochs=seed) for seed in range(3)]
    [summary] = summarize(trials(1), ended, "val_accuracy", "max")
    assert (summary.n, summary.mean, summary.failed, summary.epochs_trained, summary.complete) == (0, None, 3, 2, False)


def test_runs_that_finished_no_epoch_have_no_value():
    ended = [dataclasses.replace(ending(0, 0, 0.5), metrics={}, epochs=0)]
    [summary] = summarize(trials(1), ended, "val_accuracy", "max")
    assert (summary.n, summary.failed, summary.complete) == (0, 0, False)


def test_unknown_metric_names_those_there_are():
    with pytest.raises(
        ConfigError, match=r"no metric 'val_loss' in the logs of run 0; expected one of loss, val_accuracy"
    ):
        summarize(trials(1), [ending(0, 0, 0.5)], "val_loss", "min")


def test_without_scipy(monkeypatch):
    intervals._quantile.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    for ask in (statistics.check_installed, lambda: summaries_of({0: [0.1, 0.2]})):
        with pytest.raises(ConfigError, match=r"^scipy is not installed: pip install 'scipy>=.*$"):
            ask()


# --- intervals within bounds ---


@pytest.mark.parametrize(
    ("metric", "bounds"),
    [
        *(
            (name, (0, 1))
            for name in ("val_accuracy", "acc", "auc_1", "head_top_k_categorical_accuracy", "val_f1_score")
        ),
        *((name, (0, math.inf)) for name in ("val_loss", "mean_squared_error", "RMSE", "sparse_crossentropy_2")),
        *((name, (-math.inf, math.inf)) for name in ("cosine_similarity", "reward", "lossy", "accuracy_gain")),
    ],
)
def test_bounds_follow_from_a_metrics_name(metric, bounds):
    assert intervals.bounds_of(metric, [0.5, 0.0, 1.0]) == bounds


def test_a_value_outside_shows_that_a_name_means_something_else():
    assert intervals.bounds_of("accuracy", [0.5, 97.0]) == intervals.UNBOUNDED  # per cent
    assert intervals.bounds_of("loss", [0.5, -0.1]) == intervals.UNBOUNDED


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.sampled_from([(0.0, 1.0), (0.0, math.inf)]))
def test_an_interval_stays_within_the_bounds_and_contains_the_mean(values, bounds):
    mean, low, high = mean_and_interval(values, bounds)
    if len(set(values)) == 1:
        low = high = mean
    near = 1e-12 * mean
    assert bounds[0] <= low <= mean + near
    assert mean - near <= high <= bounds[1]


@pytest.mark.parametrize("values", [[0.97, 0.99, 0.985], [0.0, 0.2], [0.4, 0.9, 0.55, 0.61, 0.7, 1.0]])
def test_intervals_within_bounds_are_those_of_quasi_likelihood_models(values):
    api = pytest.importorskip("statsmodels.api", reason="the reference of intervals within bounds")
    families = api.families
    constant = np.ones((len(values), 1))
    # A model of a constant, its deviation estimated from the residuals, with t for the quantile.
    logit = api.GLM(values, constant, family=families.Binomial()).fit(scale="X2", use_t=True)
    low, high = 1 / (1 + np.exp(-logit.conf_int()[0]))
    assert mean_and_interval(values, (0, 1))[1:] == pytest.approx((low, high), rel=1e-6)
    positive = [value + 0.01 for value in values]
    log = api.GLM(positive, constant, family=families.Gamma(families.links.Log())).fit(scale="X2", use_t=True)
    low, high = np.exp(log.conf_int()[0])
    assert mean_and_interval(positive, (0, math.inf))[1:] == pytest.approx((low, high), rel=1e-6)


# --- seeds and samples ---


def test_seeds_that_agree_on_few_samples_have_an_interval_of_the_samples():
    interval = intervals.interval_of([1.0] * 4, (0, 1), samples=intervals.SampleSize(36))
    quantile = stats.t.ppf(0.975, 36)
    assert (interval.mean, interval.high, interval.covers) == (1.0, 1.0, "seeds and samples")
    assert interval.low == pytest.approx(36 / (36 + quantile**2), rel=1e-9)  # Wilson's
    ended = endings({0: [1.0] * 4})
    [summary] = summarize(trials(1), ended, "val_accuracy", "max", samples=36)
    assert (summary.ci_low, summary.ci_high, summary.covers) == (interval.low, 1.0, "seeds and samples")
    [loss] = summarize(trials(1), [ending(0, seed, 1.0) for seed in range(4)], "loss", "min", samples=36)
    assert (loss.ci_low, loss.covers) == (None, "")  # nothing shows what the samples make of it


def test_variances_of_seeds_and_samples_add_up():
    values, rng = [1.2, 1.4, 1.1, 1.3], np.random.default_rng(0)
    interval = intervals.interval_of(values, samples=intervals.SampleSize(50, 0.003))
    of_seeds = np.var(values, ddof=1) / 4
    freedom = (of_seeds + 0.003) ** 2 / (of_seeds**2 / 3 + 0.003**2 / 49)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(of_seeds + 0.003)
    assert [interval.low, interval.high] == pytest.approx([1.25 - half, 1.25 + half], rel=1e-9)
    assert interval.covers == "seeds and samples"
    alone = intervals.interval_of(values[:1], samples=intervals.SampleSize(50, 0.003))
    assert (alone.covers, alone.low < 1.2 < alone.high) == ("samples alone", True)
    assert intervals.interval_of(values).covers == "seeds alone"
    accuracies = rng.normal(0.8, 0.05, 5).tolist()
    wide_interval = intervals.interval_of(accuracies, (0, 1), samples=intervals.SampleSize(10**9))
    assert [wide_interval.low, wide_interval.high] == pytest.approx(mean_and_interval(accuracies, (0, 1))[1:], abs=0.01)


@pytest.mark.parametrize(("accuracy", "count", "seeds"), [(0.95, 40, 4), (0.8, 100, 3), (0.99, 200, 5)])
def test_intervals_of_both_cover_the_accuracy_of_fresh_seeds_and_fresh_samples(accuracy, count, seeds):
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        difficulty = rng.beta(accuracy * 4, (1 - accuracy) * 4, count)  # how often a seed is right on a sample
        values = (rng.random((seeds, count)) < difficulty).mean(axis=1).tolist()
        interval = intervals.interval_of(values, (0, 1), samples=intervals.SampleSize(count))
        assert interval.low < interval.high
        covered += interval.low <= accuracy <= interval.high
    assert covered / 400 >= 0.93


def beta(mean, deviation):
    size = mean * (1 - mean) / deviation**2 - 1
    return lambda rng, shape: rng.beta(mean * size, (1 - mean) * size, shape)


@pytest.mark.parametrize(
    ("metric", "draw", "truth", "n"),
    [
        ("accuracy", beta(0.98, 0.005), 0.98, 3),
        ("accuracy", beta(0.97, 0.02), 0.97, 5),  # skewed: Student's t alone covers 92 %
        ("accuracy", beta(0.6, 0.1), 0.6, 10),
        ("accuracy", lambda rng, shape: rng.binomial(1000, 0.95, shape) / 1000, 0.95, 5),
        ("loss", lambda rng, shape: np.exp(rng.normal(0, 0.3, shape)), math.exp(0.045), 5),
        ("reward", lambda rng, shape: rng.normal(-3, 2, shape), -3, 2),
        ("reward", lambda rng, shape: rng.normal(-3, 2, shape), -3, 5),
    ],
)
def test_95_percent_intervals_cover_the_truth_in_95_of_100_sweeps(metric, draw, truth, n):
    sweeps = draw(np.random.default_rng(11), (2000, n)).tolist()
    bounds = intervals.bounds_of(metric, itertools.chain.from_iterable(sweeps))
    ends = [mean_and_interval(values, bounds)[1:] for values in sweeps]
    assert 0.93 <= np.mean([low <= truth <= high for low, high in ends]) <= 0.97


# --- ranking ---


def test_ranking_by_mean_then_deviation_then_number():
    values = {0: [0.4, 0.6], 1: [0.45, 0.55], 2: [0.9, 0.9], 3: [0.1, 0.1], 4: [0.45, 0.55]}
    assert [s.trial for s in rank(summaries_of(values), "max")] == [2, 1, 4, 0, 3]
    assert [s.trial for s in rank(summaries_of(values, "min"), "min")] == [3, 1, 4, 0, 2]


def test_no_trial_rises_by_losing_runs_or_by_stopping_early():
    ended = [
        *endings({0: [0.5, 0.5], 1: [0.6, 0.6]}),
        *(ending(2, 0, 0.99), ending(2, 1, status=Status.DIVERGED)),
        *(ending(3, seed, 0.7, Status.PRUNED, epochs=1) for seed in range(2)),
        *(ending(4, seed, 0.3, Status.PRUNED, epochs=3) for seed in range(2)),
        *(ending(5, seed, status=Status.FAILED) for seed in range(2)),
    ]
    summaries = summarize(trials(7), ended, "val_accuracy", "max")
    assert [s.trial for s in rank(summaries, "max")] == [1, 0, 2, 4, 3, 5, 6]


@given(st.permutations(range(4)))
def test_ranking_does_not_depend_on_the_order(order):
    summaries = summaries_of({0: [0.4], 1: [0.4], 2: [0.9], 3: [0.1]})
    assert [s.trial for s in rank([summaries[n] for n in order], "max")] == [2, 0, 1, 3]


# --- comparisons ---


def test_paired_test_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 2 sqrt(3). With 2 degrees of freedom the two-sided
    # p is 1 - t / sqrt(t^2 + 2), and 97.5 % lie below 4.3026527.
    [row] = comparisons_of({0: [11.0, 13.0, 12.0], 1: [10.0, 11.0, 9.0]})
    assert (row.a, row.b, row.n, row.difference) == (0, 1, 3, pytest.approx(2.0))
    assert row.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
    assert [row.ci_low, row.ci_high] == pytest.approx([2 - 4.3026527 / 3**0.5, 2 + 4.3026527 / 3**0.5], rel=1e-7)
    # Both deviate by 1 over seeds; the correction for n = 3 is 1 - 3 / (4 * 4 - 1).
    assert row.effect == pytest.approx(2 * 0.8)
    assert row.p_corrected == pytest.approx(row.p)  # one pair: nothing to correct for


def test_all_pairs_are_scipys_and_corrected_together():
    source = random.Random(3)
    values = {trial: [source.gauss(0.5 + 0.02 * trial, 0.02) for _ in range(6)] for trial in range(5)}
    rows = comparisons_of(values)
    assert [(row.a, row.b) for row in rows] == list(itertools.combinations(range(5), 2))
    ps = [stats.ttest_rel(values[row.a], values[row.b]).pvalue for row in rows]
    assert [row.p for row in rows] == pytest.approx(ps, rel=1e-10)
    # by hand: p of rank i of m, times m (1 + 1/2 + ... + 1/m) / i, made monotonic from the largest down
    factor = len(ps) * sum(1 / i for i in range(1, len(ps) + 1))
    order = sorted(range(len(ps)), key=lambda index: ps[index], reverse=True)
    smallest, expected = 1.0, {}
    for place, index in enumerate(order):
        smallest = min(smallest, ps[index] * factor / (len(ps) - place))
        expected[index] = smallest
    assert [row.p_corrected for row in rows] == pytest.approx([expected[n] for n in range(len(ps))], rel=1e-10)


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=2, max_size=5))
def test_corrected_values_are_no_smaller(values):
    for row in comparisons_of(dict(enumerate(values))):
        assert 0 <= row.p <= row.p_corrected <= 1
        assert (row.ci_low is None) == (row.ci_high is None)
        if row.ci_low is not None:
            assert row.ci_low <= row.difference <= row.ci_high


# Values of two decimals; another trial's, by chance or, but for rounding, apart by one number that may be much larger.
VALUES = st.lists(st.integers(-99, 99).map(lambda n: n / 100), min_size=3, max_size=6)
OTHERS = st.one_of(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 7.7, 1000.1]))


@given(VALUES, OTHERS)
def test_swapping_two_trials_changes_signs_alone(first, other):
    if isinstance(other, random.Random):
        second = [round(other.uniform(-1, 1), other.randrange(1, 6)) for _ in first]
    else:
        second = [round(value + other, 2) for value in first]
    [row], [swapped] = comparisons_of({0: first, 1: second}), comparisons_of({0: second, 1: first})
    assert (swapped.n, swapped.p) == (row.n, row.p)
    for mine, its in (
        (row.difference, swapped.difference),
        (row.effect, swapped.effect),
        (row.ci_low, swapped.ci_high),
    ):
        assert (mine is None) is (its is None)
        assert mine is None or mine == -its


def test_pairs_use_the_seeds_that_both_have():
    ended = [*endings({0: [0.1, 0.2, 0.4, 0.3], 1: [0.2, 0.5, 0.5, 0.9]}), ending(2, 0, 0.3)]
    ended[1] = ending(0, 1, status=Status.DIVERGED)
    ended += [ending(2, 1, 0.1), ending(2, 2, math.nan), ending(2, 3, status=Status.FAILED)]
    summaries = summarize(trials(3), ended, "val_accuracy", "max")
    rows = {(row.a, row.b): row for row in compare(summaries, ended, "val_accuracy", "max")}
    # trials 0 and 2 share seed 0 alone
    assert {pair: row.n for pair, row in rows.items()} == {(0, 1): 3, (1, 2): 2}
    assert rows[0, 1].p == pytest.approx(stats.ttest_rel([0.1, 0.4, 0.3], [0.2, 0.5, 0.9]).pvalue)
    assert rows[1, 2].p == pytest.approx(stats.ttest_rel([0.2, 0.5], [0.3, 0.1]).pvalue)


def test_differences_that_are_all_alike_are_judged_by_their_signs():
    values = {0: [0.1, 0.2, 0.7], 1: [0.1, 0.2, 0.7]}
    [row] = comparisons_of(values)
    assert (row.difference, row.ci_low, row.ci_high, row.effect, row.p) == (0, None, None, 0, 1)
    [row] = comparisons_of({0: [0.5, 1.5, 2.5], 1: [0.25, 1.25, 2.25]})
    assert (row.difference, row.ci_low, row.ci_high) == (0.25, None, None)
    assert row.p == stats.binomtest(3, 3).pvalue == 0.25
    # 0.3 - 0.2 and 0.4 - 0.3 differ by rounding alone
    [row] = comparisons_of({0: [0.3, 0.4], 1: [0.2, 0.3]})
    assert row.difference == pytest.approx(0.1)
    assert (row.ci_low, row.ci_high, row.p) == (None, None, 0.5)
    # the sum of ten times 0.1 is 1 but for rounding
    [row] = comparisons_of({0: [sum([0.1] * 10)] * 2, 1: [1.0, 1.0]})
    assert (row.difference, row.p) == (0.0, 1.0)
    # no deviation to measure the difference by
    [row] = comparisons_of({0: [0.5, 0.5], 1: [0.25, 0.25]})
    assert (row.difference, row.effect) == (0.25, None)


def test_differences_respect_the_bounds():
    [row] = comparisons_of({0: [0.9, 0.5], 1: [0.1, 0.2]})
    low, high = stats.ttest_rel([0.9, 0.5], [0.1, 0.2]).confidence_interval(0.95)
    assert low < -1
    assert high > 1
    assert (row.ci_low, row.ci_high) == (-1, 1)


def test_effects_and_corrected_values_are_those_of_statsmodels():
    meta = pytest.importorskip("statsmodels.stats.meta_analysis", reason="the reference of effect sizes")
    multitest = pytest.importorskip("statsmodels.stats.multitest", reason="the reference of corrections")
    source = random.Random(3)
    values = {trial: [source.gauss(0.5 + 0.02 * trial, 0.02) for _ in range(6)] for trial in range(5)}
    rows = comparisons_of(values)
    for row in rows:
        a, b = values[row.a], values[row.b]
        expected, _ = meta.effectsize_smd(np.mean(a), np.std(a, ddof=1), 6, np.mean(b), np.std(b, ddof=1), 6)
        assert row.effect == pytest.approx(expected, rel=1e-9)
    _, corrected, _, _ = multitest.multipletests([row.p for row in rows], method="fdr_by")
    assert [row.p_corrected for row in rows] == pytest.approx(corrected.tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("effect", "words"),
    [(0.1, "negligible"), (-0.2, "small"), (0.79, "medium"), (-1.1, "large"), (1.2, "very large"), (-9.0, "huge")],
)
def test_effects_in_words(effect, words):
    assert statistics.effect_in_words(effect) == words


def claims(sweeps):
    """Return which part of sweeps claims a significant difference; values are by sweep, trial and seed."""
    summaries = summaries_of(dict(enumerate(sweeps[0].tolist())))
    claimed = 0
    for values in sweeps:
        ended = endings(dict(enumerate(values.tolist())))
        rows = compare(summaries, ended, "val_accuracy", "max")
        claimed += any(row.p_corrected <= statistics.SIGNIFICANCE for row in rows)
    return claimed / len(sweeps)


@pytest.mark.long
def test_at_most_5_of_100_sweeps_without_a_difference_claim_one():
    rng = np.random.default_rng(5)
    over_seeds = 0.02 * rng.standard_normal((1000, 1, 5))
    assert 0.005 <= claims(0.9 + 0.01 * rng.standard_normal((1000, 4, 5)) + over_seeds) <= 0.05


@pytest.mark.parametrize("seeds", [2, 3])
def test_a_metric_of_few_samples_makes_no_claims(seeds):
    # Differences over seeds are often alike, for which Student's t knows no doubt.
    assert claims(np.random.default_rng(6).binomial(20, 0.95, (200, 3, seeds)) / 20) <= 0.05


def test_incomplete_trials_and_single_seeds_are_not_compared():
    assert comparisons_of({0: [0.1], 1: [0.2]}) == []
    ended = [*endings({0: [0.1, 0.2]}), *(ending(1, seed, 0.9, Status.PRUNED, epochs=2) for seed in range(2))]
    summaries = summarize(trials(2), ended, "val_accuracy", "max")
    assert compare(summaries, ended, "val_accuracy", "max") == []


def test_of_many_trials_only_the_best_is_compared_as_strictly_as_if_all_were(monkeypatch):
    source = random.Random(5)
    values = {trial: [source.gauss(0.1 * trial, 0.05) for _ in range(5)] for trial in range(6)}
    all_pairs = {(row.a, row.b): row for row in comparisons_of(values)}
    monkeypatch.setattr(statistics, "MOST_PAIRS", 14)
    rows = comparisons_of(values)
    assert [(row.a, row.b) for row in rows] == [(other, 5) for other in range(5)]
    for row in rows:
        assert row.p == all_pairs[row.a, row.b].p
        assert row.p_corrected >= all_pairs[row.a, row.b].p_corrected
    ps = [row.p for row in rows]
    assert [row.p_corrected for row in rows] == pytest.approx(
        stats.false_discovery_control(ps + [1.0] * 10, method="by")[:5].tolist()
    )


def test_three_hundred_trials():
    source = random.Random(7)
    values = {trial: [source.gauss(trial, 1) for _ in range(4)] for trial in range(300)}
    assert len(comparisons_of(values)) == 299


def folded(trial: int, values: list[list[float]]) -> list[Ending]:
    """Return endings of cross-validation: seed -> fold -> value."""
    folds = len(values[0])
    return [
        dataclasses.replace(
            ending(trial, seed * folds + fold, value),
            run=Run(100 * trial + seed * folds + fold, trial, seed, fold, folds),
        )
        for seed, row in enumerate(values)
        for fold, value in enumerate(row)
    ]


@pytest.mark.parametrize(("folds", "difference"), [(1, 0.3), (1, 0.9), (2, 2.2), (2, 2.4), (5, 1.05), (5, 1.15)])
def test_as_many_seeds_as_are_missing_make_a_difference_significant(folds, difference):
    """With the same difference and deviation, and one seed fewer do not."""

    def compared(seeds):
        normal = stats.norm.ppf((np.arange(seeds * folds) + 0.5) / (seeds * folds))
        deviations = (normal / normal.std(ddof=1)).reshape(seeds, folds)
        ended = folded(0, (difference + deviations).tolist()) + folded(1, np.zeros((seeds, folds)).tolist())
        return compare(summarize(trials(2), ended, "val_accuracy", "max"), ended, "val_accuracy", "max")[0]

    missing = compared(3).missing
    assert missing
    assert compared(3 + missing).p_corrected <= 0.05 < compared(2 + missing).p_corrected


def test_cross_validation_by_the_formula_of_nadeau_and_bengio():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.9, 0.01, (2, 5)), rng.normal(0.88, 0.01, (2, 5))
    ended = folded(0, a.tolist()) + folded(1, b.tolist())
    first, second = summarize(trials(2), ended, "val_accuracy", "max")
    # Two seeds times five folds: 1 / 10 + 1 / 4 in the place of 1 / 10.
    half = stats.t.ppf(0.975, 9) * np.sqrt((1 / 10 + 1 / 4) * np.var(a, ddof=1))
    assert (first.n, first.complete) == (10, True)
    assert first.ci_high - first.mean == pytest.approx(half, rel=0.2)  # exactly so where the metric has no bounds
    mean, low, high = mean_and_interval(a.ravel().tolist(), folds=5)
    assert (mean - low, high - mean) == pytest.approx((half, half))
    [row] = compare([first, second], ended, "val_accuracy", "max")
    differences = (a - b).ravel()
    t = differences.mean() / np.sqrt((1 / 10 + 1 / 4) * np.var(differences, ddof=1))
    assert row.n == 10
    assert row.p == pytest.approx(2 * stats.t.sf(abs(t), 9))
    assert row.ci_high - row.difference == pytest.approx(
        stats.t.ppf(0.975, 9) * np.sqrt((1 / 10 + 1 / 4) * np.var(differences, ddof=1))
    )
    missing = summarize(trials(2), ended[:-1], "val_accuracy", "max")[1]
    assert not missing.complete
