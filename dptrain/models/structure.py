"""A model's layers, the symbolic tensors of functional models, and how it is built and called."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.layers.hideable_property import hideable_property
from dptrain.layers.node import LayerCall
from dptrain.layers.operation_layer import OperationLayer
from dptrain.layers.parts import name_layers
from dptrain.models.graph import Graph, Maker, name_of_maker
from dptrain.models.host_stage import HostStage, split_graph
from dptrain.program import tree
from dptrain.program.dims import is_number, number_of, read, symbolic
from dptrain.program.tensor import Tensor, Variable, constant, placeholder, untraced
from dptrain.program.turns import MAKING
from dptrain.runtime.types import is_floating

T = TypeVar("T")


class Structure(Layer):
    """Adds layers, inputs and outputs to models."""

    # Of the program, of the whole model, and the part before the program, if there is one.
    _graph: Graph | None
    _whole_graph: Graph | None = None
    _host_stage: HostStage | None = None
    _output_shapes: Any  # of a sample, nested like the outputs
    _symbols: Any = None  # symbolic inputs of a model without a graph, nested like these
    _model_seed: int
    _marks_itself_built, _checks_lengths = True, True

    def _set_graph(self, graph: Graph) -> None:
        self._host_stage, self._graph = split_graph(graph, self._data_dtype)
        self._whole_graph, self._stack, self.built = graph, graph.layers, True
        self._output_shapes = tree.map_leaves(lambda path, output: sample_shape(output), graph.outputs)

    @property
    def layers(self) -> list[Layer]:
        """The layers, in Keras' order."""
        return [layer for layer in self._sublayers if not isinstance(layer, OperationLayer)]

    @layers.setter
    def layers(self, layers: Any) -> None:
        raise AttributeError(
            "`Model.layers` attribute is reserved and should not be used. Use `add()` and `pop()` of a Sequential to "
            "change its layers, and another name for your own list of layers."
        )

    @property
    def _input_tensors(self) -> list[Tensor]:
        return tree.leaves(self._require_graph().inputs)

    @property
    def _output_tensors(self) -> list[Tensor]:
        return tree.leaves(self._require_graph().outputs)

    @hideable_property
    def inputs(self) -> list[Tensor]:
        """The symbolic inputs of a functional model; AttributeError for others."""
        return self._input_tensors

    @hideable_property
    def outputs(self) -> list[Tensor]:
        """The symbolic outputs of a functional model; AttributeError for others."""
        return self._output_tensors

    @property
    def input(self) -> Any:
        """The symbolic inputs of a functional model, nested as they were passed; AttributeError for others."""
        tensors = self._input_tensors
        return tensors[0] if len(tensors) == 1 else self._require_graph().inputs

    @property
    def output(self) -> Any:
        """The symbolic outputs of a functional model, nested as it returns them; AttributeError for others."""
        tensors = self._output_tensors
        return tensors[0] if len(tensors) == 1 else self._require_graph().outputs

    @property
    def _input_names(self) -> list[str]:
        return [symbol.history.layer.name for symbol in self._input_tensors]

    @property
    def _output_names(self) -> list[str]:
        return [name_of_maker(symbol) for symbol in self._output_tensors]

    @hideable_property
    def input_names(self) -> list[str]:
        """The names of the inputs of a functional model."""
        return self._input_names

    @hideable_property
    def output_names(self) -> list[str]:
        """The names of the layers that make the outputs of a functional model."""
        return self._output_names

    @property
    def _input_shape(self) -> Any:
        if self._graph is None:
            return self._sample_shape
        shapes = [read(symbol.shape) for symbol in self._input_tensors]
        return shapes[0] if len(shapes) == 1 else shapes

    @property
    def _output_shape(self) -> Any:
        if self._output_shapes is None:
            raise AttributeError(f"model {self.name!r} has not been built: its output shape is not known yet")
        if self._graph is not None:
            shapes = [read(symbol.shape) for symbol in self._output_tensors]
            return shapes[0] if len(shapes) == 1 else shapes
        batch_shapes = [(None, *shape) for _, shape in tree.flat_shapes(self._output_shapes)]
        return batch_shapes[0] if len(batch_shapes) == 1 else batch_shapes

    @hideable_property
    def input_shape(self) -> Any:
        """Shapes of the inputs, with None for unknown lengths; None if unknown."""
        return self._input_shape

    @hideable_property
    def output_shape(self) -> Any:
        """Shapes of the outputs, with None for unknown lengths."""
        return self._output_shape

    @property
    def _fixed_batch_size(self) -> int | None:
        """The rows of every batch, if an input of a functional model fixes them."""
        symbols = [] if self._graph is None else self._input_tensors
        return next((number_of(symbol.shape[0]) for symbol in symbols if is_number(symbol.shape[0])), None)

    @property
    def _layer_calls(self) -> list[LayerCall]:
        """The calls of layers in a functional model; none in others."""
        return [] if self._whole_graph is None else self._whole_graph.nodes

    @property
    def _makers(self) -> list[Maker]:
        """Calls of layers, and tensors that ops made, in topological order; none in other models."""
        return [] if self._whole_graph is None else self._whole_graph.makers

    def _require_graph(self) -> Graph:
        if self._whole_graph is None:
            raise AttributeError(f"{type(self).__name__} model {self.name!r} has no defined inputs and outputs yet.")
        return self._whole_graph

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return a layer by either its name or its index; ConfigError if there is none."""
        if (name is None) == (index is None):
            raise ConfigError("Provide either a layer name or layer index at `get_layer`.")
        layers = self.layers
        name_layers(layers)
        if index is not None:
            if len(layers) <= index:
                raise ConfigError(
                    f"Was asked to retrieve layer at index {index} but model only has {len(layers)} layers."
                )
            return layers[index]
        for layer in layers:
            if layer.name == name:
                return layer
        raise ConfigError(f"No such layer: {name}. Existing layers are: {[layer.name for layer in layers]}.")

    # Calls

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model, see `Layer`; layers that work on the host are called first, except in a step."""
        if self._host_stage is None or not arguments or getattr(self._of_thread, "in_step", False):
            return super().__call__(*arguments, **keywords)
        if any(isinstance(leaf, Tensor) and leaf.value is None for leaf in tree.leaves(arguments[0])):
            return self._require_graph().run(arguments[0], self._data_dtype, name=self._display_name)
        return super().__call__(self._host_stage.encode(arguments[0]), *arguments[1:], **keywords)

    def _in_step(self, function: Callable[[Any], T]) -> Callable[[Any], T]:
        """Let a step call the model on what its program takes, which the host has computed."""
        if self._host_stage is None:
            return function

        @functools.wraps(function)
        def step(data: Any) -> T:
            self._of_thread.in_step = True
            try:
                return function(data)
            finally:
                self._of_thread.in_step = False

        return step

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Return the outputs; a subclass without inputs and outputs writes it."""
        if self._graph is not None:
            name = self._display_name if self._checks_lengths else None
            return self._graph.run(inputs, self._data_dtype, mask=mask, name=name)
        raise NotImplementedError(f"Model {type(self).__name__} does not have a `call()` method implemented.")

    def build(self, input_shape: Any = None) -> None:
        """Make the weights for input shapes (batch size or None, *shape of a sample), nested like the inputs.

        Raises:
            ConfigError: no such shape, or a layer that cannot take it.
        """
        if self.built or input_shape is None:
            return
        with self._building():
            if not self.built:
                self._build_on(_symbols(input_shape, self._data_dtype))

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Make other threads wait until the weights are made and initialized."""
        with MAKING:
            before, self._builds = self._builds, True
            try:
                yield
            finally:
                self._builds = before

    def _build_on(self, inputs: Any) -> None:
        """Make the weights by calling the model on symbolic tensors."""
        self._symbols = inputs
        self.built = True  # or `Layer` would call `build`
        try:
            outputs = self(inputs, training=False)
        except BaseException:
            self.built = False
            raise
        self._output_shapes = tree.map_leaves(lambda path, output: sample_shape(output), outputs)
        self._adopt(self._model_seed)

    @property
    def _casts_inputs(self) -> bool:  # type: ignore[override]
        return self._graph is None

    def _as_tensor(self, value: Any) -> Any:
        if self._casts_inputs:
            return super()._as_tensor(value)
        if isinstance(value, Variable):
            return value.value
        return constant(value) if not isinstance(value, Tensor) and hasattr(value, "__array__") else value

    def _build_for(self, arguments: Any) -> None:  # not `Layer`'s: the weights are the sublayers'
        if type(self).build is not Structure.build and not self.built:
            super()._build_for(arguments)
        first = next(iter(arguments.values()), None)
        self._symbols = tree.map_leaves(lambda path, spec: symbol(spec.shape[1:], spec.dtype), first)
        self.built = True

    def _build_like(self, x: Any) -> None:
        """Make the weights, if missing, for samples like those of a batch."""
        if type(self).call is Structure.call:
            return

        def symbols() -> Any:
            return tree.map_leaves(lambda path, array: symbol(np.shape(array)[1:], _kind(array, self._data_dtype)), x)

        def has_what_it_needs() -> bool:
            return self.built and not self._builds and (self._output_shapes is not None or x is None)

        if not has_what_it_needs():
            with self._building():
                if not self.built or (self._output_shapes is None and x is not None):
                    self._build_on(symbols())
        self._sample = None
        if x is not None and _shapes(x) != _shapes(self._symbols):
            with untraced(), suppress(ConfigError):  # the step will raise it as well
                outputs = self(symbols(), training=False)
                self._sample = None, tree.map_leaves(lambda path, output: sample_shape(output), outputs)

    @property
    def _sample(self) -> tuple[Any, Any] | None:
        """Shapes of inputs and outputs of this thread's batch where they differ from the built ones."""
        return getattr(self._of_thread, "sample", None)

    @_sample.setter
    def _sample(self, shapes: tuple[Any, Any] | None) -> None:
        self._of_thread.sample = shapes

    @property
    def _input_symbols(self) -> Any:
        """Symbolic tensors nested like the inputs; None if their shapes are unknown."""
        return self._symbols if self._graph is None else self._graph.inputs


def sample_shape(symbol: Tensor) -> tuple[int | None, ...]:
    """Return the shape of a sample of a symbolic batch, with None for unknown lengths."""
    return read(symbol.shape[1:])


def symbol(shape: Sequence[Any], dtype: npt.DTypeLike) -> Tensor:
    """Return a symbolic batch of samples of a shape."""
    return placeholder(symbolic((None, *shape)), dtype, "input")


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, np.shape(array)[1:])) for array in tree.leaves(batch)]


def _kind(array: Any, dtype: str) -> npt.DTypeLike:
    own_dtype = getattr(array, "dtype", None)
    return dtype if own_dtype is None or is_floating(np.dtype(own_dtype)) else np.dtype(own_dtype).newbyteorder("=")


def _symbols(shape: Any, dtype: str) -> Any:
    if isinstance(shape, Mapping):
        return {key: _symbols(entry, dtype) for key, entry in shape.items()}
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        if shape and all(isinstance(entry, Sequence | Mapping) for entry in shape):
            return [_symbols(entry, dtype) for entry in shape]
        if len(shape) >= 1 and all(n is None or isinstance(n, int) for n in shape[1:]):
            return symbol(shape[1:], dtype)
    raise ConfigError(
        f"build: input_shape = {shape!r}: expected (batch size or None, *shape of one sample), such as (None, 784)"
    )
