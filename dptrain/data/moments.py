"""Column means and variances of selected rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16
"""Rows looked at together."""


def moments(
    x: npt.NDArray[Any], rows: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the mean and biased variance of each column of x (rows, columns), in float64 and two passes."""
    count = len(x) if rows is None else len(rows)

    def parts() -> "list[npt.NDArray[Any]]":
        return [x[begin : begin + _CHUNK] if rows is None else x[rows[begin : begin + _CHUNK]] for begin in starts]

    starts = range(0, count, _CHUNK)
    mean = sum((part.sum(0, dtype=np.float64) for part in parts()), np.zeros(x.shape[1])) / count
    squares = sum((np.square(part - mean).sum(0) for part in parts()), np.zeros(x.shape[1]))
    return mean, squares / count
