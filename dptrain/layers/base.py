"""What a layer is: a specification that states its shapes and parameters, and writes its mathematics in backend ops."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.params import ParamSpec
from dptrain.registry.serialization import Configurable


def _alone(buffer: Buffer) -> None:
    """One rank's sum over the ranks."""


@dataclass(frozen=True)
class StepContext:
    """Where in the training a batch is; what random layers key their numbers by.

    Attributes:
        training: False in evaluation and prediction.
        seed: the run's seed.
        step: updates made before this one, over all epochs.
        first_row: place of the batch's first sample in the global batch.
        reduce: replaces a small buffer on the device by its sum over the ranks. Collective, also for ranks without
            rows; in training only.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_row: int = 0
    reduce: Callable[[Buffer], None] = _alone


@dataclass
class LayerBuffers:
    """The memory that a layer works on, cut to the rows of the batch at hand. Layers never allocate.

    Attributes:
        x: input, (rows, *input_shape).
        y: output, (rows, *output_shape).
        dx: gradient of the loss in the input, to be written; None where nobody needs it.
        dy: gradient of the loss in the output; the layer may overwrite it.
        params: the layer's parameters by name.
        grads: gradients of those that are trained, to be overwritten.
        scratch: what `scratch_shapes` asked for.
        fixed: what `fixed_shapes` asked for.
        position: the layer's place in the model.
    """

    x: Buffer
    y: Buffer
    dx: Buffer | None
    dy: Buffer
    params: dict[str, Buffer]
    grads: dict[str, Buffer]
    scratch: dict[str, Buffer] = field(default_factory=dict)
    fixed: dict[str, Buffer] = field(default_factory=dict)
    position: int = 0


class Layer(Configurable):
    """A step from inputs to outputs.

    Args:
        input_shape: shape of one sample, for the first layer of a model.
        input_dim: the same for flat samples, their number of features.
        name: unique in the model; by default the class's name in snake case, numbered.
        trainable: False keeps the parameters as they are; read when the model is built, compiled and used.
        dtype: only None: all layers compute in the model's.
        activity_regularizer: only None.

    Attributes:
        is_view: the output is the input's memory in another shape; such a layer has no forward and backward.
        synchronizes_ranks: forward and backward in training sum something over the ranks: every rank must run them in
            every step, with an empty batch where it has no rows.

    Raises:
        ConfigError: an argument that there is not, that is not supported, or a shape that is none.
    """

    is_view = False
    synchronizes_ranks = False

    def __init__(
        self,
        *,
        input_shape: Sequence[int] | None = None,
        input_dim: int | None = None,
        name: str | None = None,
        trainable: bool = True,
        dtype: None = None,
        activity_regularizer: None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(f"Unrecognized keyword arguments passed to {type(self).__name__}: {unknown}")
        self.refuse(dtype=dtype, activity_regularizer=activity_regularizer)
        if input_dim is not None:
            input_shape = (input_dim,)
        self.input_shape = None if input_shape is None else sizes(input_shape)
        self.name = name
        self.trainable = bool(trainable)

    def refuse(self, **arguments: Any) -> None:
        """Raise for arguments that Keras has and dptrain has not.

        Raises:
            ConfigError: one of them is not None.
        """
        for name, value in arguments.items():
            if value is not None:
                raise ConfigError(f"not supported: {name} = {value!r} of layer {type(self).__name__}")

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

    def fixed_shapes(self, input_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike | None]]:
        """Return what the layer keeps that does not grow with the batch: shape and dtype (None: the backend's)."""
        return {}

    @abstractmethod
    def forward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write y."""

    @abstractmethod
    def backward(self, ops: Backend, buffers: LayerBuffers, context: StepContext) -> None:
        """Write the gradients that are asked for and, unless it is None, dx."""

    # As JSON

    @abstractmethod
    def own_config(self) -> dict[str, Any]:
        """Return the constructor's own arguments as Keras' `get_config` names them, in types that JSON has."""

    def config(self) -> dict[str, Any]:
        """Return all of the constructor's arguments as Keras' `get_config` names them, in types that JSON has."""
        return {"name": self.name, "trainable": self.trainable, **self.own_config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` described, Keras' own configurations included; their dtype is left out.

        Raises:
            ConfigError: an argument is unknown, out of range or not supported.
        """
        try:
            return cls(**{key: value for key, value in config.items() if key != "dtype"})
        except TypeError as error:
            raise ConfigError(f"layer {cls.__name__}: {error}") from error

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

    def copied(self) -> "Layer":
        """Return a copy that shares initializers and regularizers."""
        return copy.copy(self)


def sizes(shape: Any) -> tuple[int, ...]:
    """Return the shape of one sample after checking it.

    Raises:
        ConfigError: it is no list of positive integers.
    """
    if not isinstance(shape, Sequence) or any(
        isinstance(n, bool) or not isinstance(n, Integral) or int(n) < 1 for n in shape
    ):
        raise ConfigError(f"Input shape: expected positive integers. Received: shape={shape}")
    return tuple(int(n) for n in shape)
