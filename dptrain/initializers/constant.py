"""Initial values that are not random."""

from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.initializers.base import Initializer, Values


class Zeros(Initializer):
    """All zero."""

    def draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return zeros."""
        return np.zeros(shape)

    def _get_config(self) -> dict[str, Any]:
        """No arguments."""
        return {}


class Ones(Initializer):
    """All one."""

    def draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return ones."""
        return np.ones(shape)

    def _get_config(self) -> dict[str, Any]:
        """No arguments."""
        return {}


class Constant(Initializer):
    """All the same value.

    Args:
        value: one number.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = float(value)

    def draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the value everywhere."""
        return np.full(shape, self.value)

    def _get_config(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}


class Identity(Initializer):
    """The identity matrix times a factor; of a matrix that is not square, ones on the main diagonal.

    Args:
        gain: the factor.
    """

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = float(gain)

    def draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return gain * identity.

        Raises:
            ConfigError: the parameter is no matrix.
        """
        if len(shape) != 2:
            raise ConfigError(
                "Identity matrix initializer can only be used for 2D matrices. "
                f"Received: shape={shape} of rank {len(shape)}."
            )
        return self.gain * np.eye(*shape)

    def _get_config(self) -> dict[str, Any]:
        """Return the gain."""
        return {"gain": self.gain}
