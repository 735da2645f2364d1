"""A model as a table."""

from typing import Any

import numpy as np

from dptrain.layers import Layer
from dptrain.program import tree
from dptrain.runtime.launcher import detect_launch


def summary(model: Any) -> None:
    """Print layers, output shapes and numbers of weights, on rank 0.

    Args:
        model: a `Model`; a `Sequential` that knows the shape of its samples is built.
    """
    launch = detect_launch()  # not the communicator: looking at a model need not start MPI
    if launch is None or launch.rank == 0:
        print(f'Model: "{model.name}"\n{table(model)}')


def table(model: Any) -> str:
    """Return the table of a model as text."""
    model.build()
    rows = [("Layer (type)", "Output Shape", "Param #")]
    for layer in model.layers:
        count = sum(int(np.prod(one.shape, dtype=np.int64)) for one in layer.weights)
        rows.append((f"{layer.name} ({type(layer).__name__})", _output_shape(layer), f"{count:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths) + 4))
    total = sum(int(np.prod(one.shape, dtype=np.int64)) for one in model.weights)
    trained = sum(int(np.prod(one.shape, dtype=np.int64)) for one in model.trainable_weights)
    counts = f"Total params: {total:,}\nTrainable params: {trained:,}\nNon-trainable params: {total - trained:,}"
    return "\n".join([*lines, counts])


def _output_shape(layer: Layer) -> str:
    try:
        found = tree.leaves(layer.output)
    except AttributeError:
        return "?"
    shapes = [f"({', '.join(['None', *(str(int(n)) for n in one.shape[1:])])})" for one in found]
    return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]"
