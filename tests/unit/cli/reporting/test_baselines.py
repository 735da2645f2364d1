"""What a network is compared with, and in which words."""

import sys

import numpy as np
import pytest

from dptrain.cli.reporting.baselines import boosting, constant, difference, sampled, verdict
from dptrain.data.preprocessing import Column, Preprocessing

RNG = np.random.default_rng(2)
NAMES = ("mean absolute error", "the other")


def table(*columns, task="regression", **options):
    return Preprocessing(task, columns, "y", **options)


def test_the_mean_and_the_most_frequent_class():
    mean = constant(np.array([1.0, 2.0, 6.0], np.float32), 2, 0)
    assert (mean.outputs.tolist(), mean.rows) == ([3, 3], 3)
    shares = constant(np.array([0, 1, 1, 3], np.int32), 2, 4)
    assert shares.outputs.tolist() == [[0.25, 0.5, 0, 0.25]] * 2


def test_boosting_learns_what_a_mean_does_not():
    pytest.importorskip("sklearn")
    numbers = table(
        Column("a", "number"), Column("s", "embedding", tuple("abc")), Column("t", "words", ("w",), length=3)
    )
    x = np.column_stack([RNG.normal(size=600), RNG.integers(0, 3, 600), RNG.integers(0, 2, (600, 3))]).astype(
        np.float32
    )
    y = 5 * x[:, 0] + np.array([0, 50, -50])[x[:, 1].astype(int)]
    first, again = (boosting(numbers, x[:500], y[:500], x[500:], 0) for _ in range(2))
    assert np.abs(first.outputs - y[500:]).mean() < 0.1 * np.abs(y[500:] - y[:500].mean()).mean()
    np.testing.assert_array_equal(first.outputs, again.outputs)
    assert (first.rows, first.remark) == (500, "without t")
    labels = (y > 20) * 2  # of three classes one does not occur
    classes = boosting(numbers, x[:500], labels[:500], x[500:], 3)
    assert classes.outputs.shape == (100, 3)
    assert np.abs(classes.outputs.sum(axis=1) - 1).max() < 1e-9
    assert (classes.outputs[:, 1] == 0).all()
    assert (classes.outputs.argmax(axis=1) == labels[500:]).mean() > 0.95


def test_why_there_is_no_boosting(monkeypatch):
    x, y = np.zeros((300, 2), np.float32), np.arange(300) % 2
    texts = table(Column("t", "words", ("w",), length=2))
    assert boosting(texts, x, y, x, 0) == "the table has texts alone"
    numbers = table(Column("a", "number"), Column("b", "number"))
    pytest.importorskip("sklearn")
    assert "too long with 2 features and 11 classes" in boosting(numbers, x, y, x, 11)
    assert "of one class" in boosting(numbers, x, 0 * y, x, 2)
    assert "too long with 2 features and 1,000,000 classes" in boosting(numbers, x, y, x, 1_000_000)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert boosting(numbers, x, y, x, 2) == "scikit-learn is not installed: pip install scikit-learn"


def test_drawn_rows_are_the_same_and_rise():
    assert sampled(5, 9).tolist() == [0, 1, 2, 3, 4]
    rows = sampled(10_000, 100)
    assert len(set(rows.tolist())) == 100
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, sampled(10_000, 100))
    assert len(sampled(10, 0)) == len(sampled(10, -1)) == 0


def test_a_difference_has_an_interval_over_samples():
    network, other = RNG.normal(1, 0.1, 1000), RNG.normal(2, 0.1, 1000)
    mean, half = difference(network, other)
    assert mean == pytest.approx(-1, abs=0.02)
    assert half == pytest.approx(1.96 * np.sqrt(0.02 / 1000), rel=0.1)


@pytest.mark.parametrize(
    ("network", "other", "words"),
    [
        (1.0, 2.0, "The network's mean absolute error is lower than that of the other by 50 %."),
        (1.9, 1.0, "The network's mean absolute error is higher than that of the other by 90 %: the network is not"),
        (2.5, 1.0, "The network's mean absolute error is 2.5 times that of the other: the network is not worth"),
        (12.3, 1.0, "The network's mean absolute error is 12.3 times that of the other: the network is not worth"),
        (1.0, 1.0, "The network and the other cannot be told apart by their mean absolute error on so many samples."),
        (np.inf, 1.0, "The network's mean absolute error is not finite, so it cannot be compared with the other."),
    ],
)
def test_verdicts(network, other, words):
    noise = RNG.normal(0, 0.01, 200)
    assert verdict(network + noise, other + noise[::-1], NAMES).startswith(words)


def test_one_sample_tells_nothing():
    assert "cannot be told apart" in verdict(np.array([1.0]), np.array([5.0]), NAMES)
