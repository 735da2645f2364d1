"""The part of a functional model that takes texts: computed on the host, before the program of the rest.

Layers such as TextVectorization and StringLookup turn the inputs into numbers. A model computes these for whole arrays,
or for each batch of a generator, and its program takes them in place of the inputs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers.node import LayerCall
from dptrain.layers.preprocessing.lookups import on_host
from dptrain.models.graph import Graph, Maker, graph_of
from dptrain.program import tree
from dptrain.program.dims import read
from dptrain.program.shapes import axis_of_one
from dptrain.program.tensor import Tensor


class HostStage:
    """The calls of layers that work on the host, from a model's inputs to those of its program.

    Args:
        graph: of the whole model.
        calls: of layers that work on the host, in topological order.
        ends: symbolic tensors that the program takes: inputs, and outputs of these calls.
    """

    def __init__(self, graph: Graph, calls: Sequence[LayerCall], ends: Sequence[Tensor]) -> None:
        self._graph, self._calls, self._ends = graph, calls, ends

    @property
    def inputs(self) -> Any:
        """The symbolic inputs of the whole model, nested as its user passes them."""
        return self._graph.inputs

    def encode(self, inputs: Any) -> Any:
        """Return the program's inputs, an array or a list, for arrays nested like the model's inputs.

        Raises:
            DataError: other inputs, or no texts where the model takes some.
        """
        symbols = tree.leaves(self._graph.inputs)
        names = [symbol.name for symbol in symbols]
        try:
            arrays = tree.matched(inputs, self._graph.inputs, names, by_key=not self._graph.takes_lists)
        except ConfigError as error:
            raise DataError(f"x: {error}") from error
        values = {
            id(symbol): _checked(array, symbol) if symbol.dtype.kind == "U" else array
            for symbol, array in zip(symbols, arrays, strict=True)
        }
        for call in self._calls:
            arguments = tree.map_leaves(lambda _, leaf: values.get(id(leaf), leaf), list(call.arguments))
            values[id(call.outputs)] = call.layer(*arguments).numpy()
        ends = [values[id(end)] for end in self._ends]
        return ends[0] if len(ends) == 1 else ends


def split_graph(graph: Graph, dtype: str) -> tuple[HostStage | None, Graph]:
    """Return a graph's part for the host, None without any, and the rest, which computes in `dtype`.

    Raises:
        ConfigError: a layer that works on the host takes what the model computes, another takes texts, or they are an
            output.
    """
    inputs = {id(symbol): symbol for symbol in tree.leaves(graph.inputs)}
    calls = [maker for maker in graph.nodes if maker.layer._works_on_host]
    if not calls and all(symbol.dtype.kind != "U" for symbol in inputs.values()):
        return None, graph
    available = dict(inputs)
    for call in calls:
        for symbol in call.inputs:
            if id(symbol) not in available:
                raise ConfigError(
                    f"not supported: layer {call.layer._display_name!r} works on the host, before the model, and "
                    "cannot take what other layers compute"
                )
        available[id(call.outputs)] = call.outputs
    done = {id(call) for call in calls}
    read_symbols = [symbol for maker in graph.makers if id(maker) not in done for symbol in _taken(maker, inputs)]
    ends: dict[int, Tensor] = {}
    for symbol in [*read_symbols, *tree.leaves(graph.outputs)]:
        if symbol.dtype.kind == "U":
            raise ConfigError(
                f"not supported: {symbol} is text, which only TextVectorization, StringLookup, Hashing and "
                "HashedCrossing take"
            )
        if id(symbol) in available:
            ends[id(symbol)] = symbol
    listed = list(ends.values())
    rest = graph_of(listed[0] if len(listed) == 1 else listed, graph.declared_outputs, dtype)
    return HostStage(graph, calls, listed), rest


def _taken(maker: Maker, inputs: dict[int, Tensor]) -> list[Tensor]:
    """Return the symbolic tensors that a call takes, none for an input."""
    outputs = [maker] if isinstance(maker, Tensor) else tree.leaves(maker.outputs)
    if any(id(output) in inputs for output in outputs):
        return []
    return [symbol for symbol in maker.inputs if isinstance(symbol, Tensor)]


def _checked(array: Any, symbol: Tensor) -> Any:
    """Return texts of an input's shape."""
    texts = on_host(symbol.history.layer, array)
    if not texts.size:
        texts = texts.astype(np.str_)
    if texts.dtype.kind not in "UO":
        raise DataError(f"x: input {symbol.name!r} takes texts, found {texts.dtype.name}")
    if texts.ndim == 0:
        raise DataError(f"x: input {symbol.name!r} takes rows of texts, found a single one")
    expected = read(symbol.shape[1:])
    adjusted = axis_of_one(texts.shape[1:], expected)
    if adjusted is not None:
        texts = texts.reshape(len(texts), *adjusted)
    shape = texts.shape[1:]
    if len(shape) != len(expected) or any(n not in (None, m) for n, m in zip(expected, shape, strict=True)):
        raise DataError(f"x: input {symbol.name!r} takes texts of shape {expected}, found {shape}")
    return texts
