"""Structure of a batch as a step takes it: inputs, targets and weights, nested as the user's."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain import ops
from dptrain.program import tree
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import is_floating


@dataclass(frozen=True)
class BatchSpec:
    """Structure, shapes and dtypes of a batch."""

    data: Any  # nested as the step takes it, with names in place of arrays
    shapes: tuple[tuple[int, ...], ...]  # (stored rows, ...) of each array
    dtypes: tuple[str, ...]  # of each array
    dtype: str  # of floating-point numbers in the step

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the arrays, in order."""
        return tree.leaves(self.data)

    @functools.cached_property
    def key(self) -> Hashable:
        """Cache key that batches of the same structure share; read for every chunk, hence cached."""
        return tuple(tree.flatten(self.data)), self.shapes, self.dtypes, self.dtype

    @functools.cached_property
    def rounded(self) -> "BatchSpec":
        """With rows rounded up to a power of two, which batches from data sets of about the same size share."""
        shapes = tuple((1 << max(rows - 1, 0).bit_length(), *shape) for rows, *shape in self.shapes)
        return replace(self, shapes=shapes)

    def filled(self, arrays: Sequence[Tensor]) -> Any:
        """Return the data with tensors for names; floating-point ones are cast to the step's dtype."""
        by_name = dict(zip(self.names, arrays, strict=True))

        def cast(path: str, name: str) -> Tensor:
            tensor = by_name[name]
            return ops.cast(tensor, self.dtype) if is_floating(tensor.dtype) and tensor.dtype != self.dtype else tensor

        return tree.map_leaves(cast, self.data)
