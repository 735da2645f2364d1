"""The samples that a page shows as the worst are those, whatever else is not finite."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.cli.reporting.outcomes import ClassOutcome, NumberOutcome
from dptrain.cli.reporting.quality import Quality
from dptrain.cli.reporting.worst import MOST, worst_samples
from dptrain.data.loading import Split

ODD = st.sampled_from([float("nan"), float("inf"), -float("inf")])


def held_out(rows: int) -> Split:
    """Return samples whose one number is their row."""
    return Split(np.arange(rows)[:, None], np.arange(rows))


@given(st.lists(st.tuples(st.integers(-50, 50), st.one_of(st.integers(-50, 50), ODD)), min_size=1, max_size=30))
def test_numbers(pairs):
    true, predicted = np.array(pairs, np.float64).T
    quality = Quality("", held_out(len(true)), None, [NumberOutcome.of("y", true, predicted)])
    finite = [row for row in range(len(true)) if np.isfinite(predicted[row])]
    expected = sorted(finite, key=lambda row: -abs(predicted[row] - true[row]))[:MOST]
    shown = worst_samples(quality, None)
    assert [sample.row for sample in shown] == expected
    assert [sample.text for sample in shown] == [str(row) for row in expected]
    assert [float(sample.true) for sample in shown] == true[expected].tolist()
    assert [float(sample.predicted) for sample in shown] == predicted[expected].tolist()


@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(1, 30))
def test_classes(seed, classes, rows):
    rng = np.random.default_rng(seed)
    probabilities, labels = rng.dirichlet(np.ones(classes), rows), rng.integers(0, classes, rows)
    probabilities[rng.random((rows, classes)) < 0.05] = np.nan
    outcome = ClassOutcome([f"class {label}" for label in range(classes)], labels, probabilities)
    wrong = [row for row in range(rows) if outcome.predicted[row] != labels[row]]
    expected = sorted(wrong, key=lambda row: -outcome.losses[row])[:MOST]
    shown = worst_samples(Quality("", held_out(rows), outcome), None)
    assert [sample.row for sample in shown] == expected
    assert [sample.text for sample in shown] == [str(row) for row in expected]
    assert [sample.true for sample in shown] == [f"class {labels[row]}" for row in expected]
    for sample in shown:
        value = probabilities[sample.row, labels[sample.row]]
        said = f"{100 * value:.1f} %" if np.isfinite(value) else "no number"
        assert sample.error == f"the true class had {said}"


@pytest.mark.parametrize("predicted", [[1.0, 2.0], [np.nan, np.nan]])
def test_nothing_to_show(predicted):
    outcome = NumberOutcome.of("y", np.array([np.nan, np.inf]), np.array(predicted))
    assert worst_samples(Quality("", held_out(2), None, [outcome]), None) == []
