"""Initial values that are not random."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from dptrain.errors import ConfigError
from dptrain.initializers.base import Initializer, Values


class Zeros(Initializer):
    """All 0."""

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        return np.zeros(shape)

    def _get_config(self) -> dict[str, Any]:
        return {}


class Ones(Initializer):
    """All 1."""

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        return np.ones(shape)

    def _get_config(self) -> dict[str, Any]:
        return {}


class Constant(Initializer):
    """All the same value: a number, or an array that broadcasts to the parameter."""

    _only_shape: tuple[int, ...] | None = None  # of the only parameters that it serves

    def __init__(self, value: Any = 0.0) -> None:
        self.value: Any = float(value) if np.ndim(value) == 0 else np.asarray(value)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the value everywhere; ConfigError for an array of another shape."""
        if self._only_shape is not None and self._only_shape != tuple(shape):
            raise ConfigError(
                f"Expected `shape` to be {self._only_shape} for direct tensor as initializer. Received shape={shape}"
            )
        try:
            return np.broadcast_to(self.value, shape).astype(np.float64)
        except ValueError:
            raise ConfigError(
                f"initializer Constant: a value of shape {np.shape(self.value)}; expected one that can be broadcast to "
                f"{shape}"
            ) from None

    def _get_config(self) -> dict[str, Any]:
        if isinstance(self.value, float):
            return {"value": self.value}
        description = {"value": self.value.tolist(), "dtype": self.value.dtype.name}
        return {"value": {"class_name": "__numpy__", "config": description}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the initializer from a `get_config`."""
        value = config.get("value", 0.0)
        if isinstance(value, Mapping):
            description = value.get("config", {})
            value = np.asarray(description.get("value"), np.dtype(description.get("dtype", "float64")))
        return cls(value)


def of_tensor(tensor: Any) -> Constant:
    """Return the initializer that gives a tensor, or an array, to parameters of its shape."""
    initializer = Constant(np.asarray(tensor))
    initializer._only_shape = np.shape(tensor)
    return initializer


class Identity(Initializer):
    """The identity matrix times `gain`; in a non-square matrix, ones on the main diagonal."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = float(gain)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return gain * identity; ConfigError if the parameter is not a matrix."""
        if len(shape) != 2:
            raise ConfigError(
                "Identity matrix initializer can only be used for 2D matrices. "
                f"Received: shape={shape} of rank {len(shape)}."
            )
        return self.gain * np.eye(*shape)

    def _get_config(self) -> dict[str, Any]:
        return {"gain": self.gain}
