"""Sequential: layers in a row."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.base import sizes
from dptrain.layers.parts import name_layers
from dptrain.models.configuration import sequential_config, sequential_layers
from dptrain.models.graph import Graph
from dptrain.models.model import Model
from dptrain.program.tensor import Tensor, Variable, untraced
from dptrain.registry.serialization import custom_object_scope
from dptrain.runtime.text import short


class Sequential(Model):
    """Layers in a row.

    Args:
        layers: the layers; more can be added with `add`. An `Input`, or `input_shape` of the first layer, states the
            shape of a sample; without, the first batch does.
        trainable: False leaves all weights as they are, whatever the layers say.
        name: for summaries; "sequential" by default.
        seed: as `Model`.

    Raises:
        ConfigError: the seed is out of range, something else than a layer, or a layer that cannot take its input.
    """

    _notes_built = True

    def __init__(
        self,
        layers: Sequence[Layer] | None = None,
        trainable: bool = True,
        name: str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        self._input: InputLayer | None = None
        super().__init__(name=name, seed=seed)
        for layer in layers or []:
            self._append(layer)
        self._trainable = bool(trainable)

    @property
    def layers(self) -> list[Layer]:
        """The layers in a list of their own, as in Keras without an `Input`."""
        return list(self._stack)

    @property
    def input_shape(self) -> Any:
        """Shape of the input, with None for the rows; None where nobody has said it."""
        return super().input_shape if self._input is None else tuple(self._input.batch_shape)

    @input_shape.setter
    def input_shape(self, shape: Any) -> None:
        self._given_shape = shape

    def add(self, layer: Layer | Tensor, rebuild: bool = True) -> None:
        """Append a layer.

        Args:
            layer: a layer, or an `Input` in the first place.
            rebuild: without effect.

        Raises:
            ConfigError: the model has been used already, or it is no layer.
        """
        self._unbuild("added")
        self._append(layer)

    def pop(self, rebuild: bool = True) -> Layer:
        """Remove the last layer and return it.

        Raises:
            ConfigError: the model has been used already, or there is no layer.
        """
        self._unbuild("removed")
        if not self._stack:
            raise ConfigError("There are no layers in the model.")
        return self._stack.pop()

    def _unbuild(self, what: str) -> None:
        if self._trainer_kept is not None or (self.built and self._compiled is not None):
            raise ConfigError(f"layers can be {what} only before the model is first used")
        self.built, self._graph, self._output_shapes = False, None, None

    def _append(self, layer: Any) -> None:
        if isinstance(layer, Tensor) and layer.history is not None and isinstance(layer.history.layer, InputLayer):
            layer = layer.history.layer
        if isinstance(layer, InputLayer):
            if self._stack or self._input is not None:
                raise ConfigError("an Input can stand only before the first layer")
            self._input = layer
            return
        if not isinstance(layer, Layer):
            raise ConfigError(
                f"Only instances of `dptrain.layers.Layer` can be added to a Sequential model. Received: "
                f"{short(layer)} (of type {type(layer)})"
            )
        if not self._stack and self._input is None:
            if isinstance(layer, Model) and layer._graph is not None:
                self._input = InputLayer(layer.input_shape[1:])
            elif not isinstance(layer, Model) and layer.input_shape is not None:
                self._input = InputLayer(layer.input_shape)
        self._stack.append(layer)

    def _build_if_known(self) -> None:
        """Make the weights as soon as somebody looks at them, if the shape of a sample is known."""
        if not self.built and self._input is not None and self._stack:
            self.build()

    @property
    def weights(self) -> list[Variable]:
        """See `Layer`."""
        self._build_if_known()
        return super().weights

    @property
    def trainable_weights(self) -> list[Variable]:
        """See `Layer`."""
        self._build_if_known()
        return super().trainable_weights

    trainable_variables = trainable_weights

    def count_params(self) -> int:
        """See `Layer`."""
        self._build_if_known()
        return super().count_params()

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Return what the last layer makes of what the first one is given."""
        self._refuse_mask(mask)
        if self._graph is not None:
            return super().call(inputs)
        for layer in self._stack:
            inputs = layer(inputs)
        return inputs

    @property
    def awaits_shape(self) -> bool:
        """Whether nobody has said yet what shape a sample has."""
        return not self.built and self._input is None

    def build(self, input_shape: Any = None) -> None:
        """Make the weights of all layers.

        Args:
            input_shape: (batch size, *shape of one sample), as in Keras; the batch size, which may be None, is left
                unused. None: the first layer says it.

        Raises:
            ConfigError: there are no layers, it is no such shape, another one than the model has already, or a layer
                cannot take it.
        """
        if input_shape is not None:
            if isinstance(input_shape, str | Mapping) or not isinstance(input_shape, Sequence) or len(input_shape) < 2:
                raise ConfigError(
                    f"build: input_shape = {input_shape!r}: expected (batch size or None, *shape of one sample), such "
                    "as (None, 784)"
                )
            shape = sizes(input_shape[1:])
            known = None if self._input is None else tuple(self._input.batch_shape[1:])
            if known not in (None, shape):
                raise ConfigError(
                    f"Sequential model {self.name!r} has already been configured to use input shape {(None, *known)}. "
                    f"You cannot build it with input_shape {tuple(input_shape)}"
                )
            if self._input is None:
                self._input = InputLayer(shape)
        if self.built:
            return
        if not self._stack:
            raise ConfigError("a model needs at least one layer")
        if self._input is None:
            raise ConfigError(
                f"the first layer ({type(self._stack[0]).__name__}) needs input_shape=(...), the shape of one sample"
            )
        names = [layer.name for layer in self._stack if not layer.has_default_name]
        if repeated := [name for name in names if name is not None and names.count(name) > 1]:
            raise ConfigError(f"layer names must be unique, found {repeated[0]!r} {names.count(repeated[0])} times")
        with untraced():
            symbol = result = self._input.output
            for layer in self._stack:
                result = layer(result)
        stack = self._stack
        self._set_graph(Graph(symbol, result))
        self._stack = stack
        self.adopt(self.seed)

    def _build_like(self, x: Any) -> None:
        if not self.built and self._input is None and self._stack and x is not None:
            leaf = x[0] if isinstance(x, list | tuple) and len(x) == 1 else x
            shape = np.shape(leaf)
            if len(shape) >= 1 and not isinstance(leaf, Mapping | list | tuple):
                self._input = InputLayer(shape[1:])
        self.build()

    def _build_for(self, arguments: Any) -> None:
        self._build_like(next(iter(arguments.values())))

    # Its configuration

    def config(self) -> dict[str, Any]:
        """Return name, layers and input shape as Keras' `Sequential.get_config` does."""
        if self._stack and not self.awaits_shape:
            self.build()
        name_layers(self.sublayers)
        return sequential_config(self, self._input if self.built else None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a new model of a `get_config`, of dptrain's or Keras'; see `Model.from_config`."""
        with custom_object_scope(custom_objects):
            layers, dtype = sequential_layers(config)
        made = cls(layers, trainable=bool(config.get("trainable", True)), name=config["name"])
        made.set_dtype(dtype)
        if not made.awaits_shape:
            made.build()
        return made
