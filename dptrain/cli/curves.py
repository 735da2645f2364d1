"""curves.png: loss and metrics over epochs."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.runtime.extras import pip_install
from dptrain.runtime.output.streams import write_error
from dptrain.sweeps.reporting.drawing import log_if_wide, trouble

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Keys of metrics.jsonl that are not curves.
_NOT_CURVES = {"epoch", "seconds", "samples_per_second"}
_DPI = 120
_LARGEST = 1e300
# Epochs without which none is left out of a picture, and how many times the range of the later ones it must take.
_FEWEST_CLIPPED, _FLATTENING = 5, 4


def can_draw() -> bool:
    """Return whether matplotlib is installed, though it may not start."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    except Exception:  # such as MPLBACKEND, which names no backend: `draw_curves` has said so
        return True
    return True


def draw_curves(epochs: Sequence[Mapping[str, float]], title: str = "", restored: int | None = None) -> bytes | None:
    """Return a PNG with a panel for each metric, or None without matplotlib, or with a warning if it fails.

    `restored` is the epoch, from 1, whose weights the model has, if not the last.
    """
    if not epochs:
        return None
    try:
        return _png(make_figure(epochs, title, restored))
    except ImportError:
        return None
    except Exception as error:  # the run matters more than its picture
        write_error(f"dptrain: warning: no curves.png: {trouble(error)}\n")
        return None


def draw_comparison(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes | str:
    """Return a PNG with a panel for each metric and a colour for each run, validation solid; or why there is none."""
    try:
        return _comparison(runs)
    except ImportError:
        return f"no picture without matplotlib: {pip_install('plots')}"
    except Exception as error:
        return f"no picture: {trouble(error)}"


def _comparison(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes:
    from matplotlib.ticker import MaxNLocator

    keys = dict.fromkeys(key for epochs in runs.values() for epoch in epochs for key in epoch)
    names = list(dict.fromkeys(key.removeprefix("val_") for key in keys if key not in _NOT_CURVES))
    figure = _empty_figure(5 * max(len(names), 1), 3.6 + 0.2 * len(runs))
    panels = figure.subplots(1, max(len(names), 1), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for panel, name in zip(panels, names, strict=False):
        drawn: list[float] = []
        for number, (run, epochs) in enumerate(runs.items()):
            for key, style in ((name, ":"), (f"val_{name}", "-")):
                points = _points(epochs, key)
                drawn += points[1]
                lines[run] = panel.plot(*points, style, color=f"C{number % 10}", marker=".")[0]
        log_if_wide(panel, "y", drawn)
        panel.set_xlabel("epoch")
        panel.set_ylabel(name.replace("$", r"\$"))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.grid(alpha=0.3)
    # A name is not a formula, and Matplotlib omits labels that begin with an underscore.
    labels = [f" {run}".replace("$", r"\$") for run in lines]
    figure.legend(list(lines.values()), labels, loc="outside lower center", title="solid: validation, dotted: training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        return _png(figure)


def make_figure(epochs: Sequence[Mapping[str, float]], title: str, restored: int | None = None) -> "Figure":
    """Return the figure of at least one epoch."""
    names = curve_names(epochs)
    figure = _empty_figure(5 * len(names), 3.6)
    if title:
        figure.suptitle(title.replace("$", r"\$"))  # a name, not a formula
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        draw_panel(panel, epochs, name, restored)
    return figure


def curve_names(epochs: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics that have a panel each, without "val_"."""
    return [key for key in epochs[0] if key not in _NOT_CURVES and not key.startswith("val_")]


def draw_panel(
    panel: "Axes", epochs: Sequence[Mapping[str, float]], name: str, restored: int | None = None, marker: bool = True
) -> None:
    """Draw a metric in training and validation; `restored` is the epoch, from 1, whose weights the model has."""
    from matplotlib.ticker import MaxNLocator

    drawn: list[float] = []
    curves = []
    for key, label, shape in ((name, "training", "o"), (f"val_{name}", "validation", "s")):
        if key in epochs[0]:
            points = _points(epochs, key)
            drawn += points[1]
            curves.append(points)
            panel.plot(*points, marker=shape if marker else None, label=label)
    log_if_wide(panel, "y", drawn)
    if panel.get_yscale() == "linear" and (limits := limits_of_later(curves)) is not None:
        panel.set_ylim(*limits)
        panel.set_title("the first epochs are outside", fontsize="small", loc="right", color="#555")
    if restored is not None:
        panel.axvline(restored, color="#555", linestyle="--", linewidth=1, label=f"restored: epoch {restored}")
    panel.set_xlabel("epoch")
    panel.set_ylabel(name.replace("$", r"\$"))
    # With the default minimum of two ticks, one or two epochs would get halves as well.
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.grid(alpha=0.3)
    panel.legend()


def limits_of_later(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[float, float] | None:
    """Return an axis' limits without the first epochs where they would flatten the rest; None where they do not."""
    epochs = max((len(values) for _, values in curves), default=0)
    first = max(1, epochs // 4)
    later = [value for _, values in curves for value in values[first:] if math.isfinite(value)]
    every = [value for _, values in curves for value in values if math.isfinite(value)]
    if epochs < _FEWEST_CLIPPED or not later:
        return None
    low, high = min(later), max(later)
    if high == low or max(every) - min(every) <= _FLATTENING * (high - low):
        return None
    return low - 0.08 * (high - low), high + 0.08 * (high - low)


def _points(epochs: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    having = [epoch for epoch in epochs if key in epoch and not abs(epoch[key]) > _LARGEST]
    return [epoch["epoch"] for epoch in having], [epoch[key] for epoch in having]


def _empty_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="none")  # type: ignore[arg-type]  # it may be "none"


def _png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    FigureCanvasAgg(figure)
    # By hand: a figure with its own layout engine is drawn twice.
    ConstrainedLayoutEngine().execute(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DPI)
    return picture.getvalue()
