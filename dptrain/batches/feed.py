"""How a rank's samples reach its device: all at once, or in chunks where the device cannot hold them.

A feed is told what an epoch's steps will ask for, and then asked for it in that order. Either way the batch op gathers
the same values, so that the results do not depend on where the samples are.
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
from dptrain.runtime.children import ending_forks

# The most that one of the two chunks holds: larger ones make no copy faster.
_CHUNK_BYTES = 64 << 20
# Of rows that must be made first, which takes longer than a copy: the device waits for the first chunk.
_LAZY_CHUNK_BYTES = 4 << 20

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchRows:
    """Samples on the device, of one or more steps.

    Attributes:
        arrays: features, targets and what else belongs to a sample, each (stored rows, ...).
        order: int64, numbers of stored rows.
        starts: where in `order` those of each shard begin.
    """

    arrays: tuple[Buffer, ...]
    order: Buffer
    starts: list[int]


class Feed(ABC):
    """The samples of one rank, in the order of an epoch; a context that ends what runs in the background.

    Attributes:
        stored_rows: of the arrays that it gives.
    """

    stored_rows: int

    def __enter__(self) -> Self:
        """Return the feed."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Begin an epoch.

        Args:
            order: rows in the order of the epoch, int64.
            steps: shards of what `rows` will be asked for, in that order; an epoch may end before the last.
        """

    @abstractmethod
    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of the next steps, of as many of those given as lie in memory; valid until the next call.

        Args:
            steps: shards of what comes next, in the order that `start` was told.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop what runs in the background."""


class ResidentFeed(Feed):
    """All samples on the device.

    Args:
        backend: the device.
        arrays: (rows, ...) each.
    """

    def __init__(self, backend: Backend, arrays: Sequence[HostArray]) -> None:
        self._backend = backend
        self._arrays = tuple(backend.upload_samples(array) for array in arrays)
        self.stored_rows = len(arrays[0])
        self._order: Buffer = None

    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Send the order."""
        # Kept from epoch to epoch: giving memory back would make the host wait for all that the device has to do.
        if self._order is None or len(self._order) != len(order):
            self._order = self._backend.empty(order.shape, np.int64)
        self._backend.write(self._order, order)

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return all samples and the whole order."""
        return BatchRows(self._arrays, self._order, [shard.start for shards in steps for shard in shards])

    def close(self) -> None:
        """Nothing runs."""


class StreamedFeed(Feed):
    """Chunks of the epoch's order, gathered on the host by a thread while the device works on the chunk before.

    Args:
        backend: the device.
        arrays: (rows, ...) each.
        chunk_rows: rows of a chunk, at least those of the largest step; two chunks are on the device.
    """

    def __init__(self, backend: Backend, arrays: Sequence[HostArray], chunk_rows: int) -> None:
        self._sources = tuple(arrays)
        self._chunk_rows = self.stored_rows = chunk_rows
        self._slots = [
            [backend.staging((chunk_rows, *array.shape[1:]), array.dtype) for array in arrays] for _ in range(2)
        ]
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
        """Cut the epoch into chunks and bring the first one in."""
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
        """Return the chunk that holds the next step, with the steps that lie in it as well."""
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
        return BatchRows(arrays, self._identity, starts)

    def close(self) -> None:
        """End the thread, whatever it met."""
        self._thread.shutdown(cancel_futures=True)

    def _enter(self, chunk: int) -> None:
        """Make a chunk the one that ops read, and begin to gather the one after it into the other slot."""
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
        self._filling = self._thread.submit(ending_forks, partial(_gather, self._sources, rows, slot))

    def _send(self) -> None:
        """Send the chunk that is being gathered, when it is."""
        assert self._filling is not None
        self._filling.result()
        self._filling = None
        self._sent += 1
        rows = sum(map(_rows, self._chunks[self._sent]))
        for staging in self._slots[self._sent % 2]:
            staging.send(rows)


class KeptFeed(Feed):
    """Steps of few rows, one at a time, in memory that stays: what is prepared to read it is found again.

    Rows behind those of a step are zeros.

    Args:
        backend: the device.
        like: arrays of the shapes (but for the rows) and types of those to come.
        capacity: the most rows of a step.
        give_back: called with the feed when it is closed.
    """

    def __init__(
        self, backend: Backend, like: Sequence[HostArray], capacity: int, give_back: "Callable[[KeptFeed], None]"
    ) -> None:
        self._backend, self.stored_rows, self._give_back = backend, capacity, give_back
        self._host = [np.zeros((capacity, *array.shape[1:]), array.dtype) for array in like]
        self._device = tuple(map(backend.upload, self._host))
        self._identity = backend.upload(np.arange(capacity, dtype=np.int64))
        self._sources: Sequence[HostArray] = ()
        self._order: Order = np.empty(0, np.int64)

    def read(self, arrays: Sequence[HostArray]) -> Self:
        """Let the samples be those of these arrays from now on; return the feed."""
        self._sources = tuple(arrays)
        return self

    def start(self, order: Order, steps: Sequence[Sequence[Shard]]) -> None:
        """Note the order."""
        self._order = order

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of the first step, which has one shard."""
        ((shard,), *_) = steps
        chosen = self._order[shard.start : shard.stop]
        for source, host, device in zip(self._sources, self._host, self._device, strict=True):
            host[: len(chosen)] = source[chosen]
            host[len(chosen) :] = 0
            self._backend.write(device, host)
        return BatchRows(self._device, self._identity, [0])

    def close(self) -> None:
        """Let go of the samples; the memory stays, for the next prediction."""
        self._sources = ()
        self._give_back(self)


class KeptFeeds:
    """The memory of small predictions, which come one after another and are alike; each has its own meanwhile.

    Args:
        backend: the device.
    """

    # Bytes of samples that are copied rather than read where they lie; kinds of samples that are remembered, and for
    # how many predictions at once there is memory of a kind.
    _MOST_BYTES, _MOST_KINDS, _MOST_FREE = 4 << 20, 8, 8

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._free: OrderedDict[Any, list[KeptFeed]] = OrderedDict()

    def feed(self, arrays: Sequence[HostArray], largest: int, room: int | None) -> KeptFeed | None:
        """Return a feed of these arrays; None where they are too large to be copied, or for the device.

        Args:
            arrays: (rows, ...) each.
            largest: rows of the largest step.
            room: bytes of the device's memory; None for as many as are wanted.
        """
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
        return KeptFeed(self._backend, arrays, capacity, partial(self._give_back, key)).read(arrays)

    def _give_back(self, key: Any, feed: KeptFeed) -> None:
        with self._lock:
            free = self._free.get(key)
            if free is not None and len(free) < self._MOST_FREE:
                free.append(feed)


def padded_rows(rows: int) -> int:
    """Return the power of two from `rows` on: steps of any number of rows then have few different ones."""
    return 1 << max(rows - 1, 0).bit_length()


def make_feed(
    backend: Backend,
    arrays: Sequence[HostArray],
    largest: int,
    most_bytes: int | None = None,
    reserved: int = 0,
    kept: KeptFeeds | None = None,
) -> Feed:
    """Return a feed that keeps the samples on the device if they fit there, and else streams them.

    Lazy arrays are streamed, so that nobody waits for rows that are needed later.

    Args:
        backend: the device.
        arrays: (rows, ...) each; features, targets and so on.
        largest: rows of the largest step.
        most_bytes: of the device's memory that samples may take; None for what is free.
        reserved: bytes of what is free that something else will need.
        kept: memory for few samples; None where they are read where they lie.
    """

    def free() -> int | None:
        found = backend.room_for_data()
        return None if found is None else max(found - reserved, 0)

    room = free() if most_bytes is None else most_bytes
    are_lazy = any(isinstance(array, LazyArray) for array in arrays)
    needed = 0 if are_lazy else sum(backend.missing_samples(array) for array in arrays)
    if most_bytes is None and room is not None and needed > room:
        gc.collect()  # a model that was dropped, which is a cycle, holds its memory until then
        room = free()
    few = None if kept is None else kept.feed(arrays, largest, room)
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
    """Cut the steps that have rows into runs of at most `most` rows."""
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
    """Copy rows of every array to the host's side of a slot."""
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
