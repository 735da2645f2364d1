"""Splits training rows for validation: a fraction, or one of K folds; integer labels are stratified."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream

RowNumbers = npt.NDArray[np.int64]


def split_rows(y: npt.NDArray[Any], fraction: float) -> tuple[RowNumbers, RowNumbers]:
    """Return the training and the held-out rows, each rising; the same labels give the same split."""
    held_out = round(len(y) * fraction)
    if not 0 < held_out < len(y):
        raise ConfigError(f"validation_split = {fraction} holds out {held_out} of {len(y)} samples")
    # At even distances through the consecutive classes.
    places = np.arange(len(y) + 1, dtype=np.int64) * held_out // len(y)
    is_held = np.zeros(len(y), bool)
    is_held[_by_class(y, 0)] = places[1:] > places[:-1]
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def fold_rows(y: npt.NDArray[Any], fold: int, folds: int, seed: int) -> tuple[RowNumbers, RowNumbers]:
    """Return the training rows and the rows of one of a seed's disjoint, nearly equal folds, each rising."""
    if folds > len(y):
        raise ConfigError(f"{folds} folds for {len(y)} samples; expected at most one fold per sample")
    is_held = np.zeros(len(y), bool)
    is_held[_by_class(y, seed)[fold::folds]] = True
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _by_class(y: npt.NDArray[Any], seed: int) -> RowNumbers:
    """Return all rows in random order, grouped by class where `y` holds labels."""
    rows = stream(seed, Purpose.HOLD_OUT).permutation(len(y))
    is_labels = y.ndim == 1 and y.dtype.kind in "iu"
    return rows[np.argsort(y[rows], kind="stable")] if is_labels else rows
