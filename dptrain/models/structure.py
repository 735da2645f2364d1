"""A model's layers, and the symbolic tensors of functional models."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.layers.hideable_property import hideable_property
from dptrain.layers.node import Node
from dptrain.layers.parts import name_layers
from dptrain.models.graph import Graph, Maker, name_of_maker
from dptrain.program import tree
from dptrain.program.dims import is_number, number_of, read, symbolic
from dptrain.program.tensor import Tensor, placeholder


class Structure(Layer):
    """Adds layers, inputs and outputs to models."""

    _graph: Graph | None
    _output_shapes: Any  # of a sample, nested as the outputs

    def _set_graph(self, graph: Graph) -> None:
        self._graph, self._stack, self.built = graph, graph.layers, True
        self._output_shapes = tree.map_leaves(lambda path, output: sample_shape(output), graph.outputs)

    @property
    def layers(self) -> list[Layer]:
        """The layers, in Keras' order."""
        return self._sublayers

    @layers.setter
    def layers(self, layers: Any) -> None:
        raise AttributeError(
            "`Model.layers` attribute is reserved and should not be used. Use `add()` and `pop()` of a Sequential to "
            "change its layers, and another name for a list of layers of your own."
        )

    @property
    def _input_tensors(self) -> list[Tensor]:
        return tree.leaves(self._require_graph().inputs)

    @property
    def _output_tensors(self) -> list[Tensor]:
        return tree.leaves(self._require_graph().outputs)

    @hideable_property
    def inputs(self) -> list[Tensor]:
        """The symbolic inputs of a functional model.

        Raises:
            AttributeError: it is none.
        """
        return self._input_tensors

    @hideable_property
    def outputs(self) -> list[Tensor]:
        """The symbolic outputs of a functional model.

        Raises:
            AttributeError: it is none.
        """
        return self._output_tensors

    @property
    def input(self) -> Any:
        """The symbolic inputs of a functional model, nested as it was given them.

        Raises:
            AttributeError: it is none.
        """
        tensors = self._input_tensors
        return tensors[0] if len(tensors) == 1 else self._require_graph().inputs

    @property
    def output(self) -> Any:
        """The symbolic outputs of a functional model, nested as it returns them.

        Raises:
            AttributeError: it is none.
        """
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
        """Shapes of the inputs, with None for lengths that are not known; None where nobody has said them."""
        return self._input_shape

    @hideable_property
    def output_shape(self) -> Any:
        """Shapes of the outputs, with None for lengths that are not known."""
        return self._output_shape

    @property
    def _fixed_batch_size(self) -> int | None:
        """The rows of every batch, where an input of a functional model fixes them."""
        symbols = [] if self._graph is None else self._input_tensors
        return next((number_of(symbol.shape[0]) for symbol in symbols if is_number(symbol.shape[0])), None)

    @property
    def _layer_calls(self) -> list[Node]:
        """The calls of layers in a functional model; none in others."""
        return [] if self._graph is None else self._graph.nodes

    @property
    def _makers(self) -> list[Maker]:
        """Calls of layers, and tensors that ops made, in topological order; none in other models."""
        return [] if self._graph is None else self._graph.makers

    def _require_graph(self) -> Graph:
        if self._graph is None:
            raise AttributeError(f"{type(self).__name__} model {self.name!r} has no defined inputs and outputs yet.")
        return self._graph

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return a layer by its name or its place.

        Raises:
            ConfigError: there is none, or both or neither were given.
        """
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


def sample_shape(symbol: Tensor) -> tuple[int | None, ...]:
    """Return the shape of a sample of a symbolic batch, with None for unknown lengths."""
    return read(symbol.shape[1:])


def symbol(shape: Sequence[Any], dtype: npt.DTypeLike) -> Tensor:
    """Return a symbolic batch of samples of a shape."""
    return placeholder(symbolic((None, *shape)), dtype, "input")
