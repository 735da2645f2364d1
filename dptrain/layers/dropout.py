"""Dropout: in training, zeroes each element with a probability and scales the others up."""

from typing import Any

from dptrain.backend.base import Backend
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext


class Dropout(Layer):
    """y = x * mask in training, y = x otherwise; the mask is 0 with probability `rate`, else 1 / (1 - rate).

    Source: N. Srivastava et al., "Dropout", JMLR 15, 2014, scaled in training ("inverted"), as Keras. The mask is a
    function of (seed, step, place in the global batch): the same on any number of ranks.

    Args:
        rate: fraction of elements to drop, 0 to below 1.
        input_shape: shape of one sample, for the first layer of a model.
        name: unique in the model.

    Raises:
        ConfigError: the rate is out of range.
    """

    def __init__(self, rate: float, *, input_shape: tuple[int, ...] | None = None, name: str | None = None) -> None:
        super().__init__(input_shape=input_shape, name=name)
        if not 0 <= rate < 1:
            raise ConfigError(
                f"Invalid value received for argument `rate`. Expected 0 <= rate < 1. Received: rate={rate}"
            )
        self.rate = float(rate)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def scratch_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Keep the mask, of the input's shape."""
        return {"mask": input_shape}

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y, and in training the mask."""
        if not context.training or self.rate == 0:
            ops.copy(buffers.x, buffers.y)
            return
        mask = buffers.scratch["mask"]
        rows = mask.shape[0]
        ops.dropout_mask(
            self.rate, context.seed, context.step, buffers.position, context.first_row, mask.reshape(rows, -1)
        )
        ops.multiply(buffers.x, mask, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers) -> None:
        """Write dx = dy * mask."""
        if buffers.dx is None:
            return
        if self.rate == 0:
            ops.copy(buffers.dy, buffers.dx)
        else:
            ops.multiply(buffers.dy, buffers.scratch["mask"], buffers.dx)

    def config(self) -> dict[str, Any]:
        """Return the rate."""
        return {"rate": self.rate}
