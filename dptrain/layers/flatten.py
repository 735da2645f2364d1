"""Flatten and Reshape: the same numbers in another shape."""

from collections.abc import Sequence
from typing import Any

from dptrain.backend.base import Backend, flat_features
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext


class View(Layer):
    """A layer that moves nothing."""

    is_view = True

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Nothing to do: y is x."""

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Nothing to do: dx is dy."""


class Flatten(View):
    """Reshapes (rows, a, b, ...) to (rows, a * b * ...).

    Args:
        data_format: only "channels_last", which None stands for.
        options: as `Layer`.

    Raises:
        ConfigError: another data format.
    """

    def __init__(self, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.refuse(data_format=None if data_format == "channels_last" else data_format)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (product of the dimensions,)."""
        return (flat_features(input_shape),)

    def own_config(self) -> dict[str, Any]:
        """Return the data format."""
        return {"data_format": "channels_last"}


class Reshape(View):
    """Reshapes (rows, ...) to (rows, *target_shape).

    Args:
        target_shape: one dimension may be -1, for what is left.
        options: as `Layer`.

    Raises:
        ConfigError: more than one dimension is unknown, or one is not a positive integer.
    """

    def __init__(self, target_shape: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.target_shape = tuple(target_shape)
        if any(isinstance(n, bool) or not isinstance(n, int) or (n < 1 and n != -1) for n in self.target_shape):
            raise ConfigError(
                f"`target_shape` must be positive integers, or -1 once. Received: target_shape={self.target_shape}"
            )
        if self.target_shape.count(-1) > 1:
            raise ConfigError(
                f"There must be at most one unknown dimension (-1) in target_shape. Received: {self.target_shape}."
            )

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the target with -1 filled in."""
        size = flat_features(input_shape)
        known = flat_features([n for n in self.target_shape if n != -1])
        shape = tuple(size // known if n == -1 else n for n in self.target_shape)
        if flat_features(shape) != size:
            raise ConfigError(
                f"layer {self.name!r}: the total size of the samples must be unchanged. "
                f"Received: input_shape={input_shape}, target_shape={self.target_shape}"
            )
        return shape

    def own_config(self) -> dict[str, Any]:
        """Return the target."""
        return {"target_shape": list(self.target_shape)}
