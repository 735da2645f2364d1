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
from dptrain.layers.lora import LoraKernelLayer
from dptrain.program.tensor import Tensor


class Dense(LoraKernelLayer):
    """y = activation(x @ kernel + bias), x of shape (rows, ..., inputs), kernel (inputs, units), bias (units,).

    Args:
        units: outputs, at least 1.
        use_bias: whether to add a bias.
        lora_rank, lora_alpha: begin with `enable_lora(lora_rank, lora_alpha)`.
        quantization_config: must be None.
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
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
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
        self._set_lora(lora_rank, lora_alpha)
        self._refuse(quantization_config=quantization_config)
        self.input_spec = InputSpec(min_ndim=2)

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        inputs = input_shape[-1]
        self._make_weights((inputs, self.units), (self.units,))
        self._build_lora()
        self.input_spec = InputSpec(min_ndim=2, axes={-1: inputs})

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, ..., units)."""
        x = self._floating(inputs)
        flat = x if x.ndim == 2 else ops.reshape(x, (-1, x.shape[-1]))  # one product of matrices
        y = ops.matmul(flat, self._base)
        if (factors := self._factors) is not None:
            y = y + self._widened(ops.matmul(flat, ops.cast(factors[0], flat.dtype)), factors[1])
        y = self._add_bias(y)
        y = y if x.ndim == 2 else ops.reshape(y, (*x.shape[:-1], self.units))
        outputs: Tensor = self.activation(y)
        return outputs
