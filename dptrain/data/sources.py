"""Sources of a data set's rows: arrays in memory, or files read row by row into memory that the caller owns.

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
    """An array of shape (N, F...) whose rows can be read in part; `where` begins messages, `dtype` is native."""

    def __init__(self, where: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
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
        """Fill `out`, (n, F...), with rows from `start`; the first read checks a compressed file to its end."""
        if out.dtype != self.dtype or not out.flags.c_contiguous or out.shape[1:] != self.shape[1:] or out.ndim == 0:
            raise ValueError(
                f"{self.where}: rows {self.shape[1:]} of {self.dtype} need a C-contiguous buffer, got {out.dtype} "
                f"{out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
            )
        if not 0 <= start <= self.shape[0] - len(out):
            raise ValueError(f"{self.where}: rows {start} to {start + len(out)} are not within 0 to {self.shape[0]}")
        self._read_rows(out, start)

    def read(self) -> NDArray[Any]:
        """Return the whole array in new memory."""
        out: NDArray[Any] = np.empty(self.shape, self.dtype)
        self.read_into(out)
        return out

    @abstractmethod
    def _read_rows(self, out: NDArray[Any], start: int) -> None:
        """Fill `out`, which `read_into` has checked."""


class ByteStream(Protocol):
    """The part of a binary file that `StreamSource` uses: of `io` files, `gzip.GzipFile`, `zipfile.ZipExtFile`."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill `buffer` as far as one read goes; return the number of bytes, 0 at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position; not called on a sequential stream."""


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the stream."""
    parts = b""
    while len(parts) < size and (part := stream.read(size - len(parts))):
        parts += part
    return parts


class StreamSource(ArraySource):
    """An array stored as consecutive numbers in a byte stream, compressed or not."""

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
        """Describe the stream without reading.

        `open_payload` opens it at the first number, once a read. A `sequential` stream skips rows only by reading them,
        and ends in a length or checksum.
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
    """Reads exactly what a source declares, and reports a stream that differs."""

    def __init__(self, source: StreamSource, stream: ByteStream, *, seekable: bool) -> None:
        self._source = source
        self._stream = stream
        self._seekable = seekable
        self._position = 0

    def fill(self, out: NDArray[Any]) -> None:
        if out.size:
            self._fill(out.reshape(-1).view(np.uint8).data)

    def skip(self, size: int) -> None:
        if self._seekable:
            self._stream.seek(size, 1)
            self._position += size
            return
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
        while size:
            part = buffer[: min(size, CHUNK_BYTES)]
            self._fill(part)
            size -= len(part)

    def finish(self) -> None:
        """Read on to the end of the payload and check that the stream ends there."""
        self.skip(self._source.nbytes - self._position)
        # A compressed stream checks its own length and checksum when it is read past its last byte.
        if self._stream.readinto(memoryview(bytearray(1))):
            raise length_error(
                self._source.where, self._source.shape, self._source.nbytes, f"{self._position + 1} or more"
            )

    def _fill(self, view: memoryview) -> None:
        while view:
            # In pieces, because the readers of the standard library hold a second copy of what one call asks for.
            count = self._stream.readinto(view[:CHUNK_BYTES])
            if not count:
                raise length_error(self._source.where, self._source.shape, self._source.nbytes, str(self._position))
            self._position += count
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
    """The four arrays of a data set; y is (N,) class numbers (or (N, 1), as in Keras) or (N, O...) targets."""

    name: str
    x_train: ArraySource
    y_train: ArraySource
    x_test: ArraySource
    y_test: ArraySource

    def __post_init__(self) -> None:
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
    """Refuse a header's shape that needs more than `max_bytes`, before memory is allocated for it."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise DataError(f"{where}: {len(shape)} dimensions declared, expected 1 to {MAX_DIMENSIONS}")
    # A zero among the sizes makes the product zero, yet the others still have to be sizes of an array.
    declared = math.prod(max(size, 1) for size in shape) * itemsize
    if declared > max_bytes:
        size, bound = format_bytes(declared), format_bytes(max_bytes)
        if size == bound:
            size, bound = f"{declared} bytes", f"{max_bytes} bytes"
        raise DataError(
            f"{where}: declared {size} > max_bytes = {bound} (shape {format_shape(shape)}); raise max_bytes if the "
            "file is what you mean to read"
        )


def length_error(where: str, shape: tuple[int, ...], declared: int, actual: str) -> DataError:
    """Return the error for a file longer or shorter than its header declares; `actual`: bytes after the header."""
    return DataError(
        f"{where}: header declares {format_shape(shape)} = {declared} bytes, file has {actual}; delete it and fetch it "
        "again"
    )


def format_shape(shape: tuple[int, ...]) -> str:
    """Format as `60000x28x28`; a damaged header's many dimensions are elided."""
    sizes = [str(size) for size in shape]
    return "x".join(sizes if len(sizes) <= 8 else [*sizes[:4], "...", sizes[-1]])


def format_bytes(count: int) -> str:
    """Format as `8.0 GB`, in powers of 1000."""
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
    """Turn errors of reading a damaged file into a `DataError` that begins with `where`."""
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
