"""Flatten: the same numbers as one vector a sample."""

from typing import Any

from dptrain.backend.base import Backend, flat_features
from dptrain.layers.base import Layer, LayerBuffers, StepContext


class Flatten(Layer):
    """Reshapes (rows, a, b, ...) to (rows, a * b * ...) without moving anything."""

    is_view = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (product of the dimensions,)."""
        return (flat_features(input_shape),)

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Nothing to do: y is x."""

    def backward(self, ops: Backend, buffers: LayerBuffers) -> None:
        """Nothing to do: dx is dy."""

    def config(self) -> dict[str, Any]:
        """No arguments."""
        return {}
