"""curves.png: loss and metrics over epochs."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What metrics.jsonl holds besides curves.
_NOT_CURVES = {"epoch", "seconds", "samples_per_second"}


def draw_curves(epochs: Sequence[Mapping[str, float]], title: str = "") -> bytes | None:
    """Return a PNG with one panel for each metric, training and validation in it; None without matplotlib.

    Args:
        epochs: the objects of metrics.jsonl.
        title: above all panels.
    """
    if not epochs:
        return None
    try:
        figure = make_figure(epochs, title)
    except ImportError:
        return None
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def make_figure(epochs: Sequence[Mapping[str, float]], title: str) -> "Figure":
    """Return the figure of at least one epoch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [key for key in epochs[0] if key not in _NOT_CURVES and not key.startswith("val_")]
    figure = Figure(figsize=(5 * len(names), 3.6), layout="constrained")
    if title:
        figure.suptitle(title.replace("$", r"\$"))  # a name, no formula
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    numbers = [epoch["epoch"] for epoch in epochs]
    for panel, name in zip(panels, names, strict=True):
        for key, label, marker in ((name, "training", "o"), (f"val_{name}", "validation", "s")):
            if key in epochs[0]:
                panel.plot(numbers, [epoch[key] for epoch in epochs], marker=marker, label=label)
        panel.set_xlabel("epoch")
        panel.set_ylabel(name)
        # With the default minimum of two ticks, one or two epochs would get halves as well.
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.grid(alpha=0.3)
        panel.legend()
    return figure
