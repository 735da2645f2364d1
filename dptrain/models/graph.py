"""A functional model's graph between symbolic inputs and outputs, and how it runs on tensors.

Layers, and so weights, are in Keras' order (keras/src/models/functional.py, `map_graph_network`): by decreasing
distance from the outputs, then in the order of a walk from the outputs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.node import LayerCall, maker_of
from dptrain.ops.operation_calls import OperationCall
from dptrain.program import tree
from dptrain.program.dims import Dim, bound, is_number, learned, number_of, read
from dptrain.program.shapes import axis_of_one
from dptrain.program.tensor import Tensor, as_tensors, counted, is_whole, mask_of, with_mask
from dptrain.runtime.failure import warn
from dptrain.runtime.types import is_floating, is_narrow

# Origin of a symbolic tensor: a call of a layer or operation, or the tensor itself if an op made it.
Maker = LayerCall | OperationCall | Tensor


class Graph:
    """The calls of layers and ops between symbolic tensors."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        self.inputs, self.outputs = tree.with_sorted_keys(inputs), tree.with_sorted_keys(outputs)
        self._returned = outputs
        # As in Keras, a list may stand for a dictionary whose keys were declared in sorted order.
        self.declared_inputs, self.takes_lists = inputs, tree.has_sorted_keys(inputs)
        for name, tensors in (("inputs", inputs), ("outputs", outputs)):
            if not tree.leaves(tensors):
                raise ConfigError(f"`{name}` argument cannot be empty. Received: inputs={inputs}, outputs={outputs}")
            for tensor in tree.leaves(tensors):
                if not isinstance(tensor, Tensor) or tensor.value is not None:
                    raise ConfigError(
                        f"All `{name}` values must be KerasTensors. Received: {name}={tensors} including invalid value "
                        f"{tensor} of type {type(tensor)}"
                    )
        self._ends = {id(tensor) for tensor in tree.leaves(inputs)}
        order, indices = self._walk()
        self.makers = order  # calls of layers and operations, and tensors that ops made, in topological order
        self.nodes = [maker for maker in order if isinstance(maker, LayerCall)]
        self.layers = self._in_keras_order(order, indices)

    @property
    def dtype(self) -> str:
        """The type of the first floating-point input; "float32" without any."""
        floating = (symbol.dtype.name for symbol in tree.leaves(self.inputs) if is_floating(symbol.dtype))
        return next(floating, "float32")

    @property
    def declared_outputs(self) -> Any:
        """The outputs as the model returns them."""
        return self._returned

    @property
    def input_layers(self) -> list[Layer]:
        """The layers of the inputs, except of inputs that ops made."""
        return [symbol.history.layer for symbol in tree.leaves(self.inputs) if symbol.history is not None]

    def run(
        self,
        inputs: Any,
        dtype: str,
        call: Callable[..., Any] | None = None,
        mask: Any = None,
        name: str | None = None,
    ) -> Any:
        """Return the outputs for inputs nested like the graph's, or in its order.

        Inputs are cast to `dtype` where the graph's are floating-point. `call` calls a layer with its arguments, by
        default directly; `mask` replaces the inputs' masks, in their order. With the model's `name`, inputs must have
        the declared lengths.
        """
        names = [symbol.name for symbol in tree.leaves(self.inputs)]
        leaves = tree.matched(inputs, self.inputs, names, by_key=not self.takes_lists)
        if warning := tree.structure_warning(inputs, self.inputs):
            warn(warning)
        tensors = [None if leaf is None else as_tensors([leaf])[0] for leaf in leaves]
        masks = [mask_of(tensor) if mask is None else mask for tensor, mask in zip(tensors, _each(mask), strict=False)]
        values = _Values(call)
        for number, (symbol, tensor, mask) in enumerate(zip(tree.leaves(self.inputs), tensors, masks, strict=True)):
            if tensor is None:
                values.leave_out(symbol)
                continue
            tensor = _of_rank(tensor, symbol)
            _check_rows(tensor, symbol)
            if name is not None:
                _check_lengths(tensor, symbol, f"Input {number} with name {symbol.name!r} of layer {name!r}")
            values.enter(symbol, tensor, np.dtype(dtype) if is_floating(symbol.dtype) else symbol.dtype, mask)
        for maker in self.makers:  # iteratively: a chain may be too deep for recursion
            values.complete(maker)
        return tree.map_leaves(lambda path, symbol: values.of(symbol), self._returned)

    def _is_end(self, maker: Maker) -> bool:
        outputs = [maker] if isinstance(maker, Tensor) else tree.leaves(maker.outputs)
        return any(id(output) in self._ends for output in outputs)

    def _parents(self, maker: Maker) -> Iterator[Maker]:
        if self._is_end(maker):
            return
        for tensor in maker.inputs:
            if isinstance(tensor, Tensor) and tensor.value is None and not tensor.is_length:
                yield maker_of(tensor)

    def _walk(self) -> tuple[list[Maker], dict[int, int]]:
        """Return the makers of the outputs in topological order, and when a walk from the outputs meets each layer."""
        order: list[Maker] = []
        visited: set[int] = set()
        indices: dict[int, int] = {}
        starts = [maker_of(tensor) for tensor in tree.leaves(self.outputs)]
        stack = [(maker, False) for maker in reversed(starts)]
        while stack:
            maker, finished = stack.pop()
            if finished:
                order.append(maker)
            elif id(maker) not in visited:
                visited.add(id(maker))
                indices.setdefault(id(maker.layer if isinstance(maker, LayerCall) else maker), len(indices))
                parents = list(self._parents(maker))
                origin = not isinstance(maker, Tensor) or maker.op is None
                if not parents and not self._is_end(maker) and origin:
                    label = maker.layer._display_name if isinstance(maker, LayerCall) else maker
                    raise ConfigError(
                        f"`inputs` not connected to `outputs`: an output needs {label!r}, which is not among them"
                    )
                stack.append((maker, True))
                stack += [(parent, False) for parent in reversed(parents)]
        return order, indices

    def _in_keras_order(self, order: Sequence[Maker], indices: dict[int, int]) -> list[Layer]:
        depths: dict[int, int] = {}
        of_layer: dict[int, int] = {}
        layers: dict[int, Layer] = {}
        for maker in reversed(order):
            key = id(maker.layer if isinstance(maker, LayerCall) else maker)
            depth = max(depths.get(id(maker), 0), of_layer.get(key, 0))
            depths[id(maker)] = of_layer[key] = depth
            if isinstance(maker, LayerCall):
                layers[key] = maker.layer
            for parent in self._parents(maker):
                depths[id(parent)] = max(depth + 1, depths.get(id(parent), 0))
        for layer in self.input_layers:
            layers.setdefault(id(layer), layer)
        return sorted(layers.values(), key=lambda layer: (-of_layer.get(id(layer), 0), indices.get(id(layer), -1)))


class _Values:
    """The tensors of one run by symbolic ones; `call` calls a layer with its arguments, by default directly."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call
        self._tensors: dict[int, Any] = {}
        self._integers: dict[int, Tensor] = {}  # of inputs that are cast to floating point
        self._lengths: dict[str, Any] = {}

    def enter(self, symbol: Tensor, tensor: Tensor, dtype: np.dtype[Any], mask: Any) -> None:
        """Set an input, cast to a type."""
        value = tensor if tensor.dtype == dtype else ops.cast(tensor, dtype)
        if is_floating(dtype) and tensor.dtype.kind in "iu":
            self._integers[id(symbol)] = tensor
            value.is_whole = True
        self._tensors[id(symbol)] = value if mask is None else with_mask(value, mask)
        learned(self._lengths, symbol.shape, tensor.shape)

    def leave_out(self, symbol: Tensor) -> None:
        """Let an optional input be None; ConfigError for another."""
        if not is_optional(symbol):
            raise ConfigError(not_optional(symbol.name))
        self._tensors[id(symbol)] = None

    def of(self, symbol: Any) -> Any:
        """Return the tensor of a symbolic one, None for an optional input that is left out; anything else as it is."""
        if not isinstance(symbol, Tensor) or symbol.value is not None:
            return symbol
        if id(symbol) not in self._tensors:
            self._compute(maker_of(symbol))
        return self._tensors[id(symbol)]

    def complete(self, maker: Maker) -> None:
        """Compute what a call or an op makes, unless that is known."""
        if isinstance(maker, Tensor):
            self.of(maker)
        elif any(id(symbol) not in self._tensors for symbol in tree.leaves(maker.outputs)):
            self._compute(maker)

    def _compute(self, maker: Maker) -> None:
        if isinstance(maker, OperationCall):
            self._compute_operation(maker)
        elif isinstance(maker, LayerCall):
            self._call_layer(maker)
        else:
            attributes = {name: bound(attribute, self._lengths) for name, attribute in maker.attributes.items()}
            if maker.op is None:
                self._tensors[id(maker)] = counted(**attributes)
            else:
                self._tensors[id(maker)] = maker.op(*map(self.of, maker.inputs), **attributes)
                self._mark_whole(maker, maker.inputs, maker.op.moves)

    def _compute_operation(self, node: OperationCall) -> None:
        arguments, keywords = tree.map_leaves(self._argument, (node.arguments, node.keywords))
        outputs = tree.leaves(node.function(*arguments, **keywords))
        moves = node.moves_values
        for symbol, output in zip(tree.leaves(node.outputs), outputs, strict=True):
            if getattr(symbol, "operation_call", None) is node:
                self._tensors[id(symbol)] = output
                self._mark_whole(symbol, node.inputs, moves)
                learned(self._lengths, symbol.shape, output.shape)

    def _argument(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(self._argument(path, end) for end in (leaf.start, leaf.stop, leaf.step)))
        return bound(leaf, self._lengths) if isinstance(leaf, Dim) else self.of(leaf)

    def _call_layer(self, node: LayerCall) -> None:
        takes_integers = node.layer._takes_ids or not node.layer._casts_inputs  # float32 rounds above 2^24

        def argument(path: str, symbol: Any) -> Any:
            return self._integers[id(symbol)] if takes_integers and id(symbol) in self._integers else self.of(symbol)

        arguments, keywords = tree.map_leaves(argument, (node.arguments, dict(node.keywords)))
        call = self._call
        outputs = node.layer(*arguments, **keywords) if call is None else call(node.layer, *arguments, **keywords)
        for symbol, output in zip(tree.leaves(node.outputs), tree.leaves(outputs), strict=True):
            self._tensors[id(symbol)] = output
            if mask_of(symbol) is not None:
                self._tensors[id(mask_of(symbol))] = mask_of(output)
            if isinstance(output, Tensor):
                self._mark_whole(symbol, tree.leaves(node.arguments), node.layer._moves_values)
                learned(self._lengths, symbol.shape, output.shape)

    def _mark_whole(self, symbol: Tensor, inputs: Sequence[Any], moves: bool) -> None:
        """Mark a tensor as integers if its maker only moves values of such inputs."""
        output = self._tensors[id(symbol)]
        are_whole = (is_whole(self._tensors.get(id(read_symbol))) for read_symbol in inputs)
        if moves and isinstance(output, Tensor) and not is_narrow(output.dtype) and inputs and all(are_whole):
            output.is_whole = True


def graph_of(inputs: Any, outputs: Any, dtype: str) -> Graph:
    """Return the graph between symbolic tensors; an `Input` replaces an input that a layer or op made."""
    graph = Graph(inputs, outputs)
    if all(_is_input(symbol) for symbol in tree.leaves(inputs)):
        return graph
    entries = tree.map_leaves(lambda path, symbol: symbol if _is_input(symbol) else _input_like(symbol), inputs)
    return Graph(entries, graph.run(entries, dtype))


def is_optional(symbol: Tensor) -> bool:
    """Whether an input may be left out."""
    return _is_input(symbol) and symbol.history.layer.optional


def not_optional(name: str) -> str:
    """Return the message about a missing input, as in Keras."""
    return f"The input '{name}' is not optional, but None was passed. Please provide a valid tensor."


def _is_input(symbol: Tensor) -> bool:
    return symbol.history is not None and isinstance(symbol.history.layer, InputLayer)


def _input_like(symbol: Tensor) -> Tensor:
    tensor: Tensor = InputLayer(batch_shape=read(symbol.shape), dtype=input_dtype(symbol)).output
    return tensor


def input_dtype(symbol: Tensor) -> str:
    """Return the type of an `Input` like a symbolic tensor."""
    return "string" if symbol.dtype.kind == "U" else symbol.dtype.name


def name_of_maker(symbol: Tensor) -> str:
    """Return the name of the layer or op that made a symbolic tensor."""
    if symbol.history is not None:
        return str(symbol.history.layer.name)
    assert symbol.op is not None
    return symbol.op.label


def _each(masks: Any) -> Iterator[Any]:
    """Yield masks in order, then None for ever."""
    if isinstance(masks, Mapping):
        masks = [masks[key] for key in sorted(masks)]
    if isinstance(masks, list | tuple):
        for nested in masks:
            yield from itertools.islice(_each(nested), max(1, len(tree.leaves(nested))))
    elif masks is not None:
        yield masks
    yield from itertools.repeat(None)


def _of_rank(tensor: Tensor, like: Tensor) -> Tensor:
    """Add or remove a last axis of length 1 to match an input's declared rank."""
    shape = axis_of_one(tensor.shape[1:], like.shape[1:])
    return tensor if shape is None else ops.reshape(tensor, (tensor.shape[0], *shape))


def _check_lengths(tensor: Tensor, like: Tensor, where: str) -> None:
    pairs = zip(tensor.shape[1:], like.shape[1:], strict=False)
    if tensor.ndim != like.ndim or any(
        is_number(n) and is_number(expected) and number_of(n) != number_of(expected) for n, expected in pairs
    ):
        raise ConfigError(
            f"{where} is incompatible with the layer: "
            f"expected shape={read(like.shape)}, found shape={read(tensor.shape)}"
        )


def _check_rows(tensor: Tensor, like: Tensor) -> None:
    """Refuse a batch that differs from a fixed size."""
    rows, expected = (symbol.shape[0] if symbol.ndim else 1 for symbol in (tensor, like))
    if is_number(expected) and is_number(rows) and int(rows) != number_of(expected):
        raise ConfigError(
            f"Invalid input shape for input {like.name!r}. Expected shape {read(like.shape)}, but input has "
            f"incompatible shape {read(tensor.shape)}: its batch_size is fixed, so every batch must have "
            f"{number_of(expected)} rows"
        )
