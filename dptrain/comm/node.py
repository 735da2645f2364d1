"""Collectives between the ranks of one node in shared memory, without copies through MPI's buffers.

Sums are those of `tree_sum`, so that every rank has the same bits at every run, which MPI promises for two ranks only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.comm.node_sum import Array, tree_sum
from dptrain.runtime.types import is_narrow

# Bytes of a rank that the others read at a time: the pieces of some ranks fit into shared caches.
PIECE = 1 << 20
# Below this MPI is faster for two ranks, which synchronize less often there (MPICH 5.0: about 2 us against 5).
LEAST = 1 << 14


def shape(ranks: int, piece: int | None = None) -> tuple[int, int, int]:
    """Return the shape of the shared memory in bytes: (halves, ranks, piece)."""
    return (2, ranks, PIECE if piece is None else piece)


# Numbers between those of different ranks, so that they are in different cache lines.
APART = 8


@dataclass(frozen=True)
class NodeMessage:
    """A sum over this node's ranks, for code that makes it by itself (`kernels/native_ranks.h`)."""

    summands: list[Array]  # each rank's, flat, in shared memory
    total: Array  # memory of the sum
    call: tuple[int, int, int, int, int]  # numbers of the record meanwhile, see `records.numbers_of`


@dataclass(frozen=True)
class NodeMessages:
    """Sums in the order in which they are made."""

    rank: int  # this rank of the node
    messages: list[NodeMessage]
    arrived: Array  # int64 (ranks, `APART`): column 0 counts each rank's arrivals
    progress: memoryview  # `Record.progress` of this rank
    neighbors: list[memoryview]  # `Record.progress` of its neighbours
    attend: Callable[[], None]  # called now and then while this rank waits; may raise
    spins: bool  # whether each rank has a core to itself


class SharedMemoryCollectives(ABC):
    """Collectives of ranks that share memory, at least with others of their node."""

    in_a_tree: bool  # whether sums are those of `tree_sum` over all ranks

    def __init__(self, shared: Array, rank: int, barrier: Callable[[], None]) -> None:
        self._shared, self._rank, self._barrier = shared, rank, barrier
        self._half = 0

    @abstractmethod
    def sum(self, flat: Array) -> None:
        """Replace a flat array by its sum over the ranks. Collective."""

    @abstractmethod
    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """See `Communicator.reduce_scatter`."""

    @abstractmethod
    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """See `Communicator.all_gather`."""

    def _next(self) -> Array:
        """Return the next half of the memory, (ranks, bytes), where each rank of the node writes for the others.

        A half is written again only after the collective over the other, which no rank enters while it reads this one.
        """
        half: Array = self._shared[self._half]
        self._half = 1 - self._half
        return half

    def _pieces(self, like: Array) -> list[Array]:
        return [memory[: like.nbytes].view(like.dtype) for memory in self._next()]


class NodeCollectives(SharedMemoryCollectives):
    """Collectives of ranks that are all on this node."""

    in_a_tree = True

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def sum(self, flat: Array) -> None:
        """See `SharedMemoryCollectives`."""
        step = PIECE // flat.itemsize
        for start in range(0, flat.size, step):
            self._sum(flat[start : start + step])

    def _sum(self, piece: Array) -> None:
        summands = self._pieces(piece)
        np.copyto(summands[self._rank], piece)
        self._barrier()
        ranks = len(summands)
        if ranks == 2:
            np.add(summands[0], summands[1], out=piece)
            return
        share = slice(piece.size * self._rank // ranks, piece.size * (self._rank + 1) // ranks)
        reduced([summand[share] for summand in summands], summands[0][share])
        self._barrier()
        np.copyto(piece, summands[0])

    @np.errstate(all="ignore")
    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """See `SharedMemoryCollectives`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, PIECE // parts.itemsize // len(counts)):
            pieces = self._pieces(parts[: ends[-1]])
            sent, places = pieces[self._rank], list(zip(ends[:-1], ends[1:], starts, strict=False))
            for rank, (first, last, start) in enumerate(places):
                if rank != self._rank:
                    np.copyto(sent[first:last], parts[start + begin : start + begin + last - first])
            self._barrier()
            first, last, start = places[self._rank]
            mine = parts[start + begin : start + begin + last - first]
            summands = [mine if rank == self._rank else piece[first:last] for rank, piece in enumerate(pieces)]
            reduced(summands, out[begin : begin + last - first], over)

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """See `SharedMemoryCollectives`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, PIECE // part.itemsize):
            mine = part[begin : begin + ends[self._rank + 1] - ends[self._rank]]
            pieces = self._pieces(out[: max(np.diff(ends))])
            np.copyto(pieces[self._rank][: mine.size], mine)
            self._barrier()
            for rank, piece in enumerate(pieces):
                place = out[starts[rank] + begin :][: ends[rank + 1] - ends[rank]]
                np.copyto(place, mine if rank == self._rank else piece[: place.size])


def rounds(counts: Sequence[int], step: int, longest: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Yield rounds of at most `step` elements a part: where they begin in the parts, and cumulative lengths from 0."""
    for begin in range(0, max(counts) if longest is None else longest, step):
        yield begin, np.cumsum([0, *(min(max(count - begin, 0), step) for count in counts)]).tolist()


def reduced(summands: Sequence[Array], out: Array, over: str = "sum") -> None:
    """Reduce arrays into `out`: "sum" in the tree of `tree_sum`, or "max"."""
    if over == "max":
        np.maximum.reduce(summands, out=out)
    elif len(summands) == 2 and out.dtype == summands[0].dtype and not is_narrow(out.dtype):
        np.add(summands[0], summands[1], out=out)
    else:
        np.copyto(out, tree_sum(summands), casting="unsafe")
