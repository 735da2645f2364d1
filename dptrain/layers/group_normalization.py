"""Normalization within a sample: of groups of channels, by the root of a mean square, to length 1."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import axis_number, axis_numbers
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.normalization import AffineNormalization
from dptrain.ops.elementwise import in_float32
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor


class GroupNormalization(AffineNormalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, of each sample and each group of channels.

    Source: Y. Wu and K. He, "Group normalization", ECCV 2018.

    Args:
        groups: a divisor of the number of channels; -1 for a group per channel.
        axis: of the channels.
        epsilon: added to the variance.
        center: whether there is a beta.
        scale: whether there is a gamma.
        beta_initializer: name or initializer of beta.
        gamma_initializer: name or initializer of gamma.
        beta_regularizer: name or regularizer of beta.
        gamma_regularizer: name or regularizer of gamma.
        beta_constraint: name or constraint of beta.
        gamma_constraint: name or constraint of gamma.
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: an argument is out of range or unknown, or the channels do not fall into so many groups.
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

    Source: B. Zhang and R. Sennrich, "Root mean square layer normalization", NeurIPS 2019.

    Args:
        axis: one, or several; the scale has their lengths and is broadcast along the last axes.
        epsilon: added to the mean.
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: there are no such axes, or they have other lengths than the last ones.
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
    """y = x / |x|, vectors along axes of length 1.

    Args:
        axis: one, or several.
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: no axes.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, axis: int | Sequence[int] = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis_numbers(axis)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input normalized."""
        return ops.normalize(self._floating(inputs), self.axis, epsilon=1e-12)
