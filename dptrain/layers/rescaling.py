"""Rescaling: a fixed affine map, usually of pixels."""

from typing import Any

from dptrain.backend.base import Backend
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext


class Rescaling(Layer):
    """y = x * scale + offset. As the first layer of a model it costs nothing: the batch op does it.

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
        self.scale = float(scale)
        self.offset = float(offset)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y = x * scale + offset."""
        ops.affine(buffers.x, self.scale, self.offset, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write dx = dy * scale."""
        if buffers.dx is not None:
            ops.affine(buffers.dy, self.scale, 0.0, buffers.dx)

    def own_config(self) -> dict[str, Any]:
        """Return scale and offset."""
        return {"scale": self.scale, "offset": self.offset}
