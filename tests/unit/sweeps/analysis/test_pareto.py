"""Several metrics: which trials no other one beats, and what is said and drawn of them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")

from dptrain.errors import ConfigError
from dptrain.sweeps.analysis.pareto import (
    decided,
    front_of,
    objectives_of,
    on_front,
    require_free,
    require_single_metric,
)
from dptrain.sweeps.records import Status
from tests.sample import sample
from tests.unit.sweeps.drawn import check_widths
from tests.unit.sweeps.samples import ending, trials

MODES = {"val_accuracy": "max", "parameters": "min"}


def ended(values, **metrics):
    """Return the endings of runs: trial -> (val_accuracy, parameters) over seeds 0, 1, ..."""
    return [
        dataclasses.replace(
            plain := ending(trial, seed, accuracy), metrics={**plain.metrics, "parameters": size, **metrics}
        )
        for trial, row in values.items()
        for seed, (accuracy, size) in enumerate(row)
    ]


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.tuples(
            st.lists(st.lists(st.integers(-3, 3), min_size=width, max_size=width), max_size=12),
            st.lists(st.sampled_from(["max", "min"]), min_size=width, max_size=width),
        )
    )
)
def test_the_front_is_what_brute_force_finds(case):
    rows, modes = case

    def beats(candidate, other):
        gains = [a - b if mode == "max" else b - a for a, b, mode in zip(candidate, other, modes, strict=True)]
        return min(gains) >= 0 and max(gains) > 0

    values_TM = np.array(rows, np.float64).reshape(len(rows), len(modes))
    assert on_front(values_TM, modes) == [not any(beats(other, row) for other in rows) for row in rows]


def test_the_front_is_of_means_over_seeds():
    # Trial 1 is beaten by 0; 2 and 3 are equal, and neither beats the other; 4 is the smallest.
    values = {0: [(0.9, 50), (0.7, 50)], 1: [(0.9, 60), (0.6, 60)], 2: [(0.5, 9)] * 2, 3: [(0.5, 9)] * 2}
    front = front_of(trials(5), ended(values | {4: [(0.1, 3)] * 2}), MODES)
    assert front.trials == [0, 2, 3, 4]
    assert front.means[0] == (pytest.approx(0.8), 50)
    assert front.columns(1) == {"mean_parameters": 60, "pareto": False}
    assert "parameters (less is better): trial 0 (val_accuracy 0.8, parameters 50), trial 2" in front.sentence()


def test_a_single_metric_has_no_front():
    assert front_of(trials(1), ended({0: [(0.9, 50)]}), {"val_accuracy": "max"}) is None


def test_a_trial_is_on_no_front_by_losing_runs_or_by_stopping_early():
    values = {0: [(0.5, 50)] * 2, 1: [(0.9, 40), (math.nan, 40)], 2: [(0.9, 40), (0.9, math.inf)], 3: [(0.9, 40)]}
    lost = [ending(4, 0, 0.9, Status.DIVERGED)]
    front = front_of(trials(5), [*ended(values), *lost], MODES)
    assert (front.compared, front.trials) == ([0], [0])
    assert front.columns(4) == {"mean_parameters": None, "pareto": False}
    no_front = front_of(trials(1), lost[:0], MODES)
    assert no_front.trials == []
    assert no_front.sentence().startswith("No trial is complete")


def test_many_trials_are_counted_in_the_sentence():
    front = front_of(trials(20), ended({n: [(n / 20, n)] for n in range(20)}), MODES)
    assert len(front.trials) == 20
    assert "trial 8 (val_accuracy 0.4, parameters 8) and 8 more." in front.sentence()


@pytest.mark.parametrize("modes", sample([MODES, MODES | {"loss": "min"}, {"parameters": "min", "loss": "max"}], 3))
@pytest.mark.parametrize("number", [1, 30])
def test_the_picture_of_the_front(figures, modes, number):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    from dptrain.sweeps.reporting.pictures import draw_front

    accuracies = np.random.default_rng(1).random(number)
    front = front_of(trials(number), ended({n: [(accuracies[n], 10 * n + 10)] for n in range(number)}), modes)
    check_widths([draw_front(front)], figures)
    [axes] = figures[0].axes
    line, *dots = axes.lines
    assert {dot.get_gid() for dot in dots} == {f"dot-trial-{n}" for n in range(number)}
    if len(modes) == 2:
        filled = {dot.get_gid() for dot in dots if dot.get_markerfacecolor() != "white"}
        assert filled == {f"dot-trial-{n}" for n in front.trials}
        assert len(line.get_xdata()) == len(front.trials)
    # Along the steps the first metric only rises or only falls.
    assert list(line.get_ydata()) in (sorted(line.get_ydata()), sorted(line.get_ydata(), reverse=True))


def test_a_mode_for_each_metric():
    assert objectives_of(["loss"], ["min"]) == {"loss": "min"}
    assert objectives_of(["loss", "parameters"], ["auto"]) == {"loss": "auto", "parameters": "auto"}
    assert objectives_of(["a", "b"], ["max", "min"]) == {"a": "max", "b": "min"}
    assert decided({"loss": "min"}) == {"metric": "loss", "mode": "min"}
    assert decided({"a": "max", "b": "min"}) == {"metric": ["a", "b"], "mode": ["max", "min"]}


@pytest.mark.parametrize(
    ("metrics", "modes", "message"),
    [
        ([], ["auto"], "one or more names"),
        ([3], ["auto"], "one or more names"),
        (["a", "a"], ["auto"], "none twice"),
        (["a", "b"], ["max"], r"expected min, max or auto for each of 2 metrics \(a, b\)"),
        (["a"], ["max", "min"], "expected min, max or auto for each of 1 metric"),
    ],
)
def test_metrics_and_modes_that_do_not_fit(metrics, modes, message):
    with pytest.raises(ConfigError, match=message):
        objectives_of(metrics, modes)


def test_names_and_halving_that_do_not_go_with_several_metrics():
    require_single_metric({"a": "max"})
    with pytest.raises(ConfigError, match="halving: compares trials by one metric, but there are 2"):
        require_single_metric({"a": "max", "b": "min"})
    require_free(["pareto"], ["a"])
    with pytest.raises(ConfigError, match="swept 'mean_b': results already have a column of that name"):
        require_free(["x", "mean_b"], ["a", "b"])
