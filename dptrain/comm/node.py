"""Collectives of arrays between the ranks of one node, in memory that they share: no copies through MPI's own buffers.

Sums are those of `tree_sum`, so that every rank has the same bits at every run, which MPI promises for two ranks alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.comm.node_sum import Array, is_half, tree_sum

# Bytes of a rank that the others read at a time, so that the pieces of some ranks stay in the caches between them.
PIECE = 1 << 20
# Below this MPI is faster for two ranks: they meet less often there (measured with MPICH 5.0: some 5 us against 2).
LEAST = 1 << 14


def shape(ranks: int, piece: int | None = None) -> tuple[int, int, int]:
    """Return the shape of the shared memory, in bytes, for so many ranks and pieces of so many bytes."""
    return (2, ranks, PIECE if piece is None else piece)


# Numbers between those that different ranks write, so that they do not lie in one cache line.
APART = 8


@dataclass(frozen=True)
class NodeMessage:
    """A sum over the ranks of this node, for code that adds it up by itself (`kernels/native_ranks.h`).

    Attributes:
        given: what each rank adds, flat; memory that all of them see, as all else here.
        found: where the sum goes.
        call: what a rank's record says while it is made, see `records.numbers_of`.
    """

    given: list[Array]
    found: Array
    call: tuple[int, int, int, int, int]


@dataclass(frozen=True)
class NodeMessages:
    """Sums that are made in this order.

    Attributes:
        rank: this one of the node.
        messages: the sums.
        arrived: how often each rank has arrived, int64 of (ranks, `APART`), of which the first of each rank counts.
        own: `Record.progress` of this rank.
        beside: the same of its neighbours.
        attend: what to call now and then while this rank waits; may raise.
        spins: whether each rank has a core to itself.
    """

    rank: int
    messages: list[NodeMessage]
    arrived: Array
    own: memoryview
    beside: list[memoryview]
    attend: Callable[[], None]
    spins: bool


class Together(ABC):
    """Collectives of ranks that share memory, at least with others of their node.

    Args:
        shared: memory that the ranks of this node see, of `shape` and type uint8.
        rank: this one among those of its node.
        barrier: returns once all of them have called it.

    Attributes:
        in_a_tree: whether sums are those of `tree_sum` over all ranks.
    """

    in_a_tree: bool

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
        """Return where each rank of the node puts what the others then read, of shape (ranks, bytes).

        A half of the memory is written again only after the collective over the other, which no rank enters while it
        reads this one.
        """
        half: Array = self._shared[self._half]
        self._half = 1 - self._half
        return half

    def _pieces(self, like: Array) -> list[Array]:
        """Return the next memory as arrays of an array's type and size, one of each rank of the node."""
        return [one[: like.nbytes].view(like.dtype) for one in self._next()]


class NodeCollectives(Together):
    """What ranks do that are all on this node."""

    in_a_tree = True

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def sum(self, flat: Array) -> None:
        """See `Together`."""
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
        reduced([one[share] for one in summands], summands[0][share])
        self._barrier()
        np.copyto(piece, summands[0])

    @np.errstate(all="ignore")
    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """See `Together`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, PIECE // parts.itemsize // len(counts)):
            pieces = self._pieces(parts[: ends[-1]])
            given, places = pieces[self._rank], list(zip(ends[:-1], ends[1:], starts, strict=False))
            for rank, (first, last, start) in enumerate(places):
                if rank != self._rank:
                    np.copyto(given[first:last], parts[start + begin : start + begin + last - first])
            self._barrier()
            first, last, start = places[self._rank]
            own = parts[start + begin : start + begin + last - first]
            summands = [own if rank == self._rank else one[first:last] for rank, one in enumerate(pieces)]
            reduced(summands, out[begin : begin + last - first], over)

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """See `Together`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, PIECE // part.itemsize):
            own = part[begin : begin + ends[self._rank + 1] - ends[self._rank]]
            pieces = self._pieces(out[: max(np.diff(ends))])
            np.copyto(pieces[self._rank][: own.size], own)
            self._barrier()
            for rank, piece in enumerate(pieces):
                place = out[starts[rank] + begin :][: ends[rank + 1] - ends[rank]]
                np.copyto(place, own if rank == self._rank else piece[: place.size])


def rounds(counts: Sequence[int], step: int, longest: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Cut all ranks' parts into pieces of so many elements at most.

    Args:
        counts: elements of the parts.
        step: of a piece at most.
        longest: part that any rank knows of; by default of these.

    Yields:
        Where the pieces of a round begin in the parts, and the running sums of their lengths, from 0.
    """
    for begin in range(0, max(counts) if longest is None else longest, step):
        yield begin, np.cumsum([0, *(min(max(count - begin, 0), step) for count in counts)]).tolist()


def reduced(summands: Sequence[Array], out: Array, over: str = "sum") -> None:
    """Put the sum of arrays, in the tree of `tree_sum`, or the greatest of each element into another."""
    if over == "max":
        np.maximum.reduce(summands, out=out)
    elif len(summands) == 2 and out.dtype == summands[0].dtype and not is_half(out.dtype):
        np.add(summands[0], summands[1], out=out)
    else:
        np.copyto(out, tree_sum(summands), casting="unsafe")
