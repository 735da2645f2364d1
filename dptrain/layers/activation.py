"""Layers that apply a function, mostly to single elements."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import activations, constraints, initializers, ops, regularizers
from dptrain.errors import ConfigError
from dptrain.layers.arguments import ActivationAttribute
from dptrain.layers.base import (
    ActivationArgument,
    BuildShape,
    ConstraintArgument,
    InitializerArgument,
    Layer,
    RegularizerArgument,
)
from dptrain.layers.input_spec import InputSpec
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor

# Masked logits, as in Keras: their exponential is 0. Infinity would give NaN in gradients.
_MASKED_LOGIT, _MASKED_LOGIT_FLOAT16 = -1e9, -3e4


class Activation(Layer):
    """y = activation(x); `activation` is the name of a function in `dptrain.activations`, or a function."""

    _has_no_weights = True
    _passes_masks = True

    activation = ActivationAttribute()

    def __init__(self, activation: ActivationArgument, **options: Any) -> None:
        super().__init__(**options)
        self.activation = activation

    def call(self, inputs: Tensor) -> Tensor:
        """Return activation(x)."""
        outputs: Tensor = self.activation(inputs)
        return outputs


class Identity(Layer):
    """y = x."""

    _has_no_weights = True
    _passes_masks = True
    _moves_values = True

    def call(self, inputs: Any) -> Any:
        """Return the input."""
        return inputs


class ReLU(Layer):
    """y = x from `threshold` up to `max_value` (None for no limit), below it negative_slope * (x - threshold).

    No argument may be negative.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(
        self, max_value: float | None = None, negative_slope: float = 0.0, threshold: float = 0.0, **options: Any
    ) -> None:
        super().__init__(**options)
        if max_value is not None and max_value < 0:
            raise ConfigError(f"max_value of a ReLU layer cannot be a negative value. Received: max_value={max_value}")
        for name, value in (("negative_slope", negative_slope), ("threshold", threshold)):
            if value is None or value < 0:
                raise ConfigError(
                    f"{name} of a ReLU layer cannot be None or a negative value. Received: {name}={value}"
                )
        self.max_value = None if max_value is None else float(max_value)
        self.negative_slope, self.threshold = float(negative_slope), float(threshold)

    def call(self, inputs: Tensor) -> Tensor:
        """Return relu(x)."""
        return activations.relu(inputs, self.negative_slope, self.max_value, self.threshold)


class LeakyReLU(Layer):
    """y = x where x > 0, else negative_slope * x, with a slope of 0 or above (Keras 2's `alpha`).

    Source: A. Maas, A. Hannun and A. Ng, "Rectifier nonlinearities improve neural network acoustic models", ICML 2013.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, negative_slope: float = 0.3, **options: Any) -> None:
        negative_slope = options.pop("alpha", negative_slope)
        super().__init__(**options)
        if negative_slope is None or negative_slope < 0:
            raise ConfigError(
                "The negative_slope value of a Leaky ReLU layer cannot be None or negative value. Expected a float. "
                f"Received: negative_slope={negative_slope}"
            )
        self.negative_slope = float(negative_slope)

    def call(self, inputs: Tensor) -> Tensor:
        """Return leaky_relu(x)."""
        return activations.leaky_relu(inputs, self.negative_slope)


class ELU(Layer):
    """y = x where x > 0, else alpha * (exp(x) - 1).

    Source: D. Clevert, T. Unterthiner and S. Hochreiter, "Fast and accurate deep network learning by exponential
    linear units", ICLR 2016.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.alpha = float(alpha)

    def call(self, inputs: Tensor) -> Tensor:
        """Return elu(x)."""
        return ops.elu(inputs, alpha=self.alpha)


class PReLU(Layer):
    """y = x where x > 0, else alpha * x, with a trained alpha for each element.

    Elements along `shared_axes`, counted from 1 after the rows, share their alpha.

    Source: K. He et al., "Delving deep into rectifiers", ICCV 2015.
    """

    _passes_masks = True

    def __init__(
        self,
        alpha_initializer: InitializerArgument = "Zeros",
        alpha_regularizer: RegularizerArgument = None,
        alpha_constraint: ConstraintArgument = None,
        shared_axes: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.alpha_initializer = initializers.get(alpha_initializer)
        self.alpha_regularizer = regularizers.get(alpha_regularizer)
        self.alpha_constraint = constraints.get(alpha_constraint)
        axes = [shared_axes] if isinstance(shared_axes, int) else shared_axes
        self.shared_axes = None if axes is None else list(axes)

    def build(self, input_shape: BuildShape) -> None:
        """Make alpha, of the shape of a sample."""
        shape, shared = list(input_shape), self.shared_axes or []
        if any(not 1 <= axis < len(shape) for axis in shared):
            raise ConfigError(
                f"shared_axes={shared} of layer {self._display_name!r}: expected axes 1 to {len(shape) - 1} of inputs "
                f"of shape {tuple(input_shape)}"
            )
        for axis in shared:
            shape[axis] = 1
        self.alpha = self.add_weight(
            shape[1:],
            self.alpha_initializer,
            regularizer=self.alpha_regularizer,
            constraint=self.alpha_constraint,
            name="alpha",
        )
        axes = {axis: n for axis, n in enumerate(input_shape) if axis and axis not in shared}
        self.input_spec = InputSpec(ndim=len(shape), axes=axes)

    def call(self, inputs: Tensor) -> Tensor:
        """Return relu(x) - alpha * relu(-x)."""
        x = self._floating(inputs)
        return ops.relu(x) - self.alpha * ops.relu(-x)


class ActivityRegularization(Layer):
    """y = x, with the penalty l1 sum |x| + l2 sum x^2, divided by the rows of the batch."""

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, l1: float = 0.0, l2: float = 0.0, **options: Any) -> None:
        super().__init__(activity_regularizer=regularizers.L1L2(l1, l2), **options)
        self.l1, self.l2 = float(l1), float(l2)

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments from which the regularizer is made."""
        config = super()._get_config()
        config.pop("activity_regularizer", None)
        return config

    def call(self, inputs: Any) -> Any:
        """Return the input."""
        return inputs


class Softmax(Layer):
    """y = exp(x) / sum(exp(x)) along an axis, or a list of axes."""

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, axis: int | Sequence[int] = -1, **options: Any) -> None:
        super().__init__(**options)
        axes = [axis] if isinstance(axis, int) else list(axis) if isinstance(axis, Sequence) else []
        if not axes or any(isinstance(number, bool) or not isinstance(number, int) for number in axes):
            raise ConfigError(f"`axis` must be an integer or a list of integers. Received: axis={axis}")
        self.axis = axis if isinstance(axis, int) else axes

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return softmax(x).

        `mask`, of a shape that broadcasts to x's, says which elements count: booleans, or numbers above 0.5 for those
        that do; the others become 0.
        """
        if mask is None:
            return self._softmax(inputs)
        pairs = zip(reversed(mask.shape), reversed(inputs.shape), strict=False)
        if mask.ndim > inputs.ndim or any(mask_length not in (1, length) for mask_length, length in pairs):
            raise ConfigError(
                f"The `mask` must be broadcastable to `inputs`. Received: inputs.shape={without_rows(inputs.shape)}, "
                f"mask.shape={without_rows(mask.shape)}"
            )
        counts = mask if mask.dtype == np.bool_ else mask > 0.5
        least = _MASKED_LOGIT_FLOAT16 if inputs.dtype == np.float16 else _MASKED_LOGIT
        return ops.where(counts, self._softmax(ops.where(counts, inputs, least)), 0.0)

    def _softmax(self, x: Tensor) -> Tensor:
        if isinstance(self.axis, int):
            return ops.softmax(x, self.axis)
        if len(self.axis) == 1:
            return ops.softmax(x, self.axis[0])
        powers = ops.exp(x - ops.stop_gradient(ops.max(x, self.axis, keepdims=True)))
        return powers / ops.sum(powers, self.axis, keepdims=True)
