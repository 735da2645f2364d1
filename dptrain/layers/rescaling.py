"""Rescaling: a fixed affine map, usually of pixels."""

from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor


class Rescaling(Layer):
    """y = x * scale + offset.

    Args:
        scale: factor, such as 1 / 255.
        offset: added after scaling.
        options: as `Layer`.

    Raises:
        ConfigError: scale or offset is not one number.
    """

    def __init__(self, scale: float, offset: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(scale, float | int) or not isinstance(offset, float | int):
            raise ConfigError(f"not supported: Rescaling({scale!r}, {offset!r}); expected one number each")
        self.scale, self.offset = float(scale), float(offset)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input scaled, as floating-point numbers."""
        x = self._floating(inputs)
        return x * self.scale + self.offset
