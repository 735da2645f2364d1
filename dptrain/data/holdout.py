"""Splits training rows for validation: a fraction, or one of K folds; integer labels are stratified."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError, DataError
from dptrain.random import Purpose, stream

RowNumbers = npt.NDArray[np.int64]


def split_rows(y: npt.NDArray[Any], fraction: float) -> tuple[RowNumbers, RowNumbers]:
    """Return the training and the held-out rows, each rising; the same labels give the same split.

    Each class keeps a training row, unless there are fewer of these than classes.
    """
    held_out = round(len(y) * fraction)
    if not 0 < held_out < len(y):
        raise ConfigError(f"validation_split = {fraction} holds out {held_out} of {len(y)} samples")
    # At even distances through the consecutive classes.
    places = np.arange(len(y) + 1, dtype=np.int64) * held_out // len(y)
    is_held = np.zeros(len(y), bool)
    is_held[_by_class(y, 0)] = places[1:] > places[:-1]
    if _are_labels(y):
        _keep_classes(y, is_held)
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
    return rows[np.argsort(y[rows], kind="stable")] if _are_labels(y) else rows


def _are_labels(y: npt.NDArray[Any]) -> bool:
    return y.ndim == 1 and y.dtype.kind in "iu"


def _keep_classes(y: npt.NDArray[Any], is_held: npt.NDArray[np.bool_]) -> None:
    """Give back a held-out row of each class that has no other, for one of the class of which least is held out."""
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) > len(y) - int(is_held.sum()):
        return
    rows = np.bincount(labels)
    held = np.bincount(labels[is_held], minlength=len(classes))
    share = rows * (int(is_held.sum()) / len(y))
    for label in np.flatnonzero(held == rows):
        is_held[np.flatnonzero(is_held & (labels == label))[0]] = False
        held[label] -= 1
        giver = int(np.where(rows - held > 1, held - share, np.inf).argmin())
        is_held[np.flatnonzero(~is_held & (labels == giver))[0]] = True
        held[giver] += 1


def require_classes(y: npt.NDArray[Any], names: Sequence[str], where: str) -> None:
    """Refuse training labels (rows,) of which a class has none, by its name."""
    counts = np.bincount(y, minlength=len(names))
    if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
        raise DataError(
            f"{where}: no training sample of class {absent[0]!r} ({len(absent)} such classes); add samples of it, or "
            "leave the class out"
        )
