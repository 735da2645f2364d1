"""Initializer: base class of initial values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import random
from dptrain.random import Purpose, default_seed, next_position, own_seed, stream
from dptrain.registry.serialization import Configurable

Values = npt.NDArray[np.float64]


class Initializer(Configurable):
    """Draws a weight's initial values. A subclass has `__call__(shape, dtype=None)`, as in Keras."""

    _position: int | None = None  # of calls outside models

    def __call__(
        self,
        shape: Sequence[int],
        seed: int | None = None,
        position: int | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> npt.NDArray[Any]:
        """Return the values, a function of (shape, seed, position) alone.

        Args:
            shape: the weight's dimensions.
            seed: the model's; by default that of `dptrain.utils.set_random_seed`.
            position: the weight's in the model, so that equal shapes get different values; by default 0 with a seed,
                and else one that belongs to this initializer alone.
            dtype: of the values; float64 by default.
        """
        if seed is None and position is None:
            position = self._position = next_position() if self._position is None else self._position
        values = self._draw(tuple(shape), default_seed() if seed is None else seed, position or 0)
        return values if dtype is None else values.astype(dtype)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the values in float64; see `__call__`."""
        if type(self).__call__ is Initializer.__call__:
            raise NotImplementedError(f"{type(self).__name__} has no `__call__`")
        return np.asarray(self(shape), np.float64)

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; none for a subclass without its own `get_config`."""
        return {}


class RandomInitializer(Initializer):
    """An initializer that draws random numbers.

    `seed` None takes the model's; with a `SeedGenerator` each call draws other values. As in Keras, two initializers
    with one integer give equal values to equal shapes.
    Arguments out of range raise ConfigError, here and in subclasses.
    """

    def __init__(self, seed: Any = None) -> None:
        if isinstance(seed, Mapping) and seed.get("class_name") == "SeedGenerator":
            generators: Any = random.SeedGenerator  # type: ignore[attr-defined]  # found when it is asked for
            seed = generators.from_config(seed.get("config") or {})
        self.seed: Any = seed if isinstance(seed, Configurable) else own_seed(seed)

    def _numbers(self, seed: int, position: int) -> np.random.Generator:
        """Return the random stream of the weight at a position of a model with that seed."""
        if self.seed is None:
            return stream(seed, Purpose.INITIALIZE, position)
        if isinstance(self.seed, Configurable):
            generator: Any = self.seed
            return stream(generator.seed, Purpose.INITIALIZE, generator._next_count(), 2)
        return stream(self.seed, Purpose.INITIALIZE, 0, 1)  # the 1 avoids the models' streams


def truncated_normal(numbers: np.random.Generator, shape: tuple[int, ...]) -> Values:
    """Return standard normal numbers; those beyond 2 are redrawn."""
    values = numbers.standard_normal(shape)
    while True:
        beyond = np.abs(values) > 2
        count = np.count_nonzero(beyond)
        if count == 0:
            return values
        values[beyond] = numbers.standard_normal(count)
