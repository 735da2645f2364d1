"""Sums over the ranks of one node in memory that they share: no copies through MPI's own buffers.

The summands are added in one fixed binary tree, ((0 + 1) + (2 + 3)) and so on, so that every rank has the same bits at
every run, which MPI promises for two ranks alone; it is the tree in which a rank adds its own shards.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Bytes that are summed at a time, so that the pieces of some ranks stay in the caches between them.
PIECE = 1 << 20
# Below this MPI is faster: the ranks meet less often there (measured with MPICH 5.0: some 5 us against 2).
LEAST = 1 << 14


def shape(ranks: int) -> tuple[int, int, int]:
    """Return the shape of the shared memory, in bytes, for so many ranks."""
    return (2, ranks, PIECE)


class NodeSum:
    """Sums in place over the ranks of this node.

    Args:
        shared: memory that all of them see, of `shape` and type uint8.
        rank: this one among them.
        barrier: returns once all of them have called it.
    """

    def __init__(self, shared: Array, rank: int, barrier: Callable[[], None]) -> None:
        self._shared, self._rank, self._barrier = shared, rank, barrier
        self._half = 0

    @np.errstate(all="ignore")  # infinities and NaNs are results
    def sum(self, flat: Array) -> None:
        """Replace a flat array by its sum over the ranks. Collective."""
        step = PIECE // flat.itemsize
        for start in range(0, flat.size, step):
            self._piece(flat[start : start + step])

    def _piece(self, piece: Array) -> None:
        # A half is written again only after the collective over the other, which no rank enters while it reads this.
        half, self._half = self._shared[self._half], 1 - self._half
        summands = [one[: piece.nbytes].view(piece.dtype) for one in half]
        np.copyto(summands[self._rank], piece)
        self._barrier()
        ranks = len(summands)
        if ranks == 2:
            np.add(summands[0], summands[1], out=piece)
            return
        share = slice(piece.size * self._rank // ranks, piece.size * (self._rank + 1) // ranks)
        np.copyto(summands[0][share], tree_sum(one[share] for one in summands), casting="unsafe")
        self._barrier()
        np.copyto(piece, summands[0])


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether numbers are in half precision, float16 or bfloat16, and added up in float32."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def tree_sum(summands: Iterable[Array]) -> Array:
    """Return the sum of arrays in a `TreeSum`; those in half precision are added up, and returned, in float32."""
    tree = TreeSum()
    for one in summands:
        tree.add([one.astype(np.float32) if is_half(one.dtype) else one])
    return tree.total()[0]


class TreeSum:
    """A sum that is added up in a binary tree, whose shape depends on the number of summands alone.

    Neighbours are added, then neighbours of these sums; what is left over at the end is added from the last. So the
    sums of complete subtrees can be made by different ranks, and be put together by another `TreeSum`.

    Args:
        first: number of the first summand; those before it are somebody else's.
    """

    def __init__(self, first: int = 0) -> None:
        self._subtrees: list[tuple[int, list[Array]]] = []
        self._count = first

    def add(self, summand: Sequence[Array], size: int = 1) -> None:
        """Take in a summand: one or more arrays, each added to its like.

        Args:
            summand: the arrays.
            size: of how many summands it is the sum: of a subtree, as `subtrees` has them.
        """
        self._subtrees.append((size, list(summand)))
        self._count += size
        while len(self._subtrees) > 1 and self._subtrees[-2][0] == size and self._count % (2 * size) == 0:
            self._merge()
            size *= 2

    @property
    def subtrees(self) -> list[tuple[int, list[Array]]]:
        """The largest subtrees that are complete, in order: the number of their summands, a power of two; their sum."""
        return list(self._subtrees)

    def total(self) -> list[Array]:
        """Return the sum of all."""
        while len(self._subtrees) > 1:
            self._merge()
        return self._subtrees[0][1]

    def _merge(self) -> None:
        size, last = self._subtrees.pop()
        before, other = self._subtrees.pop()
        self._subtrees.append((before + size, [np.add(one, two) for one, two in zip(other, last, strict=True)]))
