"""Pictures of sweeps: that they are drawn for whatever a sweep may hold, and hold what they should."""

import itertools
import math
import sys
import warnings

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")
pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")

from dptrain.errors import ConfigError
from dptrain.sweeps import pictures
from dptrain.sweeps.pictures import curves_of, draw_curves, draw_hyperparameters, draw_ranking
from dptrain.sweeps.records import Status, Trial
from dptrain.sweeps.statistics import mean_and_interval, summarize
from tests.unit.sweeps.samples import ending, endings, logs, trials

METRIC = "val_accuracy"


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn, to look into."""
    seen = []
    real = pictures._png

    def keeping(figure):
        seen.append(figure)
        return real(figure)

    monkeypatch.setattr(pictures, "_png", keeping)
    return seen


def drawn(some, ended):
    """Return all three pictures of a sweep; warnings are errors."""
    summaries = summarize(some, ended, METRIC, "max")
    fields = list(some[0].setting)
    return [
        draw_curves(some, summaries, curves_of(logs(ended), METRIC), METRIC, "max"),
        draw_hyperparameters(some, summaries, ended, METRIC, fields),
        draw_ranking(some, summaries, METRIC, "max"),
    ]


def check_texts(figure):
    """Check that no text reaches out of the picture, and no tick's label into the next one's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        canvas.draw()
    renderer = canvas.get_renderer()
    width, height = canvas.get_width_height()
    texts = [*figure.texts]  # the title over all panels
    texts += [text for legend in figure.legends for text in (*legend.get_texts(), legend.get_title())]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis, limits in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            ticks = [tick for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
            labels = [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
            texts += labels
            if all(label.get_rotation() in (0, 90) for label in labels):
                boxes = [label.get_window_extent(renderer) for label in labels]
                assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes)), labels
    for text in texts:
        box = text.get_window_extent(renderer)
        if text.get_text() and text.get_visible():
            assert box.x0 >= -1, text
            assert box.y0 >= -1, text
            assert box.x1 <= width + 1, text
            assert box.y1 <= height + 1, text


@pytest.mark.parametrize(("number", "seeds"), [(1, 1), (2, 2), (8, 16), (40, 3)])
def test_pictures_are_png_files_and_no_text_is_cut(figures, number, seeds):
    values = {n: [0.5 + n / 100 + 0.001 * seed**2 for seed in range(seeds)] for n in range(number)}
    for picture in drawn(trials(number), endings(values)):
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    for figure in figures:
        check_texts(figure)
        [title, *_] = [axes.get_title() for axes in figure.axes if axes.get_title()] or [figure.get_suptitle()]
        assert title
        for axes in figure.axes:
            assert axes.get_xlabel() or not axes.get_visible()


def test_curves_hold_mean_and_band(figures):
    ended = endings({0: [0.2, 0.4, 0.9], 1: [0.5, 0.6]})
    some = trials(2)
    draw_curves(some, summarize(some, ended, METRIC, "max"), curves_of(logs(ended), METRIC), METRIC, "max")
    [axes] = figures[0].axes
    best_line, other_line = sorted(axes.lines, key=lambda line: line.get_label())
    assert list(best_line.get_xdata()) == [1, 2, 3, 4, 5]
    assert best_line.get_ydata()[-1] == pytest.approx(0.5)
    band, other_band = (collection.get_paths()[0].get_extents() for collection in axes.collections)
    bands = {0: band, 1: other_band}
    # trial 0 has 3 runs: an interval; it is complete, trial 1 is not, and so it is drawn first
    _, low, high = mean_and_interval([0.2, 0.4, 0.9])
    assert (bands[0].ymin, bands[0].ymax) == (pytest.approx(low), pytest.approx(high))
    # trial 1 has 2: from the lowest to the highest
    assert (bands[1].ymin, bands[1].ymax) == (pytest.approx(0.1), pytest.approx(0.6))
    assert other_line.get_ydata()[-1] == pytest.approx(0.55)


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


def test_curves_show_the_best_trials_only(figures):
    values = {n: [0.5 + n / 1000, 0.6 + n / 1000] for n in range(40)}
    drawn(trials(40), endings(values))
    [axes] = figures[0].axes
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


def test_ranking_has_the_best_on_top_with_its_interval(figures):
    ended = endings({0: [0.5, 0.6], 1: [0.8, 0.9], 2: [0.95, 0.99]})
    ended[5] = ending(2, 1, status=Status.DIVERGED)
    drawn(trials(3), ended)
    [axes] = figures[2].axes
    assert axes.yaxis_inverted()
    labels = [text.get_text().partition(":")[0] for text in axes.get_yticklabels()]
    assert labels == ["1", "0", "2"]  # trial 2 lost a run
    bars = [line for line in axes.lines if len(line.get_xdata()) == 2]
    _, low, high = mean_and_interval([0.8, 0.9])
    assert list(bars[0].get_xdata()) == [low, high]
    assert list(bars[0].get_ydata()) == [0, 0]
    [legend] = figures[2].legends
    assert [text.get_text() for text in legend.get_texts()] == ["complete", "lost runs"]


def test_ranking_is_of_at_most_thirty(figures):
    drawn(trials(40), endings({n: [n / 100, n / 90] for n in range(40)}))
    assert len(figures[2].axes[0].get_yticks()) == 30
    assert "best 30 of 40" in figures[2].get_suptitle()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1e-5, 1e-3, 1e-1], "log"),
        ([1e-3, 1e-2, 1e-1], "linear"),  # 2 decades are not more than 2
        ([0.0, 1e-5, 1.0], "linear"),
        ([-1.0, 1.0, 1000.0], "linear"),
        ([1, 64, 128], "log"),
        ([32, 64, 128], "linear"),
        ([0.009, 0.9], "linear"),  # but for rounding
        ([7], "linear"),
        ([-100, 1, 2, 3], "linear"),  # too close for a label each
    ],
)
def test_wide_positive_numbers_have_a_logarithmic_axis(figures, values, scale):
    some = [Trial(n, {"field": value}) for n, value in enumerate(values)]
    drawn(some, endings({n: [0.5 + n / 100] for n in range(len(values))}))
    check_texts(figures[1])
    [axes] = figures[1].axes
    assert axes.get_xscale() == scale
    dots = axes.lines[2]  # of complete trials; those before are of others, here none
    assert list(dots.get_xdata()) == values


def test_other_values_have_an_axis_of_categories(figures):
    settings = [{"field": value, "flag": value is None} for value in ([128], [64], None, "relu", [64])]
    some = [Trial(n, setting) for n, setting in enumerate(settings)]
    drawn(some, endings({n: [0.5 + n / 100] for n in range(len(some))}))
    field, flag = (axes for axes in figures[1].axes if axes.get_visible())
    names = [text.get_text() for text in field.get_xticklabels()]
    assert sorted(names) == ["[128]", "[64]", "none", "relu"]
    assert [text.get_text() for text in flag.get_xticklabels()] == ["false", "true"]
    places = field.lines[2].get_xdata()
    assert [names[round(place)] for place in places] == ["[128]", "[64]", "none", "relu", "[64]"]
    assert places[1] != places[4]  # side by side


def test_lists_are_ordered_by_their_numbers(figures):
    some = [Trial(n, {"hidden": [units]}) for n, units in enumerate((512, 64, 128))]
    drawn(some, endings({n: [0.5] for n in range(3)}))
    assert [text.get_text() for text in figures[1].axes[0].get_xticklabels()] == ["[64]", "[128]", "[512]"]


def test_trials_that_are_not_complete_are_hollow(figures):
    ended = [*endings({0: [0.5, 0.6]}), *(ending(1, seed, 0.9, Status.PRUNED, epochs=1) for seed in range(2))]
    drawn(trials(2), ended)
    hollow, _, full, _ = figures[1].axes[0].lines
    assert (hollow.get_markerfacecolor(), list(hollow.get_ydata())) == ("none", [0.9, 0.9])
    assert (full.get_markerfacecolor() != "none", list(full.get_ydata())) == (True, [0.5, 0.6])
    assert "hollow" in figures[1].get_suptitle()


def test_one_field_has_room_for_the_title(figures):
    some = [Trial(n, {"learning_rate": 0.1 + n}) for n in range(2)]
    drawn(some, [*endings({0: [0.5, 0.6]}), ending(1, 0, 0.9, Status.PRUNED, epochs=1)])
    assert "hollow" in figures[1].get_suptitle()
    for figure in figures:
        check_texts(figure)


@pytest.mark.parametrize(
    "text", ["$x$", "$", "\\frac{$$", "a\nb\0c\ud800", "\u4e2d\u6587 \U0001f600", "x" * 500, "_hidden", "%s{}", ""]
)
def test_settings_are_drawn_as_text_whatever_they_hold(figures, text):
    some = [Trial(n, {text: f"{text}{n}", "other": n}) for n in range(3)]
    drawn(some, endings({n: [0.5, 0.6] for n in range(3)}))
    for figure in figures:
        check_texts(figure)


def test_many_fields_and_many_long_categories(figures):
    some = [Trial(n, {f"layers.{m}.kernel_initializer": f"variance_scaling_{n}" for m in range(11)}) for n in range(25)]
    drawn(some, endings({n: [0.5 + n, 0.6 + n] for n in range(25)}))
    check_texts(figures[1])
    check_texts(figures[2])
    assert "first 16 values" in figures[1].axes[0].get_title()
    assert sum(axes.get_visible() for axes in figures[1].axes) == 11


@pytest.mark.parametrize("values", [[1e-8, 1e12], [0.0, 1e300], [-1e300, 1e300], [5e-324, 1.0], [0.3, 0.3]])
def test_values_of_any_size(values):
    drawn(trials(2), endings({0: values, 1: values[::-1]}))


def test_nothing_to_draw_is_drawn_empty():
    some = trials(2)
    summaries = summarize(some, [], METRIC, "max")
    assert draw_curves(some, summaries, {}, METRIC, "max").startswith(b"\x89PNG")
    assert draw_ranking(some, summaries, METRIC, "max").startswith(b"\x89PNG")
    assert draw_hyperparameters(some, summaries, [], METRIC, ["learning_rate"]).startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch):
    some, ended = trials(1), endings({0: [0.5]})
    summaries = summarize(some, ended, METRIC, "max")
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert not pictures.installed()
    for draw in (
        lambda: draw_curves(some, summaries, curves_of(logs(ended), METRIC), METRIC, "max"),
        lambda: draw_ranking(some, summaries, METRIC, "max"),
        lambda: draw_hyperparameters(some, summaries, ended, METRIC, ["learning_rate"]),
    ):
        with pytest.raises(ConfigError, match=r"matplotlib is not installed: pip install 'dptrain\[sweep\]'"):
            draw()
