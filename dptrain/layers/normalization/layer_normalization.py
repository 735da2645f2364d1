"""Normalization to mean 0 and variance 1 within a sample."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import axis_numbers
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.normalization.affine import AffineNormalization
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor


class LayerNormalization(AffineNormalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, mean and variance of each sample over axes.

    `axis` is one or several; `rms_scaling` computes y = gamma * x / sqrt(variance + epsilon), unlike
    `RMSNormalization`. For other arguments see `BatchNormalization`.

    Source: J. Ba, J. Kiros and G. Hinton, "Layer normalization", 2016.
    """

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: InitializerArgument = "zeros",
        gamma_initializer: InitializerArgument = "ones",
        beta_regularizer: RegularizerArgument = None,
        gamma_regularizer: RegularizerArgument = None,
        beta_constraint: ConstraintArgument = None,
        gamma_constraint: ConstraintArgument = None,
        *,
        rms_scaling: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            epsilon,
            center,
            scale,
            beta_initializer,
            gamma_initializer,
            beta_regularizer,
            gamma_regularizer,
            beta_constraint,
            gamma_constraint,
            **options,
        )
        self.rms_scaling = bool(rms_scaling)
        if not epsilon >= 0:
            raise ConfigError(f"expected epsilon >= 0. Received: epsilon={epsilon}")
        self.axis = axis_numbers(axis)
        self.autocast = False

    def build(self, input_shape: BuildShape) -> None:
        """Make gamma and beta, of the lengths of the axes."""
        rank = len(input_shape)
        axis_list = [self.axis] if isinstance(self.axis, int) else self.axis
        axes = normalized_axes(axis_list, rank)
        if 0 in axes:
            raise ConfigError(
                f"axis = {self.axis} of layer {self._display_name!r}: expected axes other than the batch axis"
            )
        shape = [input_shape[axis] for axis in axes]
        self._make_weights(shape, self.scale or self.rms_scaling, self.center and not self.rms_scaling)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input normalized."""
        options = {"rms_scaling": True} if self.rms_scaling else {}
        weights = self.gamma, self.beta
        return self._normalize_wide(
            lambda x: ops.layer_normalization(x, *weights, self.axis, self.epsilon, **options), inputs
        )
