"""The communicator of ranks that MPI started. The only module that calls MPI, except for the abort in failure.py."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from socket import gethostname
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from dptrain.comm import hierarchy, node
from dptrain.comm.base import Array, Communicator, Mail, PointToPoint, pack, unpack
from dptrain.comm.cuda_aware import why_not
from dptrain.comm.node import rounds
from dptrain.comm.node_sum import tree_sum
from dptrain.errors import AgreedError, ConfigError, MismatchError
from dptrain.runtime.exit_codes import replace_abort
from dptrain.runtime.failure import abort_with_success
from dptrain.runtime.launch.launcher import LaunchInfo
from dptrain.runtime.types import is_narrow
from dptrain.runtime.watch import watchdog
from dptrain.runtime.watch.records import Collective, Record, numbers_of

# MPI counts are C ints; a larger buffer goes as several messages of at most this many elements.
_MAX_COUNT = 1 << 28
# Seconds for watchdogs to find ranks of several nodes in different collectives.
_JUDGED = 5.0
# By how much a tick of point-to-point transfers moves a record's position: more than its collectives.
_TICK = 1 << 12


def join(launch: LaunchInfo | None) -> "MpiCommunicator":
    """Return all ranks of COMM_WORLD, through a duplicate, so that a user's messages are not mistaken for ours.

    Raises an AgreedError if the launcher started more processes than MPI knows: the wrong `mpirun` for this MPI
    library, or `srun` without PMI.
    """
    world = MPI.COMM_WORLD
    if launch is not None and launch.size != world.size:
        raise AgreedError(
            "start-up",
            ConfigError.exit_code,
            f"{launch.launcher} started {launch.size} processes, but MPI ({_library()}) "
            f"sees a world of {world.size}: start with the mpirun that belongs to this MPI (the one next to "
            f"{sys.executable}), or srun --mpi=pmi2|pmix",
            [],
        )
    beside = cast(MPI.Intracomm, world.Split_type(MPI.COMM_TYPE_SHARED))
    watchdog.share_table(beside.allgather)
    beside.Free()
    comm = MpiCommunicator(world.Dup())
    nodes, hosts, pids = zip(*world.allgather((comm.node, gethostname(), os.getpid())), strict=True)
    here = [rank for rank, node in enumerate(nodes) if node == comm.node]
    # MPI_Finalize first deletes COMM_SELF's attributes: its caller no longer meets the others.
    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: watchdog.leave("MPI_Finalize"))
    MPI.COMM_SELF.Set_attr(key, True)
    replace_abort(MPI.Comm, abort_with_success)
    leaders = {leader: (hosts[leader], pids[leader]) for leader in sorted(set(nodes))}
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        leaders = {}
    watchdog.joined(here, leaders, _Post(world.Dup()))
    return comm


def _library() -> str:
    words = MPI.Get_library_version().replace("Version:", "").replace(",", " ").split()
    return " ".join(words[:3] if words[0] == "Open" else words[:2])


class MpiCommunicator(Communicator):
    """The ranks of an MPI communicator that this object owns; `group` tells concurrent groups apart, 0 is the world."""

    def __init__(self, world: MPI.Intracomm, group: int = 0) -> None:
        self._world, self._group = world, group
        self._node = cast(MPI.Intracomm, world.Split_type(MPI.COMM_TYPE_SHARED))
        self._windows: list[MPI.Win] = []
        self._shared: node.SharedMemoryCollectives | None = None
        self._has_tried = False
        self._arena: Array = np.empty((0, 0), np.uint8)
        self._messages: dict[Any, node.NodeMessages | None] = {}
        self._post = _Post(world)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = self._node.rank, self._node.size
        lowest = np.array([self.rank], np.int32)
        self._node.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
        self.node = int(lowest[0])
        lowest_ranks = np.empty(self.size, np.int32)
        world.Allgather(lowest, lowest_ranks)
        self._nodes = [np.flatnonzero(lowest_ranks == leader).tolist() for leader in np.unique(lowest_ranks)]
        self._record = watchdog.record()
        self._ring = watchdog.ring(self._node.allgather(MPI.COMM_WORLD.rank))

    @property
    def description(self) -> str:
        """The MPI library and its version."""
        return _library()

    def allreduce_sum(self, buffer: Any) -> None:
        """Sum in place: in shared memory within nodes, by MPI between them."""
        flat = buffer.reshape(-1)
        shared = self._in_memory(flat.nbytes) if isinstance(flat, np.ndarray) else None
        with self._meeting(Collective.ALL_REDUCE, flat):
            if shared is not None:
                shared.sum(flat)
                return
            for start in range(0, flat.size, _MAX_COUNT):
                piece = flat[start : start + _MAX_COUNT]
                if is_narrow(flat.dtype):
                    self._sum_halves(piece)
                else:
                    self._world.Allreduce(MPI.IN_PLACE, piece, op=MPI.SUM)

    @contextmanager
    def _meeting(self, kind: Collective, array: Any = None, parts: Sequence[int] = ()) -> Iterator[None]:
        """Record the collective that this rank is in, and compare it with its neighbours'.

        `array` has the elements and type that all ranks share (None if they may differ), `parts` each rank's elements.
        """
        count, dtype = (0, "\0") if array is None else (array.size, array.dtype.char)
        with self._record.collective(kind, count, dtype, parts, self._group):
            if self._ring is not None:
                self._ring.check()
            try:
                yield
            except (MPI.Exception, MismatchError) as error:
                different = "" if self._ring is None else self._ring.who_is_where()
                if not different and len(self._nodes) > 1:
                    time.sleep(_JUDGED)  # the watchdogs see and report other nodes' collectives
                if isinstance(error, MismatchError) and not different:
                    raise
                raise MismatchError(different) if different else ConfigError(f"MPI: {error}") from error

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def _sum_halves(self, flat: Array) -> None:
        """Sum half precision, which MPI lacks: each rank sums one share of all ranks' and sends the result to all."""
        ends = [flat.size * rank // self.size for rank in range(self.size + 1)]
        counts, mine = np.diff(ends).astype(np.int32), slice(ends[self.rank], ends[self.rank + 1])
        received = np.empty((self.size, counts[self.rank]), flat.dtype)
        bits, shares = _bits(flat), np.full(self.size, counts[self.rank], np.int32)
        self._world.Alltoallv([bits, counts], [_bits(received), shares])
        np.copyto(flat[mine], tree_sum(received), casting="unsafe")
        self._world.Allgatherv(MPI.IN_PLACE, [bits, counts])

    def node_messages(self, like: Sequence[tuple[int, np.dtype[Any]]]) -> node.NodeMessages | None:
        """Lay out arrays in shared memory if all ranks are on one node.

        All layouts start at its beginning, so that it is as large as the largest. A rank's own writes are apart from
        what others may still read of the previous sum.
        """
        key = tuple((size, dtype.name) for size, dtype in like)
        if key not in self._messages:
            self._messages[key] = self._laid_out(like) if self.local_size == self.size > 1 else None
        return self._messages[key]

    def _laid_out(self, like: Sequence[tuple[int, np.dtype[Any]]]) -> node.NodeMessages | None:
        line = node.APART * 8
        starts = list(accumulate((-(-size * dtype.itemsize // line) * line for size, dtype in like), initial=0))
        needed = max(starts[-1], self.size * line)
        # Even if there is enough already: concurrent groups count alike, and a rank elsewhere is found here.
        with self._record.collective(Collective.SHARED_ARRAY, group=self._group):
            if self._arena.shape[1] < needed:
                shape = (self.size + 2, max(needed, 2 * self._arena.shape[1]))
                memory = self._shared_memory(math.prod(shape) + line)
                if memory is None:
                    return None
                begin = -np.frombuffer(memory, np.uint8).ctypes.data % line
                self._arena = np.ndarray(shape, np.uint8, buffer=memory, offset=begin)
                if self.local_rank == 0:
                    self._arena[-1] = 0
            self._node.Barrier()
        *places, counters = self._arena
        messages = []
        for (size, dtype), start in zip(like, starts, strict=False):
            *summands, total = (place[start : start + size * dtype.itemsize].view(dtype) for place in places)
            numbers = numbers_of(Collective.ALL_REDUCE, size, dtype.char, group=self._group)
            messages.append(node.NodeMessage(summands, total, numbers))
        arrived = counters[: self.size * line].view(np.int64).reshape(self.size, node.APART)
        beside = [] if self._ring is None else [neighbor.progress for neighbor in self._ring.beside]
        spins = self.size <= (os.cpu_count() or 1)
        return node.NodeMessages(self.rank, messages, arrived, self._record.progress, beside, self._attend, spins)

    def _attend(self) -> None:
        """Compare collectives with the neighbours, and let MPI progress this rank's sends."""
        if self._ring is not None:
            self._ring.check()
        self._world.Iprobe()

    def sums_in_a_tree(self, nbytes: int) -> bool:
        """Whether shared memory makes the sum; MPI promises no order."""
        shared = self._in_memory(nbytes)
        return super().sums_in_a_tree(nbytes) or (shared is not None and shared.in_a_tree)

    def broadcast(self, buffer: Array) -> None:
        """`MPI_Bcast` from rank 0."""
        self.allgather(None, call="broadcast")  # a rank in another call would leave garbage in the buffer, or wait
        flat = buffer.reshape(-1)
        bits = _bits(flat)
        with self._record.collective(Collective.BROADCAST, flat.size, flat.dtype.char):
            for start in range(0, flat.size, _MAX_COUNT):
                self._world.Bcast(bits[start : start + _MAX_COUNT], root=0)

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """Gather in the shared memory of nodes, otherwise by `MPI_Allgatherv`."""
        _require(part, counts[self.rank], out, sum(counts))
        shared = self._in_memory(out.nbytes)
        with self._meeting(Collective.ALL_GATHER, out, counts):
            if shared is not None:
                shared.all_gather(part, out, counts)
                return
            for begin, ends in rounds(counts, step := self._step):
                sent = part[begin:][: ends[self.rank + 1] - ends[self.rank]]
                gathered = out if max(counts) <= step else np.empty(ends[-1], out.dtype)
                self._world.Allgatherv(_bits(sent), [_bits(gathered), np.diff(ends).astype(np.int32)])
                if gathered is not out:
                    for mine, theirs in _places(counts, begin, ends):
                        out[mine] = gathered[theirs]

    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        """`MPI_Alltoallv`, after comparing the sizes that ranks send and expect."""
        _require(parts, sum(counts), out, sum(out_counts))
        with self._meeting(Collective.ALL_TO_ALL):
            sizes = np.array([[count, parts.itemsize, max(counts)] for count in counts], np.int64)
            their_sizes = np.empty_like(sizes)
            self._world.Alltoall(sizes, their_sizes)
            for rank, (count, itemsize, _) in enumerate(their_sizes.tolist()):
                if (count, itemsize) != (out_counts[rank], out.itemsize):
                    raise MismatchError(
                        f"an all-to-all: rank {rank} of {self.size} has {count} elements of {itemsize} bytes for rank "
                        f"{self.rank}, which expects {out_counts[rank]} of {out.itemsize}"
                    )
            longest, step = int(their_sizes[:, 2].max()), self._step
            both = (rounds(sizes_of_parts, step, longest) for sizes_of_parts in (counts, out_counts))
            for (begin, send_ends), (_, receive_ends) in zip(*both, strict=True):
                sent, coming = parts, out
                if longest > step:
                    sent = np.concatenate([parts[mine] for mine, _ in _places(counts, begin, send_ends)])
                    coming = np.empty(receive_ends[-1], out.dtype)
                lengths = [np.diff(ends).astype(np.int32) for ends in (send_ends, receive_ends)]
                self._world.Alltoallv([_bits(sent), lengths[0]], [_bits(coming), lengths[1]])
                if coming is not out:
                    for mine, theirs in _places(out_counts, begin, receive_ends):
                        out[mine] = coming[theirs]

    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """Reduce in the shared memory of nodes, otherwise after an `all_to_all`."""
        _require(parts, sum(counts), out, counts[self.rank])
        shared = self._in_memory(max(parts.nbytes, node.LEAST))  # an exchange and a separate sum take longer
        if shared is None:
            super().reduce_scatter(parts, out, counts, over)
            return
        with self._meeting(Collective.REDUCE_SCATTER, parts, counts):
            shared.reduce_scatter(parts, out, counts, over)

    def point_to_point(self, ticks: int) -> PointToPoint:
        """Send and receive by MPI."""
        return _MpiPointToPoint(self._world, self._record, self._group, ticks)

    @property
    def _step(self) -> int:
        return max(_MAX_COUNT // self.size, 1)

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Split off these ranks, `MPI_Comm_split`."""
        (lowest,) = self._world.group.Translate_ranks([ranks[0]], MPI.COMM_WORLD.group)
        with self._record.collective(Collective.SPLIT):
            return MpiCommunicator(cast(MPI.Intracomm, self._world.Split(ranks[0], self.rank)), 1 + lowest)

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Exchange the lengths, then the bytes, `MPI_Allgatherv`."""
        lengths = np.empty(self.size, np.int32)
        with self._record.collective(Collective.ALL_GATHER, group=self._group):
            self._world.Allgather(np.array([len(message)], np.int32), lengths)
            content = bytearray(int(lengths.sum()))
            self._world.Allgatherv([message, MPI.BYTE], [content, lengths, MPI.BYTE])
        ends = np.cumsum(lengths).tolist()
        return [bytes(content[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]

    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        """Send without waiting, `MPI_Isend`; the bytes are kept until they are out."""
        self._post.send(rank, pack(fact, content))

    def received(self) -> list[Mail]:
        """Receive what has arrived, `MPI_Improbe` and `MPI_Imrecv`."""
        return [unpack(source, message) for source, message in self._post.received()]

    def why_not_cuda_aware(self) -> str:
        """Query the library, and let another process try."""
        return why_not()

    def barrier(self) -> None:
        """Exchange which call each rank is in, which `MPI_Barrier` would not."""
        self.allgather(None, call="barrier")

    def node_barrier(self) -> None:
        """`MPI_Barrier` over this node's ranks."""
        with self._record.collective(Collective.NODE_BARRIER, group=self._group):
            self._node.Barrier()

    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        """Return a view of a shared-memory window that local rank 0 fills.

        If the node's /dev/shm is too small (containers often give it 64 MB, and writing past that is a bus error, not
        an exception) every rank gets and fills its own memory.
        """
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # On nodes of one rank too, so that all count alike.
        with self._record.collective(Collective.SHARED_ARRAY, group=self._group):
            memory = None if self.local_size == 1 else self._shared_memory(nbytes)
        if memory is None:
            return np.empty(shape, dtype), True
        return np.ndarray(shape, dtype, buffer=memory), self.local_rank == 0

    def _shared_memory(self, nbytes: int) -> Any:
        if not self._fits_in_shared_memory(nbytes):
            return None
        window = MPI.Win.Allocate_shared(nbytes if self.local_rank == 0 else 0, 1, comm=self._node)
        self._windows.append(window)  # dropping it would unmap the memory under the array
        return window.Shared_query(0)[0]

    def _in_memory(self, nbytes: int) -> node.SharedMemoryCollectives | None:
        """Return the shared-memory collectives for `nbytes`, or None for MPI. Collective."""
        # Opened at the first collective, however small: concurrent groups may have larger and smaller ones, and must
        # count the same number.
        if not self._has_tried and self.size > 1:
            self._has_tried = True
            with self._record.collective(Collective.SHARED_ARRAY, group=self._group):
                self._shared = self._open_shared() if len(self._nodes) < self.size else None
        # In the same order for any size, as compiled sums are; two ranks have only one order.
        return None if nbytes < node.LEAST and self.size == 2 else self._shared

    def _open_shared(self) -> node.SharedMemoryCollectives | None:
        pieces = [node.PIECE] if len(self._nodes) == 1 else [hierarchy.PIECE, node.PIECE]
        for shape in (node.shape(self.local_size, piece) for piece in pieces):
            memory = self._shared_memory(math.prod(shape)) if self.local_size > 1 else bytearray(math.prod(shape))
            if self._on_all(memory is not None, self._world):
                break
        else:
            return None
        shared = np.ndarray(shape, np.uint8, buffer=memory)
        barrier = self._node.Dup().Barrier  # a separate barrier, not confused with that of a rank in another call
        if len(self._nodes) == 1:
            return node.NodeCollectives(shared, self.rank, barrier)
        talks = self.local_rank < min(map(len, self._nodes))
        column = self._world.Split(self.local_rank if talks else MPI.UNDEFINED, self.node)
        own_column = _Column(cast(MPI.Intracomm, column), self._record) if talks else None
        return hierarchy.HierarchicalCollectives(shared, self._nodes, self.rank, barrier, own_column)

    def _fits_in_shared_memory(self, nbytes: int) -> bool:
        try:
            status = os.statvfs("/dev/shm")
            free = status.f_bavail * status.f_frsize
        except OSError:
            free = 0
        return self._on_all(free > nbytes + (8 << 20), self._node)

    def _on_all(self, fact: bool, ranks: MPI.Intracomm) -> bool:
        agreed = np.array([fact], np.int32)
        ranks.Allreduce(MPI.IN_PLACE, agreed, op=MPI.MIN)
        return bool(agreed[0])


class _Column:
    """A column of ranks, see `hierarchy`: `MPI_Alltoallv`, and `MPI_Allgatherv` for small arrays."""

    def __init__(self, ranks: MPI.Intracomm, record: Record) -> None:
        self._ranks, self._record = ranks, record

    @property
    def call(self) -> Array:
        return np.frombuffer(self._record.progress[1:], np.uint8)

    def all_gather(self, memory: Array, places: Sequence[tuple[int, int]]) -> None:
        lengths, begins = _counted(places)
        if sum(lengths) <= hierarchy.GATHERED:
            self._ranks.Allgatherv(MPI.IN_PLACE, [memory, lengths, begins, MPI.BYTE])
            return
        rank = self._ranks.rank  # to each other rank at once: rings wait for the slowest at every turn
        send_lengths, receive_lengths = [lengths[rank]] * len(places), list(lengths)
        send_lengths[rank] = receive_lengths[rank] = 0
        self._ranks.Alltoallv(
            [memory, send_lengths, [begins[rank]] * len(places), MPI.BYTE], [memory, receive_lengths, begins, MPI.BYTE]
        )

    def all_to_all(self, memory: Array, places: Sequence[tuple[int, int]], out: Array) -> None:
        rows, length = out.shape
        received = _counted([(row * length, (row + 1) * length) for row in range(rows)])
        self._ranks.Alltoallv([memory, *_counted(places), MPI.BYTE], [out, *received, MPI.BYTE])


class _MpiPointToPoint(PointToPoint):
    """Point-to-point transfers by `MPI_Isend` and `MPI_Recv`.

    Ranks that wait here have not entered the same number of collectives: a record's position follows the clock. Between
    two of its ticks there is room for the collectives that a rank may be in meanwhile.
    """

    def __init__(self, world: MPI.Intracomm, record: Record, group: int, ticks: int) -> None:
        self._world, self._record, self._group = world, record, group
        self._begin, self._ticks = record.position, ticks
        self._sent: list[tuple[MPI.Request, Array]] = []

    def send(self, rank: int, array: Array, tag: int) -> None:
        self._sent = [pending for pending in self._sent if not pending[0].Test()]
        flat = _bits(array.reshape(-1))
        for start in range(0, max(flat.size, 1), _MAX_COUNT):
            piece = flat[start : start + _MAX_COUNT]
            self._sent.append((self._world.Isend(piece, dest=rank, tag=tag), piece))

    def receive(self, rank: int, out: Array, tag: int, tick: int) -> None:
        flat = _bits(out.reshape(-1))
        with self._at(tick):
            for start in range(0, max(flat.size, 1), _MAX_COUNT):
                self._world.Recv(flat[start : start + _MAX_COUNT], source=rank, tag=tag)

    def finish(self) -> None:
        with self._at(self._ticks):
            MPI.Request.Waitall([request for request, _ in self._sent])
        self._sent = []
        self._record.move_to(self._begin + (self._ticks + 1) * _TICK)

    @contextmanager
    def _at(self, tick: int) -> Iterator[None]:
        self._record.move_to(self._begin + tick * _TICK)
        with self._record.collective(Collective.HAND_OVER, group=self._group):
            yield


def _counted(places: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the lengths and begins of ranges, as MPI takes them."""
    return [last - first for first, last in places], [first for first, _ in places]


def _bits(array: Array) -> Array:
    """View an array as a type of the same size that MPI knows."""
    return array.view({1: np.uint8, 2: np.uint16}.get(array.itemsize, array.dtype))


def _require(part: Array, size: int, out: Array, out_size: int) -> None:
    """Refuse arrays that are shorter than MPI would read and write."""
    if (part.shape, out.shape, out.dtype) != ((size,), (out_size,), part.dtype):
        raise ConfigError(
            f"a collective of {part.dtype} {part.shape} into {out.dtype} {out.shape}: expected equal dtypes, and "
            f"shapes {(size,)} into {(out_size,)}"
        )


def _places(counts: Sequence[int], begin: int, ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield where each rank's piece of a round, see `rounds`, lies among all parts, and among the pieces."""
    for count, start, first, last in zip(counts, np.cumsum([0, *counts]).tolist(), ends[:-1], ends[1:], strict=False):
        offset = start + min(begin, count)
        yield slice(offset, offset + last - first), slice(first, last)


class _Post(watchdog.Post):
    """Messages between ranks without waiting, over a communicator."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._coming: list[tuple[MPI.Request, int, bytearray]] = []

    def send(self, rank: int, message: bytes) -> None:
        self._sent = [pending for pending in self._sent if not pending[0].Test()]
        self._sent.append((self._world.Isend([message, MPI.BYTE], dest=rank), message))

    def received(self) -> list[tuple[int, bytes]]:
        status = MPI.Status()
        while (message := self._world.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            content = bytearray(status.Get_count(MPI.BYTE))
            # The rest of a large message comes when its sender is ready, which may be stopped.
            self._coming.append((message.Irecv([content, MPI.BYTE]), status.Get_source(), content))
        messages = []
        while self._coming and self._coming[0][0].Test():  # in order
            _, source, content = self._coming.pop(0)
            messages.append((source, bytes(content)))
        return messages

    def arrive(self) -> Callable[[], bool]:
        return cast("Callable[[], bool]", self._world.Ibarrier().Test)
