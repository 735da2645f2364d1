"""Dense: every output sees every input."""

from typing import Any

from dptrain import initializers
from dptrain.backend.base import ACTIVATIONS, Backend, Buffer, flat_features
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.params import ParamSpec
from dptrain.registry import lookup


def activation_name(activation: str | None) -> str:
    """Return a known activation's name; None is "linear", as in Keras.

    Raises:
        ConfigError: the name is unknown.
    """
    return "linear" if activation is None else lookup("activation", activation, {name: name for name in ACTIVATIONS})


class Dense(Layer):
    """y = activation(x @ kernel + bias), x of shape (rows, inputs), kernel (inputs, units), bias (units,).

    Args:
        units: outputs, at least 1.
        activation: one of `dptrain.backend.base.ACTIVATIONS`, or None for "linear".
        use_bias: whether there is a bias.
        kernel_initializer: name or initializer of the kernel.
        bias_initializer: name or initializer of the bias.
        input_shape: shape of one sample, for the first layer of a model.
        name: unique in the model.

    Raises:
        ConfigError: an argument is out of range or unknown.
    """

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        use_bias: bool = True,
        kernel_initializer: str | initializers.Initializer = "glorot_uniform",
        bias_initializer: str | initializers.Initializer = "zeros",
        *,
        input_shape: tuple[int, ...] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(input_shape=input_shape, name=name)
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise ConfigError(
                f"Received an invalid value for `units`, expected a positive integer. Received: units={units}"
            )
        self.units = units
        self.activation = activation_name(activation)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (units,); the input must be flat."""
        if len(input_shape) != 1:
            raise ConfigError(
                f"layer {self.name!r} takes flat samples, found shape {input_shape}: put a Flatten before it"
            )
        return (self.units,)

    def param_specs(self, input_shape: tuple[int, ...]) -> list[ParamSpec]:
        """Return kernel (inputs, units) and bias (units,)."""
        kernel = ParamSpec("kernel", (flat_features(input_shape), self.units), self.kernel_initializer)
        bias = ParamSpec("bias", (self.units,), self.bias_initializer)
        return [kernel, bias] if self.use_bias else [kernel]

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """One fused op: product, bias, activation."""
        params = buffers.params
        ops.dense_forward(buffers.x, params["kernel"], params.get("bias"), self.activation, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers) -> None:
        """One fused op: the activation's gradient, dkernel, dbias and dx."""
        grads: dict[str, Buffer] = buffers.grads
        ops.dense_backward(
            buffers.x,
            buffers.params["kernel"],
            buffers.y,
            buffers.dy,
            self.activation,
            grads["kernel"],
            grads.get("bias"),
            buffers.dx,
        )

    def config(self) -> dict[str, Any]:
        """Return units, activation, use_bias and the initializers' names."""
        return {
            "units": self.units,
            "activation": self.activation,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.config_name(self.kernel_initializer),
            "bias_initializer": initializers.config_name(self.bias_initializer),
        }

    @property
    def final_activation(self) -> str:
        """The layer's activation."""
        return self.activation

    def without_activation(self) -> "Dense":
        """Return the layer that computes x @ kernel + bias alone."""
        return Dense(self.units, None, self.use_bias, self.kernel_initializer, self.bias_initializer, name=self.name)
