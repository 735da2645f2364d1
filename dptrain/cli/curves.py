"""curves.png: loss and metrics over epochs."""

import io
from collections.abc import Mapping, Sequence

# What metrics.jsonl holds besides curves.
_NOT_CURVES = {"epoch", "seconds", "samples_per_second"}


def draw_curves(epochs: Sequence[Mapping[str, float]]) -> bytes | None:
    """Return a PNG with one panel for each metric, training and validation in it; None without matplotlib.

    Args:
        epochs: the objects of metrics.jsonl.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not epochs:
        return None
    names = [key for key in epochs[0] if key not in _NOT_CURVES and not key.startswith("val_")]
    figure = Figure(figsize=(5 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    numbers = [epoch["epoch"] for epoch in epochs]
    for panel, name in zip(panels, names, strict=True):
        for key, label, marker in ((name, "training", "o"), (f"val_{name}", "validation", "s")):
            if key in epochs[0]:
                panel.plot(numbers, [epoch[key] for epoch in epochs], marker=marker, label=label)
        panel.set_xlabel("epoch")
        panel.set_ylabel(name)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
