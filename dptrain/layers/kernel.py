"""What Dense and the convolutions have in common: a kernel, a bias and an activation."""

from typing import Any

from dptrain import constraints, initializers, regularizers
from dptrain.layers.arguments import ActivationAttribute
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.program.tensor import Tensor, Variable


class KernelLayer(Layer):
    """A layer that is linear in its input, and what follows it; the arguments are those of `Dense`."""

    activation = ActivationAttribute()

    def __init__(
        self,
        activation: ActivationArgument,
        use_bias: bool,
        kernel_initializer: InitializerArgument,
        bias_initializer: InitializerArgument,
        kernel_regularizer: RegularizerArgument,
        bias_regularizer: RegularizerArgument,
        kernel_constraint: ConstraintArgument,
        bias_constraint: ConstraintArgument,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.activation, self.use_bias = activation, bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)

    def _make_weights(self, kernel_shape: tuple[int | None, ...], outputs: int) -> None:
        """Make kernel and bias."""
        self.kernel = self.add_weight(
            kernel_shape,
            self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            name="kernel",
        )
        self.bias: Variable | None = None
        if self.use_bias:
            self.bias = self.add_weight(
                (outputs,),
                self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                name="bias",
            )

    def _biased(self, y: Tensor) -> Tensor:
        """Return y with the bias, if there is one."""
        return y if self.bias is None else y + self.bias
