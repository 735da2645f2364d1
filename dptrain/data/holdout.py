"""Which rows of a training set are held out for validation: a fraction of them, or one of K folds.

Rows with integer labels are held out class by class (stratified): every class gives its share, to within one row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream

RowNumbers = npt.NDArray[np.int64]


def split_rows(y: npt.NDArray[Any], fraction: float) -> tuple[RowNumbers, RowNumbers]:
    """Return the rows that are trained on and those that are held out, each rising; the same for the same labels.

    Args:
        y: (rows,) integer labels, or (rows, ...) of anything else, of which any rows are drawn.
        fraction: of the rows that is held out, above 0 and below 1.

    Raises:
        ConfigError: nothing would be held out, or nothing be left.
    """
    held = round(len(y) * fraction)
    if not 0 < held < len(y):
        raise ConfigError(f"validation_split = {fraction}: of {len(y)} samples it holds out {held}")
    # At even distances through the classes, which lie one behind the other.
    places = np.arange(len(y) + 1, dtype=np.int64) * held // len(y)
    is_held = np.zeros(len(y), bool)
    is_held[_by_class(y, 0)] = places[1:] > places[:-1]
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def fold_rows(y: npt.NDArray[Any], fold: int, folds: int, seed: int) -> tuple[RowNumbers, RowNumbers]:
    """Return the rows that are trained on and those of a fold, each rising.

    The folds of a seed have no row in common and hold all rows together; their sizes differ by at most one.

    Args:
        y: as `split_rows`.
        fold: which one is held out, 0 to folds - 1.
        folds: how many there are, at least 2.
        seed: another one cuts other folds.

    Raises:
        ConfigError: more folds than rows.
    """
    if folds > len(y):
        raise ConfigError(f"{folds} folds of {len(y)} samples: at most one fold a sample")
    is_held = np.zeros(len(y), bool)
    is_held[_by_class(y, seed)[fold::folds]] = True
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _by_class(y: npt.NDArray[Any], seed: int) -> RowNumbers:
    """Return all rows in a random order, those of a class together where `y` are labels."""
    rows = stream(seed, Purpose.HOLD_OUT).permutation(len(y))
    is_labels = y.ndim == 1 and y.dtype.kind in "iu"
    return rows[np.argsort(y[rows], kind="stable")] if is_labels else rows
