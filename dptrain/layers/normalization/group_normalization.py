"""Normalization within a sample: by groups of channels, by the root mean square, to unit length."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import axis_number, axis_numbers
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.normalization.affine import AffineNormalization
from dptrain.ops.elementwise import in_float32
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor


class GroupNormalization(AffineNormalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, of each sample and each group of channels.

    `groups` divides the number of channels, those along `axis`; -1 is a group per channel. For other arguments see
    `BatchNormalization`.

    Source: Y. Wu and K. He, "Group normalization", ECCV 2018.
    """

    def __init__(
        self,
        groups: int = 32,
        axis: int = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: InitializerArgument = "zeros",
        gamma_initializer: InitializerArgument = "ones",
        beta_regularizer: RegularizerArgument = None,
        gamma_regularizer: RegularizerArgument = None,
        beta_constraint: ConstraintArgument = None,
        gamma_constraint: ConstraintArgument = None,
        **options: Any,
    ) -> None:
        if not isinstance(groups, int) or (groups <= 0 and groups != -1):
            raise ConfigError(
                "Received an invalid value for argument `groups`, expected a positive integer (or `-1` for instance "
                f"normalization). Received: groups={groups}"
            )
        super().__init__(
            *(epsilon, center, scale, beta_initializer, gamma_initializer, beta_regularizer, gamma_regularizer),
            *(beta_constraint, gamma_constraint),
            **options,
        )
        self.groups, self.axis = groups, axis_number(axis)
        self.autocast = False

    def build(self, input_shape: BuildShape) -> None:
        """Make gamma and beta, of the number of channels."""
        (self._axis,) = normalized_axes(self.axis, len(input_shape))
        channels = input_shape[self._axis]
        if channels is None or not self._axis:
            raise ConfigError(
                f"Axis {self.axis} of input tensor should have a defined dimension but the layer received an input "
                f"with shape {input_shape}."
            )
        self._groups = channels if self.groups == -1 else self.groups
        if channels < self._groups:
            raise ConfigError(
                f"Number of groups ({self._groups}) cannot be more than the number of channels ({channels})."
            )
        if channels % self._groups:
            raise ConfigError(
                f"Number of groups ({self._groups}) must be a multiple of the number of channels ({channels})."
            )
        self._make_weights((channels,))
        self.input_spec = InputSpec(ndim=len(input_shape), axes={self._axis: channels})

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input normalized."""
        return self._normalize_wide(in_float32(self._normalized), inputs)  # as Keras

    def _normalized(self, x: Tensor) -> Tensor:
        before, behind = x.shape[: self._axis], x.shape[self._axis + 1 :]
        group_size = int(x.shape[self._axis]) // self._groups
        grouped = ops.reshape(x, (*before, self._groups, group_size, *behind))
        over = tuple(axis for axis in range(1, grouped.ndim) if axis != self._axis)
        centered = grouped - ops.mean(grouped, over, keepdims=True)
        variance = ops.mean(ops.square(centered), over, keepdims=True)
        along = (self._groups, group_size, *(1,) * len(behind))
        factor = 1.0 / ops.sqrt(variance + self.epsilon)
        y = centered * (factor if self.gamma is None else factor * ops.reshape(self.gamma, along))
        y = y if self.beta is None else y + ops.reshape(self.beta, along)
        return ops.reshape(y, x.shape)


class RMSNormalization(Layer):
    """y = scale * x / sqrt(mean of x^2 + epsilon), the mean over axes of each sample.

    `axis` is one or several; the scale has their lengths and is broadcast along the last axes.

    Source: B. Zhang and R. Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """

    def __init__(self, axis: int | Sequence[int] = -1, epsilon: float = 1e-6, **options: Any) -> None:
        super().__init__(**options)
        self.axis, self.epsilon = axis_numbers(axis), float(epsilon)

    def build(self, input_shape: BuildShape) -> None:
        """Make the scale."""
        axes = normalized_axes(self.axis, len(input_shape))
        self.scale = self.add_weight([input_shape[axis] for axis in axes], "ones", name="scale")

    def call(self, x: Tensor) -> Tensor:
        """Return the input normalized."""
        return ops.rms_normalization(self._floating(x), self.scale, self.axis, self.epsilon)


class UnitNormalization(Layer):
    """y = x / |x|: unit vectors along one axis or several."""

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, axis: int | Sequence[int] = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis_numbers(axis)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input normalized."""
        return ops.normalize(self._floating(inputs), self.axis, epsilon=1e-12)
