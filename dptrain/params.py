"""Where each parameter lies in one flat buffer.

Parameters, gradients and optimizer slots of a replica are flat buffers with the same layout, so that an all-reduce
is one message and an update is one pass, whatever the layers are. Parameters that are not trained (of frozen layers,
and moving averages) lie behind all others: gradients and slots end before them, so that no optimizer, no norm and no
weight decay meets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.initializers import Initializer
from dptrain.regularizers import Regularizer

# 64 elements are 256 bytes in float32: the alignment of a GPU's memory transactions and of its vector loads.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a layer.

    Attributes:
        name: within the layer, as Keras names it ("kernel", "bias").
        shape: its dimensions.
        initializer: what fills it before training.
        trainable: False for what no gradient changes, such as moving averages.
        regularizer: its penalty, where it is trained.
    """

    name: str
    shape: tuple[int, ...]
    initializer: Initializer
    trainable: bool = True
    regularizer: Regularizer | None = None


@dataclass(frozen=True)
class ParamEntry:
    """One parameter's place in the flat buffer.

    Attributes:
        name: unique in the model ("dense/kernel").
        shape: its dimensions.
        offset: its first element.
        initializer: what fills it before training.
        trainable: whether it has a gradient and optimizer slots, at the same offset.
        regularizer: its penalty.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    initializer: Initializer
    trainable: bool = True
    regularizer: Regularizer | None = None

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
    """The parameters of a model, each at an offset that is a multiple of `ALIGNMENT` elements.

    Args:
        specs: (name in the model, specification) in the order of Keras' `get_weights`.

    Attributes:
        entries: the parameters, in the order of `specs`.
        size: elements of gradients and of optimizer slots: the trained parameters, the gaps between them included.
        full_size: elements of the parameters' own buffer, in which those that are not trained come last.

    Raises:
        ValueError: two parameters have the same name.
    """

    def __init__(self, specs: Sequence[tuple[str, ParamSpec]]) -> None:
        names = [name for name, _ in specs]
        if len(set(names)) != len(names):
            raise ValueError(f"parameter names repeat: {names}")
        places: dict[str, ParamEntry] = {}
        offset = self.size = 0
        for name, spec in sorted(specs, key=lambda one: not one[1].trainable):  # stable: else the order of `specs`
            entry = ParamEntry(name, spec.shape, offset, spec.initializer, spec.trainable, spec.regularizer)
            places[name] = entry
            offset += entry.padded
            self.size = offset if spec.trainable else self.size
        self.full_size = offset
        self.entries = tuple(places[name] for name in names)

    @property
    def count(self) -> int:
        """Number of parameters proper, without the gaps."""
        return sum(entry.size for entry in self.entries)

    @property
    def trained(self) -> tuple[ParamEntry, ...]:
        """The parameters that have a gradient and optimizer slots, in the order of `entries`."""
        return tuple(entry for entry in self.entries if entry.trainable)

    @property
    def trainable_count(self) -> int:
        """Number of trained parameters proper."""
        return sum(entry.size for entry in self.trained)

    def views(self, flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return every parameter in a flat buffer of `full_size` elements (or more), by name."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def gradient_views(self, flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return what belongs to every trained parameter in a flat buffer of `size` elements (or more), by name."""
        return {entry.name: entry.view(flat) for entry in self.trained}

    def initial(self, seed: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a flat buffer of `full_size` initial values, the same for the same seed whatever the rank."""
        flat = np.zeros(self.full_size, dtype)
        for position, entry in enumerate(self.entries):
            entry.view(flat)[...] = entry.initializer(entry.shape, seed, position)
        return flat

    def rearranged(self, flat: npt.NDArray[Any], source: "ParamLayout") -> npt.NDArray[Any]:
        """Return a flat buffer of `full_size` elements with the values of one that has another layout.

        Args:
            flat: of `source.full_size` elements, on the host.
            source: with parameters of the same names and shapes, some of which are trained in one layout alone.
        """
        values = source.views(flat)
        result = np.zeros(self.full_size, flat.dtype)
        for entry in self.entries:
            entry.view(result)[...] = values[entry.name]
        return result

    def rearranged_slot(self, flat: npt.NDArray[Any], source: "ParamLayout") -> npt.NDArray[Any]:
        """Return an optimizer's flat buffer, of `size` elements, with 0 for what only this layout trains.

        Args:
            flat: of `source.size` elements, on the host.
            source: as of `rearranged`.
        """
        values = source.gradient_views(flat)
        result = np.zeros(self.size, flat.dtype)
        for entry in self.trained:
            if entry.name in values:
                entry.view(result)[...] = values[entry.name]
        return result
