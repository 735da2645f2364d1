"""Pictures of the swept fields: metric against each, parallel coordinates, importance."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.sweeps.analysis.intervals import mean_and_interval
from dptrain.sweeps.analysis.statistics import Mode, Summary, rank, values_by_seed
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.reporting.drawing import BLUE, ORANGE, Width, draw, label, log_if_wide, make_figure
from dptrain.sweeps.reporting.fields import Field, is_number, is_wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How much one picture can show.
MOST_PARALLEL = 200
MOST_AXES = 10
_MOST_CATEGORIES = 16
# The most dots drawn as vectors; more become an image.
_MOST_DOTS = 2000


def draw_hyperparameters(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    endings: Sequence[Ending],
    metric: str,
    fields: Sequence[Field],
) -> str:
    """Draw the metric against each field, a panel each: a dot a run, a diamond a trial's mean, hollow if incomplete."""
    values = values_by_seed(endings, metric)
    complete = {summary.trial for summary in summaries if summary.complete}
    shown = [trial for trial in trials if values.get(trial.number)]
    runs = {trial.number: list(values[trial.number].values()) for trial in shown}
    means = {trial: mean_and_interval(of_trial)[0] for trial, of_trial in runs.items()}
    hollow = "" if complete.issuperset(runs) else "; hollow: stopped early or unfinished"

    def picture(width: Width) -> "Figure":
        columns = min(1 if width.is_narrow else 3, len(fields))
        rows = math.ceil(len(fields) / columns)
        figure = make_figure(width, (2.6 if width.is_narrow else 3.6) * rows + 0.5)
        panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for panel in panels[len(fields) :]:
            panel.set_visible(False)
        everything = list(itertools.chain.from_iterable(runs.values()))
        for place, (field, panel) in enumerate(zip(fields, panels, strict=False)):
            places = _places(panel, field, [trial.setting.get(field.name) for trial in shown])
            for whole in (False, True):
                some = [
                    (x, trial.number)
                    for x, trial in zip(places, shown, strict=True)
                    if x is not None and (trial.number in complete) == whole
                ]
                dots = [(x, value) for x, trial in some for value in runs[trial]]
                face = BLUE if whole else "none"
                panel.plot(
                    *_columns(dots),
                    "o",
                    color=BLUE,
                    markerfacecolor=face,
                    alpha=0.35,
                    markersize=5,
                    rasterized=len(dots) > _MOST_DOTS,
                )
                face = ORANGE if whole else "white"
                diamonds = [(x, means[trial]) for x, trial in some]
                panel.plot(
                    *_columns(diamonds),
                    "D",
                    color="black",
                    markerfacecolor=face,
                    markersize=5,
                    rasterized=len(diamonds) > _MOST_DOTS,
                )
            panel.set_xlabel(label(field.name, 44))
            panel.grid(alpha=0.3)
            if place % columns == 0:
                panel.set_ylabel(label(metric, 30))
        log_if_wide(panels[0], "y", everything)  # and with it all panels, which share the axis
        title = f"{label(metric, 24 if width.is_narrow else 60)} against swept fields"
        lines = f"dot: a run, diamond: a trial's mean{hollow}"
        figure.suptitle(f"{title}\n{lines.replace('; ', chr(10)) if width.is_narrow else lines}", fontsize="medium")
        return figure

    return draw("fields", picture)


def draw_parallel(
    trials: Sequence[Trial], summaries: Sequence[Summary], metric: str, mode: Mode, fields: Sequence[Field]
) -> str:
    """Draw parallel coordinates of the best trials, coloured by the metric; the best thick, incomplete ones dashed."""
    settings = {trial.number: trial.setting for trial in trials}
    shown = [summary for summary in rank(summaries, mode) if summary.mean is not None][:MOST_PARALLEL]
    means = [summary.mean for summary in shown if summary.mean is not None]
    axes_of = [
        *(
            _Axis.of(field.name, [settings[each.trial].get(field.name) for each in shown], field.is_log)
            for field in fields
        ),
        _Axis.of(metric, means, is_wide(means)),
    ]

    def picture(width: Width) -> "Figure":
        from matplotlib import colormaps

        height = 0.95 * len(axes_of) + 0.6 if width.is_narrow else 4.6
        figure = make_figure(width, height)
        axes = figure.add_subplot()
        axes.set_axis_off()
        colors = colormaps["viridis"]
        across = range(len(axes_of))
        for place, summary in reversed(list(enumerate(shown))):  # the best on top
            along = [axis.places[place] for axis in axes_of]
            good = along[-1] if mode == "max" else 1 - along[-1]
            axes.plot(
                *((along, across) if width.is_narrow else (across, along)),
                color=colors(0.9 * good),
                alpha=0.95 if place == 0 else 0.5,
                linewidth=3 if place == 0 else 1.2,
                linestyle="-" if summary.complete else "--",
                gid=f"line-trial-{summary.trial}",
            )
        for number, axis in enumerate(axes_of):
            _draw_axis(axes, number, axis, width)
        if width.is_narrow:
            axes.set_ylim(len(axes_of) - 0.5, -0.6)
            axes.set_xlim(-0.12, 1.12)
        else:
            axes.set_xlim(-0.4, len(axes_of) - 0.4)
            axes.set_ylim(-0.08, 1.12)
        return figure

    return draw("parallel", picture)


def draw_importances(importances: Mapping[str, float]) -> str:
    """Draw a bar for each field's share of the variance."""

    def picture(width: Width) -> "Figure":
        figure = make_figure(width, 1.1 + 0.3 * len(importances))
        axes = figure.add_subplot()
        places = range(len(importances))
        axes.barh(places, list(importances.values()), color=BLUE)
        axes.set_yticks(places, labels=[label(name, width.name_length) for name in importances])
        axes.set_ylim(len(importances) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.set_xlabel("part of the variance between trials")
        axes.grid(alpha=0.3, axis="x")
        return figure

    return draw("importance", picture)


class _Axis:
    """An axis of parallel coordinates: trials' positions from 0 to 1, and tick labels by position."""

    def __init__(self, name: str, places: Sequence[float], ticks: Mapping[float, str]) -> None:
        self.name, self.places, self.ticks = name, places, ticks

    @classmethod
    def of(cls, name: str, values: Sequence[Any], is_log: bool) -> "_Axis":
        if not all(map(is_number, values)):
            names = list(dict.fromkeys(formatting.brief(value) for value in _ordered(values)))
            last = max(1, len(names) - 1)
            step = math.ceil(len(names) / _MOST_CATEGORIES)
            ticks = {place / last: text for place, text in enumerate(names) if place % step == 0}
            return cls(name, [names.index(formatting.brief(value)) / last for value in values], ticks)
        is_log = is_log and min(values) > 0
        scaled = [math.log(value) if is_log else float(value) for value in values]
        low, high = min(scaled), max(scaled)
        # Halves, as the difference of two finite floats need not be one.
        span = high / 2 - low / 2
        places = [(value / 2 - low / 2) / span if span else 0.5 for value in scaled]
        distinct = dict(sorted(zip(places, values, strict=True)))
        gaps = [right - left for left, right in itertools.pairwise(distinct)]
        if len(distinct) > 8 or min(gaps, default=1) < 0.1:
            ends = {0.0: distinct[0.0], 1.0: distinct[1.0]}
            between = [part / 4 for part in range(1, 4)]
            inner = {part: 2 * (low / 2 * (1 - part) + high / 2 * part) for part in between}
            distinct = ends | {part: math.exp(value) if is_log else value for part, value in inner.items()}
            return cls(name, places, {place: f"{value:.3g}" for place, value in distinct.items()})
        return cls(name, places, {place: formatting.number(value) for place, value in distinct.items()})


def _draw_axis(axes: "Axes", number: int, axis: _Axis, width: Width) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    if width.is_narrow:
        axes.plot([0, 1], [number, number], color="black", linewidth=0.8)
        axes.text(0, number - 0.2, label(axis.name, 40), ha="left", va="bottom", weight="bold", fontsize="small")
        room = -1.0
        for place, text in sorted(axis.ticks.items()):
            if place - room < 0.03 + 0.022 * len(text):
                continue
            room = place
            axes.text(place, number + 0.1, label(text, 12), ha="center", va="top", fontsize="x-small", bbox=box)
        return
    axes.plot([number, number], [0, 1], color="black", linewidth=0.8)
    axes.text(number, 1.05, label(axis.name, 22), ha="center", va="bottom", weight="bold", fontsize="small")
    for place, text in axis.ticks.items():
        axes.text(number - 0.03, place, label(text, 16), ha="right", va="center", fontsize="small", bbox=box)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _ordered(values: Sequence[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # such as None among them
        return sorted(values, key=formatting.brief)


def _places(panel: "Axes", field: Field, values: Sequence[Any]) -> list[float | None]:
    """Set up the x-axis for a field's values and return their positions; None for those beyond the last category."""
    if all(map(is_number, values)):
        numbers = [float(value) for value in values]
        if field.is_log and min(numbers, default=0) > 0:
            panel.set_xscale("log")
        _set_number_ticks(panel, sorted(set(numbers)))
        return list(numbers)
    names = list(dict.fromkeys(formatting.brief(value) for value in _ordered(values)))
    if len(names) > _MOST_CATEGORIES:
        names = names[:_MOST_CATEGORIES]
        panel.set_title(f"the first {_MOST_CATEGORIES} values", fontsize="small")
    labels = [label(name, 22) for name in names]
    panel.set_xticks(range(len(names)), labels=labels)
    if sum(map(len, labels)) > 30:
        angle = 35 if len(names) <= 6 else 90
        upright = "center" if angle == 90 else "top"
        panel.tick_params("x", labelsize="small")
        for text in panel.get_xticklabels():
            text.set(rotation=angle, ha="right", va=upright, rotation_mode="anchor")
    panel.set_xlim(-0.6, len(names) - 0.4)
    of_value = [formatting.brief(value) for value in values]
    numbers_in = Counter(of_value)
    counts: Counter[str] = Counter()
    places: list[float | None] = []
    for name in of_value:
        beside = 0.6 * ((counts[name] + 0.5) / numbers_in[name] - 0.5)
        places.append(names.index(name) + beside if name in names else None)
        counts[name] += 1
    return places


def _set_number_ticks(panel: "Axes", numbers: Sequence[float]) -> None:
    """Put ticks at the numbers where they are few and far enough apart for their labels, else at round ones."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

    logarithmic = panel.get_xscale() == "log"
    places = [math.log(number) for number in numbers] if logarithmic else numbers
    gaps = [right - left for left, right in itertools.pairwise(places)]
    if not gaps or min(gaps) >= 0.2 * sum(gaps):
        panel.set_xticks(numbers, labels=[formatting.number(number) for number in numbers])
        panel.xaxis.set_minor_locator(NullLocator())
    elif not logarithmic:
        panel.xaxis.set_major_locator(MaxNLocator(5))
    else:
        round_ones = _round_numbers(numbers[0], numbers[-1])
        panel.set_xticks(round_ones, labels=[formatting.number(number) for number in round_ones])
        panel.xaxis.set_minor_formatter(NullFormatter())


def _round_numbers(low: float, high: float) -> list[float]:
    """Return 2 to 6 ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or fewer powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    numbers = [number for number in numbers if low <= number <= high]
    if 2 <= len(numbers) <= 6:
        return numbers
    tens = [float(f"1e{power}") for power in powers if low <= float(f"1e{power}") <= high]
    return tens[:: math.ceil(len(tens) / 6)] if len(tens) > 1 else [low, high]
