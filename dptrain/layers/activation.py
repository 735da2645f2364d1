"""Layers without weights that are a function of their input, most of single elements."""

from typing import Any

from dptrain import activations, ops
from dptrain.errors import ConfigError
from dptrain.layers.base import ActivationArgument, Layer
from dptrain.program.tensor import Tensor


class Activation(Layer):
    """y = activation(x).

    Args:
        activation: name or function of `dptrain.activations`.
        options: as `Layer`.

    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(self, activation: ActivationArgument, **options: Any) -> None:
        super().__init__(**options)
        self.activation = activations.get(activation)

    def call(self, inputs: Tensor) -> Tensor:
        """Return activation(x)."""
        found: Tensor = self.activation(inputs)
        return found


class Identity(Layer):
    """y = x."""

    def call(self, inputs: Any) -> Any:
        """Return the input."""
        return inputs


class ReLU(Layer):
    """y = x from the threshold up to max_value, below it negative_slope * (x - threshold).

    Args:
        max_value: 0 or more; None for no limit.
        negative_slope: 0 or more.
        threshold: 0 or more.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range.
    """

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
    """y = x where x > 0, else negative_slope * x.

    Source: A. Maas, A. Hannun and A. Ng, "Rectifier nonlinearities improve neural network acoustic models", ICML 2013.

    Args:
        negative_slope: 0 or more.
        options: as `Layer`.

    Raises:
        ConfigError: the slope is out of range.
    """

    def __init__(self, negative_slope: float = 0.3, **options: Any) -> None:
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

    Args:
        alpha: of what is negative.
        options: as `Layer`.
    """

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.alpha = float(alpha)

    def call(self, inputs: Tensor) -> Tensor:
        """Return elu(x)."""
        return ops.elu(inputs, alpha=self.alpha)


class Softmax(Layer):
    """y = exp(x) / sum(exp(x)) along an axis.

    Args:
        axis: one.
        options: as `Layer`.

    Raises:
        ConfigError: several axes.
    """

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(axis, bool) or not isinstance(axis, int):
            self.refuse(axis=axis)
        self.axis = axis

    def call(self, inputs: Tensor) -> Tensor:
        """Return softmax(x)."""
        return ops.softmax(inputs, self.axis)
