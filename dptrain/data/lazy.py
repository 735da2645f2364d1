"""Arrays whose rows are computed on demand, such as decoded pictures."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class RowSource(ABC):
    """Computes rows for lazy arrays: `sample_shape` and `dtype` of a row, and `read`."""

    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def read(self, rows: Rows, out: Array) -> None:
        """Fill `out`, (rows, *sample_shape), with these rows; thread-safe; DataError if a row cannot be computed."""


class NativeRows(RowSource):
    """Rows of an array (rows, ...) converted to native byte order, such as those of a foreign memory map."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.sample_shape, self.dtype = array.shape[1:], array.dtype.newbyteorder("=")

    def read(self, rows: Rows, out: Array) -> None:
        """See `RowSource`."""
        out[...] = self._array[rows]


class LazyArray:
    """Rows of a source behind NumPy's array interface; `numpy.asarray` computes all, `sample_shape` reshapes them."""

    def __init__(self, source: RowSource, rows: Rows, sample_shape: tuple[int, ...] | None = None) -> None:
        self._source, self._rows = source, rows
        self.shape = (len(rows), *(source.sample_shape if sample_shape is None else sample_shape))
        self.dtype, self.ndim = source.dtype, len(self.shape)
        self.itemsize = self.dtype.itemsize
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice | Rows | npt.NDArray[np.bool_]) -> "LazyArray":
        return LazyArray(self._source, self._rows[rows], self.shape[1:])

    def reshape(self, *shape: int) -> "LazyArray":
        """Return the same rows, each reshaped."""
        if shape[0] != len(self) or np.prod(shape, dtype=np.int64) != self.size:
            raise ValueError(f"cannot reshape rows of {self.shape} to {shape}")
        return LazyArray(self._source, self._rows, tuple(shape[1:]))

    def read_into(self, rows: Rows, out: Array) -> None:
        """Fill the C-contiguous `out`, (rows, ...), with these rows."""
        self._source.read(self._rows[rows], out.reshape(len(rows), *self._source.sample_shape))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        out = np.empty(self.shape, self.dtype)
        self.read_into(np.arange(len(self)), out)
        return out if dtype is None else out.astype(dtype, copy=False)
