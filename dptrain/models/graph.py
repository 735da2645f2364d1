"""A functional model's graph: from symbolic inputs to symbolic outputs, and how it is run on real ones.

The order of layers is Keras' (keras/src/models/functional.py, `map_graph_network`), so that weights have the same order
in both: by falling distance from the outputs, then as a walk from the outputs meets them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.node import Node, OperationCall, is_symbolic, maker_of
from dptrain.program import tree
from dptrain.program.dims import bound, is_number, learned, number_of, read
from dptrain.program.shapes import axis_of_one
from dptrain.program.tensor import Tensor, as_tensors, counted, is_whole, mask_of, with_mask
from dptrain.program.types import is_half

# What makes a symbolic tensor: a call of a layer or an operation, or the tensor itself where an op was called.
Maker = Node | OperationCall | Tensor


class Graph:
    """What lies between symbolic tensors.

    Args:
        inputs: of `Input`, nested.
        outputs: made of them, nested.

    Attributes:
        inputs: as given, dictionaries with sorted keys.
        outputs: likewise.
        makers: calls of layers and operations, and tensors that ops made, each after those that it needs.
        nodes: of these the calls of layers.
        layers: in Keras' order.
        declared_inputs: as given, in their own order.
        takes_lists: whether a list may stand for a dictionary of inputs: its order is that of the sorted keys, Keras',
            and the one in which they were declared.

    Raises:
        ConfigError: something else than symbolic tensors, or an output that needs other inputs.
    """

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.inputs, self.outputs = tree.with_sorted_keys(inputs), tree.with_sorted_keys(outputs)
        self._returned = outputs
        self.declared_inputs, self.takes_lists = inputs, tree.has_sorted_keys(inputs)
        for name, given in (("inputs", inputs), ("outputs", outputs)):
            if not tree.leaves(given):
                raise ConfigError(f"`{name}` argument cannot be empty. Received: inputs={inputs}, outputs={outputs}")
            for one in tree.leaves(given):
                if not isinstance(one, Tensor) or one.value is not None:
                    raise ConfigError(
                        f"All `{name}` values must be KerasTensors. Received: {name}={given} including invalid value "
                        f"{one} of type {type(one)}"
                    )
        self._ends = {id(one) for one in tree.leaves(inputs)}
        order, indices = self._walk()
        self.makers = order
        self.nodes = [one for one in order if isinstance(one, Node)]
        self.layers = self._in_keras_order(order, indices)

    @property
    def input_layers(self) -> list[Layer]:
        """The layers of the inputs, but for those that ops made."""
        return [one.history.layer for one in tree.leaves(self.inputs) if one.history is not None]

    def run(
        self,
        inputs: Any,
        dtype: str,
        call: Callable[..., Any] | None = None,
        mask: Any = None,
        name: str | None = None,
    ) -> Any:
        """Return the outputs for inputs that are nested as the graph's, or in its order.

        Args:
            inputs: tensors.
            dtype: the model's, to which inputs become that are to be floating-point numbers and are not.
            call: calls a layer with the arguments that follow it; by default as they are.
            mask: of the inputs, in the graph's order, None among them; by default what they have.
            name: of the model, whose inputs must have the lengths that were declared; None where others may do.

        Raises:
            ConfigError: other inputs than the graph has.
        """
        names = [one.name for one in tree.leaves(self.inputs)]
        given = as_tensors(tree.matched(inputs, self.inputs, names, by_key=not self.takes_lists))
        masks = [mask_of(tensor) if mask is None else mask for tensor, mask in zip(given, _each(mask), strict=False)]
        known: dict[int, Any] = {}
        integers: dict[int, Tensor] = {}
        lengths: dict[str, Any] = {}
        for number, (symbol, one, mask) in enumerate(zip(tree.leaves(self.inputs), given, masks, strict=True)):
            wanted = np.dtype(dtype) if symbol.dtype.kind in "fV" else symbol.dtype
            one = _of_rank(one, symbol)
            _check_rows(one, symbol)
            if name is not None:
                _check_lengths(one, symbol, f"Input {number} with name {symbol.name!r} of layer {name!r}")
            known[id(symbol)] = one if one.dtype == wanted else ops.cast(one, wanted)
            if wanted.kind in "fV" and one.dtype.kind in "iu":
                integers[id(symbol)] = one
                known[id(symbol)].is_whole = True
            if mask is not None:
                known[id(symbol)] = with_mask(known[id(symbol)], mask)
            learned(lengths, symbol.shape, one.shape)

        def value(symbol: Any) -> Any:
            if not isinstance(symbol, Tensor) or symbol.value is not None:
                return symbol
            if id(symbol) not in known:
                made_by = symbol.history
                attributes = {name: bound(one, lengths) for name, one in symbol.attributes.items()}
                if made_by is not None:
                    run(made_by)
                elif symbol.op is None:
                    known[id(symbol)] = counted(**attributes)
                else:
                    known[id(symbol)] = symbol.op(*map(value, symbol.inputs), **attributes)
                    _mark_whole(known[id(symbol)], symbol.inputs, symbol.op.moves, known)
            return known[id(symbol)]

        def run(node: Node) -> None:
            if integers and (node.layer._takes_ids or not node.layer._casts_inputs):  # float32 rounds from 2^24 on
                self._call(node, lambda x: integers[id(x)] if id(x) in integers else value(x), known, call)
            else:
                self._call(node, value, known, call)
            for symbol in tree.leaves(node.outputs):
                if isinstance(known[id(symbol)], Tensor):
                    _mark_whole(known[id(symbol)], tree.leaves(node.arguments), node.layer._moves_values, known)
                    learned(lengths, symbol.shape, known[id(symbol)].shape)

        for node in self.nodes:  # in order, so that no chain of layers is too deep for Python
            if not all(id(one) in known for one in tree.leaves(node.outputs)):
                run(node)
        outputs = tree.map_leaves(lambda path, one: value(one), self._returned)
        if is_symbolic(tree.leaves(outputs)[0]):
            for maker in self.makers:
                if isinstance(maker, OperationCall):
                    maker.repeat(value)
        return outputs

    def _call(self, node: Node, value: Any, known: dict[int, Any], call: Callable[..., Any] | None) -> None:
        arguments = tree.map_leaves(lambda path, one: value(one), node.arguments)
        keywords = {name: tree.map_leaves(lambda path, one: value(one), one) for name, one in node.keywords.items()}
        found = node.layer(*arguments, **keywords) if call is None else call(node.layer, *arguments, **keywords)
        for symbol, one in zip(tree.leaves(node.outputs), tree.leaves(found), strict=True):
            known[id(symbol)] = one
            if mask_of(symbol) is not None:
                known[id(mask_of(symbol))] = mask_of(one)

    def _is_end(self, maker: Maker) -> bool:
        made = [maker] if isinstance(maker, Tensor) else tree.leaves(maker.outputs)
        return any(id(one) in self._ends for one in made)

    def _parents(self, maker: Maker) -> Iterator[Maker]:
        if self._is_end(maker):
            return
        for one in maker.inputs:
            if isinstance(one, Tensor) and one.value is None and not one.is_length:
                yield maker_of(one)

    def _walk(self) -> tuple[list[Maker], dict[int, int]]:
        """Return what makes the outputs, each after what it needs, and when a walk from them meets each layer.

        Raises:
            ConfigError: something is made of no input.
        """
        order: list[Maker] = []
        done: set[int] = set()
        indices: dict[int, int] = {}
        starts = [maker_of(one) for one in tree.leaves(self.outputs)]
        stack = [(one, False) for one in reversed(starts)]
        while stack:
            maker, finished = stack.pop()
            if finished:
                order.append(maker)
            elif id(maker) not in done:
                done.add(id(maker))
                indices.setdefault(id(maker.layer if isinstance(maker, Node) else maker), len(indices))
                parents = list(self._parents(maker))
                origin = not isinstance(maker, Tensor) or maker.op is None
                if not parents and not self._is_end(maker) and origin:
                    one = maker.layer._display_name if isinstance(maker, Node) else maker
                    raise ConfigError(
                        f"`inputs` not connected to `outputs`: an output needs {one!r}, which is not among them"
                    )
                stack.append((maker, True))
                stack += [(one, False) for one in reversed(parents)]
        return order, indices

    def _in_keras_order(self, order: Sequence[Maker], indices: dict[int, int]) -> list[Layer]:
        depths: dict[int, int] = {}
        of_layer: dict[int, int] = {}
        found: dict[int, Layer] = {}
        for maker in reversed(order):
            own = id(maker.layer if isinstance(maker, Node) else maker)
            depth = max(depths.get(id(maker), 0), of_layer.get(own, 0))
            depths[id(maker)] = of_layer[own] = depth
            if isinstance(maker, Node):
                found[own] = maker.layer
            for parent in self._parents(maker):
                depths[id(parent)] = max(depth + 1, depths.get(id(parent), 0))
        for layer in self.input_layers:
            found.setdefault(id(layer), layer)
        return sorted(found.values(), key=lambda one: (-of_layer.get(id(one), 0), indices.get(id(one), -1)))


def graph_of(inputs: Any, outputs: Any, dtype: str) -> Graph:
    """Return the graph between symbolic tensors; what lies before them is no part of it.

    Args:
        inputs: nested; where one was made by a layer or an op, an `Input` like it takes its place.
        outputs: made of them, nested.
        dtype: the model's.

    Raises:
        ConfigError: as `Graph`.
    """
    graph = Graph(inputs, outputs)
    if all(_is_input(one) for one in tree.leaves(inputs)):
        return graph
    entries = tree.map_leaves(lambda path, one: one if _is_input(one) else _input_like(one), inputs)
    return Graph(entries, graph.run(entries, dtype))


def _is_input(symbol: Tensor) -> bool:
    return symbol.history is not None and isinstance(symbol.history.layer, InputLayer)


def _input_like(symbol: Tensor) -> Tensor:
    found: Tensor = InputLayer(batch_shape=read(symbol.shape), dtype=symbol.dtype.name).output
    return found


def name_of_maker(symbol: Tensor) -> str:
    """Return the name of the layer, or of the op, that makes a symbolic tensor."""
    if symbol.history is not None:
        return str(symbol.history.layer.name)
    assert symbol.op is not None
    return symbol.op.label


def _mark_whole(output: Tensor, inputs: Sequence[Any], moves: bool, known: Mapping[int, Any]) -> None:
    """Mark an output as one of integers, if it has been made of such by moving them.

    Args:
        output: of a layer or an op.
        inputs: symbols of what it was made of.
        moves: whether its maker only moves numbers.
        known: tensors by their symbols.
    """
    if moves and not is_half(output.dtype) and inputs and all(is_whole(known.get(id(symbol))) for symbol in inputs):
        output.is_whole = True


def _each(masks: Any) -> Iterator[Any]:
    """Yield masks in order, None among them, and then None for ever."""
    if isinstance(masks, Mapping):
        masks = [masks[key] for key in sorted(masks)]
    if isinstance(masks, list | tuple):
        for nested in masks:
            yield from itertools.islice(_each(nested), max(1, len(tree.leaves(nested))))
    elif masks is not None:
        yield masks
    yield from itertools.repeat(None)


def _of_rank(given: Tensor, like: Tensor) -> Tensor:
    """Return an input with a last axis of length 1 where it lacks one, or without where it has one too many."""
    shape = axis_of_one(given.shape[1:], like.shape[1:])
    return given if shape is None else ops.reshape(given, (given.shape[0], *shape))


def _check_lengths(given: Tensor, like: Tensor, where: str) -> None:
    """Raise where an input has another rank or other lengths than were declared.

    Raises:
        ConfigError: it has.
    """
    pairs = zip(given.shape[1:], like.shape[1:], strict=False)
    if given.ndim != like.ndim or any(
        is_number(n) and is_number(wanted) and number_of(n) != number_of(wanted) for n, wanted in pairs
    ):
        raise ConfigError(
            f"{where} is incompatible with the layer: "
            f"expected shape={read(like.shape)}, found shape={read(given.shape)}"
        )


def _check_rows(given: Tensor, like: Tensor) -> None:
    """Raise where an input's number of rows has been fixed and a batch has another.

    Raises:
        ConfigError: it has.
    """
    rows, wanted = (one.shape[0] if one.ndim else 1 for one in (given, like))
    if is_number(wanted) and is_number(rows) and int(rows) != number_of(wanted):
        raise ConfigError(
            f"Invalid input shape for input {like.name!r}. Expected shape {read(like.shape)}, but input has "
            f"incompatible shape {read(given.shape)}: its batch_size is fixed, so every batch must have "
            f"{number_of(wanted)} rows"
        )
