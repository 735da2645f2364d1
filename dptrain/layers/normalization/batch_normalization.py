"""Normalization to mean 0 and variance 1 over the global batch."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain import initializers, ops
from dptrain.config import epsilon
from dptrain.errors import ConfigError
from dptrain.layers.arguments import axis_number
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.masks import require_mask
from dptrain.layers.normalization.affine import AffineNormalization
from dptrain.ops.elementwise import in_float32
from dptrain.program.shapes import normalized_axes, without_rows
from dptrain.program.tensor import Tensor, Variable


class BatchNormalization(AffineNormalization):
    """y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, for each feature, each index of an axis.

    In training mean and (biased) variance are those of the global batch, of all ranks together, and the moving averages
    become moving * momentum + batch's * (1 - momentum), as in Keras. Evaluation and prediction normalize with the
    moving averages. With `trainable` False so does training, and they stay as they are.

    With `renorm` y = gamma * ((x - mean) / sqrt(variance + epsilon) * r + d) + beta in training, where r and d, without
    gradients, replace the batch's mean and deviation by separate moving averages.

    Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015; over all ranks, like "synchronized" in Keras.
    S. Ioffe, "Batch renormalization", NeurIPS 2017.

    Args:
        axis: of the features.
        momentum: of the moving averages.
        epsilon: added to the variance.
        center, scale: whether there is a beta, and a gamma.
        renorm: whether to renormalize.
        renorm_clipping: limits of r and d: "rmin", "rmax" and "dmax", all optional.
        renorm_momentum: of the averages behind r and d.
        synchronized: has no effect: statistics are always those of the global batch.
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
        renorm_clipping: Mapping[str, float] | None = None,
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
        if not 0 <= momentum <= 1 or not epsilon >= 0:
            raise ConfigError(
                f"expected 0 <= momentum <= 1 and epsilon >= 0. Received: momentum={momentum}, epsilon={epsilon}"
            )
        self.axis, self.renorm, self.momentum = axis_number(axis), bool(renorm), float(momentum)
        self.renorm_clipping = _clipping(renorm_clipping or {}) if renorm else renorm_clipping
        self.moving_mean_initializer = initializers.get(moving_mean_initializer)
        self.moving_variance_initializer = initializers.get(moving_variance_initializer)
        self.renorm_momentum, self.synchronized = float(renorm_momentum), bool(synchronized)

    def build(self, input_shape: BuildShape) -> None:
        """Make gamma, beta, moving mean and moving variance, (features,) each."""
        rank = len(input_shape)
        self._axis = normalized_axes(self.axis, rank)[0]
        shape = (input_shape[self._axis],)
        if not self._axis or shape == (None,):
            raise ConfigError(
                f"axis = {self.axis} of layer {self._display_name!r}: expected an axis of known length, "
                f"other than the batch axis, found shape {input_shape}"
            )
        self._make_weights(shape)
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        self.moving_mean = self.add_weight(shape, self.moving_mean_initializer, name="moving_mean", **options)
        self.moving_variance = self.add_weight(
            shape, self.moving_variance_initializer, name="moving_variance", **options
        )
        if self.renorm:
            deviation = _SquareRootOf(self.moving_variance_initializer)
            self.moving_stddev = self.add_weight(shape, deviation, name="moving_stddev", **options)
            self.renorm_mean = self.add_weight(shape, self.moving_mean_initializer, name="renorm_mean", **options)
            self.renorm_stddev = self.add_weight(shape, deviation, name="renorm_stddev", **options)
        self.input_spec = InputSpec(ndim=rank, axes={self._axis: shape[0]})

    def call(self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the input (rows, ..., features) normalized; in training, move the averages.

        `mask`, of the inputs' shape without the features, says what counts in the batch's statistics.
        """
        if mask is not None and mask.ndim != inputs.ndim - 1:
            raise ConfigError(
                "The mask provided should be one dimension less than the inputs. Received: "
                f"mask.shape={without_rows(mask.shape)}, inputs.shape={without_rows(inputs.shape)}"
            )
        require_mask(self, mask, inputs.shape[:-1])
        return in_float32(self._normalized)(self._floating(inputs), training, mask)  # as Keras

    def _normalized(self, x: Tensor, training: bool | None, mask: Tensor | None) -> Tensor:
        mean, variance = self.moving_mean.value, self.moving_variance.value
        gamma: Any = self.gamma
        beta: Any = self.beta
        centered = x - self._along_features(mean, x)
        if training and self.trainable:
            over = tuple(axis for axis in range(x.ndim) if axis != self._axis)
            mean_of = functools.partial(_mean, over=over, counts=None if mask is None else ops.expand_dims(mask, -1))
            mean = mean_of(x)
            centered = x - self._along_features(mean, x)
            variance = mean_of(ops.square(centered))
            if self.renorm:
                gamma, beta = self._renorm_factors(mean, variance)
            else:
                for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
                    self._move(moving, batch, self.momentum)
        factor = 1.0 / ops.sqrt(variance + self.epsilon)
        y: Tensor = centered * self._along_features(factor if gamma is None else factor * gamma, x)
        return y if beta is None else y + self._along_features(beta, x)

    def _along_features(self, vector: Any, x: Tensor) -> Any:
        """Return a vector in a shape that broadcasts along the axis of the features."""
        behind = x.ndim - 1 - self._axis
        return ops.reshape(vector, (-1, *(1,) * behind)) if behind else vector

    def _move(self, moving: Variable, batch: Tensor, momentum: float) -> None:
        moving.assign(moving * momentum + ops.stop_gradient(batch) * (1.0 - momentum))

    def _renorm_factors(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor and offset of renormalization, and move the averages."""
        deviation = ops.sqrt(variance + self.epsilon)
        usual = ops.maximum(self.renorm_stddev, math.sqrt(self.epsilon))
        r, d = ops.stop_gradient(deviation / usual), ops.stop_gradient((mean - self.renorm_mean) / usual)
        limits = self.renorm_clipping or {}
        r = ops.maximum(r, limits["rmin"]) if "rmin" in limits else r
        r = ops.minimum(r, limits["rmax"]) if "rmax" in limits else r
        d = ops.clip(d, -limits["dmax"], limits["dmax"]) if "dmax" in limits else d
        gamma, beta = (r, d) if self.gamma is None else (r * self.gamma, d * self.gamma)
        self._move(self.renorm_mean, mean, self.renorm_momentum)
        self._move(self.renorm_stddev, deviation, self.renorm_momentum)
        self._move(self.moving_mean, mean, self.momentum)
        self._move(self.moving_stddev, deviation, self.momentum)
        self.moving_variance.assign(ops.relu(ops.square(self.moving_stddev) - self.epsilon))
        return gamma, beta if self.beta is None else beta + self.beta


def _mean(x: Tensor, over: Sequence[int], counts: Tensor | None) -> Tensor:
    """Return the mean over axes of unmasked elements."""
    if counts is None:
        return ops.mean(x, over)
    counts = ops.broadcast_to(ops.cast(counts, "bool"), x.shape)
    return ops.sum(ops.where(counts, x, 0), over) / (ops.sum(ops.cast(counts, x.dtype), over) + epsilon())


def _clipping(clipping: Mapping[str, float]) -> dict[str, float]:
    """Return the limits of renormalization that are set; refuse unknown or empty ranges."""
    supported = ["rmax", "rmin", "dmax"]
    if set(clipping) - set(supported):
        raise ConfigError(
            f"Received invalid keys for `renorm_clipping` argument: {clipping}. Supported values: {supported}."
        )
    limits = {key: float(limit) for key, limit in clipping.items() if limit is not None}
    if limits.get("rmax", math.inf) < limits.get("rmin", -math.inf):
        raise ConfigError(f"rmax should be greater than rmin in the `renorm_clipping` argument. Received: {clipping}.")
    if limits.get("dmax", 0) < 0:
        raise ConfigError(f"dmax should be non-negative in the `renorm_clipping` argument. Received: {clipping}.")
    return limits


class _SquareRootOf(initializers.Initializer):
    """Square roots of another initializer's draws: deviations from variances."""

    def __init__(self, variances: Any) -> None:
        self.variances = variances

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Any:
        return np.sqrt(self.variances(shape, seed, position))

    def _get_config(self) -> dict[str, Any]:
        """Return nothing: no file has it."""
        return {}
