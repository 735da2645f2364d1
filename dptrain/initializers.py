"""Initial values of parameters, as in Keras."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.random import Purpose, stream
from dptrain.registry import lookup


class Initializer(ABC):
    """Draws a parameter's initial values."""

    @abstractmethod
    def __call__(self, shape: tuple[int, ...], seed: int, position: int) -> npt.NDArray[np.float64]:
        """Return the values, float64, a function of (shape, seed, position) alone.

        Args:
            shape: the parameter's dimensions.
            seed: the run's seed.
            position: the parameter's place in the model, so that equal shapes get different values.
        """


class Zeros(Initializer):
    """All zero."""

    def __call__(self, shape: tuple[int, ...], seed: int, position: int) -> npt.NDArray[np.float64]:
        """Return zeros."""
        return np.zeros(shape)


class GlorotUniform(Initializer):
    """Uniform on [-limit, limit) with limit = sqrt(6 / (fan_in + fan_out)), for kernels of shape (in, out).

    Source: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010, equation 16.
    """

    def __call__(self, shape: tuple[int, ...], seed: int, position: int) -> npt.NDArray[np.float64]:
        """Return the draw."""
        fan_in, fan_out = shape
        limit = np.sqrt(6.0 / (fan_in + fan_out))
        return stream(seed, Purpose.INITIALIZE, position).uniform(-limit, limit, shape)


# Names as Keras accepts them; serialisation reads this table.
INITIALIZERS: dict[str, type[Initializer]] = {"zeros": Zeros, "glorot_uniform": GlorotUniform}


def get(identifier: str | Initializer) -> Initializer:
    """Return the initializer of that name, or the one given.

    Raises:
        ConfigError: no initializer has that name.
    """
    if isinstance(identifier, Initializer):
        return identifier
    return lookup("initializer", identifier, INITIALIZERS)()


def config_name(initializer: Initializer) -> str:
    """Return the name under which `get` finds this initializer."""
    return next(name for name, cls in INITIALIZERS.items() if type(initializer) is cls)
