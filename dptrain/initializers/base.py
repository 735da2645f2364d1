"""What an initializer is."""

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.random import Purpose, own_seed, stream
from dptrain.registry.serialization import Configurable

Values = npt.NDArray[np.float64]


class Initializer(Configurable):
    """Draws a parameter's initial values."""

    @abstractmethod
    def __call__(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the values, float64, a function of (shape, seed, position) alone.

        Args:
            shape: the parameter's dimensions.
            seed: the run's seed.
            position: the parameter's place in the model, so that equal shapes get different values.
        """


class RandomInitializer(Initializer):
    """An initializer that draws random numbers.

    Args:
        seed: None for the run's. As in Keras, two initializers of one seed give equal values to equal shapes.

    Raises:
        ConfigError: the seed is out of range.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = own_seed(seed)

    def numbers(self, seed: int, position: int) -> np.random.Generator:
        """Return the stream of random numbers of the parameter at a position of a run with that seed."""
        if self.seed is None:
            return stream(seed, Purpose.INITIALIZE, position)
        return stream(self.seed, Purpose.INITIALIZE, 0, 1)  # the 1 keeps clear of the runs' own streams


def truncated_normal(numbers: np.random.Generator, shape: tuple[int, ...]) -> Values:
    """Return standard normal numbers, those beyond 2 drawn again."""
    values = numbers.standard_normal(shape)
    while True:
        beyond = np.abs(values) > 2
        count = np.count_nonzero(beyond)
        if count == 0:
            return values
        values[beyond] = numbers.standard_normal(count)
