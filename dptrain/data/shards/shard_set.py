"""The shards of a data set on one rank: listed by rank 0, measured by all ranks, fetched ahead, read by row."""

import hashlib
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.data.shards.cache import ShardCache
from dptrain.data.shards.formats import DamagedCopyError, Extent, Indices, ReadOptions, ShardFormat, ShardReader
from dptrain.data.shards.index import Indexed, read_indices
from dptrain.data.shards.parquet_shards import ParquetFormat
from dptrain.data.shards.stores import Store, StoredFile
from dptrain.data.shards.tars import TarFormat
from dptrain.data.shards.tokens import TokenFormat
from dptrain.data.texts import object_array
from dptrain.errors import DataError, printable
from dptrain.program import tree
from dptrain.runtime.failure import phase
from dptrain.runtime.text import short
from dptrain.runtime.undisturbed import undisturbed

T = TypeVar("T")

FORMATS: tuple[ShardFormat, ...] = (ParquetFormat(), TarFormat(), TokenFormat())
SUFFIXES = tuple(suffix for shard_format in FORMATS for suffix in shard_format.suffixes)
_DIGITS = 12
# Times that a copy is opened that others remove, or that is damaged.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Shard:
    """A shard of a set."""

    file: StoredFile
    samples: int
    sha256: str  # empty where no index knows it


@dataclass(frozen=True)
class ShardOptions:
    """How shards are fetched."""

    read: ReadOptions
    bad: str  # "stop" at a shard that cannot be read, or "skip" it
    cache_bytes: int  # of the copies on disk, a node
    cache_dir: Path | None  # their folder


class ShardSet:
    """The shards of a data set."""

    def __init__(
        self,
        shard_format: ShardFormat,
        shards: Sequence[Shard],
        layout: str,
        skipped: Sequence[str],
        store: Store,
        options: ShardOptions,
    ) -> None:
        self.format, self.shards, self.layout = shard_format, shards, layout
        self.skipped = list(skipped)  # why shards were left out
        self.fetched = 0  # shards that this rank has fetched or converted
        self._store, self._options = store, options
        self._cache = ShardCache(options.cache_dir, options.cache_bytes)
        # By index, the least recently used first.
        self._readers: OrderedDict[int, Future[ShardReader]] = OrderedDict()
        self._bad: dict[int, DataError] = {}
        self._lock = threading.Lock()

    @property
    def describe(self) -> list[Any]:
        """What must not change when a training resumes: format, shards and samples, without their folders."""
        facts = [[shard.file.url.rpartition("/")[2], shard.file.nbytes, shard.samples] for shard in self.shards]
        digest = hashlib.blake2b(json.dumps([facts, self.layout]).encode(), digest_size=8).hexdigest()
        return [self.format.name, len(self.shards), sum(shard.samples for shard in self.shards), digest]

    @property
    def cache_bytes(self) -> int:
        """Bytes that copies of shards may take on this node's disk."""
        return self._options.cache_bytes

    def part(self, shards: Sequence[int]) -> "ShardSet":
        """Return the set of some shards."""
        chosen = [self.shards[shard] for shard in shards]
        return ShardSet(self.format, chosen, self.layout, self.skipped, self._store, self._options)

    def read(self, shard: int, rows: Indices) -> Any:
        """Return samples of a shard."""
        return self._reader(shard).read(rows)

    def is_readable(self, shard: int) -> bool:
        """Whether a shard can be opened; one that cannot is left out and noted, or raises DataError."""
        if self._options.bad != "skip":
            self._reader(shard)
            return True
        if shard in self._bad:
            return False
        try:
            self._reader(shard)
        except DataError as error:
            self._skip(shard, error)
            return False
        return True

    def fetch(self, shard: int) -> None:
        """Copy or convert a shard ahead of its use, if that is needed."""
        if self.fetches and shard not in self._bad:
            self._copied(self.shards[shard])

    @property
    def fetches(self) -> bool:
        """Whether shards are copied or converted before they are read."""
        return self.format.converts or not self.shards[0].file.is_local

    def _skip(self, shard: int, error: DataError) -> None:
        with self._lock:
            if shard in self._bad:
                return
            self._bad[shard] = error
            self.skipped.append(str(error))
        warnings.warn(printable(f"skipped: {error}"), stacklevel=2)

    def _reader(self, shard: int) -> ShardReader:
        """Return an open shard; threads that ask for the same wait for the first."""
        with self._lock:
            future, opens = self._readers.get(shard, Future()), shard not in self._readers
            self._readers[shard] = future
            self._readers.move_to_end(shard)
        if opens:
            try:
                future.set_result(self._open(self.shards[shard]))
            except BaseException as error:
                future.set_exception(error)  # first: other threads wait for it
                with undisturbed(self._lock):
                    self._readers.pop(shard, None)
                raise
            self._close_others()
        return future.result()

    def _open(self, shard: Shard) -> ShardReader:
        reader = self._reader_of(shard)
        if reader.length != shard.samples:
            raise DataError(
                f"{shard.file.shown}: {reader.length:,} samples, {shard.samples:,} when it was measured; run "
                "python -m dptrain index again, or fetch it again"
            )
        return reader

    def _reader_of(self, shard: Shard) -> ShardReader:
        for attempt in range(_ATTEMPTS):
            path = self._copied(shard) if self.fetches else Path(shard.file.url)
            try:
                return self.format.open(path, shard.file, self.layout, self._options.read)
            except DataError as error:
                is_damaged = isinstance(error, DamagedCopyError)
                # Another rank may have removed the copy to make room.
                if attempt + 1 == _ATTEMPTS or not self.fetches or not (is_damaged or not path.exists()):
                    raise
                if is_damaged:
                    path.unlink(missing_ok=True)
        raise AssertionError("at least one attempt")

    def _close_others(self) -> None:
        """Close the least recently used shards until the open ones fit into memory."""
        with undisturbed(self._lock):
            done = [(shard, future) for shard, future in self._readers.items() if future.done()]
            used = sum(future.result().nbytes for _, future in done if future.exception() is None)
            for shard, future in done[:-1]:
                if used <= self._options.read.max_bytes:
                    return
                used -= future.result().nbytes
                del self._readers[shard]

    def _copied(self, shard: Shard) -> Path:
        """Return the copy of a shard on this machine, converted where its format wants that."""
        file, read = shard.file, self._options.read
        converts = [read.columns, read.max_bytes] if self.format.converts else []
        facts = json.dumps([file.url, file.nbytes, file.version, shard.sha256, self.format.name, converts, 1])
        key = hashlib.sha256(facts.encode()).hexdigest()[:40]

        def make(part: Path) -> None:
            self.fetched += 1
            if not self.format.converts:
                self._download(shard, part)
            elif file.is_local:
                self._require_checksum(shard)
                self.format.convert(Path(file.url), file, part, read)
            else:
                raw = part.with_name(part.name.replace(".part", ".raw.part"))
                raw.unlink(missing_ok=True)
                try:
                    self._download(shard, raw)
                    self.format.convert(raw, file, part, read)
                finally:
                    raw.unlink(missing_ok=True)

        # A remote file that is converted is there twice for a moment; how large the copy becomes is not known.
        copies = 2 if self.format.converts and not file.is_local else 1
        return self._cache.fetch(key, copies * file.nbytes, make)

    def _download(self, shard: Shard, path: Path) -> None:
        digest = hashlib.sha256()
        with open(path, "xb") as out:

            def write(content: bytes) -> None:
                digest.update(content)
                out.write(content)

            self._store.copy(shard.file, write)
        self._compare(shard, digest.hexdigest())

    def _require_checksum(self, shard: Shard) -> None:
        if shard.sha256:
            digest = hashlib.sha256()
            self._store.copy(shard.file, digest.update)
            self._compare(shard, digest.hexdigest())

    def _compare(self, shard: Shard, digest: str) -> None:
        if shard.sha256 and digest != shard.sha256:
            raise DataError(
                f"{shard.file.shown}: SHA-256 {digest[:_DIGITS]}..., expected {shard.sha256[:_DIGITS]}... by the "
                "index; it is damaged: write it again"
            )


def open_shards(urls: Sequence[str], store: Store, options: ShardOptions, comm: Communicator) -> ShardSet:
    """Return the set of the shards that some paths, addresses, globs or folders name. Collective.

    Each rank measures its part of those that no index knows.
    """
    with phase.during("data"):
        files = list_shards(urls, store, comm)
        known = _indexed(files, store, comm)
        extents: dict[str, Extent | DataError] = {url: entry.extent for url, entry in known.items()}
        extents |= _measure([file for file in files if file.url not in known], store, options, comm)
        return agreed(comm, lambda: _assembled(files, extents, known, store, options))


def agreed(comm: Communicator, action: Callable[[], T]) -> T:
    """Return the result of an action; where it fails on a rank it does on all, alone with the error itself."""
    return comm.agree("data", action) if comm.size > 1 else action()


def list_shards(urls: Sequence[str], store: Store, comm: Communicator) -> list[StoredFile]:
    """Return the shards as rank 0 sees them. Collective."""

    def listed() -> list[Any]:
        if comm.rank != 0:
            return []
        files = [file for url in urls for file in store.list_files(url, SUFFIXES)]
        format_of(files)
        return [[file.url, file.nbytes, file.version] for file in files]

    return [StoredFile(*entry) for entry in comm.broadcast_fact(agreed(comm, listed))]


def measure_shards(
    files: Sequence[StoredFile], store: Store, options: ShardOptions, comm: Communicator
) -> dict[str, Extent]:
    """Return the length and layout of each shard by its address, or raise the first fault. Collective."""
    extents = _measure(files, store, options, comm)

    def checked() -> dict[str, Extent]:
        for extent in extents.values():
            if isinstance(extent, DataError):
                raise extent
        return {url: extent for url, extent in extents.items() if not isinstance(extent, DataError)}

    return agreed(comm, checked)


def _indexed(files: Sequence[StoredFile], store: Store, comm: Communicator) -> dict[str, Indexed]:
    def read() -> list[Any]:
        entries = read_indices(files, store) if comm.rank == 0 else {}
        return [[url, entry.nbytes, list(entry.extent), entry.sha256] for url, entry in entries.items()]

    entries = comm.broadcast_fact(agreed(comm, read))
    return {url: Indexed(nbytes, Extent(*extent), sha256) for url, nbytes, extent, sha256 in entries}


def _measure(
    files: Sequence[StoredFile], store: Store, options: ShardOptions, comm: Communicator
) -> dict[str, Extent | DataError]:
    """Return the length and layout of each shard, or why it cannot be read, by its address. Collective."""
    measured = agreed(comm, lambda: _measured(files[comm.rank :: comm.size], store, options))
    extents: dict[str, Extent | DataError] = {}
    for rank, results in enumerate(comm.allgather(measured)):
        for file, result in zip(files[rank :: comm.size], results, strict=True):
            extents[file.url] = DataError(result) if isinstance(result, str) else Extent(*result)
    return extents


def format_of(files: Sequence[StoredFile]) -> ShardFormat:
    """Return the format of all files, by their endings."""
    formats: dict[ShardFormat, StoredFile] = {}
    for file in files:
        chosen = next((each for each in FORMATS if file.url.lower().endswith(each.suffixes)), None)
        if chosen is None:
            raise DataError(f"{file.shown}: not a shard by its ending; expected {', '.join(SUFFIXES)}")
        formats.setdefault(chosen, file)
    if len(formats) > 1:
        (first, a), (second, b), *_ = formats.items()
        raise DataError(f"{a.shown} is {first.name}, {b.shown} is {second.name}; expected shards of one format")
    return next(iter(formats))


def _measured(files: Sequence[StoredFile], store: Store, options: ShardOptions) -> list[list[Any] | str]:
    """Return length and layout of each shard, or why it cannot be read."""
    if not files:
        return []
    shard_format = format_of(files)
    paths: list[Path] = [Path(file.url) for file in files]
    if shard_format.scans and not files[0].is_local:
        shards = ShardSet(shard_format, [Shard(file, 0, "") for file in files], "", [], store, options)
        extents: list[Extent | DataError] = []
        for index, file in enumerate(files):
            try:
                path = shards._copied(shards.shards[index])
                extents.append(shard_format.extent(file, path, store, options.read))
            except DataError as error:
                extents.append(error)
    else:
        extents = shard_format.extents(files, paths, store, options.read)
    return [str(extent) if isinstance(extent, DataError) else list(extent) for extent in extents]


def _assembled(
    files: Sequence[StoredFile],
    extents: dict[str, Extent | DataError],
    known: dict[str, Indexed],
    store: Store,
    options: ShardOptions,
) -> ShardSet:
    """Return the set of the shards that can be read; refuse others, or leave them out."""
    shard_format = format_of(files)
    shards, skipped, layout = [], [], ""
    for file in files:
        extent = extents[file.url]
        try:
            if not isinstance(extent, DataError):
                extent = Extent(extent.length, shard_format.narrowed(extent.layout, options.read))
                if extent.length and layout:
                    shard_format.require_layout(file.shown, extent.layout, layout)
        except DataError as error:
            text = str(error)
            extent = DataError(text if text.startswith(file.shown) else f"{file.shown}: {text}")
        if isinstance(extent, DataError):
            if options.bad != "skip":
                raise DataError(f"{extent}; or leave such shards out (--bad-shards skip, bad_shards='skip')")
            skipped.append(str(extent))
            continue
        if extent.length and not layout:
            layout = extent.layout
        samples = shard_format.samples(extent.length, options.read)
        sha256 = known[file.url].sha256 if file.url in known else ""
        shards.append(Shard(file, samples, sha256))
    if not any(shard.samples for shard in shards):
        reason = f" ({skipped[0]})" if skipped else ""
        raise DataError(f"{files[0].shown}: no samples in {len(files)} shards{reason}; expected at least one")
    return ShardSet(shard_format, shards, layout, skipped, store, options)


def rows_of(parts: Sequence[Any], order: Indices) -> Any:
    """Return rows of nested batches of one structure as one batch: row i is row `order[i]` of their concatenation."""
    first = tree.flatten(parts[0])
    columns: dict[str, list[Any]] = {path: [] for path, _ in first}
    for part in parts:
        for path, leaf in tree.flatten(part):
            if path not in columns:
                raise DataError(f"samples of {short(sorted(columns))} and of {short(path)} in one batch")
            columns[path].append(leaf)
    return tree.map_leaves(lambda path, leaf: _joined(columns[path])[order], parts[0])


def _joined(arrays: Sequence[Any]) -> Any:
    arrays = [array for array in arrays if len(array)] or list(arrays[:1])
    if len({array.shape[1:] for array in arrays}) > 1 or len({array.dtype == object for array in arrays}) > 1:
        # Samples of several shapes, for `map` to bring into one.
        return object_array([sample for array in arrays for sample in array])
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
