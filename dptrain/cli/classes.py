"""Per-class results of a classifier."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import printable
from dptrain.runtime.output import terminal

if TYPE_CHECKING:
    from dptrain.cli.predictions import Meaning
    from dptrain.data.loading import Split
    from dptrain.models import Model

Array = npt.NDArray[Any]
# The most classes whose confusion matrix is shown.
_MOST_SHOWN = 12


def confusion_matrix(y: Array, outputs: Array, classes: int) -> npt.NDArray[np.int64]:
    """Count samples by true class (row) and predicted class (column).

    `y` is (rows,) or (rows, 1); `outputs` (rows, classes), or (rows, 1) probabilities of label 1.
    """
    predicted = (outputs[:, 0] > 0.5).astype(np.int64) if outputs.shape[1] == 1 else outputs.argmax(axis=1)
    return count_pairs(y, predicted, classes)


def count_pairs(y: Array, predicted: Array, classes: int) -> npt.NDArray[np.int64]:
    """Count samples by true class (row) and predicted class (column), both (rows,) or (rows, 1)."""
    pairs = y.reshape(-1).astype(np.int64) * classes + predicted.reshape(-1)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def scores(matrix: npt.NDArray[np.int64]) -> dict[str, list[float]]:
    """Return precision, recall and F1 of each class, 0 where undefined."""
    right = np.diag(matrix).astype(np.float64)

    def over(total: Array) -> Array:
        return np.divide(right, total, out=np.zeros_like(right), where=total > 0)

    precision, recall = over(matrix.sum(axis=0)), over(matrix.sum(axis=1))
    both = matrix.sum(axis=0) + matrix.sum(axis=1)
    return {"precision": precision.tolist(), "recall": recall.tolist(), "f1": (2 * over(both)).tolist()}


def of_classes(means: "Meaning", y: Array | None, outputs: Any) -> dict[str, Any] | None:
    """Return names, scores and confusion matrix for JSON; None without classes or with other labels."""
    is_array = isinstance(outputs, np.ndarray) and outputs.ndim == 2
    if means.task not in ("binary", "multiclass") or y is None or not is_array or len(y) != y.size or not len(y):
        return None
    classes = max(outputs.shape[1], 2)
    if y.min() < 0 or y.max() >= classes:
        return None
    names = list(means.names) if len(means.names) == classes else list(map(str, range(classes)))
    matrix = confusion_matrix(y, outputs, classes)
    return {"names": names, **scores(matrix), "confusion": matrix.tolist()}


def held_out_outputs(model: "Model", split: "Split", batch_size: int) -> Any:
    """Return a classifier's outputs for held-out samples that all ranks have; None for other models. Collective."""
    from dptrain.cli import predictions

    if predictions.meaning(model).task not in ("binary", "multiclass"):
        return None
    if not len(split) or split.total is not None or split.y.size != len(split.y):
        return None
    return model.predict(split.selected().x, batch_size=batch_size, verbose=0)


def show(report: dict[str, Any]) -> None:
    """Print a line a class, and the confusion matrix if it is small."""
    from rich.text import Text

    names, matrix = [printable(name) for name in report["names"]], report["confusion"]
    is_shown = len(names) <= _MOST_SHOWN
    table = terminal.table(
        "class", "samples", "precision", "recall", "F1", *(_column_titles(names) if is_shown else ())
    )
    for row, name in enumerate(names):
        numbers = [f"{report[key][row]:.4g}" for key in ("precision", "recall", "f1")]
        cells = [name, f"{sum(matrix[row]):,}", *numbers, *(map(str, matrix[row]) if is_shown else ())]
        table.add_row(*map(Text, cells))
    means = [f"{float(np.mean(report[key])):.4g}" for key in ("precision", "recall", "f1")]
    table.add_section()
    table.add_row("mean", f"{sum(map(sum, matrix)):,}", *means, *([""] * len(names) if is_shown else ()))
    terminal.show_table(table)


def _column_titles(names: Sequence[str]) -> list[str]:
    from rich.markup import escape

    return [escape(f"taken for {name}") for name in names]
