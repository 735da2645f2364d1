"""What is computed from predictions and targets, beside scikit-learn's and NumPy's."""

import itertools

import numpy as np
import pytest

from dptrain.cli.reporting.outcomes import ClassOutcome, NumberOutcome, calibration_error, r2

RNG = np.random.default_rng(3)


def classifier(rows=400, classes=3):
    probabilities = RNG.dirichlet(np.ones(classes), rows)
    labels = np.array([RNG.choice(classes, p=row) for row in probabilities])
    return ClassOutcome([f"c{n}" for n in range(classes)], labels, probabilities)


def test_a_classifier_as_scikit_learn_measures_it():
    metrics = pytest.importorskip("sklearn.metrics")
    calibration = pytest.importorskip("sklearn.calibration")
    outcome = classifier()
    np.testing.assert_array_equal(outcome.confusion, metrics.confusion_matrix(outcome.labels, outcome.predicted))
    assert outcome.losses.mean() == pytest.approx(metrics.log_loss(outcome.labels, outcome.probabilities))
    two = classifier(classes=2)
    share, confidence = calibration.calibration_curve(two.labels, two.probabilities[:, 1], n_bins=10)
    bins = two.calibration()
    assert [part.share for part in bins] == pytest.approx(share)
    assert [part.confidence for part in bins] == pytest.approx(confidence)
    assert sum(part.count for part in bins) == 400


def test_calibration_of_the_sure_and_wrong():
    probabilities = np.array([[0.95, 0.05, 0.0]] * 4)
    bins = ClassOutcome("abc", np.array([0, 0, 1, 2]), probabilities).calibration()
    assert [(part.count, part.confidence, part.share) for part in bins] == [(4, pytest.approx(0.95), 0.5)]
    assert calibration_error(bins) == pytest.approx(0.45)
    assert calibration_error([]) == 0


@pytest.mark.parametrize("classes", [2, 3])
def test_bins_hold_every_sample_also_at_their_edges(classes):
    confidence = np.repeat(np.concatenate([np.arange(11) / 10, np.nextafter(np.arange(11) / 10, 0)]), 3)
    confidence = confidence[confidence >= (0 if classes == 2 else 1 / 3)]
    rest = (1 - confidence)[:, None] * (np.array([1.0]) if classes == 2 else np.array([0.5, 0.5]))
    probabilities = np.concatenate([rest, confidence[:, None]], 1)
    labels = np.arange(len(confidence)) % classes
    bins = ClassOutcome("abc"[:classes], labels, probabilities).calibration()
    assert sum(part.count for part in bins) == len(confidence)
    sure = probabilities[:, 1] if classes == 2 else probabilities.max(1)
    assert sum(part.count * part.confidence for part in bins) == pytest.approx(sure.sum())
    assert len(bins) <= 10


@pytest.mark.parametrize("values", [1, 2, 7, 10, 11, 40])
def test_deciles_hold_every_sample(values):
    true = np.arange(40.0) % values
    parts = NumberOutcome.of("y", true, true + 1).deciles()
    assert sum(part.count for part in parts) == 40
    assert all(before.high < after.low for before, after in itertools.pairwise(parts))


def test_the_most_frequent_confusions_come_first():
    labels, predicted = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 1, 0, 2, 2, 1])
    outcome = ClassOutcome("abc", labels, np.eye(3)[predicted])
    assert outcome.confusions(2) == [(0, 1, 2), (1, 2, 1)]
    assert len(outcome.confusions(20)) == 3
    assert ClassOutcome("ab", np.array([0, 1]), np.eye(2)).confusions(5) == []


def test_what_is_no_probability_has_an_infinite_loss():
    outcome = ClassOutcome("ab", np.array([0, 1, 1]), np.array([[np.nan, np.nan], [0.2, 0.8], [1.0, 0.0]]))
    assert outcome.losses.tolist() == [np.inf, pytest.approx(-np.log(0.8)), pytest.approx(-np.log(1e-7))]
    assert sum(part.count for part in outcome.calibration()) == 2


def test_deciles_hold_a_tenth_each_and_keep_equal_values_together():
    true = RNG.permutation(np.arange(1000)).astype(np.float32)
    outcome = NumberOutcome.of("y", true, true + np.where(true < 100, 7, -1).astype(np.float32))
    parts = outcome.deciles()
    assert [part.count for part in parts] == [100] * 10
    assert [part.error for part in parts] == [7] + [1] * 9
    assert [part.bias for part in parts] == [7] + [-1] * 9
    assert (parts[0].low, parts[-1].high) == (0, 999)
    stars = np.repeat([1, 2, 3], [80, 15, 5]).astype(np.float32)
    parts = NumberOutcome.of("stars", stars, stars).deciles()
    assert [(part.low, part.high, part.count) for part in parts] == [(1, 1, 80), (2, 2, 15), (3, 3, 5)]
    one = NumberOutcome.of("y", np.ones(4, np.float32), np.zeros(4, np.float32)).deciles()
    assert [(part.low, part.high, part.count, part.error) for part in one] == [(1, 1, 4, 1)]


def test_predictions_that_are_no_numbers_are_counted():
    outcome = NumberOutcome.of("y", np.array([1.0, 2.0, 3.0]), np.array([np.nan, 2.5, np.inf]))
    assert (outcome.lost, outcome.rows.tolist(), outcome.residuals.tolist()) == (2, [1], [0.5])


def test_r2():
    metrics = pytest.importorskip("sklearn.metrics")
    true, predicted = RNG.normal(size=(2, 50))
    assert r2(true, predicted) == pytest.approx(metrics.r2_score(true, predicted))
    assert np.isnan(r2(np.ones(3), np.ones(3)))
    assert np.isnan(r2(np.zeros(0), np.zeros(0)))
