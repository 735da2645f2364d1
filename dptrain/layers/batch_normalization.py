"""BatchNormalization: every feature brought to mean 0 and variance 1 over the global batch, then scaled and shifted."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import initializers, regularizers
from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.params import ParamSpec

_INITIALIZER = str | dict[str, Any] | initializers.Initializer
_REGULARIZER = str | dict[str, Any] | regularizers.Regularizer | None


class BatchNormalization(Layer):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, for each feature, the last axis.

    In training mean and (biased) variance are those of the global batch, of all ranks together: two sums over the
    ranks in forward and one in backward, each of some numbers a feature, in float64. The variance is the mean of
    (x - mean)^2, which does not cancel. The moving averages, with which evaluation and prediction normalize, become
    moving * momentum + batch's * (1 - momentum), as in Keras. With `trainable` False they are used in training, too,
    and stay as they are.

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
        beta_constraint: only None.
        gamma_constraint: only None.
        renorm: only False.
        renorm_clipping: only None.
        renorm_momentum: of no effect without `renorm`.
        synchronized: of no effect: statistics are always those of the global batch.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    synchronizes_ranks = True

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: _INITIALIZER = "zeros",
        gamma_initializer: _INITIALIZER = "ones",
        moving_mean_initializer: _INITIALIZER = "zeros",
        moving_variance_initializer: _INITIALIZER = "ones",
        beta_regularizer: _REGULARIZER = None,
        gamma_regularizer: _REGULARIZER = None,
        beta_constraint: None = None,
        gamma_constraint: None = None,
        renorm: bool = False,
        renorm_clipping: None = None,
        renorm_momentum: float = 0.99,
        synchronized: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.refuse(beta_constraint=beta_constraint, gamma_constraint=gamma_constraint)
        self.refuse(renorm=renorm or None, renorm_clipping=renorm_clipping)
        if not 0 <= momentum <= 1 or not epsilon >= 0:
            raise ConfigError(
                f"expected 0 <= momentum <= 1 and epsilon >= 0. Received: momentum={momentum}, epsilon={epsilon}"
            )
        self.axis = axis
        self.momentum, self.epsilon = float(momentum), float(epsilon)
        self.center, self.scale = bool(center), bool(scale)
        self.beta_initializer = initializers.get(beta_initializer)
        self.gamma_initializer = initializers.get(gamma_initializer)
        self.moving_mean_initializer = initializers.get(moving_mean_initializer)
        self.moving_variance_initializer = initializers.get(moving_variance_initializer)
        self.beta_regularizer = regularizers.get(beta_regularizer)
        self.gamma_regularizer = regularizers.get(gamma_regularizer)
        self.renorm_momentum, self.synchronized = float(renorm_momentum), bool(synchronized)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        if self.axis not in (-1, len(input_shape)):
            raise ConfigError(f"not supported: axis = {self.axis} of layer {self.name!r}; expected -1, the last axis")
        return input_shape

    def param_specs(self, input_shape: tuple[int, ...]) -> list[ParamSpec]:
        """Return gamma, beta, moving mean and moving variance, (features,) each."""
        shape = (input_shape[-1],)
        gamma = ParamSpec("gamma", shape, self.gamma_initializer, regularizer=self.gamma_regularizer)
        beta = ParamSpec("beta", shape, self.beta_initializer, regularizer=self.beta_regularizer)
        return [
            *([gamma] if self.scale else []),
            *([beta] if self.center else []),
            ParamSpec("moving_mean", shape, self.moving_mean_initializer, trainable=False),
            ParamSpec("moving_variance", shape, self.moving_variance_initializer, trainable=False),
        ]

    def fixed_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike | None]]:
        """Keep the batch's statistics, and what is summed over the ranks."""
        F = input_shape[-1]
        return {
            "mean": ((F,), None),
            "variance": ((F,), None),
            "totals": ((F + 1,), np.float64),
            "squares": ((F,), np.float64),
            "gradient_sums": ((2 * F,), np.float64),
        }

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y; in training also the batch's statistics and the moving averages."""
        params = buffers.params
        x_BF, y_BF = _rows(buffers.x), _rows(buffers.y)
        mean_F, variance_F = params["moving_mean"], params["moving_variance"]
        if context.training and self.trainable:
            fixed = buffers.fixed
            B, F = x_BF.shape
            totals_F1, squares_F = fixed["totals"], fixed["squares"]
            ops.batch_sums(x_BF, totals_F1[:F])
            ops.fill(totals_F1[F:], B)
            context.reduce(totals_F1)
            ops.batch_squares(x_BF, totals_F1, squares_F)
            context.reduce(squares_F)
            moving = mean_F, variance_F
            mean_F, variance_F = fixed["mean"], fixed["variance"]
            ops.batch_statistics(totals_F1, squares_F, self.momentum, *moving, mean_F, variance_F)
        ops.batch_normalize(x_BF, mean_F, variance_F, params.get("gamma"), params.get("beta"), self.epsilon, y_BF)

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write dgamma, dbeta and dx; in training dx knows that mean and variance depend on every x."""
        params, grads, fixed = buffers.params, buffers.grads, buffers.fixed
        x_BF, dy_BF = _rows(buffers.x), _rows(buffers.dy)
        by_batch = context.training and self.trainable
        if by_batch:
            mean_F, variance_F = fixed["mean"], fixed["variance"]
        else:
            mean_F, variance_F = params["moving_mean"], params["moving_variance"]
        sums_2F = fixed["gradient_sums"]
        if grads or by_batch:
            ops.batch_gradient_sums(
                *(x_BF, dy_BF, mean_F, variance_F, self.epsilon, sums_2F),
                *(grads.get("gamma"), grads.get("beta")),
            )
        if buffers.dx is None:
            return
        if by_batch:
            context.reduce(sums_2F)
        sums, totals = (sums_2F, fixed["totals"]) if by_batch else (None, None)
        gamma_F, dx_BF = params.get("gamma"), _rows(buffers.dx)
        ops.batch_normalize_backward(x_BF, dy_BF, mean_F, variance_F, gamma_F, self.epsilon, sums, totals, dx_BF)

    def own_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "axis": self.axis,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
            "beta_initializer": initializers.serialize(self.beta_initializer),
            "gamma_initializer": initializers.serialize(self.gamma_initializer),
            "moving_mean_initializer": initializers.serialize(self.moving_mean_initializer),
            "moving_variance_initializer": initializers.serialize(self.moving_variance_initializer),
            "beta_regularizer": regularizers.serialize(self.beta_regularizer),
            "gamma_regularizer": regularizers.serialize(self.gamma_regularizer),
            "beta_constraint": None,
            "gamma_constraint": None,
            "synchronized": self.synchronized,
            "renorm": False,
            "renorm_clipping": None,
            "renorm_momentum": self.renorm_momentum,
        }


def _rows(buffer: Buffer) -> Buffer:
    """Return a buffer with all axes but the last as one."""
    return buffer.reshape(-1, buffer.shape[-1])
