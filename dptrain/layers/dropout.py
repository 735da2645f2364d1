"""Dropout: in training, zeroes each element with a probability and scales the others up."""

from typing import Any

from dptrain.backend.base import Backend
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.random import own_seed


class Dropout(Layer):
    """y = x * mask in training, y = x otherwise; the mask is 0 with probability `rate`, else 1 / (1 - rate).

    Source: N. Srivastava et al., "Dropout", JMLR 15, 2014, scaled in training ("inverted"), as Keras. The mask is a
    function of (seed, step, place in the global batch): the same on any number of ranks.

    Args:
        rate: fraction of elements to drop, 0 to 1.
        noise_shape: only None.
        seed: of the masks; None for the run's.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    def __init__(self, rate: float, noise_shape: None = None, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= rate <= 1:
            raise ConfigError(
                "Invalid value received for argument `rate`. Expected a float value between 0 and 1. "
                f"Received: rate={rate}"
            )
        self.refuse(noise_shape=noise_shape)
        self.rate = float(rate)
        self.seed = own_seed(seed)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def scratch_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Keep the mask, of the input's shape."""
        return {"mask": input_shape} if 0 < self.rate < 1 else {}

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y, and in training the mask."""
        mask = buffers.scratch.get("mask")
        if context.training and mask is not None:
            rows = mask.shape[0]
            seed = context.seed if self.seed is None else self.seed
            ops.dropout_mask(self.rate, seed, context.step, buffers.position, context.first_row, mask.reshape(rows, -1))
            ops.multiply(buffers.x, mask, buffers.y)
        elif context.training and self.rate == 1:
            ops.fill(buffers.y, 0)
        else:
            ops.copy(buffers.x, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write dx = dy * mask."""
        if buffers.dx is None:
            return
        if self.rate == 0:
            ops.copy(buffers.dy, buffers.dx)
        elif self.rate == 1:
            ops.fill(buffers.dx, 0)
        else:
            ops.multiply(buffers.dy, buffers.scratch["mask"], buffers.dx)

    def own_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"rate": self.rate, "seed": self.seed, "noise_shape": None}
