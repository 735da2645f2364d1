"""What the formats of shards have in common: how long a shard is, and how samples are read from it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.data.shards.stores import Store, StoredFile, changed
from dptrain.errors import DataError
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES
from dptrain.runtime.storage.files import open_regular

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

# Shards that are measured at once: stores answer late, not slowly.
_THREADS = 8
# Characters of a layout in a message.
_MOST_SHOWN = 200


class Extent(NamedTuple):
    """How long a shard is, and what a sample of it has."""

    length: int  # samples, or tokens of a token shard
    layout: str  # fields and types, equal in all shards of a set


@dataclass(frozen=True)
class ReadOptions:
    """What is read of a shard."""

    columns: tuple[str, ...] | None = None  # of a Parquet file; None for all
    sequence_length: int | None = None  # ids of a window; None for other formats
    token_dtype: str = "uint16"  # of .bin files without a header
    vocabulary_size: int | None = None  # ids at or above it are refused; None for any
    max_bytes: int = DEFAULT_MAX_BYTES  # of one shard in memory


class DamagedCopyError(DataError):
    """A copy in the cache is not what was written there."""


class LocalFile:
    """An open file of this machine, read at any offset by any thread; closed with the object."""

    def __init__(self, path: Path, listed: StoredFile) -> None:
        """Open `path`, the listed file itself or a copy of it; refuse a file that has changed."""
        self.where = listed.shown
        try:
            with open_regular(path) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise DataError(f"{self.where}: {error.strerror or error}") from None
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        current = StoredFile(listed.url, status.st_size, str(status.st_mtime_ns))
        if not listed.is_local and self.nbytes != listed.nbytes:
            raise DamagedCopyError(f"{self.where}: its copy in the cache has {self.nbytes:,} bytes: {path}")
        if listed.is_local and current != listed:
            raise changed(listed, current)

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start`; refuse a file that ends before."""
        parts = b""
        while len(parts) < size:
            try:
                part = os.pread(self._fd, size - len(parts), start + len(parts))
            except OSError as error:
                raise DataError(
                    f"{self.where}: not read at byte {start + len(parts):,} ({error.strerror or error})"
                ) from None
            if not part:
                end = os.fstat(self._fd).st_size
                raise DataError(
                    f"{self.where}: truncated at byte {end:,}, expected {start + size:,} or more; fetch it again"
                )
            parts += part
        return parts

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class ShardReader(ABC):
    """An open shard; any thread may read from it."""

    length: int  # samples
    nbytes: int  # memory that it takes

    @abstractmethod
    def read(self, rows: Indices) -> Any:
        """Return samples: a dictionary of arrays (rows, ...), or a tuple of them."""


class ShardFormat(ABC):
    """A file format of shards."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    converts: ClassVar[bool] = False  # whether `open` takes what `convert` has written, not the file itself
    scans: ClassVar[bool] = False  # whether only the whole file tells its length

    @abstractmethod
    def extent(self, file: StoredFile, path: Path, store: Store, options: ReadOptions) -> Extent:
        """Return a shard's length and layout; `path` is the file, or its copy if it `scans`."""

    def extents(
        self, files: Sequence[StoredFile], paths: Sequence[Path], store: Store, options: ReadOptions
    ) -> "list[Extent | DataError]":
        """Return the extent of each shard, or why it cannot be read."""

        def measure(file: StoredFile, path: Path) -> Extent | DataError:
            try:
                return self.extent(file, path, store, options)
            except DataError as error:
                return error

        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(measure, files, paths))

    def samples(self, length: int, options: ReadOptions) -> int:
        """Return the samples of a shard of this length."""
        return length

    def narrowed(self, layout: str, options: ReadOptions) -> str:
        """Return the layout of what is read of a shard with this one; DataError where it lacks a column."""
        return layout

    def require_layout(self, where: str, layout: str, expected: str) -> None:
        """Refuse a shard whose samples have other fields or types than those of the set's first shard."""
        if layout != expected:
            fault = f"its samples are {self.shown(layout)}; those of the set's first shard are {self.shown(expected)}"
            raise DataError(f"{where}: {fault}")

    def shown(self, layout: str) -> str:
        """Return a layout for messages."""
        return layout if len(layout) <= _MOST_SHOWN else f"{layout[:_MOST_SHOWN]}..."

    def convert(self, path: Path, file: StoredFile, target: Path, options: ReadOptions) -> None:
        """Write what `open` takes."""
        raise NotImplementedError

    @abstractmethod
    def open(self, path: Path, file: StoredFile, layout: str, options: ReadOptions) -> ShardReader:
        """Open a shard on this machine; refuse another layout than the set's."""


def stacked(arrays: Sequence[Array], where: str, name: str) -> Array:
    """Return samples as one array (rows, ...); refuse other shapes than the first's."""
    first = arrays[0]
    for array in arrays:
        if array.shape != first.shape:
            raise DataError(f"{where}: {name} of shape {array.shape}, others have {first.shape}")
    return np.stack(arrays)
