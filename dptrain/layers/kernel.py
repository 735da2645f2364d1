"""Bases of Dense and convolutions: kernel, bias and activation."""

from typing import Any

from dptrain import constraints, initializers, regularizers
from dptrain.layers.arguments import ActivationAttribute
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.program.tensor import Tensor, Variable


class BiasLayer(Layer):
    """Adds a bias and applies an activation; takes the arguments of `Dense`."""

    activation = ActivationAttribute()

    def __init__(
        self,
        activation: ActivationArgument,
        use_bias: bool,
        bias_initializer: InitializerArgument,
        bias_regularizer: RegularizerArgument,
        bias_constraint: ConstraintArgument,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.activation, self.use_bias = activation, bool(use_bias)
        self.bias_initializer = initializers.get(bias_initializer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.bias_constraint = constraints.get(bias_constraint)

    def _make_bias(self, shape: tuple[int | None, ...]) -> None:
        self.bias: Variable | None = None
        if self.use_bias:
            self.bias = self.add_weight(
                shape,
                self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                name="bias",
            )

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


class KernelLayer(BiasLayer):
    """A linear map with a kernel, then bias and activation; takes the arguments of `Dense`."""

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
        super().__init__(activation, use_bias, bias_initializer, bias_regularizer, bias_constraint, **options)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)

    @property
    def kernel(self) -> Any:
        """The kernel; AttributeError before the layer is built."""
        if "_kernel" not in vars(self):
            raise AttributeError("You must build the layer before accessing `kernel`.")
        return self._kernel

    @kernel.setter
    def kernel(self, value: Any) -> None:
        self._kernel = value

    def _make_weights(self, kernel_shape: tuple[int | None, ...], bias_shape: tuple[int | None, ...]) -> None:
        self._kernel = self.add_weight(
            kernel_shape,
            self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            name="kernel",
        )
        self._make_bias(bias_shape)
