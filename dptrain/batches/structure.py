"""What the arrays of a batch are to the step that takes it: inputs, targets and weights, nested as the user's."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dptrain import ops
from dptrain.program import tree
from dptrain.program.tensor import Tensor


@dataclass(frozen=True)
class Batch:
    """What the arrays of a batch are.

    Attributes:
        data: as the step takes it, names in place of the arrays.
        shapes: of each array, the first length is that of the stored rows.
        dtypes: of each array.
        dtype: of floating-point numbers in the step.
    """

    data: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dtype: str

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the arrays, in order."""
        return tree.leaves(self.data)

    @functools.cached_property
    def key(self) -> Hashable:
        """What batches of the same structure have in common, to find what was prepared for them: asked every chunk."""
        return tuple(tree.flatten(self.data)), self.shapes, self.dtypes, self.dtype

    def filled(self, arrays: Sequence[Tensor]) -> Any:
        """Return the data with what the step is to see of each array: floating-point numbers in its type."""
        found = dict(zip(self.names, arrays, strict=True))

        def cast(path: str, name: str) -> Tensor:
            one = found[name]
            return ops.cast(one, self.dtype) if one.dtype.kind in "fV" and one.dtype != self.dtype else one

        return tree.map_leaves(cast, self.data)
