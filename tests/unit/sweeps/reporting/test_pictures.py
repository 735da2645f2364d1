"""Pictures of sweeps: that they are drawn for whatever a sweep may hold, and hold what they should."""

import dataclasses
import math

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")
pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")

from dptrain.sweeps.analysis.intervals import mean_and_interval
from dptrain.sweeps.analysis.statistics import summarize
from dptrain.sweeps.records import Run, Status, Trial
from dptrain.sweeps.reporting import pictures
from dptrain.sweeps.reporting.pictures import curves_of, draw_curves, draw_ranking, draw_seeds
from tests.sample import sample
from tests.unit.sweeps.drawn import check_texts, check_widths
from tests.unit.sweeps.samples import NASTY, ending, endings, logs, trials

METRIC = "val_accuracy"


def curves(all_trials, ended):
    """Return the picture over epochs; warnings are errors."""
    return draw_curves(
        all_trials, summarize(all_trials, ended, METRIC, "max"), curves_of(logs(ended), METRIC), METRIC, "max"
    )


def ranking(all_trials, ended):
    return draw_ranking(all_trials, summarize(all_trials, ended, METRIC, "max"), METRIC, "max")


def drawn(all_trials, ended):
    return [curves(all_trials, ended), ranking(all_trials, ended)]


@pytest.mark.parametrize(("number", "seeds"), sample([(2, 2), (40, 3)], 2))
def test_no_text_is_cut_at_either_width(figures, number, seeds):
    values = {n: [0.5 + n / 100 + 0.001 * seed**2 for seed in range(seeds)] for n in range(number)}
    check_widths(drawn(trials(number), endings(values)), figures)
    for figure in figures:
        [title, *_] = [axes.get_title() for axes in figure.axes if axes.get_title()] or [figure.get_suptitle()]
        assert title
        assert all(axes.get_xlabel() for axes in figure.axes)


def test_curves_hold_mean_and_band(undrawn):
    ended = endings({0: [0.2, 0.4, 0.9], 1: [0.5, 0.6]})
    curves(trials(2), ended)
    [axes] = undrawn[0].axes
    best_line, other_line = sorted(axes.lines, key=lambda line: line.get_label())
    assert list(best_line.get_xdata()) == [1, 2, 3, 4, 5]
    assert best_line.get_ydata()[-1] == pytest.approx(0.5)
    corners = [collection.get_paths()[0].vertices for collection in axes.collections]
    bands = [sorted({*xy[xy[:, 0] == 5, 1]}) for xy in corners]  # at the last epoch
    # trial 0 has 3 runs: an interval; it is complete, trial 1 is not, and so it is drawn first
    _, low, high = mean_and_interval([0.2, 0.4, 0.9], (0, 1))
    assert bands[0] == pytest.approx([low, high])
    # trial 1 has 2: from the lowest to the highest
    assert bands[1] == pytest.approx([0.5, 0.6])
    assert other_line.get_ydata()[-1] == pytest.approx(0.55)


def test_bands_are_those_of_cross_validation(undrawn):
    values = [0.7, 0.75, 0.8, 0.9]
    ended = [dataclasses.replace(e, run=Run(n, 0, 0, n, 4)) for n, e in enumerate(endings({0: values}))]
    summaries = summarize(trials(1), ended, METRIC, "max")
    draw_curves(trials(1), summaries, curves_of(logs(ended), METRIC), METRIC, "max", 4)
    corners = undrawn[0].axes[0].collections[0].get_paths()[0].vertices
    assert sorted({*corners[corners[:, 0] == 5, 1]}) == pytest.approx([summaries[0].ci_low, summaries[0].ci_high])


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_epochs_are_whole(figures, epochs):
    ended = [ending(trial, seed, 0.5 + seed / 10, epochs=epochs) for trial in range(2) for seed in range(2)]
    curves(trials(2), ended)
    for figure in figures:
        ticks = [tick for tick in figure.axes[0].get_xticks() if 0 < tick <= epochs]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)


def test_a_single_trial_is_drawn_with_all_its_seeds(figures):
    single_trial, ended = [Trial(0, {})], endings({0: [0.5, 0.6, 0.8]})
    [summary] = summarize(single_trial, ended, METRIC, "max")
    curves(single_trial, ended)
    draw_seeds(summary, ended, METRIC)
    for figure in figures:
        check_texts(figure)
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == ["mean", "a seed each"]
    assert len(figures[0].axes[0].lines) == 4
    dots, mean = figures[2].axes[0].lines
    assert list(dots.get_ydata()) == [0.5, 0.6, 0.8]
    assert mean.get_ydata()[0] == summary.mean
    assert [text.get_text() for text in figures[2].axes[0].get_xticklabels()] == ["0", "1", "2"]


def test_many_seeds_with_long_names(figures):
    ended = [ending(0, seed, 0.5 + seed / 200) for seed in range(99)]
    [summary] = summarize([Trial(0, {})], ended, METRIC, "max")
    draw_seeds(summary, ended, METRIC)
    for figure in figures:
        check_texts(figure)
        assert len(figure.axes[0].get_xticks()) <= 21


def test_curves_leave_out_what_is_not_finite_and_take_the_last_of_a_repeated_epoch():
    rows = [
        {"trial": 0, "run": 0, "epoch": 1, METRIC: 0.1},
        {"trial": 0, "run": 0, "epoch": 1, METRIC: 0.2},
        {"trial": 0, "run": 1, "epoch": 1, METRIC: math.nan},
        {"trial": 0, "run": 2, "epoch": 1, METRIC: None},
        {"trial": 0, "run": 3, "epoch": 1, METRIC: math.inf},
        {"trial": 0, "run": 4, "epoch": 1, "loss": 1.0},
        {"trial": 0, "run": 5, "epoch": 1, METRIC: 0.3},
        {"trial": 0, "run": 5, "epoch": 1, METRIC: None},
    ]
    assert curves_of(rows, METRIC) == {0: {1: {0: 0.2}}}


def test_curves_show_the_best_trials_only(undrawn):
    values = {n: [0.5 + n / 1000, 0.6 + n / 1000] for n in range(40)}
    curves(trials(40), endings(values))
    [axes] = undrawn[0].axes
    numbers = [line.get_label().partition(":")[0] for line in axes.lines]
    assert numbers == [str(n) for n in range(39, 39 - pictures.MOST_CURVES, -1)]
    assert "12 best" in axes.get_title()
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == pictures.MOST_CURVES


def test_thousands_of_epochs_are_thinned_with_first_and_last():
    thinned = pictures._thinned(range(1, 10_001))
    assert (thinned[0], thinned[-1]) == (1, 10_000)
    assert len(thinned) <= 301
    assert pictures._thinned([3, 5]) == [3, 5]
    assert pictures._thinned([]) == []


def test_ranking_has_the_best_on_top_with_its_interval(undrawn):
    ended = endings({0: [0.5, 0.6], 1: [0.8, 0.9], 2: [0.95, 0.99]})
    ended[5] = ending(2, 1, status=Status.DIVERGED)
    ranking(trials(3), ended)
    [axes] = undrawn[0].axes
    assert axes.yaxis_inverted()
    labels = [text.get_text().partition(":")[0] for text in axes.get_yticklabels()]
    assert labels == ["1", "0", "2"]  # trial 2 lost a run
    bars = [line for line in axes.lines if len(line.get_xdata()) == 2]
    _, low, high = mean_and_interval([0.8, 0.9], (0, 1))
    assert list(bars[0].get_xdata()) == [low, high]
    assert list(bars[0].get_ydata()) == [0, 0]
    [legend] = undrawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["complete", "lost runs"]


def test_ranking_is_of_at_most_thirty(undrawn):
    ranking(trials(40), endings({n: [n / 100, n / 90] for n in range(40)}))
    assert len(undrawn[0].axes[0].get_yticks()) == 30
    assert "best 30 of 40" in undrawn[0].get_suptitle()


def test_settings_are_drawn_as_text_whatever_they_hold(figures):
    all_trials = [Trial(n, {"a\nb\0$": text, "$\\frac{$$": [text]}) for n, text in enumerate(NASTY)]
    drawn(all_trials, endings({n: [0.5, 0.6] for n in range(len(all_trials))}))
    for figure in figures:
        check_texts(figure)


@pytest.mark.parametrize("values", sample([[1e-8, 1e12], [-1e300, 1e300], [5e-324, 1.0], [0.3, 0.3]], 3))
def test_values_of_any_size(values):
    drawn(trials(2), endings({0: values, 1: values[::-1]}))


def test_nothing_to_draw_is_drawn_empty():
    all_trials = trials(2)
    summaries = summarize(all_trials, [], METRIC, "max")
    assert "<svg " in draw_curves(all_trials, summaries, {}, METRIC, "max")
    assert "<svg " in draw_ranking(all_trials, summaries, METRIC, "max")
