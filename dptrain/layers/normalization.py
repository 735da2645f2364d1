"""Normalization: features brought to mean 0 and variance 1, over the global batch or within a sample."""

from collections.abc import Sequence
from typing import Any

from dptrain import constraints, initializers, ops, regularizers
from dptrain.errors import ConfigError
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.layers.input_spec import InputSpec
from dptrain.ops.elementwise import in_float32
from dptrain.program.tensor import Tensor, Variable


class _Normalization(Layer):
    """What scales and shifts normalized features by gamma and beta; the arguments are those of `BatchNormalization`."""

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

    def _make_weights(self, shape: Sequence[int | None]) -> None:
        """Make gamma and beta, where there are to be any."""
        self.gamma: Variable | None = None
        self.beta: Variable | None = None
        if self.scale:
            self.gamma = self.add_weight(
                shape,
                self.gamma_initializer,
                regularizer=self.gamma_regularizer,
                constraint=self.gamma_constraint,
                autocast=False,
                name="gamma",
            )
        if self.center:
            self.beta = self.add_weight(
                shape,
                self.beta_initializer,
                regularizer=self.beta_regularizer,
                constraint=self.beta_constraint,
                autocast=False,
                name="beta",
            )


class BatchNormalization(_Normalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, for each feature, the last axis.

    In training mean and (biased) variance are those of the global batch, of all ranks together, and the moving averages
    become moving * momentum + batch's * (1 - momentum), as in Keras. Evaluation and prediction normalize with the
    moving averages. With `trainable` False they are used in training, too, and stay as they are.

    Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015; over all ranks, as "synchronized" in Keras.

    Args:
        axis: only the last.
        momentum: of the moving averages.
        epsilon: added to the variance.
        center: whether there is a beta.
        scale: whether there is a gamma.
        beta_initializer: name or initializer, as the three that follow.
        gamma_initializer: of gamma.
        moving_mean_initializer: of the moving mean.
        moving_variance_initializer: of the moving variance.
        beta_regularizer: name or regularizer of beta.
        gamma_regularizer: name or regularizer of gamma.
        beta_constraint: name or constraint of beta.
        gamma_constraint: name or constraint of gamma.
        renorm: only False.
        renorm_clipping: only None.
        renorm_momentum: of no effect without `renorm`.
        synchronized: of no effect: statistics are always those of the global batch.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: InitializerArgument = "zeros",
        gamma_initializer: InitializerArgument = "ones",
        moving_mean_initializer: InitializerArgument = "zeros",
        moving_variance_initializer: InitializerArgument = "ones",
        beta_regularizer: RegularizerArgument = None,
        gamma_regularizer: RegularizerArgument = None,
        beta_constraint: ConstraintArgument = None,
        gamma_constraint: ConstraintArgument = None,
        renorm: bool = False,
        renorm_clipping: None = None,
        renorm_momentum: float = 0.99,
        synchronized: bool = False,
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
        self.refuse(renorm=renorm or None, renorm_clipping=renorm_clipping)
        if not 0 <= momentum <= 1 or not epsilon >= 0:
            raise ConfigError(
                f"expected 0 <= momentum <= 1 and epsilon >= 0. Received: momentum={momentum}, epsilon={epsilon}"
            )
        self.axis, self.renorm, self.momentum = axis, False, float(momentum)
        self.moving_mean_initializer = initializers.get(moving_mean_initializer)
        self.moving_variance_initializer = initializers.get(moving_variance_initializer)
        self.renorm_momentum, self.synchronized = float(renorm_momentum), bool(synchronized)

    def build(self, input_shape: BuildShape) -> None:
        """Make gamma, beta, moving mean and moving variance, (features,) each."""
        if self.axis not in (-1, len(input_shape) - 1):
            raise ConfigError(f"not supported: axis = {self.axis} of layer {self.label!r}; expected -1, the last axis")
        shape = (input_shape[-1],)
        self._make_weights(shape)
        own: dict[str, Any] = {"trainable": False, "autocast": False}
        self.moving_mean = self.add_weight(shape, self.moving_mean_initializer, name="moving_mean", **own)
        self.moving_variance = self.add_weight(shape, self.moving_variance_initializer, name="moving_variance", **own)
        self.input_spec = InputSpec(ndim=len(input_shape), axes={-1: shape[0]})

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Return the input normalized; in training, move the averages."""
        return in_float32(self._normalized)(self._floating(inputs), training)  # as Keras

    def _normalized(self, x: Tensor, training: bool | None) -> Tensor:
        mean, variance = self.moving_mean.value, self.moving_variance.value
        centered = x - mean
        if training and self.trainable:
            over = tuple(range(x.ndim - 1))
            mean = ops.mean(x, over)
            centered = x - mean
            variance = ops.mean(ops.square(centered), over)
            for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
                moving.assign(moving * self.momentum + ops.stop_gradient(batch) * (1.0 - self.momentum))
        factor = 1.0 / ops.sqrt(variance + self.epsilon)
        y = centered * (factor if self.gamma is None else factor * self.gamma)
        return y if self.beta is None else y + self.beta


class LayerNormalization(_Normalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, mean and variance of each sample over its last axes.

    Source: J. Ba, J. Kiros and G. Hinton, "Layer normalization", 2016.

    Args:
        axis: the last, or several, which are the last ones.
        epsilon: added to the variance.
        center: whether there is a beta.
        scale: whether there is a gamma.
        beta_initializer: name or initializer of beta.
        gamma_initializer: name or initializer of gamma.
        beta_regularizer: name or regularizer of beta.
        gamma_regularizer: name or regularizer of gamma.
        beta_constraint: name or constraint of beta.
        gamma_constraint: name or constraint of gamma.
        rms_scaling: only False.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
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
        self.refuse(rms_scaling=rms_scaling or None)
        self.rms_scaling = False
        if not epsilon >= 0:
            raise ConfigError(f"expected epsilon >= 0. Received: epsilon={epsilon}")
        self.axis = axis if isinstance(axis, int) else list(axis)

    def build(self, input_shape: BuildShape) -> None:
        """Make gamma and beta, of the lengths of the axes."""
        rank = len(input_shape)
        given = [self.axis] if isinstance(self.axis, int) else self.axis
        self._axes = sorted(axis % rank for axis in given)
        if self._axes != list(range(rank - len(given), rank)) or 0 in self._axes:
            raise ConfigError(f"not supported: axis = {self.axis} of layer {self.label!r}; expected the last axes")
        shape = [input_shape[axis] for axis in self._axes]
        self._make_weights(shape)
        self.input_spec = InputSpec(ndim=rank)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input normalized."""
        return ops.layer_normalization(self._floating(inputs), self.gamma, self.beta, self._axes, self.epsilon)
