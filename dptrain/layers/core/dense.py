"""Dense: every output depends on every input."""

from typing import Any

from dptrain import ops
from dptrain.layers.arguments import positive
from dptrain.layers.base import (
    ActivationArgument,
    BuildShape,
    ConstraintArgument,
    InitializerArgument,
    RegularizerArgument,
)
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.kernel import KernelLayer
from dptrain.program.tensor import Tensor


class Dense(KernelLayer):
    """y = activation(x @ kernel + bias), x of shape (rows, ..., inputs), kernel (inputs, units), bias (units,).

    Args:
        units: outputs, at least 1.
        use_bias: whether to add a bias.
        lora_rank, lora_alpha, quantization_config: must be None.
    """

    _passes_masks = True
    _unwritten = ("lora_rank", "lora_alpha")

    def __init__(
        self,
        units: int,
        activation: ActivationArgument = None,
        use_bias: bool = True,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        lora_rank: None = None,
        lora_alpha: None = None,
        quantization_config: None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(kernel_constraint, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self.units = positive("units", units)
        self._refuse(lora_rank=lora_rank, lora_alpha=lora_alpha, quantization_config=quantization_config)
        self.input_spec = InputSpec(min_ndim=2)

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        inputs = input_shape[-1]
        self._make_weights((inputs, self.units), (self.units,))
        self.input_spec = InputSpec(min_ndim=2, axes={-1: inputs})

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, ..., units)."""
        x = self._floating(inputs)
        flat = x if x.ndim == 2 else ops.reshape(x, (-1, x.shape[-1]))  # one product of matrices
        y = self._add_bias(ops.matmul(flat, self.kernel))
        y = y if x.ndim == 2 else ops.reshape(y, (*x.shape[:-1], self.units))
        outputs: Tensor = self.activation(y)
        return outputs
