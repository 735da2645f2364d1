"""Sequential: a linear stack of layers."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.base import checked_shape
from dptrain.layers.parts import name_layers
from dptrain.models.configuration import sequential_config, sequential_layers
from dptrain.models.graph import Graph
from dptrain.models.model import Model
from dptrain.models.structure import sample_shape, symbol
from dptrain.program import tree
from dptrain.program.shapes import differ
from dptrain.program.tensor import Tensor, Variable, untraced, with_mask
from dptrain.registry.serialization import custom_object_scope
from dptrain.runtime.text import short


class Sequential(Model):
    """A linear stack of layers.

    Args:
        layers: more can be added with `add`. An `Input`, or the first layer's `input_shape`, states the shape of a
            sample; otherwise the first batch does.
        trainable, name, seed: see `Model`.

    Raises:
        ConfigError: the seed is out of range, something that is not a layer, or a layer that cannot take its input.
    """

    _marks_itself_built, _is_base, _checks_lengths = True, True, False
    _casts_inputs = False

    def __init__(
        self,
        layers: Sequence[Layer] | None = None,
        trainable: bool = True,
        name: str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        self._input: InputLayer | None = None
        self._guessed = False  # whether the input's shape was taken from a batch
        self._results: list[Any] = []  # symbolic, of each layer
        super().__init__(name=name, trainable=trainable, seed=seed)
        for layer in layers or []:
            self._append(layer)
        self._build_if_ready()

    @property
    def layers(self) -> list[Layer]:
        """A list of the layers, without an `Input`, as in Keras; `add` and `pop` change it."""
        return list(self._stack)

    @layers.setter
    def layers(self, layers: Any) -> None:
        raise AttributeError("`Sequential.layers` cannot be set. Use `add()` and `pop()` to change the layers.")

    @property
    def _input_shape(self) -> Any:
        """Shape of the input, with None for the rows; None while unknown."""
        return super()._input_shape if self._input is None else tuple(self._input.batch_shape)

    def _require_graph(self) -> Graph:
        self._build_if_ready()
        return super()._require_graph()

    def add(self, layer: Layer | Tensor, rebuild: bool = True) -> None:
        """Append a layer, or an `Input` as the first; a compiled model must be compiled again.

        `rebuild` builds a model that knows its input at once. ConfigError if it is not a layer, or cannot take the
        previous layer's output; the model then stays as it was.
        """
        before = list(self._stack), self._input
        self._unbuild()
        self._append(layer)
        try:
            if rebuild:
                self._build_if_ready()
        except BaseException:
            self._stack, self._input = before
            self._build_if_ready()
            raise

    def pop(self, rebuild: bool = True) -> Layer:
        """Remove the last layer and return it; a compiled model must be compiled again.

        `rebuild` builds a model that knows its input at once. ConfigError if there is no layer.
        """
        if not self._stack:
            raise ConfigError("There are no layers in the model.")
        self._unbuild()
        layer = self._stack.pop()
        del self._results[len(self._stack) :]
        if rebuild:
            self._build_if_ready()
        return layer

    def _unbuild(self) -> None:
        self._leave_device()
        self._compilations += 1
        self._outputs = None
        self.built, self._graph, self._output_shapes, self._stack = False, None, None, list(self._stack)
        self._whole_graph = self._host_stage = None

    def _append(self, layer: Any) -> None:
        if isinstance(layer, Tensor) and layer.history is not None and isinstance(layer.history.layer, InputLayer):
            layer = layer.history.layer
        if isinstance(layer, InputLayer):
            if self._stack or self._input is not None:
                raise ConfigError("an Input must come before the first layer")
            self._input = layer
            return
        if not isinstance(layer, Layer):
            raise ConfigError(
                f"Only instances of `dptrain.layers.Layer` can be added to a Sequential model. Received: "
                f"{short(layer)} (of type {type(layer)})"
            )
        _check_arguments(layer)
        if not self._stack and self._input is None:
            if isinstance(layer, Model) and layer._graph is not None:
                self._input = InputLayer(batch_shape=layer._input_shape)
            elif not isinstance(layer, Model) and layer._sample_shape is not None:
                self._input = InputLayer(layer._sample_shape)
        self._stack.append(layer)

    def _build_if_ready(self) -> None:
        """Make the weights if the shape of a sample is known."""
        if not self.built and self._input is not None and self._stack:
            self.build()

    @property
    def weights(self) -> list[Variable]:
        """See `Layer`."""
        self._build_if_ready()
        return super().weights

    @property
    def trainable_weights(self) -> list[Variable]:
        """See `Layer`."""
        self._build_if_ready()
        return super().trainable_weights

    trainable_variables = trainable_weights

    def count_params(self) -> int:
        """See `Layer`."""
        self._build_if_ready()
        return super().count_params()

    @property
    def _input_layer(self) -> InputLayer | None:
        """The input layer, declared or of the first batch; None before."""
        return self._input

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Apply the layers in order."""
        if self._graph is not None and not (self._guessed and self._is_of_another_size(inputs)):
            return super().call(inputs, mask=mask)
        if isinstance(inputs, Tensor) and isinstance(mask, Tensor):
            inputs = with_mask(inputs, mask)
        for layer in self._stack:
            inputs = layer(inputs)
        return inputs

    def _is_of_another_size(self, x: Any) -> bool:
        """Return whether x has the rank of the built input, but other lengths."""
        assert self._input is not None
        shape = np.shape(x) if not isinstance(x, Tensor) else x.shape
        declared = self._input.batch_shape[1:]
        return len(shape) == len(declared) + 1 and any(map(differ, shape[1:], declared))

    @property
    def _awaits_shape(self) -> bool:
        """Whether the shape of a sample is still unknown."""
        return not self.built and self._input is None

    def build(self, input_shape: Any = None) -> None:
        """Make the weights of all layers.

        Args:
            input_shape: (batch size, *shape of a sample), as in Keras; the batch size may be None and is not used. None
                takes the first layer's.

        Raises:
            ConfigError: no layers, no such shape, another than the model has, or a layer that cannot take it.
        """
        if input_shape is not None:
            if isinstance(input_shape, str | Mapping) or not isinstance(input_shape, Sequence) or len(input_shape) < 2:
                raise ConfigError(
                    f"build: input_shape = {input_shape!r}: expected (batch size or None, *shape of one sample), such "
                    "as (None, 784)"
                )
            shape = checked_shape(input_shape[1:])
            prior = None if self._input is None else tuple(self._input.batch_shape[1:])
            if prior not in (None, shape):
                raise ConfigError(
                    f"Sequential model {self.name!r} has already been configured to use input shape {(None, *prior)}. "
                    f"You cannot build it with input_shape {tuple(input_shape)}"
                )
            if self._input is None:
                self._input = InputLayer(shape)
        if self.built and not self._builds:
            return
        with self._building():
            if not self.built:  # another thread may have done it
                self._build_stack()

    def _build_stack(self) -> None:
        """Make the weights; in one thread at a time."""
        if not self._stack:
            raise ConfigError("a model needs at least one layer")
        if self._input is None:
            raise ConfigError(
                f"the first layer ({type(self._stack[0]).__name__}) needs input_shape=(...), the shape of one sample"
            )
        names = [layer._name for layer in self._stack if not layer._has_default_name]
        if repeated := [name for name in names if name is not None and names.count(name) > 1]:
            raise ConfigError(f"layer names must be unique, found {repeated[0]!r} {names.count(repeated[0])} times")
        start = self._input.output
        with untraced():
            for layer in self._stack[len(self._results) :]:
                if self.compiled:
                    layer._set_dtype(self.dtype_policy)
                self._results.append(layer(self._results[-1] if self._results else start))
        stack = self._stack
        self._set_graph(Graph(start, self._results[-1]))
        self._stack = stack
        self._adopt(self._model_seed)

    def _build_like(self, x: Any) -> None:
        if self._input is None and self._stack and tree.is_nested(x) and not (isinstance(x, list) and len(x) == 1):
            super()._build_like(x)  # layer by layer, without a graph
            return
        if not self.built or self._builds:
            with self._building():
                self._guess_input(x)
                self.build()
        self._look_at_size(x)

    def _guess_input(self, x: Any) -> None:
        """Take the shape of a sample from a batch, if it was not declared."""
        if not self.built and self._input is None and self._stack and x is not None:
            leaf = x[0] if isinstance(x, list | tuple) and len(x) == 1 else x
            shape = np.shape(leaf)
            if len(shape) >= 1 and not isinstance(leaf, Mapping | list | tuple):
                self._input, self._guessed = InputLayer(shape[1:]), True

    @property
    def _takes_any_size(self) -> bool:
        """See `Model`."""
        return self._guessed

    def _look_at_size(self, x: Any) -> None:
        """Note the shapes of samples whose lengths differ from the built ones."""
        self._sample = None
        leaf = x[0] if isinstance(x, list | tuple) and len(x) == 1 else x
        if not self._guessed or leaf is None or tree.is_nested(leaf) or not self._is_of_another_size(leaf):
            return
        shape = np.shape(leaf)[1:]
        with suppress(ConfigError), untraced():  # the model will report the shape it expects
            result = symbol((shape), self._data_dtype)
            for layer in self._stack:
                result = layer(result)
            self._sample = shape, tree.map_leaves(lambda path, output: sample_shape(output), result)

    def _build_for(self, arguments: Any) -> None:
        self._build_like(next(iter(arguments.values())))

    # Its configuration

    def _get_config(self) -> dict[str, Any]:
        """Return Keras' `Sequential.get_config`."""
        if self._stack and not self._awaits_shape:
            self.build()
        name_layers(self._sublayers)
        return sequential_config(self, self._input if self.built else None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a new model from a `get_config` of dptrain or Keras; see `Model.from_config`."""
        with custom_object_scope(custom_objects):
            layers, dtype = sequential_layers(config)
        model = cls(layers, trainable=bool(config.get("trainable", True)), name=config["name"])
        model._set_dtype(dtype)
        if not model._awaits_shape:
            model.build()
        return model


def _check_arguments(layer: Layer) -> None:
    """Refuse a layer that needs more than the previous layer's output."""
    empty = inspect.Parameter.empty
    required = [
        parameter
        for parameter in inspect.signature(layer.call).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and parameter.default is empty
    ]
    required = [parameter for parameter in required if parameter.name not in ("training", "mask")]
    if len(required) > 1:
        raise ConfigError(
            "Layers added to a Sequential model can only have a single required positional argument, the input tensor. "
            f"Layer {type(layer).__name__} has multiple required positional arguments: {required}"
        )
