"""Activation: a function of each element (softmax: of each row)."""

from typing import Any

from dptrain.backend.base import Backend
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.layers.dense import activation_name


class Activation(Layer):
    """y = activation(x).

    Args:
        activation: one of `dptrain.backend.base.ACTIVATIONS`.
        input_shape: shape of one sample, for the first layer of a model.
        name: unique in the model.

    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(self, activation: str, *, input_shape: tuple[int, ...] | None = None, name: str | None = None) -> None:
        super().__init__(input_shape=input_shape, name=name)
        self.activation = activation_name(activation)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y = activation(x)."""
        ops.activation_forward(buffers.x, self.activation, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers) -> None:
        """Write dx from y and dy."""
        if buffers.dx is not None:
            ops.activation_backward(buffers.y, buffers.dy, self.activation, buffers.dx)

    def config(self) -> dict[str, Any]:
        """Return the activation's name."""
        return {"activation": self.activation}

    @property
    def final_activation(self) -> str:
        """The layer's activation."""
        return self.activation

    def without_activation(self) -> "Activation":
        """Return the identity."""
        return Activation("linear", name=self.name)
