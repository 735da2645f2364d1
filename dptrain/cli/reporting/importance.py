"""Permutation importance: how much worse a model becomes where a column's values are shuffled among rows.

Source: L. Breiman, "Random forests", Machine Learning 45 (2001); measured on held-out samples, as A. Fisher, C. Rudin
and F. Dominici, "All models are wrong, but many are useful", JMLR 20 (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.reporting.columns import columns_of
from dptrain.data.preprocessing import Preprocessing
from dptrain.random import Purpose, stream

Array = npt.NDArray[Any]

REPEATS = 5
# Rows of the held-out part that are shuffled, and predicted rows in all: with texts fewer, whose networks are slow.
# Bounds in rows, not in seconds: the same run writes the same page on every machine.
MOST_ROWS, LEAST_ROWS = 2000, 100
_MOST_PREDICTED, _MOST_PREDICTED_TEXTS = 1_000_000, 20_000


@dataclass(frozen=True)
class Importance:
    """What shuffling a column does to the model's error, in the unit of the score."""

    name: str
    rise: float  # mean over the shuffles
    deviation: float  # standard deviation over the shuffles


def shuffled_rows(preprocessing: Preprocessing, rows: int) -> int:
    """Return how many held-out rows are shuffled; 0 where a column is alone, or there are too many columns."""
    columns = len(preprocessing.columns)
    if columns < 2 or rows < 2:
        return 0
    budget = _MOST_PREDICTED_TEXTS if preprocessing.word_columns else _MOST_PREDICTED
    affordable = min(MOST_ROWS, budget // (REPEATS * columns))
    return min(rows, affordable) if affordable >= LEAST_ROWS else 0


def importances(
    predict: Callable[[Array], Array],
    preprocessing: Preprocessing,
    x: Array,
    y: Array,
    error: Callable[[Array, Array], float],
) -> list[Importance]:
    """Return the importance of each of a table's columns, the greatest first. Collective, as `predict` is.

    Args:
        predict: returns outputs of x.
        preprocessing: of the table.
        x, y: the held-out samples to shuffle.
        error: returns a mean error of targets and outputs.
    """
    repeated, targets = np.tile(x, (REPEATS, 1)), np.tile(y, REPEATS)
    whole = error(y, predict(repeated)[: len(y)])
    measured = []
    for index, (column, part) in enumerate(columns_of(preprocessing)):
        shuffled = repeated.copy()
        orders = [stream(0, Purpose.REPORT, index, repeat).permutation(len(x)) for repeat in range(REPEATS)]
        shuffled[:, part] = x[np.concatenate(orders), part]
        outputs = predict(shuffled)
        rises = [
            error(targets[start : start + len(x)], outputs[start : start + len(x)]) - whole
            for start in range(0, len(targets), len(x))
        ]
        measured.append(Importance(column.name, float(np.mean(rises)), float(np.std(rises, ddof=1))))
    return sorted(measured, key=lambda importance: -importance.rise)
