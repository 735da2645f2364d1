"""Dense: every output sees every input."""

from typing import Any

from dptrain import activations, initializers, regularizers
from dptrain.backend.base import INPUT_ACTIVATIONS, Backend, Buffer, flat_features
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.params import ParamSpec

_INITIALIZER = str | dict[str, Any] | initializers.Initializer
_REGULARIZER = str | dict[str, Any] | regularizers.Regularizer | None


class Dense(Layer):
    """y = activation(x @ kernel + bias), x of shape (rows, inputs), kernel (inputs, units), bias (units,).

    Args:
        units: outputs, at least 1.
        activation: name or object of `dptrain.activations`, or None for "linear".
        use_bias: whether there is a bias.
        kernel_initializer: name or initializer of the kernel.
        bias_initializer: name or initializer of the bias.
        kernel_regularizer: name or regularizer of the kernel.
        bias_regularizer: name or regularizer of the bias.
        activity_regularizer: only None, as the arguments that follow.
        kernel_constraint: only None.
        bias_constraint: only None.
        lora_rank: only None.
        lora_alpha: only None.
        quantization_config: only None.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    def __init__(
        self,
        units: int,
        activation: str | activations.Activation | None = None,
        use_bias: bool = True,
        kernel_initializer: _INITIALIZER = "glorot_uniform",
        bias_initializer: _INITIALIZER = "zeros",
        kernel_regularizer: _REGULARIZER = None,
        bias_regularizer: _REGULARIZER = None,
        activity_regularizer: None = None,
        kernel_constraint: None = None,
        bias_constraint: None = None,
        lora_rank: None = None,
        lora_alpha: None = None,
        quantization_config: None = None,
        **options: Any,
    ) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **options)
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise ConfigError(
                f"Received an invalid value for `units`, expected a positive integer. Received: units={units}"
            )
        self.refuse(kernel_constraint=kernel_constraint, bias_constraint=bias_constraint)
        self.refuse(lora_rank=lora_rank, lora_alpha=lora_alpha, quantization_config=quantization_config)
        self.units = units
        self.activation = activations.get(activation).name
        self.use_bias = bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (units,); the input must be flat."""
        if len(input_shape) != 1:
            raise ConfigError(
                f"layer {self.name!r} takes flat samples, found shape {input_shape}: put a Flatten before it"
            )
        return (self.units,)

    def param_specs(self, input_shape: tuple[int, ...]) -> list[ParamSpec]:
        """Return kernel (inputs, units) and bias (units,)."""
        shape = (flat_features(input_shape), self.units)
        kernel = ParamSpec("kernel", shape, self.kernel_initializer, regularizer=self.kernel_regularizer)
        bias = ParamSpec("bias", (self.units,), self.bias_initializer, regularizer=self.bias_regularizer)
        return [kernel, bias] if self.use_bias else [kernel]

    def scratch_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Keep the activation's input where its derivative is no function of the output."""
        return {"preactivation": (self.units,)} if self.activation in INPUT_ACTIVATIONS else {}

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """One fused op: product, bias, activation; or two, where the activation's input is kept."""
        params = buffers.params
        kept = buffers.scratch.get("preactivation")
        if kept is None:
            ops.dense_forward(buffers.x, params["kernel"], params.get("bias"), self.activation, buffers.y)
        else:
            ops.dense_forward(buffers.x, params["kernel"], params.get("bias"), "linear", kept)
            ops.activation_forward(kept, self.activation, buffers.y)

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """One fused op: the activation's gradient, dkernel, dbias and dx."""
        grads: dict[str, Buffer] = buffers.grads
        ops.dense_backward(
            buffers.x,
            buffers.params["kernel"],
            buffers.scratch.get("preactivation", buffers.y),
            buffers.dy,
            self.activation,
            grads.get("kernel"),
            grads.get("bias"),
            buffers.dx,
        )

    def own_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "units": self.units,
            "activation": self.activation,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "kernel_regularizer": regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": regularizers.serialize(self.bias_regularizer),
            "kernel_constraint": None,
            "bias_constraint": None,
            "quantization_config": None,
        }

    @property
    def final_activation(self) -> str:
        """The layer's activation."""
        return self.activation

    def without_activation(self) -> "Layer":
        """Return the layer that computes x @ kernel + bias alone."""
        same = self.copied()
        assert isinstance(same, Dense)
        same.activation = "linear"
        return same
