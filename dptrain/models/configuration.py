"""Models as Keras' configurations: `get_config` of Sequential and functional models, and back.

A functional model lists its layers with their calls ("inbound_nodes"), whose arguments refer to tensors as [layer,
call, output]. Ops on symbolic tensors follow the layers: those that Keras has and those read from its files
(`operations`) under Keras' names, others as "dptrain.ops".

Source: keras/src/models/functional.py, Keras 3.15.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.node import maker_of
from dptrain.layers.operation_layer import OperationLayer
from dptrain.models.graph import Graph, input_dtype
from dptrain.models.operations import Operation, described_call, described_operation, operation
from dptrain.ops.operation_calls import OperationCall
from dptrain.program import tree
from dptrain.program.dims import Dim, length_of, read
from dptrain.program.op import Op
from dptrain.program.tensor import OPS, Tensor, Variable, counted
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import plain
from dptrain.runtime.types import is_floating
from dptrain.saving.keras_config import (
    MAX_LAYERS,
    MODELS,
    Config,
    batch_shape,
    described,
    give_policies,
    layer_config,
    listed_layers,
    policy,
    read_layer,
    serialize_keras_object,
)
from dptrain.saving.program import attribute_from, attribute_of


def sequential_config(model: Any, start: InputLayer | None) -> dict[str, Any]:
    """Return Keras' `Sequential.get_config`; `start` is the input layer of a built model."""
    listed = [layer_config(layer) for layer in model.layers]
    result = {"name": model.name, "trainable": model.trainable, "dtype": policy(model), "layers": listed}
    if start is not None:
        first = _input_config(start, model._data_dtype)
        first["config"]["name"] = first["config"]["name"] or "input_layer"
        listed.insert(0, first)
        result["build_input_shape"] = list(start.batch_shape)
    return result


def _input_config(start: InputLayer, dtype: str) -> dict[str, Any]:
    """Return an input layer's description, with the model's floating-point dtype."""
    config = layer_config(start)
    if start.dtype.startswith("float"):
        config["config"]["dtype"] = dtype
    return config


def sequential_layers(config: Config) -> tuple[list[Layer], str]:
    """Return the layers and the floating-point dtype in a `Sequential.get_config`."""
    layers: list[Layer] = []
    problems = []
    listed = listed_layers(config, "Sequential")
    for position, description in enumerate(listed):
        try:
            layer = read_layer(description)
            if isinstance(layer, InputLayer) and position:
                raise ConfigError("an InputLayer must come before the first layer")
            layers.append(layer)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    if layers and all(isinstance(layer, InputLayer) for layer in layers):
        raise ConfigError("a model needs at least one layer")
    policy = give_policies(list(zip(listed, layers, strict=True)))
    shape = config.get("build_input_shape")
    if layers and not isinstance(layers[0], InputLayer) and shape is not None:
        layers.insert(0, InputLayer(batch_shape=batch_shape(shape)))
    return layers, policy


def functional_config(model: Any, graph: Graph) -> dict[str, Any]:
    """Return Keras' `Functional.get_config`."""
    if any(not isinstance(layer, InputLayer) for layer in graph.input_layers):
        raise ConfigError(f"model {model.name!r} starts in the middle of another model and cannot be saved")
    return _FunctionalWriter(model, graph).config()


class _FunctionalWriter:
    """Writes a graph as Keras' configuration of a functional model."""

    def __init__(self, model: Any, graph: Graph) -> None:
        self._model, self._graph = model, graph
        node_ids = {id(node) for node in graph.nodes}
        self._nodes = {id(layer): [node for node in layer._nodes if id(node) in node_ids] for layer in graph.layers}
        self._makers = [maker for maker in graph.makers if isinstance(maker, Tensor | OperationCall)]
        self._names = self._operation_names()
        outputs = [tree.leaves(maker if isinstance(maker, Tensor) else maker.outputs) for maker in graph.makers]
        symbols = [*tree.leaves(graph.inputs), *itertools.chain(*outputs)]
        self._axes = {  # a tensor and axis for each symbolic length's name
            length.name: (tensor, axis)
            for tensor in reversed(symbols)
            for axis, length in enumerate(tensor.shape)
            if isinstance(length, Dim)
        }

    def config(self) -> dict[str, Any]:
        return {
            "name": self._model.name,
            "trainable": self._model.trainable,
            "layers": [*map(self._layer, self._graph.layers), *map(self._operation, self._makers)],
            "input_layers": tree.map_leaves(lambda path, tensor: self._end(tensor), self._graph.declared_inputs),
            "output_layers": tree.map_leaves(lambda path, tensor: self._end(tensor), self._graph.outputs),
        }

    def _operation_names(self) -> dict[int, str]:
        """Return a name for each op and operation that no layer has."""
        names: dict[int, str] = {}
        used = {layer.name for layer in self._graph.layers}
        for maker in self._makers:
            kind = _kind_of(maker)
            numbered = (kind if not number else f"{kind}_{number}" for number in itertools.count())
            names[id(maker)] = next(name for name in numbered if name not in used)
            used.add(names[id(maker)])
        return names

    def _layer(self, layer: Layer) -> dict[str, Any]:
        if isinstance(layer, InputLayer):
            return _input_config(layer, self._model._data_dtype) | {"name": layer.name, "inbound_nodes": []}
        if isinstance(layer, OperationLayer):
            raise ConfigError(f"not supported: operation {layer.function.__name__!r} in a file; use it in a layer")
        calls = [self._call(node.arguments, node.keywords) for node in self._nodes[id(layer)]]
        return layer_config(layer) | {"name": layer.name, "inbound_nodes": calls}

    def _operation(self, maker: Tensor | OperationCall) -> dict[str, Any]:
        name = self._names[id(maker)]
        if isinstance(maker, Tensor):
            all_attributes = {**_default_attributes(maker), **maker.attributes}
            attributes = {key: self._attribute(value) for key, value in all_attributes.items()}
            return _op_config(maker, name, [self._operand(maker, operand) for operand in maker.inputs], attributes)
        call = described_call(maker)
        config = {"name": name} | {key: self._nested(value) for key, value in call.config.items()}
        description = described(call.module, call.class_name, config, call.class_name)
        return description | {"name": name, "inbound_nodes": [self._call(call.arguments, call.keywords)]}

    def _operand(self, maker: Tensor, operand: Tensor) -> Any:
        """Return an operand of an op; a number where reading it gives the same tensor."""
        is_number = operand.value is not None and operand.variable is None and not operand.shape and operand.op is None
        if is_number and any(operand.dtype == other.dtype for other in maker.inputs if other.value is None):
            return operand.numpy().item()
        return self._argument("", operand)

    def _call(self, arguments: Any, keywords: Any) -> dict[str, Any]:
        return {
            "args": [self._nested(argument) for argument in arguments],
            "kwargs": {name: self._nested(argument) for name, argument in keywords.items()},
        }

    def _nested(self, value: Any) -> Any:
        """Return an argument as JSON has it: tuples are lists."""
        if isinstance(value, list | tuple):
            return [self._nested(entry) for entry in value]
        return tree.map_leaves(self._argument, value)

    def _history(self, tensor: Tensor) -> list[Any]:
        """Return a tensor's origin: [layer, call, output]."""
        maker = maker_of(tensor)
        if isinstance(maker, OperationCall):
            return [self._names[id(maker)], 0, _position(tensor, maker.outputs)]
        if tensor.history is None:
            return [self._names[id(tensor)], 0, 0]
        layer = tensor.history.layer
        if isinstance(layer, InputLayer):
            return [layer.name, 0, 0]
        call = next(number for number, node in enumerate(self._nodes[id(layer)]) if node is tensor.history)
        return [layer.name, call, _position(tensor, tensor.history.outputs)]

    def _end(self, tensor: Tensor) -> list[Any]:
        """Return the origin of an input or output of the model."""
        name, call, output = self._history(tensor)
        return [name, call + _own_calls(None if tensor.history is None else tensor.history.layer), output]

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._attribute(entry) for entry in value]
        if not isinstance(value, Dim):
            return attribute_of(value)
        factors = [self._factor(name) for name in value.names]
        return {"class_name": "__length__", "factors": factors, "scale": value.scale, "offset": value.offset}

    def _factor(self, name: Any) -> Any:
        if not isinstance(name, str):
            return [name[0], *map(self._attribute, name[1:])]
        if name not in self._axes:  # the rows
            return None
        symbol, axis = self._axes[name]
        return {"class_name": "__keras_tensor__", "config": {"keras_history": self._history(symbol)}, "axis": axis}

    def _argument(self, path: str, value: Any) -> Any:
        if value is ...:
            return {"class_name": "__ellipsis__", "config": {}}
        if isinstance(value, np.ndarray):
            return serialize_keras_object(value)
        if isinstance(value, slice):
            ends = {"start": value.start, "stop": value.stop, "step": value.step}
            return {"class_name": "__slice__", "config": tree.map_leaves(self._argument, ends)}
        if isinstance(value, Dim):
            return self._attribute(value)
        if isinstance(value, type | np.dtype):
            return np.dtype(value).name
        if isinstance(value, Variable):
            value = value.value
        if not isinstance(value, Tensor):
            return plain(value)
        if value.is_length:
            return self._attribute(value.attributes["length"]) | {"dtype": value.dtype.name}
        if value.value is None:
            dtype = self._model._data_dtype if is_floating(value.dtype) else input_dtype(value)
            config = {"shape": list(read(value.shape)), "dtype": dtype, "keras_history": self._history(value)}
            return {"class_name": "__keras_tensor__", "config": config}
        if value.variable is not None or value.counts_rows:
            name = self._model.name
            raise ConfigError(f"model {name!r}: {value} is an argument that cannot be saved; use it in a layer")
        return {"class_name": "__numpy__", "config": {"value": value.numpy().tolist(), "dtype": value.dtype.name}}


def _kind_of(maker: Tensor | OperationCall) -> str:
    """Return Keras' name of an operation, which is the same once it has been read from a file."""
    if isinstance(maker, OperationCall):
        return snake_case(described_call(maker).class_name)
    assert maker.op is not None
    kind = described_operation(maker.op)
    return maker.op.name if kind is None else snake_case(kind[1])


def _position(tensor: Tensor, outputs: Any) -> int:
    return [id(output) for output in tree.leaves(outputs)].index(id(tensor))


def _own_calls(layer: Any) -> int:
    """Count the calls that Keras numbers before the first: a functional model's own."""
    return int(isinstance(layer, MODELS["Functional"]) and not isinstance(layer, MODELS["Sequential"]))


def functional_ends(config: Config) -> tuple[Any, Any, str]:
    """Return symbolic inputs and outputs, and the floating-point dtype, from a `Functional.get_config`."""
    reader = _FunctionalReader(listed_layers(config, "Functional"))
    reader.make_calls()
    return reader.end(config.get("input_layers")), reader.end(config.get("output_layers")), reader.dtype


@dataclass(frozen=True)
class _Call:
    """A pending call of the layer or op `name` in a configuration."""

    name: str
    node: Mapping[str, Any]  # arguments
    config: Mapping[str, Any]  # of the maker
    inputs: list[Any]  # histories of its input tensors


class _FunctionalReader:
    """Replays Keras' configuration of a functional model as calls on symbolic tensors."""

    def __init__(self, listed: Sequence[Config]) -> None:
        self._makers: dict[str, Layer | Op | Operation] = {}
        self._calls: list[_Call] = []
        problems = []
        for description in listed:
            try:
                self._read(description)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(dict.fromkeys(problems)))
        if len(self._calls) > MAX_LAYERS:
            raise ConfigError(f"{len(self._calls)} calls of layers, at most {MAX_LAYERS} are read")
        self._outputs: dict[str, list[list[Any]]] = {
            name: [[maker.output]] if isinstance(maker, InputLayer) else [] for name, maker in self._makers.items()
        }
        makers = zip(listed, self._makers.values(), strict=True)
        self.dtype = give_policies([(config, maker) for config, maker in makers if isinstance(maker, Layer)])

    def _read(self, description: Config) -> None:
        """Read a layer, op or operation, and note its calls."""
        is_op = isinstance(description, Mapping) and ".ops" in str(description.get("module"))
        maker = _op(description) if is_op else read_layer(description)
        config = description["config"]
        name = description.get("name") or config.get("name")
        if not isinstance(name, str) or name in self._makers:
            raise ConfigError(f"layer names must be unique, found {str(name)[:80]!r} again")
        if isinstance(maker, Layer):
            maker.name = name
        self._makers[name] = maker
        self._calls += [
            _Call(name, node, config, _histories([node, config if is_op else {}]))
            for node in description.get("inbound_nodes") or ()
        ]

    def make_calls(self) -> None:
        """Call all layers and ops, each once its inputs exist."""
        waiting = self._calls
        while waiting:
            later: list[_Call] = []
            blocked: set[str] = set()  # makers with an earlier pending call
            for call in waiting:
                if call.name in blocked or not all(map(self._is_available, call.inputs)):
                    later.append(call)
                    blocked.add(call.name)
                else:
                    self._outputs[call.name].append(self._make(call))
            if len(later) == len(waiting):
                raise ConfigError(
                    f"the inputs of layer {later[0].name[:80]!r} do not come from layers of the model, or the layers "
                    "form a cycle"
                )
            waiting = later

    def _make(self, call: _Call) -> list[Any]:
        arguments, keywords = self._argument(call.node.get("args", [])), self._argument(call.node.get("kwargs") or {})
        maker = self._makers[call.name]
        if isinstance(maker, Layer):
            return tree.leaves(maker(*arguments, **keywords))
        options = {key: value for key, value in call.config.items() if key != "name"}
        if isinstance(maker, Op):
            return [maker(*arguments, **{key: self._attribute(value) for key, value in options.items()})]
        return maker.call(arguments, keywords, {key: self._argument(value) for key, value in options.items()})

    def end(self, value: Any) -> Any:
        """Return the inputs or outputs of the model, nested like in its configuration."""
        if isinstance(value, Mapping):
            return {key: self.end(entry) for key, entry in value.items()}
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"expected the layers of inputs and outputs, found {str(value)[:80]!r}")
        if not isinstance(value[0], str):
            ends = [self.end(entry) for entry in value]
            return tuple(ends) if isinstance(value, tuple) else ends  # JSON has lists alone
        name, call, output = value
        history = (name, call - _own_calls(self._makers.get(name)), output)
        if not self._is_available(history):
            raise ConfigError(f"an output does not come from a layer of the model: {str(value)[:80]}")
        return self._tensor(history)

    def _is_available(self, history: Any) -> bool:
        if not isinstance(history, list | tuple) or len(history) != 3 or not isinstance(history[0], str):
            raise ConfigError(f"expected [layer, call, output], found {str(history)[:80]!r}")
        name, call, output = history
        calls = self._outputs.get(name, [])
        return type(call) is type(output) is int and 0 <= call < len(calls) and 0 <= output < len(calls[call])

    def _tensor(self, history: Any) -> Tensor:
        name, call, output = history
        tensor: Tensor = self._outputs[name][int(call)][int(output)]
        return tensor

    def _length(self, description: Mapping[str, Any]) -> Any:
        factors = [part if part is None else self._factor(part) for part in description["factors"]]
        return length_of(factors, description["scale"], description["offset"])

    def _factor(self, part: Any) -> Any:
        if isinstance(part, Mapping):
            return self._tensor(part["config"]["keras_history"]).shape[part["axis"]]
        function, *operands = part
        return (
            function,
            *(self._length(operand) if isinstance(operand, Mapping) else operand for operand in operands),
        )

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("class_name") == "__length__":
            return self._length(value)
        return tuple(map(self._attribute, value)) if isinstance(value, list) else attribute_from(value)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return [self._argument(entry) for entry in value] if isinstance(value, list | tuple) else value
        config: Any = value.get("config")
        match value.get("class_name"):
            case "__length__":
                length = self._length(value)
                return counted(length, value["dtype"]) if "dtype" in value else length
            case "__slice__":
                return slice(*(self._argument(config[end]) for end in ("start", "stop", "step")))
            case "__ellipsis__":
                return ...
            case "__keras_tensor__":
                return self._tensor(config["keras_history"])
            case "__numpy__":
                return np.array(config["value"], config["dtype"])
        return {key: self._argument(entry) for key, entry in value.items()}


def _histories(value: Any) -> list[Any]:
    """Return the histories [layer, call, output] of the tensors in a call's arguments."""
    if isinstance(value, Mapping):
        inner = value.get("config")
        if value.get("class_name") == "__keras_tensor__":
            return [inner.get("keras_history") if isinstance(inner, Mapping) else None]
        return [history for entry in value.values() for history in _histories(entry)]
    return [history for entry in value for history in _histories(entry)] if isinstance(value, list | tuple) else []


def _op_config(tensor: Tensor, name: str, arguments: list[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    assert tensor.op is not None
    if OPS.get(tensor.op.name) is not tensor.op:
        raise ConfigError(
            f"not supported: {tensor.op} is not an op of dptrain.ops and cannot be saved; use it in a layer"
        )
    kind = described_operation(tensor.op)
    module, class_name = ("dptrain.ops", tensor.op.name) if kind is None else kind
    description = described(module, class_name, {"name": name} | attributes, None if kind is None else class_name)
    return description | {"name": name, "inbound_nodes": [{"args": arguments, "kwargs": {}}]}


def _default_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes with defaults of one of Keras' operations, which Keras writes too."""
    if tensor.op is None or described_operation(tensor.op) is None:
        return {}
    parameters = inspect.signature(tensor.op.compute).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _op(description: Config) -> Op | Operation:
    kind, is_ours = str(description.get("class_name")), description.get("module") == "dptrain.ops"
    if not is_ours:
        return operation(description)
    op = OPS.get(kind)
    if op is None:
        raise ConfigError(f"not supported: operation {kind[:80]!r}")
    return op
