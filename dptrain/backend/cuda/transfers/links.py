"""Messages from GPU to GPU, packed by copies on the device and queued on a stream between two events."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dptrain.backend.cuda.gpu.driver import Event, copy, copy_rows
from dptrain.backend.cuda.memory import DeviceArray, DeviceMemory, Streams, count
from dptrain.backend.cuda.transfers.node_first import NodeFirstReduction, NodeGrid, RankReduction, gather_shares
from dptrain.backend.cuda.transfers.p2p import NcclPointToPoint, P2pRings, RingSize, padded
from dptrain.comm.base import Communicator, PointToPoint
from dptrain.comm.device import AddingCommunicator, DeviceCommunicator
from dptrain.comm.mesh import STAGE
from dptrain.comm.nccl import NcclCommunicator, RegisteredMemory
from dptrain.program.codegen.memory import in_a_row
from dptrain.program.pipeline.send_recv import Channel
from dptrain.program.sharding.mesh import ALL_GATHER
from dptrain.program.sharding.messages import counts_of, is_contiguous, layout
from dptrain.program.tensor import Tensor
from dptrain.runtime.watch import watchdog
from dptrain.runtime.watch.records import Collective

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

# Seconds in which a job with aborted messages ends.
_END = 60.0
# Alignment of a message's scratch memory.
_ALIGNMENT = 256


class AxisLink(NamedTuple):
    """The GPUs along an axis of the mesh: all of them, and by node."""

    axis: str
    link: NcclCommunicator
    grid: NodeGrid


class Links:
    """The GPUs of ranks, connected along each mesh axis (or DeviceError; others may then wait). Collective."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._record = watchdog.record()
        self._nccl = NcclCommunicator.joined(comm)
        self._groups: dict[str, AxisLink] = {}
        self._of_nodes: list[NcclCommunicator] = []
        # All ranks of a collective must use registered memory, or none.
        self._registers = all(comm.allgather(self._nccl.registers()))
        self._rings: P2pRings | None = None
        self._queued = -1  # the record's position behind the last messages

    def along(self, axis: str) -> AxisLink:
        """Return the connection along an axis of the mesh. Collective at the first call."""
        if axis not in self._groups:
            ranks = self._comm.along(axis).allgather(self._comm.rank)
            link = self._nccl if len(ranks) == self._comm.size else self._nccl.split(ranks)
            self._groups[axis] = AxisLink(axis, link, self._grid(link, ranks))
        return self._groups[axis]

    def buckets(self, backend: "CudaBackend", sums: Sequence[tuple[int, np.dtype[Any], str]]) -> list[DeviceArray]:
        """Return flat buffers for sums (elements, type, axis of the mesh), in one memory an axis.

        That is registered if NCCL can: at the same place on all ranks along the axis, whose sums have the same sizes.
        Zeros follow where ranks could not gather equal shares otherwise.
        """
        buffers: dict[int, DeviceArray] = {}
        for axis in dict.fromkeys(axis for _, _, axis in sums):
            link = self.along(axis).link
            numbers = [number for number, (_, _, other) in enumerate(sums) if other == axis]
            nbytes = [-(-sums[n][0] // link.size) * link.size * sums[n][1].itemsize for n in numbers]
            starts = in_a_row(nbytes, _ALIGNMENT)
            allocate = partial(RegisteredMemory, communicators=[link]) if self._registers else None
            memory = DeviceMemory(backend.heap, starts[-1], "messages", allocate)
            flat = DeviceArray(memory, memory.pointer, (starts[-1],), np.dtype(np.uint8))
            backend.fill_with_zeros(flat)
            for number, start, size in zip(numbers, starts, nbytes, strict=False):
                buffers[number] = flat[start : start + size].view(sums[number][1])
        return [buffers[number] for number in range(len(sums))]

    def _grid(self, link: NcclCommunicator, ranks: Sequence[int]) -> NodeGrid:
        """Return the nodes of some ranks of this job, in rising order. Collective over all ranks."""
        node_of = self._comm.allgather(self._comm.node)
        by_node: dict[int, list[int]] = {}
        for number, rank in enumerate(ranks):
            by_node.setdefault(node_of[rank], []).append(number)
        nodes = list(by_node.values())
        is_even = len({len(members) for members in nodes}) == 1
        is_divided = is_even and len(nodes) > 1 and len(nodes[0]) > 1
        if any(self._comm.allgather(is_divided)):  # all ranks take part in a split
            own_node = next(members for members in nodes if link.rank in members)
            column = [members[own_node.index(link.rank)] for members in nodes] if is_divided else [link.rank]
            members_of = own_node if is_divided else [link.rank], column
            communicators = [self._nccl.split([ranks[number] for number in members]) for members in members_of]
            self._of_nodes += communicators
            if is_divided:
                return NodeGrid(nodes, *communicators)
        if len(nodes) == 1:
            return NodeGrid(nodes, link, None)
        return NodeGrid([[number] for number in range(len(ranks))], None, link)

    def point_to_point(
        self, channels: Sequence[Channel], sizes: Sequence[int], ticks: int, streams: Streams
    ) -> PointToPoint:
        """See `Backend.point_to_point`, for a backend with these streams. Collective."""
        stages = self._comm.along(STAGE)
        if self._rings is None:
            self._rings = P2pRings(stages, self.along(STAGE).link)
        channels_and_sizes = zip(channels, sizes, strict=True)
        self._rings.require(
            [RingSize(channel.source, channel.target, channel.slots, padded(n)) for channel, n in channels_and_sizes],
            streams,
        )
        host = stages.point_to_point(ticks)
        return NcclPointToPoint(host, channels, self._rings, self, streams, stages.rank, ticks)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Record for hang detection that this rank queues messages."""
        with self._record.collective(Collective.DEVICES):
            yield
        self._queued = self._record.position

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record for hang detection that this rank waits for a stream, on which messages may wait for other ranks."""
        # Once ranks have met again, all have queued these messages.
        must_wait = self._record.position == self._queued
        if must_wait:
            self._record.step_back()
        yield
        if must_wait:
            self._record.__exit__()
        passing = [] if self._rings is None else self._rings.links.values()
        joined = (self._nccl, *self._split, *passing)
        if any(communicator.is_aborted for communicator in joined):
            time.sleep(_END)  # the device's results are garbage

    def close(self) -> None:
        """Disconnect, once all queued work has ended. Collective."""
        if self._rings is not None:
            self._rings.close()
        for communicator in [*self._split, self._nccl]:
            communicator.close()

    @property
    def _split(self) -> list[NcclCommunicator]:
        along_axes = dict.fromkeys(axis_link.link for axis_link in self._groups.values())
        return [*self._of_nodes, *(link for link in along_axes if link is not self._nccl)]


def _adding(link: DeviceCommunicator, dtype: np.dtype[Any], over: str) -> AddingCommunicator | None:
    """Return the communicator if it can reduce."""
    return link if isinstance(link, AddingCommunicator) and link.adds(dtype, over) else None


class LinkedMessage(ABC):
    """A message between GPUs.

    `waits`: ops queued between `begin` and `finish` may read the results' memory; the same on all ranks. Messages along
    an `axis` leave in turn, and may share `scratch`, of `scratch_bytes` each; those along others do not wait for them.
    """

    scratch_bytes = 0
    scratch: DeviceArray

    def __init__(self, streams: Streams, axis_link: AxisLink, *, waits: bool = False) -> None:
        self._streams, self._link, self._waits = streams, axis_link.link, waits
        self.axis = axis_link.axis
        self._complete, self._arrived = Event(), Event()

    def begin(self) -> None:
        """Send what ops queued so far complete; ops queued later run meanwhile."""
        if not self._waits:
            self._leave()

    def finish(self) -> None:
        """Let ops queued from now on see the results."""
        if self._waits:
            self._leave()
        self._arrived.delay(self._streams.ops)

    def _leave(self) -> None:
        linked = self._streams.linked(self.axis)
        self._complete.record(self._streams.ops)
        self._complete.delay(linked)
        self._queue(linked)
        self._arrived.record(linked)

    @abstractmethod
    def _queue(self, stream: Any) -> None:
        """Queue the transfers."""

    def __del__(self) -> None:
        with suppress(AttributeError):  # if the constructor failed
            self._streams.retire(self._complete, self._arrived)


class LinkedSum(LinkedMessage):
    """A sum or elementwise maximum over the ranks, in place.

    If the communicator cannot reduce, each rank reduces its share of all ranks' elements, or everything after a gather,
    to the same bits as the host.
    """

    def __init__(self, backend: "CudaBackend", buffer: DeviceArray, over: str, axis_link: AxisLink) -> None:
        super().__init__(backend.streams, axis_link)
        link, self._grid = self._link, axis_link.grid
        self._buffer, self._over = _stored(buffer), over
        self._adding = _adding(link, self._buffer.dtype, over)
        self._join: RankReduction | NodeFirstReduction | None = None
        self._shares = self._grid.shares(buffer.size)
        if self._adding is None and over == "sum":
            # A rank computes its share of a sum and sends it to all.
            self._join = NodeFirstReduction(backend, buffer.dtype, over, self._grid, link.rank, self._shares)
            self.scratch_bytes = self._join.scratch_bytes
        elif self._adding is None:  # of a maximum, which is short, each computes all
            self._join = RankReduction(backend, buffer.dtype, over)
            self.scratch_bytes = link.size * buffer.nbytes

    def _queue(self, stream: Any) -> None:
        buffer, link, join = self._buffer, self._link, self._join
        if not buffer.size:
            return
        if self._adding is not None:
            self._adding.all_reduce(buffer, self._over, stream)
        elif isinstance(join, NodeFirstReduction):
            join(buffer, buffer[self._shares[link.rank]], self.scratch, stream)
            gather_shares(buffer, self._grid, self._shares, stream)
        else:
            assert join is not None
            received = self.scratch[: self.scratch_bytes]
            link.all_gather(buffer.view(np.uint8), received, [buffer.nbytes] * link.size, stream)
            join(stream, received, buffer, link.size)


class LinkedMove(LinkedMessage):
    """Gathers, or reduce-scatters, sent together; arguments as for `messages.exchange`."""

    def __init__(
        self,
        backend: "CudaBackend",
        message: Sequence[Tensor],
        parts: Sequence[DeviceArray],
        results: Sequence[DeviceArray],
        axis_link: AxisLink,
        *,
        waits: bool,
    ) -> None:
        super().__init__(backend.streams, axis_link, waits=waits)
        link = self._link
        self._message, self._parts, self._results = message, parts, results
        first, itemsize = message[0], parts[0].dtype.itemsize
        self._gathers = first.op is ALL_GATHER
        wholes = results if self._gathers else parts
        self._each = [counts_of(tensor, array.shape) for tensor, array in zip(message, wholes, strict=True)]
        self._counts = [sum(counts_of_rank) for counts_of_rank in zip(*self._each, strict=True)]
        self._over = "" if self._gathers else first.attributes["over"]
        own_bytes, whole_bytes = self._counts[link.rank] * itemsize, sum(self._counts) * itemsize
        contiguous = is_contiguous(message)
        # Packed: parts, or what all ranks send to this one; a whole; this rank's sums.
        sizes = [own_bytes * (len(parts) > 1), 0 if contiguous else whole_bytes, 0]
        self._adding: AddingCommunicator | None = None
        self._join: NodeFirstReduction | None = None
        if not self._gathers:
            if len(set(self._counts)) == 1:
                self._adding = _adding(link, _stored(parts[0]).dtype, self._over)
            if self._adding is None:
                shares = [slice(*bounds) for bounds in pairwise(in_a_row(self._counts))]
                dtype = parts[0].dtype
                self._join = NodeFirstReduction(backend, dtype, self._over, axis_link.grid, link.rank, shares)
            join_bytes = 0 if self._join is None else self._join.scratch_bytes
            sizes = [join_bytes, sizes[1], own_bytes * (len(results) > 1)]
        starts = in_a_row(sizes, _ALIGNMENT)
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.scratch_bytes = starts[-1]

    def _queue(self, stream: Any) -> None:
        first, second, third = (self.scratch[place] for place in self._places)
        parts, results = ([_flat(buffer) for buffer in buffers] for buffers in (self._parts, self._results))
        counts = [n * self._parts[0].dtype.itemsize for n in self._counts]
        if self._gathers:
            if first.size:
                _line_up(parts, first, stream)
            self._gather(first if first.size else parts[0], stream)
            return
        whole_flat = second if second.size else parts[0]
        if second.size:
            self._copy(second, self._parts, stream, unpack=False)
        mine = third if third.size else results[0]
        if not sum(counts):
            return
        if self._adding is not None:
            dtype = _stored(self._parts[0]).dtype
            self._adding.reduce_scatter(whole_flat.view(dtype), mine.view(dtype), self._over, stream)
        else:
            assert self._join is not None
            dtype = self._parts[0].dtype
            self._join(whole_flat.view(dtype), mine.view(dtype), first, stream)
        if third.size:
            _cut_up(third, results, stream)

    def _gather(self, own: DeviceArray, stream: Any) -> None:
        """Queue the gather of this rank's parts, which may lie in their place in the only result."""
        packed = self.scratch[self._places[1]]
        counts = [n * self._parts[0].dtype.itemsize for n in self._counts]
        self._link.all_gather(own, packed if packed.size else _flat(self._results[0]), counts, stream)
        if packed.size:
            self._copy(packed, self._results, stream, unpack=True)

    def _copy(self, flat: DeviceArray, wholes: Sequence[DeviceArray], stream: Any, *, unpack: bool) -> None:
        """Copy the ranks' parts between the tensors and the message."""
        itemsize = wholes[0].dtype.itemsize
        for number, start, begin, length in layout(self._message, self._each):
            array, axis = wholes[number], self._message[number].attributes["axis"]
            inner = count(array.shape[axis + 1 :]) * itemsize
            outer = _Rows(array.pointer + begin * inner, array.shape[axis] * inner)
            packed = _Rows(flat.pointer + start * itemsize, length * inner)
            source, target = (packed, outer) if unpack else (outer, packed)
            _copy_rows(source, target, length * inner, count(array.shape[:axis]), stream)


class LateGather(LinkedMove):
    """A gather of variables' new values that travels while the next step computes, until an op there reads one.

    At its end a step keeps this rank's parts: `finish`. Then `gather` sends them, behind what is queued so far, and ops
    queued after `arrive` see the results.
    """

    def __init__(
        self,
        backend: "CudaBackend",
        message: Sequence[Tensor],
        parts: Sequence[DeviceArray],
        results: Sequence[DeviceArray],
        axis_link: AxisLink,
    ) -> None:
        super().__init__(backend, message, parts, results, axis_link, waits=True)
        rank, itemsize = self._link.rank, parts[0].dtype.itemsize
        start, nbytes = sum(self._counts[:rank]) * itemsize, self._counts[rank] * itemsize
        if is_contiguous(message):
            self._kept = _flat(results[0])[start : start + nbytes]
        else:
            self._kept = backend.empty((nbytes,), np.uint8, "messages")

    def begin(self) -> None:
        """Do nothing: ops of the step may still read the old values."""

    def finish(self) -> None:
        """Keep this rank's parts, behind ops queued so far."""
        _line_up(self._parts, self._kept, self._streams.ops)

    def gather(self) -> None:
        """Send what was kept."""
        self._leave()

    def arrive(self) -> None:
        """Let ops queued from now on see the results."""
        self._arrived.delay(self._streams.ops)

    def _queue(self, stream: Any) -> None:
        self._gather(self._kept, stream)


class _Rows(NamedTuple):
    """Rows of bytes, `pitch` bytes apart."""

    pointer: int
    pitch: int


def _copy_rows(source: _Rows, target: _Rows, width: int, height: int, stream: Any) -> None:
    if not width or not height:
        return
    if height == 1 or source.pitch == target.pitch == width:
        copy(stream, target.pointer, source.pointer, width * height)
        return
    copy_rows(stream, target, source, width, height)


def _line_up(parts: Sequence[DeviceArray], flat: DeviceArray, stream: Any) -> None:
    for part, start in zip(parts, _starts(parts), strict=False):
        if part.size:
            copy(stream, flat.pointer + start, part.pointer, part.nbytes)


def _cut_up(flat: DeviceArray, parts: Sequence[DeviceArray], stream: Any) -> None:
    for part, start in zip(parts, _starts(parts), strict=False):
        if part.size:
            copy(stream, part.pointer, flat.pointer + start, part.nbytes)


def _starts(parts: Sequence[DeviceArray]) -> list[int]:
    return list(accumulate((part.nbytes for part in parts), initial=0))


def _flat(buffer: DeviceArray) -> DeviceArray:
    return buffer.view(np.uint8)


def _stored(buffer: DeviceArray) -> DeviceArray:
    """Return a flat array with booleans as bytes."""
    return buffer.view(np.uint8 if buffer.dtype == np.bool_ else buffer.dtype)
