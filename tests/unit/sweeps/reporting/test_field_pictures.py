"""Pictures of swept fields: that they are drawn for whatever a field may hold, and hold what they should."""

import math

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")
pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")

from dptrain.sweeps.analysis.statistics import summarize
from dptrain.sweeps.records import Status, Trial
from dptrain.sweeps.reporting.field_pictures import (
    _round_numbers,
    draw_hyperparameters,
    draw_importances,
    draw_parallel,
)
from dptrain.sweeps.reporting.fields import swept_fields
from tests.sample import sample
from tests.unit.sweeps.drawn import check_texts, check_widths
from tests.unit.sweeps.samples import NASTY, ending, endings, trials

METRIC = "val_accuracy"


def panels(all_trials, ended):
    """Return the picture with a panel for each field; warnings are errors."""
    fields = swept_fields(None, all_trials, list(all_trials[0].setting))
    return draw_hyperparameters(all_trials, summarize(all_trials, ended, METRIC, "max"), ended, METRIC, fields)


def parallel(all_trials, ended, mode="max"):
    fields = swept_fields(None, all_trials, list(all_trials[0].setting))
    return draw_parallel(all_trials, summarize(all_trials, ended, METRIC, mode), METRIC, mode, fields)


def drawn(all_trials, ended):
    return [panels(all_trials, ended), parallel(all_trials, ended)]


@pytest.mark.parametrize(("number", "seeds"), sample([(1, 1), (40, 3)], 2))
def test_no_text_is_cut_at_either_width(figures, number, seeds):
    values = {n: [0.5 + n / 100 + 0.001 * seed**2 for seed in range(seeds)] for n in range(number)}
    check_widths(drawn(trials(number), endings(values)), figures)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1e-5, 1e-3, 1e-1], "log"),
        ([16, 18, 36, 37, 70, 115, 230, 453, 2000], "log"),  # too close for a label each
        ([-100, 1, 2, 3], "linear"),
    ],
)
def test_numbers_have_an_axis_of_numbers(figures, values, scale):
    all_trials = [Trial(n, {"field": value}) for n, value in enumerate(values)]
    drawn(all_trials, endings({n: [0.5 + n / 100] for n in range(len(values))}))
    for figure in figures:
        check_texts(figure)
    [axes] = figures[0].axes
    assert axes.get_xscale() == scale
    dots = axes.lines[2]  # of complete trials; those before are of others, here none
    assert list(dots.get_xdata()) == values


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (16, 453, [20, 50, 100, 200]),
        (1e-4, 1e-1, [1e-4, 1e-3, 1e-2, 1e-1]),
        (0.5, 3000, [1, 10, 100, 1000]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1, 1e3]),
        (2.1, 4.9, [2.1, 4.9]),
    ],
)
def test_round_numbers_of_a_logarithmic_axis(low, high, expected):
    assert _round_numbers(low, high) == expected


def test_other_values_have_an_axis_of_categories(undrawn):
    settings = [{"field": value, "flag": value is None} for value in ([128], [64], None, "relu", [64])]
    all_trials = [Trial(n, setting) for n, setting in enumerate(settings)]
    drawn(all_trials, endings({n: [0.5 + n / 100] for n in range(len(all_trials))}))
    field, flag = (axes for axes in undrawn[0].axes if axes.get_visible())
    names = [text.get_text() for text in field.get_xticklabels()]
    assert sorted(names) == ["[128]", "[64]", "none", "relu"]
    assert [text.get_text() for text in flag.get_xticklabels()] == ["false", "true"]
    places = field.lines[2].get_xdata()
    assert [names[round(place)] for place in places] == ["[128]", "[64]", "none", "relu", "[64]"]
    assert places[1] != places[4]  # side by side


def test_lists_are_ordered_by_their_numbers(undrawn):
    all_trials = [Trial(n, {"hidden": [units]}) for n, units in enumerate((512, 64, 128))]
    panels(all_trials, endings({n: [0.5] for n in range(3)}))
    assert [text.get_text() for text in undrawn[0].axes[0].get_xticklabels()] == ["[64]", "[128]", "[512]"]


def test_trials_that_are_not_complete_are_hollow(undrawn):
    ended = [*endings({0: [0.5, 0.6]}), *(ending(1, seed, 0.9, Status.PRUNED, epochs=1) for seed in range(2))]
    panels(trials(2), ended)
    hollow, _, full, _ = undrawn[0].axes[0].lines
    assert (hollow.get_markerfacecolor(), list(hollow.get_ydata())) == ("none", [0.9, 0.9])
    assert (full.get_markerfacecolor() != "none", list(full.get_ydata())) == (True, [0.5, 0.6])
    assert "hollow" in undrawn[0].get_suptitle()


def test_one_field_has_room_for_the_title(figures):
    all_trials = [Trial(n, {"learning_rate": 0.1 + n}) for n in range(2)]
    drawn(all_trials, [*endings({0: [0.5, 0.6]}), ending(1, 0, 0.9, Status.PRUNED, epochs=1)])
    assert "hollow" in figures[0].get_suptitle()
    for figure in figures:
        check_texts(figure)


def test_many_fields_and_many_long_categories(figures):
    all_trials = [
        Trial(n, {f"layers.{m}.kernel_initializer": f"variance_scaling_{n}" for m in range(4)}) for n in range(25)
    ]
    drawn(all_trials, endings({n: [0.5 + n, 0.6 + n] for n in range(25)}))
    check_texts(figures[0])
    check_texts(figures[1])
    assert "first 16 values" in figures[0].axes[0].get_title()
    assert sum(axes.get_visible() for axes in figures[0].axes) == 4


@pytest.mark.parametrize("values", sample([[1e-8, 1e12], [-1e300, 1e300], [5e-324, 1.0]], 3))
def test_values_of_any_size(values):
    all_trials = [Trial(n, {"field": value, "other": n}) for n, value in enumerate(values)]
    drawn(all_trials, endings({0: values, 1: values[::-1]}))


def test_settings_are_drawn_as_text_whatever_they_hold(figures):
    all_trials = [Trial(n, {"a\nb\0$": text, "$\\frac{$$": [text]}) for n, text in enumerate(NASTY)]
    drawn(all_trials, endings({n: [0.5, 0.6] for n in range(len(all_trials))}))
    draw_importances({"a\nb\0$": 0.75, "$\\frac{$$": 0.25})
    for figure in figures:
        check_texts(figure)


def lines_of(figure):
    """Return the lines of trials in parallel coordinates by their numbers."""
    return {int(line.get_gid().removeprefix("line-trial-")): line for line in figure.axes[0].lines if line.get_gid()}


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 0)])
def test_parallel_coordinates(undrawn, mode, best):
    all_trials = [
        Trial(n, {"rate": rate, "kind": kind, "units": units})
        for n, (rate, kind, units) in enumerate([(1e-4, "relu", [8]), (1e-1, "tanh", [64]), (1e-3, "relu", [256])])
    ]
    parallel(all_trials, endings({n: [0.5 + n / 10, 0.6 + n / 10] for n in range(3)}), mode)
    wide, narrow = undrawn
    places = {number: list(line.get_ydata()) for number, line in lines_of(wide).items()}
    third = (math.log(1e-3) - math.log(1e-4)) / (math.log(1e-1) - math.log(1e-4))
    assert places[0] == [0, 0, 0, 0]  # the lowest rate, the first kind, the fewest units, the lowest metric
    assert places[1] == [1, 1, 0.5, pytest.approx(0.5)]
    assert places[2] == [pytest.approx(third), 0, 1, 1]
    assert {number: list(line.get_xdata()) for number, line in lines_of(narrow).items()} == places
    thick = max(lines_of(wide), key=lambda number: lines_of(wide)[number].get_linewidth())
    assert thick == best
    texts = [text.get_text() for text in wide.axes[0].texts]
    assert {"rate", "kind", "units", METRIC, "relu", "[8]", "0.0001", "0.1"} <= set(texts)


def test_trials_that_were_stopped_are_dashed_in_parallel_coordinates(undrawn):
    parallel(trials(2), [*endings({0: [0.5, 0.6]}), *(ending(1, seed, 0.9, Status.PRUNED, 1) for seed in range(2))])
    assert {number: line.get_linestyle() for number, line in lines_of(undrawn[0]).items()} == {0: "-", 1: "--"}


def test_importances_are_bars(figures):
    draw_importances({"rate": 0.75, "units": 0.25})
    for figure in figures:
        check_texts(figure)
        assert [bar.get_width() for bar in figure.axes[0].patches] == [0.75, 0.25]
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["rate", "units"]
