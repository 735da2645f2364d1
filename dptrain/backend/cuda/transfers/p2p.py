"""Point-to-point transfers between stages of a pipeline, from GPU to GPU.

Each pair of stages that exchange tensors has a ring of slots at both ends, each with its own stream, so that a transfer
delays neither the ops nor the opposite direction. The sender's ops copy a tensor into its slot; the stream sends it to
the slot at the other end; the receiver's ops copy it to its destination. Each waits for the one before by an event, and
so does the next use of the slot.

Nobody can wait for an event that is not yet recorded. So ranks tell each other by a byte on the host what they have
queued: the sender that a slot is filled, the receiver that it is read. These bytes take the host's point-to-point path,
with the same clock, which detects a missing rank. The host waits for no device there.

Each direction has its own communicator (`ncclSend`, `ncclRecv`): calls on one communicator run in order, and two stages
that both send first would deadlock.

**Run only on the emulated driver, with a stand-in for NCCL.** Source: NCCL User Guide, "Point-to-point communication".
"""
# ruff: noqa: D102 - these methods are documented once, in comm/base.py

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dptrain.backend.cuda.gpu.device import cuda
from dptrain.backend.cuda.gpu.driver import Event, UrgentStream
from dptrain.backend.cuda.memory import DeviceArray, Streams
from dptrain.comm.base import Communicator, PointToPoint
from dptrain.comm.nccl import NcclCommunicator
from dptrain.errors import DeviceError
from dptrain.program.pipeline.send_recv import Channel

if TYPE_CHECKING:
    from dptrain.backend.cuda.transfers.links import Links

# Alignment of slots.
_ALIGNMENT = 256
# Added to the tags of messages that a slot is read, unlike those that it is filled.
_READ = 1 << 14


class RingSize(NamedTuple):
    """A ring of so many slots of `nbytes` from one rank to another."""

    source: int
    target: int
    slots: int
    nbytes: int


class _End:
    """An end of a ring: memory of its slots, a stream, and an event for each slot that is filled and that is read."""

    def __init__(self, size: RingSize, link: NcclCommunicator) -> None:
        self.size, self._link = size, link
        self.slots, self.stream = cuda.mem_alloc(size.slots * size.nbytes), UrgentStream()
        self.filled, self.read = ([Event() for _ in range(size.slots)] for _ in range(2))

    def at(self, slot: int, nbytes: int) -> DeviceArray:
        pointer = int(self.slots) + slot * self.size.nbytes
        return DeviceArray(self.slots, pointer, (nbytes,), np.dtype(np.uint8))

    def close(self) -> None:
        self.stream.synchronize()
        self.slots.free()


class _Sender(_End):
    """The sending end; the stream sends from slots, while ops may overwrite the arrays."""

    def __init__(self, size: RingSize, link: NcclCommunicator) -> None:
        super().__init__(size, link)
        self._copied = Event()

    def send(self, slot: int, array: DeviceArray, streams: Streams) -> None:
        """Queue an array for a slot whose last content has been queued to be read."""
        if not array.nbytes:
            return
        ops, in_slot = streams.ops, self.at(slot, array.nbytes)
        self.filled[slot].delay(ops)  # the slot here has been sent
        cuda.memcpy_dtod_async(in_slot.pointer, array.pointer, in_slot.nbytes, ops)
        self._copied.record(ops)
        self._copied.delay(self.stream)
        self._link.send(in_slot, 1 - self._link.rank, self.stream)
        self.filled[slot].record(self.stream)


class _Receiver(_End):
    def receive(self, slot: int, out: DeviceArray, streams: Streams) -> None:
        """Queue the copy of a slot, which has been queued for sending, into an array."""
        if not out.nbytes:
            return
        ops, in_slot = streams.ops, self.at(slot, out.nbytes)
        self.read[slot].delay(self.stream)
        self._link.receive(in_slot, 1 - self._link.rank, self.stream)
        self.filled[slot].record(self.stream)
        self.filled[slot].delay(ops)
        cuda.memcpy_dtod_async(out.pointer, in_slot.pointer, in_slot.nbytes, ops)
        self.read[slot].record(ops)


class P2pRings:
    """This rank's ends of rings between the ranks of a group."""

    def __init__(self, comm: Communicator, nccl: NcclCommunicator) -> None:
        self._comm, self._nccl = comm, nccl
        self._sizes: dict[tuple[int, int], RingSize] = {}
        self._ends: dict[tuple[int, int], Any] = {}
        self.links: dict[tuple[int, int], NcclCommunicator] = {}  # created in the same order on all ranks

    def require(self, sizes: Sequence[RingSize], streams: Streams) -> None:
        """Allocate missing or too small rings, the same on all ranks; AgreedError if memory is short. Collective."""
        missing = []
        for size in sizes:
            current = self._sizes.get(size[:2], RingSize(*size[:2], 0, 0))
            grown = RingSize(*size[:2], max(size.slots, current.slots), max(size.nbytes, current.nbytes))
            if grown != current:
                missing.append(grown)
        if missing:
            streams.synchronize(streams.ops)
            self._close([size[:2] for size in missing])
            self._join(missing)
            self._sizes |= {size[:2]: size for size in missing}

    def _join(self, sizes: Sequence[RingSize]) -> None:
        rank = self._nccl.rank
        for size in sizes:
            pair = [size.source, size.target]
            if size[:2] not in self.links:
                self.links[size[:2]] = self._nccl.split(sorted(pair) if rank in pair else [rank])

        def make() -> None:
            try:
                for size in sizes:
                    link = self.links[size[:2]]
                    if rank == size.source:
                        self._ends[size[:2]] = _Sender(size, link)
                    elif rank == size.target:
                        self._ends[size[:2]] = _Receiver(size, link)
            except cuda.Error as error:
                raise DeviceError(
                    f"--comm nccl: cannot allocate buffers for messages between stages ({error}); use --comm host"
                ) from error

        self._comm.agree("communicator", make)

    def _close(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if key in self._ends:
                self._ends.pop(key).close()
        self._comm.barrier()

    def end(self, source: int, target: int) -> Any:
        return self._ends[source, target]

    def close(self) -> None:
        """Free the rings once all queued work has ended. Collective."""
        self._close(list(self._sizes))
        for link in self.links.values():
            link.close()


class NcclPointToPoint(PointToPoint):
    """Transfers of one step from GPU to GPU; `host` tells the other stages what is queued."""

    on_device = True

    def __init__(
        self,
        host: PointToPoint,
        channels: Sequence[Channel],
        rings: P2pRings,
        joined: "Links",
        streams: Streams,
        rank: int,
        ticks: int,
    ) -> None:
        self._host, self._rings, self._joined, self._streams = host, rings, joined, streams
        self._rank, self._ticks = rank, ticks
        self._out = {channel.target: channel for channel in channels if channel.source == rank}
        self._in = {channel.source: channel for channel in channels if channel.target == rank}
        self._given: dict[int, list[int]] = {channel: [] for channel in self._out}  # the tags
        self._known_read = dict.fromkeys(self._out, 0)
        self._taken = dict.fromkeys(self._in, 0)

    def send(self, rank: int, array: DeviceArray, tag: int) -> None:
        channel, sent_tags = self._out[rank], self._given[rank]
        number = len(sent_tags)
        if number >= channel.slots:
            self._wait(rank, channel.items[number].sender.tick)
        self._rings.end(self._rank, rank).send(number % channel.slots, array, self._streams)
        sent_tags.append(tag)
        self._host.send(rank, _byte(), tag)

    def receive(self, rank: int, out: DeviceArray, tag: int, tick: int) -> None:
        self._host.receive(rank, _byte(), tag, tick)
        slot = self._taken[rank] % self._in[rank].slots
        self._rings.end(rank, self._rank).receive(slot, out, self._streams)
        self._taken[rank] += 1
        self._host.send(rank, _byte(), tag | _READ)

    def finish(self) -> None:
        for rank, sent_tags in self._given.items():
            while self._known_read[rank] < len(sent_tags):
                self._wait(rank, self._ticks)
        self._host.finish()
        with self._joined.queueing():
            pass

    def _wait(self, rank: int, tick: int) -> None:
        """Wait until a rank has queued the reading of the oldest slot that may still be unread."""
        tag = self._given[rank][self._known_read[rank]]
        self._host.receive(rank, _byte(), tag | _READ, tick)
        self._known_read[rank] += 1


def padded(nbytes: int) -> int:
    """Return the bytes of a slot."""
    return max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT


def _byte() -> Any:
    return np.zeros(1, np.uint8)
