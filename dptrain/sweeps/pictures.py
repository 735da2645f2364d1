"""The pictures of a sweep's report, as PNG files: curves, the metric against hyperparameters, the ranking."""

import io
import itertools
import math
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.sweeps import formatting
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.statistics import CONFIDENCE, Mode, Summary, mean_and_interval, rank, values_by_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How much one picture can show.
MOST_CURVES = 12
MOST_RANKED = 30
_MOST_CATEGORIES = 16
_MOST_POINTS = 300

# Okabe and Ito's colours, which the colour-blind can tell apart too, without the yellow that white swallows.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":")
_BLUE, _ORANGE, _VERMILION = "#0072B2", "#E69F00", "#D55E00"

# Metric of each run at each epoch: trial -> epoch -> run -> value.
Curves = Mapping[int, Mapping[int, Mapping[int, float]]]


def installed() -> bool:
    """Return whether pictures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def curves_of(epochs: Iterable[Mapping[str, Any]], metric: str) -> Curves:
    """Return what `draw_curves` draws, without what is missing or not finite.

    Args:
        epochs: objects as in results.jsonl, with "trial", "run", "epoch" and metrics. The last of a run and epoch
            counts.
        metric: the log key.
    """
    curves: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in epochs:
        value = row.get(metric)
        of_epoch = curves[row["trial"]][row["epoch"]]
        if value is not None and math.isfinite(value):
            of_epoch[row["run"]] = float(value)
        else:
            of_epoch.pop(row["run"], None)
    return curves


def draw_curves(
    trials: Sequence[Trial], summaries: Sequence[Summary], curves: Curves, metric: str, mode: Mode
) -> bytes:
    """Return a picture of the metric over epochs: for each of the best trials the mean, and a band over its seeds.

    The band is the 95 % confidence interval of the mean, or from the lowest to the highest run where fewer than 3 have
    the epoch. The mean is over the runs that have the epoch.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    settings = {trial.number: trial.setting for trial in trials}
    shown = [summary.trial for summary in rank(summaries, mode) if any(curves.get(summary.trial, {}).values())]
    shown = shown[:MOST_CURVES]
    figure = _figure(9, max(4.5, 1.2 + 0.3 * len(shown)))
    from matplotlib.ticker import MaxNLocator  # after what says that Matplotlib is missing

    axes = figure.add_subplot()
    drawn: list[float] = []
    for place, trial in enumerate(shown):
        epochs = _thinned([epoch for epoch, runs in sorted(curves[trial].items()) if runs])
        rows = [_band([value for _, value in sorted(curves[trial][epoch].items())]) for epoch in epochs]
        means, lows, highs = zip(*rows, strict=True)
        color, style = _COLORS[place % len(_COLORS)], _STYLES[place // len(_COLORS)]
        axes.fill_between(epochs, lows, highs, color=color, alpha=0.15, linewidth=0)
        marker = "o" if len(epochs) == 1 else None
        axes.plot(epochs, means, color=color, linestyle=style, marker=marker, label=_name(trial, settings[trial]))
        drawn += [*lows, *highs]
    some = f" of the {len(shown)} best trials" if len(shown) < len(summaries) else ""
    axes.set_title(_label(f"{metric} over epochs{some}", 80))
    axes.set_xlabel("epoch")
    axes.set_ylabel(_label(metric, 40))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _log_if_wide(axes, "y", drawn)
    axes.grid(alpha=0.3)
    if shown:
        title = f"best first\n{_names_title(settings[shown[0]], 40)}"
        figure.legend(loc="outside right upper", fontsize="small", title=title, title_fontsize="small")
    return _png(figure)


def draw_hyperparameters(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    endings: Sequence[Ending],
    metric: str,
    fields: Sequence[str],
) -> bytes:
    """Return a picture of the metric against each swept field, a panel for each: a dot a run, a diamond a trial's mean.

    Fields of numbers have an axis of numbers (logarithmic where they are positive and span more than 2 decades), other
    fields one of categories, in which trials stand side by side. Only runs that count (see `statistics`) are drawn,
    those of trials that are not complete hollow.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    values = values_by_seed(endings, metric)
    complete = {summary.trial for summary in summaries if summary.complete}
    shown = [trial for trial in trials if values.get(trial.number)]
    columns = min(3, len(fields))
    rows = math.ceil(len(fields) / columns)
    figure = _figure(max(6, 4.2 * columns), 3.8 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for panel in panels[len(fields) :]:
        panel.set_visible(False)
    everything: list[float] = []
    for place, (field, panel) in enumerate(zip(fields, panels, strict=False)):
        places = _places(panel, [trial.setting.get(field) for trial in shown])
        for whole in (False, True):
            some = [
                (x, list(values[trial.number].values()))
                for x, trial in zip(places, shown, strict=True)
                if x is not None and (trial.number in complete) == whole
            ]
            dots = [(x, value) for x, of_trial in some for value in of_trial]
            everything += [value for _, value in dots]
            means = [(x, mean_and_interval(of_trial)[0]) for x, of_trial in some]
            face = _BLUE if whole else "none"
            panel.plot(*_columns(dots), "o", color=_BLUE, markerfacecolor=face, alpha=0.35, markersize=5)
            face = _ORANGE if whole else "white"
            panel.plot(*_columns(means), "D", color="black", markerfacecolor=face, markersize=5)
        panel.set_xlabel(_label(field, 44))
        panel.grid(alpha=0.3)
        if place % columns == 0:
            panel.set_ylabel(_label(metric, 40))
    _log_if_wide(panels[0], "y", everything)  # and with it all panels, which share the axis
    title = f"{_label(metric, 60)} against swept fields"
    hollow = "" if complete.issuperset(trial.number for trial in shown) else "; hollow: stopped early or unfinished"
    figure.suptitle(f"{title}\ndot: a run, diamond: a trial's mean{hollow}", fontsize="medium")
    return _png(figure)


def draw_ranking(trials: Sequence[Trial], summaries: Sequence[Summary], metric: str, mode: Mode) -> bytes:
    """Return a picture of the trials' means with their 95 % intervals, the best on top, at most `MOST_RANKED`.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    settings = {trial.number: trial.setting for trial in trials}
    ranked = [summary for summary in rank(summaries, mode) if summary.mean is not None]
    shown = ranked[:MOST_RANKED]
    figure = _figure(9, 1.6 + 0.32 * max(len(shown), 3))
    from matplotlib.lines import Line2D  # after what says that Matplotlib is missing

    axes = figure.add_subplot()
    kinds = {}
    drawn = []
    for place, summary in enumerate(shown):
        assert summary.mean is not None
        low = summary.mean if summary.ci_low is None else summary.ci_low
        high = summary.mean if summary.ci_high is None else summary.ci_high
        drawn.append(summary.mean)
        if not summary.complete:
            kind, color, marker, face = "stopped early or unfinished", _BLUE, "o", "white"
        elif summary.failed:
            kind, color, marker, face = "lost runs", _VERMILION, "^", _VERMILION
        else:
            kind, color, marker, face = "complete", _BLUE, "o", _BLUE
        kinds[kind] = Line2D([], [], color=color, marker=marker, markerfacecolor=face, label=kind)
        axes.plot([low, high], [place, place], color=color, marker="|" if summary.n > 1 else None)
        axes.plot([summary.mean], [place], color=color, marker=marker, markerfacecolor=face, linewidth=0)
    names = [f"{_name(summary.trial, settings[summary.trial])} (n={summary.n})" for summary in shown]
    axes.set_yticks(range(len(shown)), labels=names)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("trials")
    axes.set_xlabel(_label(f"mean of {metric} with {CONFIDENCE:.0%} interval", 80))
    some = f"the best {len(shown)} of {len(ranked)} trials" if len(shown) < len(ranked) else "trials"
    labels = f"\n{_names_title(settings[shown[0].trial], 100)}" if shown else ""
    figure.suptitle(f"Ranking of {some}, best on top{labels}", fontsize="medium")
    _log_if_wide(axes, "x", drawn)  # an interval that reaches below 0 then runs out of the picture
    axes.grid(alpha=0.3)
    if len(kinds) > 1:
        figure.legend(handles=list(kinds.values()), loc="outside lower center", ncols=3, fontsize="small")
    return _png(figure)


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'dptrain[sweep]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _label(text: str, length: int) -> str:
    """Return a text of the user's as Matplotlib draws it: short, on one line, no sign taken for mathematics."""
    visible = "".join(sign if sign.isprintable() else "?" for sign in text)
    return formatting.shortened(visible, length).replace("$", r"\$")


def _name(trial: int, setting: Mapping[str, Any]) -> str:
    """Return a trial's number and the values of its setting, without their names: there is little room."""
    return _label(f"{trial}: {', '.join(formatting.brief(value) for value in setting.values())}", 44)


def _names_title(setting: Mapping[str, Any], width: int) -> str:
    """Return what the values in names of trials are of, on at most 4 lines."""
    lines = textwrap.wrap(_label(f"trial: {', '.join(setting)}", 400), width)
    return "\n".join(lines[:4])


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _band(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lower and upper end of the band."""
    mean, low, high = mean_and_interval(values)
    if low is None or high is None or len(values) < 3:
        return mean, min(values), max(values)
    return mean, low, high


def _thinned(epochs: Sequence[int]) -> list[int]:
    """Return at most some hundred epochs, the first and the last among them: a picture has no more dots."""
    step = max(1, math.ceil(len(epochs) / _MOST_POINTS))
    return sorted({*epochs[::step], *epochs[-1:]})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _places(panel: "Axes", values: Sequence[Any]) -> list[float | None]:
    """Prepare the x-axis for the values of a field and return where each value is on it; None for what has no room."""
    if all(_is_number(value) for value in values):
        numbers = [float(value) for value in values]
        _log_if_wide(panel, "x", numbers)
        _set_number_ticks(panel, sorted(set(numbers)))
        return list(numbers)
    try:
        ordered = sorted(values)
    except TypeError:  # such as None among them
        ordered = sorted(values, key=formatting.brief)
    names = list(dict.fromkeys(formatting.brief(value) for value in ordered))
    if len(names) > _MOST_CATEGORIES:
        names = names[:_MOST_CATEGORIES]
        panel.set_title(f"the first {_MOST_CATEGORIES} values", fontsize="small")
    labels = [_label(name, 22) for name in names]
    panel.set_xticks(range(len(names)), labels=labels)
    if sum(len(label) for label in labels) > 30:
        angle = 35 if len(names) <= 6 else 90
        upright = "center" if angle == 90 else "top"
        panel.tick_params("x", labelsize="small")
        for text in panel.get_xticklabels():
            text.set(rotation=angle, ha="right", va=upright, rotation_mode="anchor")
    panel.set_xlim(-0.6, len(names) - 0.4)
    of_value = [formatting.brief(value) for value in values]
    numbers_in = Counter(of_value)
    seen: Counter[str] = Counter()
    places: list[float | None] = []
    for name in of_value:
        beside = 0.6 * ((seen[name] + 0.5) / numbers_in[name] - 0.5)
        places.append(names.index(name) + beside if name in names else None)
        seen[name] += 1
    return places


def _set_number_ticks(panel: "Axes", numbers: Sequence[float]) -> None:
    """Put ticks at the numbers where they are few and far enough apart for their labels."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    logarithmic = panel.get_xscale() == "log"
    places = [math.log(number) for number in numbers] if logarithmic else numbers
    gaps = [right - left for left, right in itertools.pairwise(places)]
    if not gaps or min(gaps) >= 0.2 * sum(gaps):
        panel.set_xticks(numbers, labels=[formatting.number(number) for number in numbers])
        panel.xaxis.set_minor_locator(NullLocator())
    elif not logarithmic:
        panel.xaxis.set_major_locator(MaxNLocator(5))


def _log_if_wide(axes: "Axes", axis: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values are positive and span more than 2 decades."""
    # 0.9 / 0.009 is more than 100 by rounding alone
    if values and min(values) > 0 and max(values) / min(values) > 100 * (1 + 1e-9):
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
