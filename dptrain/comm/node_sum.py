"""Sums in one fixed binary tree, ((0 + 1) + (2 + 3)) and so on: over a rank's shards, and over ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.runtime.types import is_narrow

Array = npt.NDArray[Any]


def tree_sum(summands: Iterable[Array]) -> Array:
    """Return the sum of arrays as a `TreeSum`; half precision is summed, and returned, in float32."""
    tree = TreeSum()
    for summand in summands:
        tree.add([summand.astype(np.float32) if is_narrow(summand.dtype) else summand])
    return tree.total()[0]


class TreeSum:
    """A sum in a binary tree whose shape depends only on the number of summands.

    Neighbours are added, then neighbours of these sums; the remainder is added from the last. So ranks can sum complete
    subtrees, which another `TreeSum` combines. `first` numbers the first summand, if other ranks have earlier ones.
    """

    def __init__(self, first: int = 0) -> None:
        self._subtrees: list[tuple[int, list[Array]]] = []
        self._count = first

    def add(self, summand: Sequence[Array], size: int = 1) -> None:
        """Add one or more arrays, the sum of `size` summands: of a complete subtree, as in `subtrees`."""
        self._subtrees.append((size, list(summand)))
        self._count += size
        while len(self._subtrees) > 1 and self._subtrees[-2][0] == size and self._count % (2 * size) == 0:
            self._merge()
            size *= 2

    @property
    def subtrees(self) -> list[tuple[int, list[Array]]]:
        """The largest complete subtrees in order: number of summands, a power of two, and sum."""
        return list(self._subtrees)

    def total(self) -> list[Array]:
        """Return the sum of all."""
        while len(self._subtrees) > 1:
            self._merge()
        return self._subtrees[0][1]

    def _merge(self) -> None:
        size, last = self._subtrees.pop()
        before, other = self._subtrees.pop()
        self._subtrees.append(
            (before + size, [np.add(first, second) for first, second in zip(other, last, strict=True)])
        )
