"""A weight: a variable that remembers how its first value was drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.initializers import Initializer, InitializerLike
from dptrain.program.tensor import Variable


class Weight(Variable):
    """A variable of a layer.

    Its first value is a function of (shape, seed, position). The weights of a layer that a model builds get theirs when
    the model adopts the layer, and with that the model's seed and their position among the model's weights; all others
    have theirs from the default seed, when they are made.

    Args:
        shape: of the value.
        initializer: what draws it.
        seed: of the initial value.
        position: of the initial value.
        provisional: whether a model that adopts the layer is to draw it anew.
        dtype: of the value.
        name: as the arguments that follow, see `Variable`.
        trainable: see `Variable`.
        regularizer: see `Variable`.
        aggregation: see `Variable`.

    Attributes:
        initializer: as above.
        provisional: as above.
    """

    def __init__(
        self,
        shape: Sequence[int],
        initializer: InitializerLike,
        seed: int,
        position: int,
        provisional: bool,
        dtype: npt.DTypeLike,
        name: str,
        trainable: bool = True,
        regularizer: Callable[[Any], Any] | None = None,
        aggregation: Any = "none",
    ) -> None:
        self.initializer, self.provisional = initializer, provisional
        self._drawn_with = seed, position
        value = _drawn(initializer, tuple(shape), seed, position, dtype)
        super().__init__(value, name, trainable, dtype=dtype, regularizer=regularizer, aggregation=aggregation)
        self._initial = self._held

    @property
    def is_initial(self) -> bool:
        """Whether it still has the value that was drawn for it."""
        return self._held is self._initial and self.home is None

    def initialize(self, seed: int, position: int) -> None:
        """Draw the value anew.

        Args:
            seed: the model's.
            position: among the model's weights.
        """
        self._drawn_with = seed, position
        self.assign(_drawn(self.initializer, self.shape, seed, position, self.dtype))
        self._initial = self._held

    def set_dtype(self, dtype: npt.DTypeLike) -> None:
        """Convert it to another type; a value that is still the initial one is drawn in that type."""
        if self.dtype == np.dtype(dtype):
            return
        if self.is_initial:
            value = _drawn(self.initializer, self.shape, *self._drawn_with, dtype)
            self._held = self._initial = self._own(value)
        else:
            self.move(None)
            self._held = self._own(self._held.numpy().astype(dtype))


def _drawn(
    initializer: InitializerLike, shape: tuple[int, ...], seed: int, position: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    if isinstance(initializer, Initializer):
        return initializer.draw(shape, seed, position).astype(dtype)
    return np.asarray(initializer(shape, dtype=np.dtype(dtype).name), dtype)
