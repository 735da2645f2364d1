"""The communicator of ranks that MPI started. The only module that calls MPI, but for the abort in failure.py."""

import os
import sys
from collections.abc import Callable, Sequence
from socket import gethostname
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from dptrain.comm import node_sum
from dptrain.comm.base import Array, Communicator, Mail, pack, unpack
from dptrain.comm.cuda_aware import why_not
from dptrain.errors import AgreedError, ConfigError, MismatchError
from dptrain.runtime import watchdog
from dptrain.runtime.exit_codes import replace_abort
from dptrain.runtime.failure import abort_with_success
from dptrain.runtime.launcher import LaunchInfo
from dptrain.runtime.records import Collective

# MPI counts are C ints; a larger buffer goes as several messages of at most this many elements.
_MAX_COUNT = 1 << 28


def join(launch: LaunchInfo | None) -> "MpiCommunicator":
    """Return all ranks of COMM_WORLD, through a duplicate, so that a user's own messages cannot be mistaken for ours.

    Args:
        launch: what the launcher said, to compare with what MPI says.

    Raises:
        AgreedError: the launcher started more processes than MPI knows of (the wrong `mpirun` for this MPI library,
            or `srun` without PMI).
    """
    world = MPI.COMM_WORLD
    if launch is not None and launch.size != world.size:
        raise AgreedError(
            "start-up",
            ConfigError.exit_code,
            f"{launch.launcher} started {launch.size} processes, but MPI ({_library()}) "
            f"sees a world of {world.size}: start with the mpirun that belongs to this MPI "
            f"(the one beside {sys.executable}), or srun --mpi=pmi2|pmix",
            [],
        )
    made = MpiCommunicator(world.Dup())
    nodes, hosts, pids = zip(*world.allgather((made.node, gethostname(), os.getpid())), strict=True)
    here = [rank for rank, node in enumerate(nodes) if node == made.node]
    # MPI_Finalize begins by forgetting what is attached to this one: who calls it meets the others no more.
    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: watchdog.leave("MPI_Finalize"))
    MPI.COMM_SELF.Set_attr(key, True)
    replace_abort(MPI.Comm, abort_with_success)
    leaders = {one: (hosts[one], pids[one]) for one in sorted(set(nodes))}
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        leaders = {}
    watchdog.joined(here, leaders, _Post(world.Dup()))
    return made


def _library() -> str:
    """Return the MPI library and its version."""
    words = MPI.Get_library_version().replace("Version:", "").replace(",", " ").split()
    return " ".join(words[:3] if words[0] == "Open" else words[:2])


class MpiCommunicator(Communicator):
    """The ranks of an MPI communicator, which is this object's own.

    Args:
        world: all these ranks.
        compares: whether all ranks of the job sum the same numbers of elements in each collective of these ranks.
    """

    def __init__(self, world: MPI.Intracomm, *, compares: bool = True) -> None:
        self._world, self._compares = world, compares
        self._node = cast(MPI.Intracomm, world.Split_type(MPI.COMM_TYPE_SHARED))
        self._windows: list[MPI.Win] = []
        self._node_sum: node_sum.NodeSum | None = None
        self._node_has_room = True
        self._post = _Post(world)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = self._node.rank, self._node.size
        lowest = np.array([self.rank], np.int32)
        self._node.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
        self.node = int(lowest[0])
        self._record = watchdog.record()

    @property
    def description(self) -> str:
        """The MPI library and its version."""
        return _library()

    def allreduce_sum(self, buffer: Any) -> None:
        """Sum in place over all ranks: in shared memory where all are on one node, else by MPI."""
        flat = buffer.reshape(-1)
        together = self._summing(flat.nbytes) if isinstance(flat, np.ndarray) else None
        try:
            told = (flat.size, flat.dtype.char) if self._compares else ()
            with self._record.collective(Collective.ALL_REDUCE, *told):
                watchdog.check_sum()
                if together is not None:
                    together.sum(flat)
                    return
                for start in range(0, flat.size, _MAX_COUNT):
                    piece = flat[start : start + _MAX_COUNT]
                    if node_sum.is_half(flat.dtype):
                        self._sum_halves(piece)
                    else:
                        self._world.Allreduce(MPI.IN_PLACE, piece, op=MPI.SUM)
        except MPI.Exception as error:
            different = watchdog.who_is_where()
            raise MismatchError(different) if different else ConfigError(f"MPI: {error}") from error

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def _sum_halves(self, flat: Array) -> None:
        """Sum numbers that MPI does not know: each rank gets a share of all ranks' and gives its sum to all.

        So a rank sends 2 (P - 1) / P times the bytes of the buffer, as in a good `MPI_Allreduce` over P ranks.
        """
        ends = [flat.size * rank // self.size for rank in range(self.size + 1)]
        counts, mine = np.diff(ends).astype(np.int32), slice(ends[self.rank], ends[self.rank + 1])
        own = np.empty((self.size, counts[self.rank]), flat.dtype)
        bits, shares = flat.view(np.uint16), np.full(self.size, counts[self.rank], np.int32)
        self._world.Alltoallv([bits, counts, MPI.UINT16_T], [own.view(np.uint16), shares, MPI.UINT16_T])
        np.copyto(flat[mine], node_sum.tree_sum(own), casting="unsafe")
        self._world.Allgatherv(MPI.IN_PLACE, [bits, counts, MPI.UINT16_T])

    def sums_in_a_tree(self, nbytes: int) -> bool:
        """Where the sum is made in shared memory; MPI promises no order."""
        return super().sums_in_a_tree(nbytes) or self._summing(nbytes) is not None

    def broadcast(self, buffer: Array) -> None:
        """Send rank 0's buffer to all, `MPI_Bcast`."""
        self.allgather(None, call="broadcast")  # a rank in another call would leave garbage in the buffer, or wait
        flat = buffer.reshape(-1)
        with self._record.collective(Collective.BROADCAST, flat.size, flat.dtype.char):
            for start in range(0, flat.size, _MAX_COUNT):
                self._world.Bcast(flat[start : start + _MAX_COUNT], root=0)

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """`MPI_Allgatherv`."""
        bits = _bits(part.dtype)
        with self._record.collective(Collective.ALL_GATHER):
            self._world.Allgatherv(part.view(bits), [out.view(bits), np.array(counts, np.int32)])

    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        """`MPI_Alltoallv`."""
        bits = _bits(parts.dtype)
        given, taken = np.array(counts, np.int32), np.array(out_counts, np.int32)
        with self._record.collective(Collective.ALL_TO_ALL):
            self._world.Alltoallv([parts.view(bits), given], [out.view(bits), taken])

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Split these ranks, `MPI_Comm_split`."""
        with self._record.collective(Collective.SPLIT):
            return MpiCommunicator(cast(MPI.Intracomm, self._world.Split(ranks[0], self.rank)), compares=False)

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Exchange the lengths, then the bytes, `MPI_Allgatherv`."""
        lengths = np.empty(self.size, np.int32)
        with self._record.collective(Collective.ALL_GATHER):
            self._world.Allgather(np.array([len(message)], np.int32), lengths)
            together = bytearray(int(lengths.sum()))
            self._world.Allgatherv([message, MPI.BYTE], [together, lengths, MPI.BYTE])
        ends = np.cumsum(lengths).tolist()
        return [bytes(together[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]

    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        """Send without waiting, `MPI_Isend`; the bytes are kept until they are out."""
        self._post.send(rank, pack(fact, content))

    def received(self) -> list[Mail]:
        """Take what has come, `MPI_Improbe` and `MPI_Imrecv`."""
        return [unpack(source, message) for source, message in self._post.received()]

    def why_not_cuda_aware(self) -> str:
        """Ask the library, and let another process try."""
        return why_not()

    def barrier(self) -> None:
        """An exchange over all ranks that says which call each of them is in, as `MPI_Barrier` would not."""
        self.allgather(None, call="barrier")

    def node_barrier(self) -> None:
        """`MPI_Barrier` over this node's ranks."""
        with self._record.collective(Collective.NODE_BARRIER):
            self._node.Barrier()

    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        """Return a view of a shared-memory window that local rank 0 fills.

        Where the node's /dev/shm cannot hold it (containers often give it 64 MB, and writing past that is a bus
        error, not an exception) every rank gets memory of its own, to be filled by itself.
        """
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._record.collective(Collective.SHARED_ARRAY):  # on nodes of one rank as well, so that all count alike
            if self.local_size == 1 or not self._fits_in_shared_memory(nbytes):
                return np.empty(shape, dtype), True
            window = MPI.Win.Allocate_shared(nbytes if self.local_rank == 0 else 0, 1, comm=self._node)
        self._windows.append(window)  # dropping it would unmap the memory under the array
        memory: Any = window.Shared_query(0)[0]
        return np.ndarray(shape, dtype, buffer=memory), self.local_rank == 0

    def _summing(self, nbytes: int) -> node_sum.NodeSum | None:
        """Return what sums so much in memory that all ranks share, made at the first, or None for MPI. Collective."""
        if self.size == 1 or nbytes < node_sum.LEAST:
            return None
        if self._node_sum is None and self._node_has_room and self.local_size == self.size:
            shape = node_sum.shape(self.size)
            with self._record.collective(Collective.SHARED_ARRAY):
                self._node_has_room = self._fits_in_shared_memory(int(np.prod(shape)))
            if self._node_has_room:
                shared, _ = self.shared_array(shape, np.uint8)
                self._node_sum = node_sum.NodeSum(shared, self.rank, self._node.Barrier)
        return self._node_sum

    def _fits_in_shared_memory(self, nbytes: int) -> bool:
        try:
            status = os.statvfs("/dev/shm")
            free = status.f_bavail * status.f_frsize
        except OSError:
            free = 0
        fits = np.array([free > nbytes + (8 << 20)], np.int32)
        self._node.Allreduce(MPI.IN_PLACE, fits, op=MPI.MIN)
        return bool(fits[0])


def _bits(dtype: np.dtype[Any]) -> npt.DTypeLike:
    """Return a type that MPI knows of as many bytes."""
    return {1: np.uint8, 2: np.uint16}.get(dtype.itemsize, dtype)


class _Post(watchdog.Post):
    """Messages between ranks that wait for nobody, over a communicator."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._coming: list[tuple[MPI.Request, int, bytearray]] = []

    def send(self, rank: int, message: bytes) -> None:
        self._sent = [one for one in self._sent if not one[0].Test()]
        self._sent.append((self._world.Isend([message, MPI.BYTE], dest=rank), message))

    def received(self) -> list[tuple[int, bytes]]:
        status = MPI.Status()
        while (message := self._world.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            content = bytearray(status.Get_count(MPI.BYTE))
            # Of a large one the rest comes when its sender is ready, which may be stopped.
            self._coming.append((message.Irecv([content, MPI.BYTE]), status.Get_source(), content))
        found = []
        while self._coming and self._coming[0][0].Test():  # in order
            _, source, content = self._coming.pop(0)
            found.append((source, bytes(content)))
        return found

    def arrive(self) -> Callable[[], bool]:
        return cast("Callable[[], bool]", self._world.Ibarrier().Test)
