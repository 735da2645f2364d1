"""Arrays whose rows are made when they are asked for, such as pictures that are decoded."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


class RowSource(ABC):
    """Where the rows of lazy arrays come from.

    Attributes:
        sample_shape: of a row.
        dtype: of its elements.
    """

    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def read(self, rows: Rows, out: Array) -> None:
        """Fill `out`, (rows, *sample_shape), with the rows of these numbers; several threads may call it at once.

        Raises:
            DataError: one cannot be made.
        """


class NativeRows(RowSource):
    """Rows of an array in this machine's byte order, such as those of a memory map of the other one.

    Args:
        array: (rows, ...), of any byte order.
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        self.sample_shape, self.dtype = array.shape[1:], array.dtype.newbyteorder("=")

    def read(self, rows: Rows, out: Array) -> None:
        """See `RowSource`."""
        out[...] = self._array[rows]


class LazyArray:
    """Some rows of a source, as an array of NumPy's shows them; indexing gives a lazy array again.

    `numpy.asarray` makes all of its rows.

    Args:
        source: where rows come from.
        rows: their numbers there.
        sample_shape: of a row, with as many elements as the source's; None for that.
    """

    def __init__(self, source: RowSource, rows: Rows, sample_shape: tuple[int, ...] | None = None) -> None:
        self._source, self._rows = source, rows
        self.shape = (len(rows), *(source.sample_shape if sample_shape is None else sample_shape))
        self.dtype, self.ndim = source.dtype, len(self.shape)
        self.itemsize = self.dtype.itemsize
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.itemsize

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, rows: slice | Rows | npt.NDArray[np.bool_]) -> "LazyArray":
        """Return some of the rows, which are not made yet."""
        return LazyArray(self._source, self._rows[rows], self.shape[1:])

    def reshape(self, *shape: int) -> "LazyArray":
        """Return the same rows, each in another shape."""
        if shape[0] != len(self) or np.prod(shape, dtype=np.int64) != self.size:
            raise ValueError(f"cannot reshape rows of {self.shape} to {shape}")
        return LazyArray(self._source, self._rows, tuple(shape[1:]))

    def read_into(self, rows: Rows, out: Array) -> None:
        """Fill the C-contiguous `out`, (rows, ...), with the rows of these numbers.

        Raises:
            DataError: one cannot be made.
        """
        self._source.read(self._rows[rows], out.reshape(len(rows), *self._source.sample_shape))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return all rows.

        Raises:
            DataError: one cannot be made.
        """
        out = np.empty(self.shape, self.dtype)
        self.read_into(np.arange(len(self)), out)
        return out if dtype is None else out.astype(dtype, copy=False)
