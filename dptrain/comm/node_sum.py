"""Sums in one fixed binary tree, ((0 + 1) + (2 + 3)) and so on: of a rank's shards, and of what ranks have."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


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
