"""curves.png: loss and metrics over epochs."""

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.runtime.extras import pip_install
from dptrain.runtime.output.streams import write_error
from dptrain.sweeps.reporting.drawing import log_if_wide, trouble

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Keys of metrics.jsonl that are not curves.
_NOT_CURVES = {"epoch", "seconds", "samples_per_second"}
_DPI = 120
_LARGEST = 1e300


def can_draw() -> bool:
    """Return whether matplotlib is installed, though it may not start."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    except Exception:  # such as MPLBACKEND, which names no backend: `draw_curves` has said so
        return True
    return True


def draw_curves(epochs: Sequence[Mapping[str, float]], title: str = "") -> bytes | None:
    """Return a PNG with a panel for each metric, or None without matplotlib, or with a warning if it fails."""
    if not epochs:
        return None
    try:
        return _png(make_figure(epochs, title))
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


def make_figure(epochs: Sequence[Mapping[str, float]], title: str) -> "Figure":
    """Return the figure of at least one epoch."""
    from matplotlib.ticker import MaxNLocator

    names = [key for key in epochs[0] if key not in _NOT_CURVES and not key.startswith("val_")]
    figure = _empty_figure(5 * len(names), 3.6)
    if title:
        figure.suptitle(title.replace("$", r"\$"))  # a name, not a formula
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        drawn: list[float] = []
        for key, label, marker in ((name, "training", "o"), (f"val_{name}", "validation", "s")):
            if key in epochs[0]:
                points = _points(epochs, key)
                drawn += points[1]
                panel.plot(*points, marker=marker, label=label)
        log_if_wide(panel, "y", drawn)
        panel.set_xlabel("epoch")
        panel.set_ylabel(name)
        # With the default minimum of two ticks, one or two epochs would get halves as well.
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


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
