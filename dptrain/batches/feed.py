"""Moves a rank's samples to its device: all at once, or in chunks if they do not fit.

Results do not depend on the feed: the batch op gathers the same values from either.
"""

import gc
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, HostArray
from dptrain.backend.transfers import Staging
from dptrain.batches.sampling import Shard
from dptrain.data.lazy import LazyArray
from dptrain.runtime.launch.children import ending_forks

# Most bytes of one of the two chunks: larger ones are not copied faster.
_CHUNK_BYTES = 64 << 20
# Likewise for rows that must be computed first, slower than a copy: the device waits for the first chunk.
_LAZY_CHUNK_BYTES = 4 << 20

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchRows:
    """Samples on the device, of one or more steps."""

    arrays: tuple[Buffer, ...]  # features, targets and so on, (stored rows, ...) each
    order: Buffer  # int64, numbers of stored rows
    starts: list[int]  # where each shard begins in `order`
    samples: "Sequence[int] | Order | None" = None  # the sample in each stored row, for messages; None: that number


class Feed(ABC):
    """Supplies the samples of one rank in the order of an epoch; a context manager that stops its thread."""

    stored_rows: int  # rows of the arrays in `BatchRows`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Begin an epoch that reads `order` (int64) for `steps` in turn; it may end early."""

    @abstractmethod
    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of as many of the next steps as lie in memory; valid until the next call."""

    @abstractmethod
    def close(self) -> None:
        """Stop the background thread."""


class ResidentFeed(Feed):
    """Keeps all samples on the device."""

    def __init__(self, backend: Backend, arrays: Sequence[HostArray]) -> None:
        self._backend = backend
        self._arrays = tuple(backend.upload_samples(array) for array in arrays)
        self.stored_rows = len(arrays[0])
        self._order: Buffer = None

    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Copy the order to the device."""
        # Kept from epoch to epoch: freeing memory would make the host wait for all queued work.
        if self._order is None or len(self._order) != len(order):
            self._order = self._backend.empty(order.shape, np.int64)
        self._backend.write(self._order, order)

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return all samples and the whole order."""
        return BatchRows(self._arrays, self._order, [shard.start for shards in steps for shard in shards])

    def close(self) -> None:
        """Do nothing: no thread runs."""


class StreamedFeed(Feed):
    """Streams chunks of rows: a thread gathers the next chunk while the device works on the current one."""

    def __init__(self, backend: Backend, arrays: Sequence[HostArray], chunk_rows: int) -> None:
        self._sources = tuple(arrays)
        self._chunk_rows = self.stored_rows = chunk_rows
        self._slots = [
            [backend.staging((chunk_rows, *array.shape[1:]), array.dtype) for array in arrays] for _ in range(2)
        ]
        self._samples: list[Any] = [(), ()]  # in each slot
        self._identity = backend.upload(np.arange(chunk_rows, dtype=np.int64))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dptrain-feed")
        self._filling: Future[None] | None = None
        self._order: Order = np.empty(0, np.int64)
        self._chunks: list[list[Sequence[Shard]]] = []
        self._current = 0
        self._sent = -1
        self._next_row = 0
        self._left = 0

    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Cut the epoch into chunks and gather the first."""
        if self._filling is not None:
            self._filling.result()  # of an epoch that ended early
        for slot in self._slots:
            _release(slot)
        self._order = order
        self._chunks = _chunks(steps, self._chunk_rows)
        self._current, self._sent, self._left = -1, -1, 0
        if self._chunks:
            self._fill(0)

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the chunk that holds the next step, and the later steps that lie in it as well."""
        if self._left == 0 and _rows(steps[0]):
            self._enter(self._current + 1)
        elif self._filling is not None and self._filling.done():
            self._send()
        starts = []
        for shards in steps:
            if _rows(shards) and not self._left:
                break
            for shard in shards:
                starts.append(self._next_row)
                self._next_row += shard.rows
            self._left -= bool(_rows(shards))
        arrays = tuple(staging.device for staging in self._slots[max(self._current, 0) % 2])
        return BatchRows(arrays, self._identity, starts, self._samples[max(self._current, 0) % 2])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _enter(self, chunk: int) -> None:
        """Make a chunk current, and begin to gather the next one into the other slot."""
        if self._current >= 0:
            _release(self._slots[self._current % 2])
        if self._sent < chunk:
            self._send()
        for staging in self._slots[chunk % 2]:
            staging.arrive()
        self._current, self._next_row, self._left = chunk, 0, len(self._chunks[chunk])
        if chunk + 1 < len(self._chunks):
            self._fill(chunk + 1)

    def _fill(self, chunk: int) -> None:
        slot = self._slots[chunk % 2]
        for staging in slot:
            staging.reuse()
        chosen = [shard for shards in self._chunks[chunk] for shard in shards]
        rows = np.concatenate([self._order[shard.start : shard.stop] for shard in chosen])
        self._samples[chunk % 2] = rows
        self._filling = self._thread.submit(ending_forks, partial(_gather, self._sources, rows, slot))

    def _send(self) -> None:
        """Wait for the chunk being gathered, and send it."""
        assert self._filling is not None
        self._filling.result()
        self._filling = None
        self._sent += 1
        rows = sum(map(_rows, self._chunks[self._sent]))
        for staging in self._slots[self._sent % 2]:
            staging.send(rows)


class PooledFeed(Feed):
    """Copies a small step at a time, and zeros behind it, into lasting memory, to reuse prepared programs."""

    def __init__(
        self, backend: Backend, like: Sequence[HostArray], capacity: int, give_back: "Callable[[PooledFeed], None]"
    ) -> None:
        self._backend, self.stored_rows, self._give_back = backend, capacity, give_back
        self._host = [np.zeros((capacity, *array.shape[1:]), array.dtype) for array in like]
        self._device = tuple(map(backend.upload, self._host))
        self._identity = backend.upload(np.arange(capacity, dtype=np.int64))
        self._sources: Sequence[HostArray] = ()
        self._order: Order = np.empty(0, np.int64)

    def read(self, arrays: Sequence[HostArray]) -> Self:
        """Read samples from these arrays from now on; return the feed."""
        self._sources = tuple(arrays)
        return self

    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Store the order."""
        self._order = order

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of the first step, which has one shard."""
        ((shard,), *_) = steps
        chosen = self._order[shard.start : shard.stop]
        for source, host, device in zip(self._sources, self._host, self._device, strict=True):
            host[: len(chosen)] = source[chosen]
            # Zeros might be no id that a layer takes.
            host[len(chosen) :] = source[chosen[:1]] if len(chosen) else 0
            self._backend.write(device, host)
        return BatchRows(self._device, self._identity, [0], chosen)

    def close(self) -> None:
        """Return the feed to its pool."""
        self._sources = ()
        self._give_back(self)


class FeedPool:
    """Memory for small predictions of similar shapes; concurrent ones use separate feeds."""

    # Most bytes of samples that are copied rather than read in place; kinds of samples with memory, and concurrent
    # predictions of a kind.
    _MOST_BYTES, _MOST_KINDS, _MOST_FREE = 4 << 20, 8, 8

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._free: OrderedDict[Any, list[PooledFeed]] = OrderedDict()

    def feed(self, arrays: Sequence[HostArray], largest: int, room: int | None) -> PooledFeed | None:
        """Return a feed of these arrays; None where they are too large to copy, or exceed `room` bytes."""
        capacity = padded_rows(largest)
        row = sum(math.prod(array.shape[1:]) * array.itemsize for array in arrays)
        key = (capacity, *((array.shape[1:], array.dtype.str) for array in arrays))
        if row * max(capacity, len(arrays[0])) > self._MOST_BYTES:
            return None
        with self._lock:
            free = self._free.setdefault(key, [])
            self._free.move_to_end(key)
            if len(self._free) > self._MOST_KINDS:
                self._free.popitem(last=False)
            if free:
                return free.pop().read(arrays)
        if room is not None and (row + 8) * capacity > room:
            return None
        return PooledFeed(self._backend, arrays, capacity, partial(self._give_back, key)).read(arrays)

    def _give_back(self, key: Any, feed: PooledFeed) -> None:
        with self._lock:
            free = self._free.get(key)
            if free is not None and len(free) < self._MOST_FREE:
                free.append(feed)


def padded_rows(rows: int) -> int:
    """Round up to a power of two, so that steps of any size need few programs."""
    return 1 << max(rows - 1, 0).bit_length()


def make_feed(
    backend: Backend,
    arrays: Sequence[HostArray],
    largest: int,
    most_bytes: int | None = None,
    reserved: int = 0,
    pool: FeedPool | None = None,
) -> Feed:
    """Return a feed that keeps the samples on the device if they fit there, and streams them otherwise."""

    def free() -> int | None:
        available = backend.room_for_data()
        return None if available is None else max(available - reserved, 0)

    room = free() if most_bytes is None else most_bytes
    are_lazy = any(isinstance(array, LazyArray) for array in arrays)
    needed = 0 if are_lazy else sum(backend.missing_samples(array) for array in arrays)
    if most_bytes is None and room is not None and needed > room:
        gc.collect()  # a dropped model, which is a cycle, holds its memory until then
        room = free()
    few = None if pool is None else pool.feed(arrays, largest, room)
    if few is not None:
        return few
    if (room is None or needed <= room) and not are_lazy:
        return ResidentFeed(backend, arrays)
    row = max(1, sum(array[:1].nbytes for array in arrays))
    most = _LAZY_CHUNK_BYTES if are_lazy else _CHUNK_BYTES
    # Both chunks take half of the room, and leave the rest to other samples, such as those for validation.
    return StreamedFeed(backend, arrays, max(largest, min(most if room is None else room // 4, most) // row, 1))


def _rows(shards: Sequence[Shard]) -> int:
    return sum(shard.rows for shard in shards)


def _chunks(steps: Sequence[Sequence[Shard]], most: int) -> list[list[Sequence[Shard]]]:
    chunks: list[list[Sequence[Shard]]] = []
    rows = 0
    for shards in steps:
        if not _rows(shards):
            continue
        if not chunks or rows + _rows(shards) > most:
            chunks.append([])
            rows = 0
        chunks[-1].append(shards)
        rows += _rows(shards)
    return chunks


def _gather(sources: Sequence[HostArray], rows: Order, slot: Sequence[Staging]) -> None:
    """Copy rows of every array to the host side of a slot."""
    for array, staging in zip(sources, slot, strict=True):
        target = staging.host[: len(rows)]
        if isinstance(array, LazyArray):
            array.read_into(rows, target)
        elif target.dtype == array.dtype and array.flags.c_contiguous:
            np.take(array, rows, axis=0, out=target, mode="clip")  # without the interpreter's lock
        else:
            target[...] = array[rows]


def _release(slot: Sequence[Staging]) -> None:
    for staging in slot:
        staging.release()
