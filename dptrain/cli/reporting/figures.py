"""Pictures of a run's page, drawn by `sweeps.reporting.drawing`: curves, calibration, predicted against true."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.cli.curves import curve_names, draw_panel
from dptrain.cli.reporting.baselines import sampled
from dptrain.cli.reporting.outcomes import Bin, NumberOutcome
from dptrain.sweeps.reporting.drawing import BLUE, VERMILION, Width, draw, label, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Panels in a row of a wide picture; height of a panel in inches; points of a cloud; epochs that have a marker each.
_COLUMNS, _HEIGHT, _MOST_POINTS, _MOST_MARKED = 3, 2.9, 500, 40


def curves(epochs: Sequence[Mapping[str, float]], restored: int | None) -> str:
    """Return a panel for each metric over epochs."""
    names = curve_names(epochs)

    def picture(width: Width) -> "Figure":
        figure, panels = _panels(width, len(names))
        for panel, name in zip(panels, names, strict=True):
            draw_panel(panel, epochs, name, restored, marker=len(epochs) <= _MOST_MARKED)
            panel.set_ylabel(label(name, width.name_length))
            if panel.get_yscale() == "linear":
                _grouped(panel, "y")
        return figure

    return draw("curves", picture) if names else ""


def calibration(bins: Sequence[Bin]) -> str:
    """Return how often the model is right, by how sure it is."""

    def picture(width: Width) -> "Figure":
        figure, (panel, beside) = _panels(width, 2)
        panel.plot([0, 100], [0, 100], color="#999", linestyle=":", label="well calibrated")
        confidences = [100 * part.confidence for part in bins]
        panel.plot(confidences, [100 * part.share for part in bins], marker="o", color=BLUE, label="the model")
        panel.set(xlabel="what the model says, %", ylabel="how often it is so, %", xlim=(0, 101), ylim=(0, 101))
        panel.legend()
        beside.bar(confidences, [part.count for part in bins], width=7, color=BLUE)
        beside.set(xlabel="what the model says, %", ylabel="samples", xlim=(0, 104))
        for axes in (panel, beside):
            axes.grid(alpha=0.3)
        return figure

    return draw("calibration", picture)


def numbers(outcome: NumberOutcome, name: str) -> str:
    """Return predicted against true numbers, residuals, and the error by decile."""
    shown = sampled(len(outcome.true), _MOST_POINTS)

    def picture(width: Width) -> "Figure":
        figure, (cloud, histogram, deciles) = _panels(width, 3)
        true, predicted = outcome.true[shown], outcome.predicted[shown]
        ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
        cloud.plot(ends, ends, color="#999", linestyle=":")
        cloud.plot(true, predicted, ".", color=BLUE, alpha=0.5, markersize=4)
        cloud.set(xlabel=f"true {label(outcome.target, 24)}", ylabel="predicted")
        low, high = np.quantile(outcome.residuals, (0.005, 0.995))
        inside = outcome.residuals[(outcome.residuals >= low) & (outcome.residuals <= high)]
        histogram.hist(inside, bins=30, color=BLUE)
        histogram.axvline(0, color=VERMILION, linewidth=1)
        histogram.set(xlabel="residual: predicted minus true", ylabel="samples")
        parts = outcome.deciles()
        deciles.bar(range(1, len(parts) + 1), [part.error for part in parts], color=BLUE)
        deciles.set(xlabel="tenth of the samples, by true value", ylabel="mean absolute error")
        deciles.set_xticks(range(1, len(parts) + 1))
        for axes, used in ((cloud, "xy"), (histogram, "x"), (deciles, "y")):
            _grouped(axes, used)
            axes.grid(alpha=0.3)
        return figure

    return draw(name, picture)


def _panels(width: Width, count: int) -> tuple["Figure", list["Axes"]]:
    columns = 1 if width.is_narrow else 2 if count == 4 else min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = make_figure(width, _HEIGHT * rows)
    axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[count:]:
        empty.set_axis_off()
    return figure, axes[:count]


def _grouped(axes: "Axes", used: str) -> None:
    """Show 25,443 on an axis, not 2.5e4."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    formatter = FuncFormatter(lambda value, _: f"{value:,.10g}" if abs(value) < 1e9 else f"{value:.3g}")
    for name in used:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(formatter)
