"""What a layer is: a specification that states its shapes and parameters, and writes its mathematics in backend ops."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.params import ParamSpec


@dataclass(frozen=True)
class StepContext:
    """Where in the training a batch is; what random layers key their numbers by.

    Attributes:
        training: False in evaluation and prediction.
        seed: the run's seed.
        step: updates made before this one, over all epochs.
        first_row: place of the batch's first sample in the global batch.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_row: int = 0


@dataclass
class LayerBuffers:
    """The memory that a layer works on, cut to the rows of the batch at hand. Layers never allocate.

    Attributes:
        x: input, (rows, *input_shape).
        y: output, (rows, *output_shape).
        dx: gradient of the loss in the input, to be written; None where nobody needs it.
        dy: gradient of the loss in the output; the layer may overwrite it.
        params: the layer's parameters by name.
        grads: their gradients, to be overwritten.
        scratch: what `scratch_shapes` asked for.
        position: the layer's place in the model.
    """

    x: Buffer
    y: Buffer
    dx: Buffer | None
    dy: Buffer
    params: dict[str, Buffer]
    grads: dict[str, Buffer]
    scratch: dict[str, Buffer] = field(default_factory=dict)
    position: int = 0


class Layer(ABC):
    """A step from inputs to outputs.

    Args:
        input_shape: shape of one sample, for the first layer of a model.
        name: unique in the model; by default the class's name in snake case, numbered.

    Attributes:
        is_view: the output is the input's memory in another shape; such a layer has no forward and backward.
    """

    is_view = False

    def __init__(self, *, input_shape: tuple[int, ...] | None = None, name: str | None = None) -> None:
        self.input_shape = None if input_shape is None else tuple(int(n) for n in input_shape)
        self.name = name

    @abstractmethod
    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one output sample.

        Raises:
            ConfigError: the layer cannot take that input.
        """

    def param_specs(self, input_shape: tuple[int, ...]) -> list[ParamSpec]:
        """Return the parameters in the order of Keras' `get_weights`; none unless the layer says so."""
        return []

    def scratch_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return what the layer keeps from forward to backward besides x and y, by name, as shapes of one sample."""
        return {}

    @abstractmethod
    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y."""

    @abstractmethod
    def backward(self, ops: Backend, buffers: LayerBuffers) -> None:
        """Write the parameters' gradients and, unless it is None, dx."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them, in types that JSON has."""

    # The last layer's activation, which a loss may take over (see losses.Loss.fused_activation)

    @property
    def final_activation(self) -> str | None:
        """The activation that ends this layer, or None where it has none to take away."""
        return None

    def without_activation(self) -> "Layer":
        """Return this layer with activation "linear", of the same name and parameters.

        Raises:
            ConfigError: the layer has no activation.
        """
        raise ConfigError(f"layer {self.name!r} has no activation to take away")
