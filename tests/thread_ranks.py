"""Ranks that are threads of one process, and meet at a barrier: collectives without MPI."""

import collections
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator, Mail, PointToPoint, pack, unpack
from dptrain.comm.mesh import MeshCommunicator
from dptrain.comm.node_sum import tree_sum

# Seconds that a rank waits for the others.
_PATIENCE = 60


class _Meeting:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.board: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.groups: dict[Any, _Meeting] = {}
        self.mail: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]
        self.handed: dict[tuple[int, int, int], queue.SimpleQueue[Any]] = collections.defaultdict(queue.SimpleQueue)

    def abort(self) -> None:
        """Let nobody wait any longer."""
        for meeting in (self, *self.groups.values()):
            meeting.barrier.abort()


class ThreadCommunicator(Communicator):
    """A rank that is a thread."""

    description = "threads"

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(meeting.board)
        self.node = 0
        self.meeting = meeting

    @property
    def host(self) -> str:
        return f"host{self.rank}"

    def gathered(self, value: Any) -> list[Any]:
        """Return what every rank says."""
        self.meeting.board[self.rank] = value
        self.meeting.barrier.wait(_PATIENCE)
        values = list(self.meeting.board)
        self.meeting.barrier.wait(_PATIENCE)
        return values

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        return self.gathered(message)

    def allreduce_sum(self, buffer: Any) -> None:
        np.copyto(buffer, tree_sum(self.gathered(buffer.copy())), casting="unsafe")

    def sums_in_a_tree(self, nbytes: int) -> bool:
        return True

    def all_gather(self, part: Any, out: Any, counts: Sequence[int]) -> None:
        blocks = self.gathered(part.copy())
        assert [block.size for block in blocks] == list(counts)
        np.copyto(out, np.concatenate(blocks))

    def all_to_all(self, parts: Any, counts: Sequence[int], out: Any, out_counts: Sequence[int]) -> None:
        assert sum(counts) == parts.size
        blocks_of_ranks = self.gathered(np.split(parts.copy(), np.cumsum(counts)[:-1]))
        mine = [blocks[self.rank] for blocks in blocks_of_ranks]
        assert [block.size for block in mine] == list(out_counts)
        np.copyto(out, np.concatenate(mine))

    def point_to_point(self, ticks: int) -> PointToPoint:
        return _ThreadPointToPoint(self.rank, self.meeting)

    def group(self, ranks: Sequence[int]) -> Communicator:
        if self.rank == ranks[0]:
            self.meeting.groups[tuple(ranks)] = _Meeting(len(ranks))
        self.gathered(None)
        return ThreadCommunicator(list(ranks).index(self.rank), self.meeting.groups[tuple(ranks)])

    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        self.meeting.mail[rank].append((self.rank, pack(fact, content)))

    def received(self) -> list[Mail]:
        mail, self.meeting.mail[self.rank] = self.meeting.mail[self.rank], []
        return [unpack(source, message) for source, message in mail]

    def why_not_cuda_aware(self) -> str:
        return "threads"

    def broadcast(self, buffer: Any) -> None:
        np.copyto(buffer, self.gathered(buffer.copy())[0])

    def barrier(self) -> None:
        self.gathered(None)

    def node_barrier(self) -> None:
        self.gathered(None)

    def shared_array(self, shape: tuple[int, ...], dtype: Any) -> tuple[Any, bool]:
        return np.empty(shape, dtype), True


class _ThreadPointToPoint(PointToPoint):
    """Arrays that threads hand to others."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank, self._handed = rank, meeting.handed

    def send(self, rank: int, array: Any, tag: int) -> None:
        self._handed[self._rank, rank, tag].put(array.copy())

    def receive(self, rank: int, out: Any, tag: int, tick: int) -> None:
        np.copyto(out, self._handed[rank, self._rank, tag].get(timeout=_PATIENCE))

    def finish(self) -> None:
        pass


def on_ranks(size: int, action: Callable[[Communicator], object]) -> list[Any]:
    """Run `action` on every rank; return results or exceptions."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = action(ThreadCommunicator(rank, meeting))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    return results


def on_mesh(action: Callable[[MeshCommunicator], object], **lengths: int) -> list[Any]:
    """Run `action` on every rank of a mesh; return results, or raise the first rank's error."""

    def run(comm: Any) -> object:
        try:
            return action(MeshCommunicator(comm, lengths))
        except Exception:
            comm.meeting.abort()
            raise

    results = on_ranks(int(np.prod(list(lengths.values()))), run)
    errors = [result for result in results if isinstance(result, Exception)]
    # A broken barrier is what the others see of an error.
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results
