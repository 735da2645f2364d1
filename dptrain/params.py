"""Where each parameter lies in one flat buffer.

Parameters, gradients and optimizer slots of a replica are flat buffers with the same layout, so that an all-reduce
is one message and an update is one pass, whatever the layers are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.initializers import Initializer

# 64 elements are 256 bytes in float32: the alignment of a GPU's memory transactions and of its vector loads.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a layer.

    Attributes:
        name: within the layer, as Keras names it ("kernel", "bias").
        shape: its dimensions.
        initializer: what fills it before training.
    """

    name: str
    shape: tuple[int, ...]
    initializer: Initializer


@dataclass(frozen=True)
class ParamEntry:
    """One parameter's place in the flat buffer.

    Attributes:
        name: unique in the model ("dense/kernel").
        shape: its dimensions.
        offset: its first element.
        initializer: what fills it before training.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    initializer: Initializer

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def padded(self) -> int:
        """Number of elements with the gap that follows."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    def view(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return this parameter in a flat buffer, as an array of `shape` that shares its memory."""
        return flat[self.offset : self.offset + self.size].reshape(self.shape)


class ParamLayout:
    """The parameters of a model in order, each at an offset that is a multiple of `ALIGNMENT` elements.

    Args:
        specs: (name in the model, specification) in the order of Keras' `get_weights`.

    Attributes:
        entries: the parameters.
        size: elements of the flat buffer, the gaps between parameters included.

    Raises:
        ValueError: two parameters have the same name.
    """

    def __init__(self, specs: Sequence[tuple[str, ParamSpec]]) -> None:
        entries = []
        offset = 0
        for name, spec in specs:
            entry = ParamEntry(name, spec.shape, offset, spec.initializer)
            entries.append(entry)
            offset += entry.padded
        self.entries = tuple(entries)
        self.size = offset
        if len({entry.name for entry in entries}) != len(entries):
            raise ValueError(f"parameter names repeat: {[entry.name for entry in entries]}")

    @property
    def count(self) -> int:
        """Number of parameters proper, without the gaps."""
        return sum(entry.size for entry in self.entries)

    def views(self, flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return every parameter in a flat buffer of `size` elements (or more), by name."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def initial(self, seed: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a flat buffer of initial values, the same for the same seed whatever the rank."""
        flat = np.zeros(self.size, dtype)
        for position, entry in enumerate(self.entries):
            entry.view(flat)[...] = entry.initializer(entry.shape, seed, position)
        return flat
