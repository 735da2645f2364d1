"""Activation: a function of each element (softmax: of each row)."""

from typing import Any

from dptrain import activations
from dptrain.backend.base import INPUT_ACTIVATIONS, Backend
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, LayerBuffers, StepContext


class ActivationLayer(Layer):
    """y = activation(x); what all layers of this kind share.

    Args:
        activation: name of the function.
        alpha: its parameter, or None for its default (see `Backend.activation_forward`).
        options: as `Layer`.
    """

    def __init__(self, activation: str, alpha: float | None, **options: Any) -> None:
        super().__init__(**options)
        self._function, self._alpha = activation, alpha

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y = activation(x)."""
        ops.activation_forward(buffers.x, self._function, buffers.y, self._alpha)

    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write dx from dy and what the function's derivative is a function of."""
        if buffers.dx is not None:
            kept = buffers.x if self._function in INPUT_ACTIVATIONS else buffers.y
            ops.activation_backward(kept, buffers.dy, self._function, buffers.dx, self._alpha)

    @property
    def final_activation(self) -> str:
        """The layer's activation."""
        return self._function

    def without_activation(self) -> "Activation":
        """Return the identity."""
        return Activation("linear", name=self.name)


class Activation(ActivationLayer):
    """y = activation(x).

    Args:
        activation: name or object of `dptrain.activations`.
        options: as `Layer`.

    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(self, activation: str | activations.Activation, **options: Any) -> None:
        self.activation = activations.get(activation).name
        super().__init__(self.activation, None, **options)

    def own_config(self) -> dict[str, Any]:
        """Return the activation's name."""
        return {"activation": self.activation}


class ReLU(ActivationLayer):
    """y = x where x > 0, else negative_slope * x.

    Args:
        max_value: only None.
        negative_slope: 0 or more.
        threshold: only 0.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    def __init__(
        self, max_value: None = None, negative_slope: float = 0.0, threshold: float = 0.0, **options: Any
    ) -> None:
        if negative_slope is None or negative_slope < 0:
            raise ConfigError(
                "negative_slope of a ReLU layer cannot be None or a negative value. "
                f"Received: negative_slope={negative_slope}"
            )
        self.negative_slope = float(negative_slope)
        if self.negative_slope:
            super().__init__("leaky_relu", self.negative_slope, **options)
        else:
            super().__init__("relu", None, **options)
        self.refuse(max_value=max_value, threshold=threshold or None)

    def own_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"max_value": None, "negative_slope": self.negative_slope, "threshold": 0.0}


class LeakyReLU(ActivationLayer):
    """y = x where x > 0, else negative_slope * x.

    Source: A. Maas, A. Hannun and A. Ng, "Rectifier nonlinearities improve neural network acoustic models", ICML 2013.

    Args:
        negative_slope: 0 or more.
        options: as `Layer`.

    Raises:
        ConfigError: the slope is out of range.
    """

    def __init__(self, negative_slope: float = 0.3, **options: Any) -> None:
        if negative_slope is None or negative_slope < 0:
            raise ConfigError(
                "The negative_slope value of a Leaky ReLU layer cannot be None or negative value. Expected a float. "
                f"Received: negative_slope={negative_slope}"
            )
        self.negative_slope = float(negative_slope)
        super().__init__("leaky_relu", self.negative_slope, **options)

    def own_config(self) -> dict[str, Any]:
        """Return the slope."""
        return {"negative_slope": self.negative_slope}


class ELU(ActivationLayer):
    """y = x where x > 0, else alpha * (exp(x) - 1).

    Source: D. Clevert, T. Unterthiner and S. Hochreiter, "Fast and accurate deep network learning by exponential
    linear units", ICLR 2016.

    Args:
        alpha: 0 or more.
        options: as `Layer`.

    Raises:
        ConfigError: alpha is negative: its derivative is no function of the output.
    """

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        if not alpha >= 0:
            raise ConfigError(f"not supported: alpha = {alpha} of layer ELU; expected 0 or more")
        self.alpha = float(alpha)
        super().__init__("elu", self.alpha, **options)

    def own_config(self) -> dict[str, Any]:
        """Return alpha."""
        return {"alpha": self.alpha}


class Softmax(ActivationLayer):
    """y = exp(x) / sum(exp(x)) over the last axis.

    Args:
        axis: only -1.
        options: as `Layer`.

    Raises:
        ConfigError: another axis.
    """

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__("softmax", None, **options)
        self.refuse(axis=None if axis == -1 else axis)

    def own_config(self) -> dict[str, Any]:
        """Return the axis."""
        return {"axis": -1}
