"""Pictures of a sweep's runs: learning curves, ranking, Pareto front, seeds of one trial."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.sweeps.analysis.intervals import CONFIDENCE, Bounds, bounds_of, mean_and_interval
from dptrain.sweeps.analysis.pareto import Front, on_front
from dptrain.sweeps.analysis.statistics import (
    Mode,
    Summary,
    rank,
    values_by_seed,
)
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.reporting.drawing import (
    BLUE,
    COLORS,
    ORANGE,
    VERMILION,
    Width,
    draw,
    label,
    log_if_wide,
    make_figure,
    names_title,
    trial_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How much one picture can show.
MOST_CURVES = 12
MOST_RANKED = 30
MOST_BESIDE = 300
_MOST_POINTS = 300
_MOST_NAMED_SEEDS = 7

_STYLES = ("-", "--", ":")

# Metric of each run at each epoch: trial -> epoch -> run -> value.
Curves = Mapping[int, Mapping[int, Mapping[int, float]]]


def curves_of(epochs: Iterable[Mapping[str, Any]], metric: str) -> Curves:
    """Return the finite values of a metric by trial, epoch and run, from objects of results.jsonl."""
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
    trials: Sequence[Trial], summaries: Sequence[Summary], curves: Curves, metric: str, mode: Mode, folds: int = 1
) -> str:
    """Draw the metric over epochs for the best trials: the mean, with the band of `_band` over the seeds."""
    settings = {trial.number: trial.setting for trial in trials}
    shown = [summary.trial for summary in rank(summaries, mode) if any(curves.get(summary.trial, {}).values())]
    shown = shown[:MOST_CURVES]
    bounds = bounds_of(metric, (value for trial in shown for runs in curves[trial].values() for value in runs.values()))

    def picture(width: Width) -> "Figure":
        from matplotlib.ticker import MaxNLocator

        lines = 0.22 * (len(shown) + 2)
        figure = make_figure(width, 2.8 + lines if width.is_narrow else max(4.5, 1.2 + lines))
        axes = figure.add_subplot()
        drawn: list[float] = []
        for place, trial in enumerate(shown):
            color, style = COLORS[place % len(COLORS)], _STYLES[place // len(COLORS)]
            name = "mean" if len(trials) == 1 else trial_name(trial, settings[trial], 44)
            drawn += _draw_trial(axes, trial, curves[trial], bounds, folds, name, color, style)
            if len(trials) == 1:
                _draw_runs(axes, curves[trial])
        some = f" of the {len(shown)} best trials" if len(shown) < len(summaries) else ""
        what = label(metric, 40) if width.is_narrow else f"{label(metric, 40)} over epochs"
        axes.set_title(f"{what}{some}", fontsize="medium")
        axes.set_xlabel("epoch")
        axes.set_ylabel(label(metric, 40))
        # With the default minimum of two ticks, one or two epochs would get halves as well.
        axes.xaxis.set_major_locator(MaxNLocator(6 if width.is_narrow else "auto", integer=True, min_n_ticks=1))
        log_if_wide(axes, "y", drawn)
        axes.grid(alpha=0.3)
        if shown:
            title = f"best first\n{names_title(settings[shown[0]], 40)}".strip() if len(trials) > 1 else None
            figure.legend(loc=width.legend, fontsize="small", title=title, title_fontsize="small")
        return figure

    return draw("curves", picture)


def _draw_trial(
    axes: "Axes",
    trial: int,
    curve: Mapping[int, Mapping[int, float]],
    bounds: Bounds,
    folds: int,
    name: str,
    color: str,
    style: str,
) -> list[float]:
    """Draw a trial's mean and band; return the band's ends."""
    epochs = _thinned([epoch for epoch, runs in sorted(curve.items()) if runs])
    rows = [_band([value for _, value in sorted(curve[epoch].items())], bounds, folds) for epoch in epochs]
    means, lows, highs = zip(*rows, strict=True)
    band = axes.fill_between(epochs, lows, highs, color=color, alpha=0.15, linewidth=0)
    band.set_gid(f"band-trial-{trial}")
    marker = "o" if len(epochs) == 1 else None
    axes.plot(
        epochs, means, color=color, linestyle=style, marker=marker, label=name, gid=f"line-trial-{trial}", linewidth=2
    )
    return [*lows, *highs]


def _draw_runs(axes: "Axes", curve: Mapping[int, Mapping[int, float]]) -> None:
    epochs = _thinned(sorted(curve))
    for place, run in enumerate(sorted({run for runs in curve.values() for run in runs})):
        points = [(epoch, curve[epoch][run]) for epoch in epochs if run in curve[epoch]]
        name = "a seed each" if place == 0 else None
        marker = "." if len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), color="gray", alpha=0.5, linewidth=0.8, marker=marker, label=name)


def draw_ranking(trials: Sequence[Trial], summaries: Sequence[Summary], metric: str, mode: Mode) -> str:
    """Draw the trials' means with their 95 % intervals, the best on top, at most `MOST_RANKED`."""
    settings = {trial.number: trial.setting for trial in trials}
    ranked = [summary for summary in rank(summaries, mode) if summary.mean is not None]
    shown = ranked[:MOST_RANKED]

    def picture(width: Width) -> "Figure":
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        figure = make_figure(width, 1.7 + (0.26 if width.is_narrow else 0.32) * max(len(shown), 3))
        axes = figure.add_subplot()
        kinds = {}
        drawn = []
        for place, summary in enumerate(shown):
            assert summary.mean is not None
            low = summary.mean if summary.ci_low is None else summary.ci_low
            high = summary.mean if summary.ci_high is None else summary.ci_high
            drawn.append(summary.mean)
            if not summary.complete:
                kind, color, marker, face = "stopped early or unfinished", BLUE, "o", "white"
            elif summary.failed:
                kind, color, marker, face = "lost runs", VERMILION, "^", VERMILION
            else:
                kind, color, marker, face = "complete", BLUE, "o", BLUE
            kinds[kind] = Line2D([], [], color=color, marker=marker, markerfacecolor=face, label=kind)
            gid = f"-trial-{summary.trial}"
            axes.plot([low, high], [place, place], color=color, marker="|" if summary.n > 1 else None, gid=f"bar{gid}")
            axes.plot(
                [summary.mean], [place], color=color, marker=marker, markerfacecolor=face, linewidth=0, gid=f"mean{gid}"
            )
        names = [f"{trial_name(each.trial, settings[each.trial], width.name_length)} (n={each.n})" for each in shown]
        axes.set_yticks(range(len(shown)), labels=names)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        if not width.is_narrow:
            axes.set_ylabel("trials")
        mean = f"mean {metric}" if width.is_narrow else f"mean of {metric} with {CONFIDENCE:.0%} interval"
        axes.set_xlabel(label(mean, 26 if width.is_narrow else 80))
        some = f"the best {len(shown)} of {len(ranked)} trials" if len(shown) < len(ranked) else "trials"
        labels = f"\n{names_title(settings[shown[0].trial], 44 if width.is_narrow else 100)}" if shown else ""
        figure.suptitle(f"Ranking of {some}, best on top{labels}".strip(), fontsize="medium")
        log_if_wide(axes, "x", drawn)  # an interval that reaches below 0 then runs out of the picture
        if width.is_narrow and axes.get_xscale() == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.grid(alpha=0.3)
        if len(kinds) > 1:
            columns = 1 if width.is_narrow else 3
            figure.legend(handles=list(kinds.values()), loc="outside lower center", ncols=columns, fontsize="small")
        return figure

    return draw("ranking", picture)


def draw_front(front: Front) -> str:
    """Draw the first metric against the second, with the front in these two metrics alone as steps."""
    (y_name, y_mode), (x_name, x_mode) = list(front.modes.items())[:2]
    beside = [trial for trial in front.compared if trial not in front.trials][:MOST_BESIDE]
    shown = [*beside, *front.trials]
    points = [(float(x), float(y)) for y, x in front.values(shown)[:, :2]]
    is_reached = on_front(front.values(front.trials)[:, :2], [y_mode, x_mode])
    reached = sorted(point for point, on in zip(points[len(beside) :], is_reached, strict=True) if on)

    def picture(width: Width) -> "Figure":
        figure = make_figure(width, 3.4 if width.is_narrow else 4.5)
        axes = figure.add_subplot()
        steps = "steps-post" if x_mode == "min" else "steps-pre"
        axes.plot(*zip(*reached, strict=True), drawstyle=steps, color=ORANGE, linewidth=1.5, zorder=1)
        for place, (trial, point) in enumerate(zip(shown, points, strict=True)):
            face = "white" if place < len(beside) else ORANGE
            axes.plot(*point, "o", color="black", markerfacecolor=face, markersize=6, gid=f"dot-trial-{trial}")
        if len(front.trials) <= MOST_CURVES:
            for trial, point in zip(front.trials, points[len(beside) :], strict=True):
                axes.annotate(str(trial), point, (4, 4), textcoords="offset points", fontsize="small")
        for name, mode, set_label in ((x_name, x_mode, axes.set_xlabel), (y_name, y_mode, axes.set_ylabel)):
            set_label(f"{label(name, 30)} ({'more' if mode == 'max' else 'less'} is better)")
        log_if_wide(axes, "x", [x for x, _ in points])
        log_if_wide(axes, "y", [y for _, y in points])
        axes.margins(0.08)
        axes.grid(alpha=0.3)
        return figure

    return draw("front", picture)


def draw_seeds(summary: Summary, endings: Sequence[Ending], metric: str) -> str:
    """Draw a trial's runs: a dot for each seed, and their mean with its 95 % interval."""
    values = sorted(values_by_seed(endings, metric)[summary.trial].items())
    folded = any(fold for (_, fold), _ in values)

    def picture(width: Width) -> "Figure":
        figure = make_figure(width, 3.2)
        axes = figure.add_subplot()
        places = range(len(values))
        axes.plot(
            places, [value for _, value in values], "o", color=BLUE, label="a run each" if folded else "a seed each"
        )
        assert summary.mean is not None
        axes.axhline(summary.mean, color=ORANGE, label="mean")
        if summary.ci_low is not None and summary.ci_high is not None:
            axes.axhspan(
                summary.ci_low, summary.ci_high, color=ORANGE, alpha=0.2, linewidth=0, label="95 % interval of the mean"
            )
        most = _MOST_NAMED_SEEDS if width.is_narrow else 3 * _MOST_NAMED_SEEDS
        step = math.ceil(len(values) / most)
        named = list(itertools.islice(zip(places, values, strict=True), 0, None, step))
        words = [f"{seed}.{fold + 1}" if folded else str(seed) for _, ((seed, fold), _) in named]
        labels = [formatting.shortened(word, 6 if width.is_narrow else 8) for word in words]
        axes.set_xticks([place for place, _ in named], labels=labels)
        axes.set_xlabel("seed.fold" if folded else "seed")
        axes.set_ylabel(label(metric, 40))
        log_if_wide(axes, "y", [value for _, value in values])
        axes.grid(alpha=0.3)
        figure.legend(loc=width.legend, fontsize="small")
        return figure

    return draw("seeds", picture)


def _band(values: Sequence[float], bounds: Bounds, folds: int) -> tuple[float, float, float]:
    """Return mean, low and high of a band: the 95 % interval, or minimum and maximum of fewer than 3 runs."""
    mean, low, high = mean_and_interval(values, bounds, folds)
    if low is None or high is None or len(values) < 3:
        return mean, min(values), max(values)
    return mean, low, high


def _thinned(epochs: Sequence[int]) -> list[int]:
    """Return at most some hundred epochs, with the first and the last among them."""
    step = max(1, math.ceil(len(epochs) / _MOST_POINTS))
    return sorted({*epochs[::step], *epochs[-1:]})
