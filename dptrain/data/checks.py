"""Checks numbers in memory: finite features, valid labels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import DataError

_CHUNK = 1 << 18
"""Numbers looked at together: temporaries stay in the cache and below a megabyte or two."""


def check_labels_integer(labels: NDArray[Any], where: str) -> None:
    """Refuse labels that are not one integer a sample, (N,) or (N, 1)."""
    if labels.ndim != 1 and labels.shape[1:] != (1,):
        hint = "; one-hot? use its argmax over the last axis" if labels.ndim == 2 else ""
        raise DataError(f"{where}: labels have shape {labels.shape}, expected one class number a sample{hint}")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{where}: labels are {labels.dtype}, expected integers; convert them with astype('int64')")


def whole_labels(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """Return float or boolean labels as integers, others as they are; refuse fractions."""
    if labels.dtype.kind not in "fb":
        return labels
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.int64)
    wrong = np.argwhere(whole != labels)
    if len(wrong):
        index = tuple(int(n) for n in wrong[0])
        shown = index[0] if len(index) == 1 or labels.shape[1:] == (1,) else index
        raise DataError(f"{where}: label {labels[index]} at index {shown}; labels must be integers")
    return whole


def is_zero_or_one(y: NDArray[Any]) -> bool:
    """Whether every number is 0 or 1."""
    flat = y.reshape(-1)
    parts = (flat[begin : begin + _CHUNK] for begin in range(0, len(flat), _CHUNK))
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts)


def check_labels(labels: NDArray[Any], num_classes: int, where: str, first_index: int = 0) -> None:
    """Refuse the first label outside [0, num_classes); `first_index` is that of `labels[0]` in the data set."""
    if num_classes == 2 and labels.dtype.kind == "f" and labels.shape[1:] in ((), (1,)):
        if not is_zero_or_one(labels):
            index = int(np.flatnonzero((labels.reshape(-1) != 0) & (labels.reshape(-1) != 1))[0])
            raise DataError(
                f"{where}: target {labels.reshape(-1)[index]:g} at index {first_index + index}; two classes are 0 and 1"
            )
        return
    check_labels_integer(labels, where)
    flat = labels[:, 0] if labels.ndim == 2 else labels
    for begin in range(0, len(flat), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        if int(part.min()) >= 0 and int(part.max()) < num_classes:
            continue
        # An unsigned label must not be compared with a negative number, nor a small one with a bound it cannot hold.
        wide = part.astype(np.int64) if part.dtype != np.uint64 else np.minimum(part, 2**63 - 1).astype(np.int64)
        index = int(np.flatnonzero((wide < 0) | (wide >= num_classes))[0])
        raise DataError(
            f"{where}: label {int(part[index])} at index {first_index + begin + index}; {num_classes} classes allow "
            f"0-{num_classes - 1}"
        )


def check_finite(x: NDArray[Any], where: str, first_index: int = 0) -> None:
    """Refuse NaN and infinity; name the first, its feature as an index into the flattened sample, and the total."""
    if x.dtype.kind not in "fc" or not x.size:
        return
    features = x.size // len(x)
    total, first = 0, ""
    for begin, part in _flat_chunks(x, features):
        finite = np.isfinite(part)
        if finite.all():
            continue
        bad = np.flatnonzero(~finite)
        total += len(bad)
        if not first:
            sample, feature = divmod(begin + int(bad[0]), features)
            kind = "NaN" if np.isnan(part[bad[0]]) else "Inf"
            first = f"{kind} at sample {first_index + sample}, feature {feature}"
    if total:
        raise DataError(f"{where}: {first} ({total} in all); remove or replace them")


def _flat_chunks(x: NDArray[Any], features: int) -> Any:
    """Yield pairs (index of the first number, some numbers in C order) that cover `x`."""
    if x.flags.c_contiguous:
        flat = x.reshape(-1)
        for begin in range(0, flat.size, _CHUNK):
            yield begin, flat[begin : begin + _CHUNK]
        return
    rows = max(1, _CHUNK // features)
    for row in range(0, len(x), rows):
        yield row * features, x[row : row + rows].reshape(-1)
