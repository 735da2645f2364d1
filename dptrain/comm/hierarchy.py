"""Collectives of arrays over several nodes: first in the shared memory of each node, then between the nodes.

Ranks of a node add their arrays. Each of the first S ranks (S: ranks of the smallest node) exchanges a slice of that
sum with the ranks of its number on the other nodes, its *column*; then all read the slices in place. So of an
all-reduce of n bytes each of N nodes sends 2 (N - 1) / N n, however many ranks it has, through S ranks at once; of a
reduce-scatter or an all-gather half of that. Nodes may have different numbers of ranks, in any order.

Sums have a fixed order: the ranks of a node in a `TreeSum`, then the nodes by their lowest ranks in another. So all
ranks have the same bits at every run: those of a `TreeSum` over all ranks if each node has the same power of two of
consecutive ranks. Half precision is added in float32, between nodes too, and rounded once.

Source: the three phases of P. Goyal et al., "Accurate, large minibatch SGD", arXiv:1706.02677, section 4.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from dptrain.comm.node import SharedMemoryCollectives, reduced, rounds
from dptrain.comm.node_sum import Array
from dptrain.comm.parts import cut
from dptrain.errors import MismatchError
from dptrain.runtime.types import is_narrow

# Bytes of a rank sent at a time, if /dev/shm has room: more than on one node, as each exchange costs more.
PIECE = 1 << 22
# Up to so many bytes each rank of a column gets all nodes' slices whole: one exchange instead of two.
GATHERED = 1 << 16
# Bytes by which nodes compare their collectives, see `NodePeers.call`: each collective begins with them.
CALL = 40
# Bytes of a cache line.
_LINE = 64


class NodePeers(Protocol):
    """The ranks of one local number on all nodes, in the nodes' order; they exchange byte ranges (begin, end)."""

    @property
    def call(self) -> Array:
        """This rank's current collective as `CALL` bytes: kind, elements, type, parts."""

    def all_gather(self, memory: Array, places: Sequence[tuple[int, int]]) -> None:
        """Fill the others' ranges of memory, in which this rank's own is filled."""

    def all_to_all(self, memory: Array, places: Sequence[tuple[int, int]], out: Array) -> None:
        """Gather into `out`, (nodes, bytes), each rank's range that is for this one."""


class HierarchicalCollectives(SharedMemoryCollectives):
    """Collectives over several nodes; `column` is None where this rank is none of the first S of its node."""

    def __init__(
        self,
        shared: Array,
        nodes: Sequence[Sequence[int]],
        rank: int,
        barrier: Callable[[], None],
        column: NodePeers | None,
    ) -> None:
        self._nodes, self._column = nodes, column
        self._node_index = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        super().__init__(shared, nodes[self._node_index].index(rank), barrier)
        self._columns, self._piece = min(map(len, nodes)), int(shared.shape[-1])
        self._order = [rank for ranks in nodes for rank in ranks]
        same = {len(ranks) for ranks in nodes}
        self.in_a_tree = self._order == sorted(self._order) and len(same) == 1 and self._columns.bit_count() == 1

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def sum(self, flat: Array) -> None:
        """See `SharedMemoryCollectives`."""
        step = self._fitting(flat.dtype)
        for start in range(0, flat.size, step):
            piece = flat[start : start + step]
            summands = self._pieces(piece)
            np.copyto(summands[self._rank], piece)
            slices = cut(0, piece.size, self._columns)
            share = slice(*slices[min(self._rank, self._columns - 1)])
            total = self._of_node(summands, "sum", [share])
            if self._column is not None:
                self._sum_in_column(total[share], summands[0][share], self._column, is_first=start == 0)
            self._barrier()
            np.copyto(piece, summands[0])

    @np.errstate(all="ignore")
    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """See `SharedMemoryCollectives`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, self._fitting(parts.dtype) // len(counts)):
            summands, lengths = self._pieces(parts[: ends[-1]]), np.diff(ends).tolist()
            places, blocks = self._laid_out(lengths)
            for rank, (first, last) in places.items():
                np.copyto(summands[self._rank][first:last], parts[starts[rank] + begin :][: last - first])
            slices = self._slices(blocks)
            total = self._of_node(summands, over, [slice(*bounds) for bounds in slices])
            if self._column is not None:
                self._require_same(self._column, begin)
                first, last = slices[self._node_index]
                received = np.empty((len(self._nodes), last - first), total.dtype)
                self._column.all_to_all(_bytes(total), _in_bytes(slices, total), _bytes(received))
                reduced(list(received), summands[0][first:last], over)
            self._barrier()
            first, last = places[self._nodes[self._node_index][self._rank]]
            np.copyto(out[begin : begin + last - first], summands[0][first:last])

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """See `SharedMemoryCollectives`."""
        starts = np.cumsum([0, *counts]).tolist()
        for begin, ends in rounds(counts, self._columns * self._piece // part.itemsize // len(counts)):
            places, blocks = self._laid_out(np.diff(ends).tolist())
            memory = self._next().reshape(-1)[: ends[-1] * part.itemsize].view(part.dtype)
            first, last = places[self._nodes[self._node_index][self._rank]]
            np.copyto(memory[first:last], part[begin : begin + last - first])
            self._barrier()
            if self._column is not None:
                self._require_same(self._column, begin)
                self._column.all_gather(_bytes(memory), _in_bytes(self._slices(blocks), memory))
            self._barrier()
            for rank, (first, last) in places.items():
                np.copyto(out[starts[rank] + begin :][: last - first], memory[first:last])

    def _of_node(self, summands: Sequence[Array], over: str, read: Sequence[slice]) -> Array:
        """Reduce over this node's ranks into the first summand's memory; half precision goes behind it, in float32."""
        total = summands[0]
        if is_narrow(total.dtype) and over == "sum":
            begin = -(-total.nbytes // _LINE) * _LINE
            total = self._shared[1 - self._half, 0, begin : begin + 4 * total.size].view(np.float32)
        self._barrier()
        apart = len(summands) > self._columns
        for share in [slice(*cut(0, total.size, len(summands))[self._rank])] if apart else read:
            reduced([summand[share] for summand in summands], total[share], over)
        if apart:
            self._barrier()
        return total

    def _sum_in_column(self, part: Array, out: Array, column: NodePeers, is_first: bool) -> None:
        """Put the sum of the nodes' parts into `out`, which may be the same memory."""
        nodes = len(self._nodes)
        if part.nbytes * nodes <= GATHERED:
            rows = self._exchanged(column, _bytes(part))
            reduced([row.view(part.dtype) for row in rows], out)
            return
        self._require_same(column, not is_first)
        slices = cut(0, part.size, nodes)
        first, last = slices[self._node_index]
        received = np.empty((nodes, last - first), part.dtype)
        column.all_to_all(_bytes(part), _in_bytes(slices, part), _bytes(received))
        reduced(list(received), out[first:last])
        column.all_gather(_bytes(out), _in_bytes(slices, out))

    def _fitting(self, dtype: np.dtype[Any]) -> int:
        """Return how many numbers fit into a rank's memory, with room for a float32 sum of half precision."""
        half = is_narrow(dtype)
        return (self._piece - _LINE * half) // (dtype.itemsize + 4 * half)

    def _exchanged(self, column: NodePeers, more: Array) -> list[Array]:
        """Gather equal numbers of bytes from each rank of the column; refuse nodes in different collectives."""
        length = CALL + more.size
        rows = np.empty((len(self._nodes), length), np.uint8)
        rows[:, :CALL] = 0  # where something shorter comes
        rows[self._node_index] = np.concatenate([column.call, more])
        column.all_gather(rows.reshape(-1), [(n * length, (n + 1) * length) for n in range(len(rows))])
        if (rows[:, :CALL] != column.call).any():
            raise MismatchError("the nodes are in different collectives")
        return [row[CALL:] for row in rows]

    def _require_same(self, column: NodePeers, begun: int | bool) -> None:
        """Compare the nodes' collectives, unless this one has already begun."""
        if not begun:
            self._exchanged(column, np.empty(0, np.uint8))

    def _laid_out(self, lengths: Sequence[int]) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
        """Return the range of each rank's part in memory, grouped by node, and the range of each node."""
        ends = list(accumulate((lengths[rank] for rank in self._order), initial=0))
        places = dict(zip(self._order, pairwise(ends), strict=True))
        return places, [(places[ranks[0]][0], places[ranks[-1]][1]) for ranks in self._nodes]

    def _slices(self, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [cut(first, last, self._columns)[min(self._rank, self._columns - 1)] for first, last in blocks]


def _bytes(array: Array) -> Array:
    return array.view(np.uint8) if array.size else np.empty((*array.shape[:-1], 0), np.uint8)


def _in_bytes(places: Sequence[tuple[int, int]], of: Array) -> list[tuple[int, int]]:
    return [(first * of.itemsize, last * of.itemsize) for first, last in places]
