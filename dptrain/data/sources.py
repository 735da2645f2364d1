"""Where the rows of a data set come from: an array in memory, or a file that is read row by row.

A source knows the shape and dtype of its array before anything is allocated, and fills memory that the caller
owns, for instance a slice of a window that the ranks of one node share. Rows that were not asked for pass through a
buffer of `CHUNK_BYTES` at most.

Shapes: N rows, F... the shape of one row.
"""

import math
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import DataError
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES as DEFAULT_MAX_BYTES
from dptrain.runtime.text import one_line

CHUNK_BYTES = 1 << 20
"""Size of the buffer through which rows that nobody asked for are skipped, and of one read of a compressed file."""

GZIP_PADDING = 1 << 20
"""Zeros that may follow the end of a .gz file, to fill a tape's block; readers skip them, however many there are."""

MAX_DIMENSIONS = 32
"""More dimensions than any data set has; NumPy itself refuses more than 64."""


class ArraySource(ABC):
    """An array of shape (N, F...) whose rows can be read in part.

    Attributes:
        where: the file, or what the array is called; messages begin with it.
        shape: (N, F...), at least one dimension.
        dtype: a number type in native byte order: what `read_into` writes.
    """

    def __init__(self, where: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Describe the array; `shape` must have at least one dimension."""
        if not shape:
            raise DataError(f"{where}: a single number, expected an array with one row a sample")
        self.where = where
        self.shape = shape
        self.dtype = dtype.newbyteorder("=")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, out: NDArray[Any], start: int = 0) -> None:
        """Fill `out` with the rows [start, start + len(out)).

        The first read of a compressed file goes on to its end, so that damage behind the wanted rows is found too.

        Args:
            out: C-contiguous, (n, F...), of the source's dtype; need not be aligned.
            start: the first row, 0 <= start <= N - n.

        Raises:
            DataError: the file is damaged, truncated, longer than declared, or changed since it was opened.
            ValueError: `out` or `start` does not fit the source: a mistake of the caller.
        """
        if out.dtype != self.dtype or not out.flags.c_contiguous or out.shape[1:] != self.shape[1:] or out.ndim == 0:
            raise ValueError(
                f"{self.where}: rows {self.shape[1:]} of {self.dtype} need a C-contiguous buffer, got {out.dtype} "
                f"{out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
            )
        if not 0 <= start <= self.shape[0] - len(out):
            raise ValueError(f"{self.where}: rows {start} to {start + len(out)} are not within 0 to {self.shape[0]}")
        self._read_rows(out, start)

    def read(self) -> NDArray[Any]:
        """The whole array in new memory.

        Raises:
            DataError: as `read_into`.
        """
        out: NDArray[Any] = np.empty(self.shape, self.dtype)
        self.read_into(out)
        return out

    @abstractmethod
    def _read_rows(self, out: NDArray[Any], start: int) -> None:
        """Fill `out`, which `read_into` has checked."""


class ByteStream(Protocol):
    """What a `StreamSource` needs of a file: `io` files, `gzip.GzipFile` and `zipfile.ZipExtFile` have it."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill `buffer` as far as one read goes; the number of bytes, 0 at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position; not called on a sequential stream."""


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the stream."""
    parts = b""
    while len(parts) < size and (part := stream.read(size - len(parts))):
        parts += part
    return parts


class StreamSource(ArraySource):
    """An array whose numbers lie one after the other in a stream of bytes, compressed or not."""

    def __init__(
        self,
        where: str,
        shape: tuple[int, ...],
        stored_dtype: np.dtype[Any],
        open_payload: Callable[[], AbstractContextManager[ByteStream]],
        *,
        sequential: bool,
        fortran_order: bool = False,
    ) -> None:
        """Describe the stream; nothing is read yet.

        Args:
            where: begins every message.
            shape: (N, F...).
            stored_dtype: dtype in the byte order of the file.
            open_payload: opens the stream at the first byte of the first number; called once a read.
            sequential: rows can be skipped only by reading them, and a length or checksum stands at the end.
            fortran_order: the first index changes fastest in the stream.
        """
        super().__init__(where, shape, stored_dtype)
        self._stored_dtype = stored_dtype
        self._open_payload = open_payload
        self._sequential = sequential
        self._fortran_order = fortran_order and sum(size > 1 for size in shape) > 1
        self._verified = not sequential

    def _read_rows(self, out: NDArray[Any], start: int) -> None:
        with stream_errors(self.where), self._open_payload() as stream:
            reader = _PayloadReader(self, stream, seekable=not self._sequential)
            if self._fortran_order:
                self._read_columns(reader, out, start)
            else:
                reader.skip(start * (self.nbytes // max(self.shape[0], 1)))
                reader.fill(out)
            if not self._verified:
                reader.finish()
                self._verified = True
        if not self._stored_dtype.isnative:
            out.byteswap(inplace=True)

    def _read_columns(self, reader: "_PayloadReader", out: NDArray[Any], start: int) -> None:
        """Scatter a stream in Fortran order: for each index into a row, the N numbers of all rows."""
        rows, n, size = self.shape[0], len(out), self.dtype.itemsize
        sample = self.shape[1:]
        features = math.prod(sample)
        out_nF = out.reshape(n, features)
        # As many whole columns at a time as the buffer holds; of a longer column only the wanted part is kept.
        columns = max(1, CHUNK_BYTES // max(rows * size, 1))
        for first in range(0, features, columns):
            in_stream = np.arange(first, min(first + columns, features))
            in_row = np.ravel_multi_index(np.unravel_index(in_stream, sample, order="F"), sample)
            if columns == 1:
                part = np.empty((1, n), self.dtype)
                reader.skip(start * size)
                reader.fill(part)
                reader.skip((rows - start - n) * size)
            else:
                block = np.empty((len(in_stream), rows), self.dtype)
                reader.fill(block)
                part = block[:, start : start + n]
            out_nF[:, in_row] = part.T


class _PayloadReader:
    """Reads exactly what a source declares from its stream, and says where the two differ."""

    def __init__(self, source: StreamSource, stream: ByteStream, *, seekable: bool) -> None:
        self._source = source
        self._stream = stream
        self._seekable = seekable
        self._done = 0

    def fill(self, out: NDArray[Any]) -> None:
        """Fill the C-contiguous `out` with the next bytes."""
        if out.size:
            self._fill(out.reshape(-1).view(np.uint8).data)

    def skip(self, size: int) -> None:
        """Pass over `size` bytes."""
        if self._seekable:
            self._stream.seek(size, 1)
            self._done += size
            return
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
        while size:
            part = buffer[: min(size, CHUNK_BYTES)]
            self._fill(part)
            size -= len(part)

    def finish(self) -> None:
        """Read on to the end of the payload and check that the stream ends there."""
        self.skip(self._source.nbytes - self._done)
        # A compressed stream checks its own length and checksum when it is read past its last byte.
        if self._stream.readinto(memoryview(bytearray(1))):
            raise length_error(self._source.where, self._source.shape, self._source.nbytes, f"{self._done + 1} or more")

    def _fill(self, view: memoryview) -> None:
        while view:
            # In pieces, because the readers of the standard library hold a second copy of what one call asks for.
            count = self._stream.readinto(view[:CHUNK_BYTES])
            if not count:
                raise length_error(self._source.where, self._source.shape, self._source.nbytes, str(self._done))
            self._done += count
            view = view[count:]


class _SqueezedSource(ArraySource):
    """Labels of shape (N, 1) seen as (N,)."""

    def __init__(self, base: ArraySource) -> None:
        super().__init__(base.where, base.shape[:1], base.dtype)
        self._base = base

    def _read_rows(self, out: NDArray[Any], start: int) -> None:
        self._base.read_into(out[:, np.newaxis], start)


@dataclass(frozen=True)
class DataSources:
    """The four arrays of a data set.

    Integer labels of shape (N, 1) become (N,), as Keras accepts both.

    Attributes:
        name: what the set is called.
        x_train: (N, F...).
        y_train: (N,) class numbers, or (N, O...) targets.
        x_test: (M, F...).
        y_test: (M,) or (M, O...).

    Raises:
        DataError: images and labels differ in number, a split is empty, or the splits differ in the shape of a sample.
    """

    name: str
    x_train: ArraySource
    y_train: ArraySource
    x_test: ArraySource
    y_test: ArraySource

    def __post_init__(self) -> None:
        """Check what the shapes alone can tell."""
        for field in ("y_train", "y_test"):
            labels: ArraySource = getattr(self, field)
            if labels.shape[1:] == (1,) and labels.dtype.kind in "iu":
                object.__setattr__(self, field, _SqueezedSource(labels))
        for x, y in ((self.x_train, self.y_train), (self.x_test, self.y_test)):
            if x.shape[0] != y.shape[0]:
                raise DataError(
                    f"{self.name}: {x.shape[0]} images, {y.shape[0]} labels ({x.where}, {y.where}); expected as many "
                    "labels as images: are the files of one set?"
                )
            if x.shape[0] == 0:
                raise DataError(f"{x.where}: no samples (shape {x.shape}); expected at least one")
        for train, test in ((self.x_train, self.x_test), (self.y_train, self.y_test)):
            if train.shape[1:] != test.shape[1:]:
                raise DataError(
                    f"{self.name}: a sample is {train.shape[1:]} in {train.where} and {test.shape[1:]} in "
                    f"{test.where}; expected the same shape in both"
                )


def check_declared(where: str, shape: tuple[int, ...], itemsize: int, max_bytes: int) -> None:
    """Refuse a declared shape before memory is allocated for it.

    Args:
        where: begins the message.
        shape: the dimensions in the header, any non-negative numbers.
        itemsize: bytes of one number.
        max_bytes: the largest array allowed.

    Raises:
        DataError: no dimension, too many, or more than `max_bytes`.
    """
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise DataError(f"{where}: {len(shape)} dimensions declared, expected 1 to {MAX_DIMENSIONS}")
    # A zero among the sizes makes the product zero, yet the others still have to be sizes of an array.
    declared = math.prod(max(size, 1) for size in shape) * itemsize
    if declared > max_bytes:
        found, bound = format_bytes(declared), format_bytes(max_bytes)
        if found == bound:
            found, bound = f"{declared} bytes", f"{max_bytes} bytes"
        raise DataError(
            f"{where}: declared {found} > max_bytes = {bound} (shape {format_shape(shape)}); raise max_bytes if the "
            "file is what you mean to read"
        )


def length_error(where: str, shape: tuple[int, ...], declared: int, found: str) -> DataError:
    """The answer to a file that is shorter or longer than its header declares (`found`: its bytes after the header)."""
    return DataError(
        f"{where}: header declares {format_shape(shape)} = {declared} bytes, file has {found}; delete it and fetch it "
        "again"
    )


def format_shape(shape: tuple[int, ...]) -> str:
    """`60000x28x28`, with the middle left out where a damaged header declares dozens of dimensions."""
    sizes = [str(size) for size in shape]
    return "x".join(sizes if len(sizes) <= 8 else [*sizes[:4], "...", sizes[-1]])


def format_bytes(count: int) -> str:
    """`8.0 GB`, in powers of 1000."""
    if count < 1000:
        return f"{count} bytes"
    if count >= 10**21:
        return "more than 1000 EB"  # the product of damaged sizes may be too large for a float
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.3g} EB"


@contextmanager
def stream_errors(where: str) -> Iterator[None]:
    """Turn what reading a damaged or unreadable file raises into a `DataError` that begins with `where`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"data: {where} not found") from None
    except EOFError:
        raise DataError(f"{where}: the compressed data ends early; delete it and fetch it again") from None
    except (zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{where}: damaged ({one_line(error)}); delete it and fetch it again") from None
    except OSError as error:
        # gzip reports a bad checksum as an OSError without a number; the others come from the operating system.
        if error.errno is None:
            raise DataError(f"{where}: damaged ({one_line(error)}); delete it and fetch it again") from None
        raise DataError(f"{where}: cannot be read ({error.strerror or error}); check the path and its rights") from None
