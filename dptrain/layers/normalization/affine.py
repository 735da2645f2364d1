"""Base of normalizations: gamma and beta."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import constraints, initializers, ops, regularizers
from dptrain.layers.base import ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.program.tensor import Tensor, Variable
from dptrain.runtime.types import is_floating, is_narrow


class AffineNormalization(Layer):
    """Scales and shifts normalized features by gamma and beta; takes the arguments of `BatchNormalization`."""

    _passes_masks = True

    def __init__(
        self,
        epsilon: float,
        center: bool,
        scale: bool,
        beta_initializer: InitializerArgument,
        gamma_initializer: InitializerArgument,
        beta_regularizer: RegularizerArgument,
        gamma_regularizer: RegularizerArgument,
        beta_constraint: ConstraintArgument,
        gamma_constraint: ConstraintArgument,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.epsilon, self.center, self.scale = float(epsilon), bool(center), bool(scale)
        self.beta_initializer = initializers.get(beta_initializer)
        self.gamma_initializer = initializers.get(gamma_initializer)
        self.beta_regularizer = regularizers.get(beta_regularizer)
        self.gamma_regularizer = regularizers.get(gamma_regularizer)
        self.beta_constraint = constraints.get(beta_constraint)
        self.gamma_constraint = constraints.get(gamma_constraint)

    def _make_weights(self, shape: Sequence[int | None], scale: bool | None = None, center: bool | None = None) -> None:
        """Make gamma and beta, by default as the arguments say."""
        self.gamma: Variable | None = None
        self.beta: Variable | None = None
        if self.scale if scale is None else scale:
            self.gamma = self.add_weight(
                shape,
                self.gamma_initializer,
                regularizer=self.gamma_regularizer,
                constraint=self.gamma_constraint,
                autocast=False,
                name="gamma",
            )
        if self.center if center is None else center:
            self.beta = self.add_weight(
                shape,
                self.beta_initializer,
                regularizer=self.beta_regularizer,
                constraint=self.beta_constraint,
                autocast=False,
                name="beta",
            )

    def _normalize_wide(self, normalize: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Normalize before rounding to half precision, whose range may be too small."""
        x = inputs if is_floating(inputs.dtype) else ops.cast(inputs, self._data_dtype)
        wide = x if is_narrow(x.dtype) else ops.cast(x, self._data_dtype)
        return ops.cast(normalize(wide), self.compute_dtype)
