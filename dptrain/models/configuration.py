"""Models as Keras' configurations: `get_config` of Sequential and functional models, and back.

A functional model lists its layers with their calls ("inbound_nodes"); the arguments of a call name the tensors that
are made by others as [layer, call, output]. Ops that were called on symbolic tensors stand behind the layers: those
that Keras has as well under its names, as all that a file of Keras' had (`operations`), the others as "dptrain.ops".

Source: keras/src/models/functional.py, Keras 3.15.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.node import OperationCall, maker_of
from dptrain.models.graph import Graph
from dptrain.models.operations import Operation, operation
from dptrain.ops.manipulation import getitem
from dptrain.program import tree
from dptrain.program.dims import Dim, is_number, length_of, read
from dptrain.program.op import Op
from dptrain.program.tensor import OPS, Tensor, counted
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import plain
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
    """Return Keras' `Sequential.get_config`; `start` is the input layer, if the model is built."""
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
    """Return the layers and the floating-point dtype of a `Sequential.get_config`."""
    layers: list[Layer] = []
    problems = []
    listed = listed_layers(config, "Sequential")
    for position, description in enumerate(listed):
        try:
            layer = read_layer(description)
            if isinstance(layer, InputLayer) and position:
                raise ConfigError("an InputLayer can stand only before the first layer")
            layers.append(layer)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    if all(isinstance(layer, InputLayer) for layer in layers):
        raise ConfigError("a model needs at least one layer")
    policy = give_policies(list(zip(listed, layers, strict=True)))
    shape = config.get("build_input_shape")
    if not isinstance(layers[0], InputLayer) and shape is not None:
        layers.insert(0, InputLayer(batch_shape=batch_shape(shape)))
    return layers, policy


def functional_config(model: Any, graph: Graph) -> dict[str, Any]:
    """Return Keras' `Functional.get_config`."""
    if any(not isinstance(layer, InputLayer) for layer in graph.input_layers):
        raise ConfigError(f"model {model.name!r} begins in the middle of another one and cannot be saved")
    node_ids = {id(node) for node in graph.nodes}
    nodes = {id(layer): [node for node in layer._nodes if id(node) in node_ids] for layer in graph.layers}
    makers = [maker for maker in graph.makers if isinstance(maker, Tensor | OperationCall)]
    names: dict[int, str] = {}
    used = {layer.name for layer in graph.layers}
    for maker in makers:
        kind = snake_case(maker.class_name) if isinstance(maker, OperationCall) else maker.op.name  # type: ignore[union-attr]
        numbered = (kind if not number else f"{kind}_{number}" for number in range(len(makers) + len(used) + 1))
        names[id(maker)] = next(name for name in numbered if name not in used)
        used.add(names[id(maker)])

    def place(tensor: Tensor) -> list[Any]:
        maker = maker_of(tensor)
        if isinstance(maker, OperationCall):
            return [names[id(maker)], 0, [id(output) for output in tree.leaves(maker.outputs)].index(id(tensor))]
        if tensor.history is None:
            return [names[id(tensor)], 0, 0]
        layer = tensor.history.layer
        if isinstance(layer, InputLayer):
            return [layer.name, 0, 0]
        of_call = [id(output) for output in tree.leaves(tensor.history.outputs)]
        number = next(n for n, node in enumerate(nodes[id(layer)]) if node is tensor.history)
        return [layer.name, number, of_call.index(id(tensor))]

    outputs = [tree.leaves(maker if isinstance(maker, Tensor) else maker.outputs) for maker in graph.makers]
    symbols = [*tree.leaves(graph.inputs), *itertools.chain(*outputs)]
    homes = {
        n.name: (tensor, axis)
        for tensor in reversed(symbols)
        for axis, n in enumerate(tensor.shape)
        if isinstance(n, Dim)
    }

    def attribute(value: Any) -> Any:
        if isinstance(value, tuple):
            return [attribute(entry) for entry in value]
        if not isinstance(value, Dim):
            return attribute_of(value)
        factors = [factor(name) for name in value.names]
        return {"class_name": "__length__", "factors": factors, "scale": value.scale, "offset": value.offset}

    def factor(name: Any) -> Any:
        if not isinstance(name, str):
            return [name[0], *map(attribute, name[1:])]
        if name not in homes:  # the rows
            return None
        symbol, axis = homes[name]
        return {"class_name": "__keras_tensor__", "config": {"keras_history": place(symbol)}, "axis": axis}

    def end(tensor: Tensor) -> list[Any]:  # in Keras a functional model has a call more, its own
        name, number, output = place(tensor)
        shifted = tensor.history is not None and isinstance(tensor.history.layer, MODELS["Functional"])
        shifted = shifted and not isinstance(tensor.history.layer, MODELS["Sequential"])
        return [name, number + 1 if shifted else number, output]

    def argument(path: str, value: Any) -> Any:
        if value is ...:
            return {"class_name": "__ellipsis__", "config": {}}
        if isinstance(value, np.ndarray | slice):
            return serialize_keras_object(value)
        if not isinstance(value, Tensor):
            return plain(value)
        if value.is_length:
            return attribute(value.attributes["length"]) | {"dtype": value.dtype.name}
        if value.value is None:
            dtype = model._data_dtype if value.dtype.kind in "fV" else value.dtype.name
            config = {"shape": list(read(value.shape)), "dtype": dtype, "keras_history": place(value)}
            return {"class_name": "__keras_tensor__", "config": config}
        if value.variable is not None or value.counts_rows:
            raise ConfigError(f"model {model.name!r}: {value} is an argument that cannot be saved; use it in a layer")
        return {"class_name": "__numpy__", "config": {"value": value.numpy().tolist(), "dtype": value.dtype.name}}

    listed = []
    for layer in graph.layers:
        description = _input_config(layer, model._data_dtype) if isinstance(layer, InputLayer) else layer_config(layer)
        calls = [] if isinstance(layer, InputLayer) else nodes[id(layer)]
        inbound = [
            {
                "args": tree.map_leaves(argument, list(symbol.arguments)),
                "kwargs": tree.map_leaves(argument, symbol.keywords),
            }
            for symbol in calls
        ]
        listed.append(description | {"name": layer.name, "inbound_nodes": inbound})
    for maker in makers:
        if isinstance(maker, OperationCall):
            config = {"name": names[id(maker)]} | tree.map_leaves(argument, maker.config)
            call = {
                "args": tree.map_leaves(argument, list(maker.arguments)),
                "kwargs": tree.map_leaves(argument, maker.keywords),
            }
            description = described(maker.module, maker.class_name, config, maker.class_name)
            listed.append(description | {"name": names[id(maker)], "inbound_nodes": [call]})
            continue
        attributes = {key: attribute(value) for key, value in maker.attributes.items()}
        listed.append(_op_config(maker, names[id(maker)], [argument("", each) for each in maker.inputs], attributes))
    return {
        "name": model.name,
        "trainable": model.trainable,
        "layers": listed,
        "input_layers": tree.map_leaves(lambda path, tensor: end(tensor), graph.declared_inputs),
        "output_layers": tree.map_leaves(lambda path, tensor: end(tensor), graph.outputs),
    }


def functional_ends(config: Config) -> tuple[Any, Any, str]:
    """Return symbolic inputs and outputs, and the floating-point dtype, of a `Functional.get_config`."""
    listed = listed_layers(config, "Functional")
    makers: dict[str, Layer | Op | Operation] = {}
    problems, waiting = [], []
    for description in listed:
        try:
            is_op = isinstance(description, Mapping) and ".ops" in str(description.get("module"))
            maker = _op(description) if is_op else read_layer(description)
            name = description.get("name") or description["config"].get("name")
            if not isinstance(name, str) or name in makers:
                raise ConfigError(f"layer names must be unique, found {str(name)[:80]!r} again")
            if isinstance(maker, Layer):
                maker.name = name
            makers[name] = maker
            arguments_of = description["config"]
            needed = arguments_of if is_op else {}
            waiting += [
                (name, node, arguments_of, _histories([node, needed]))
                for node in description.get("inbound_nodes") or ()
            ]
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    results = {name: [[maker.output]] if isinstance(maker, InputLayer) else [] for name, maker in makers.items()}
    if len(waiting) > MAX_LAYERS:
        raise ConfigError(f"{len(waiting)} calls of layers, at most {MAX_LAYERS} are read")

    def tensor(history: Any) -> Tensor:
        name, call, output = history
        symbol: Tensor = results[name][int(call)][int(output)]
        return symbol

    def length(description: Mapping[str, Any]) -> Any:
        factors = [part if part is None else factor(part) for part in description["factors"]]
        return length_of(factors, description["scale"], description["offset"])

    def factor(part: Any) -> Any:
        if isinstance(part, Mapping):
            return tensor(part["config"]["keras_history"]).shape[part["axis"]]
        function, *operands = part
        return (function, *(length(operand) if isinstance(operand, Mapping) else operand for operand in operands))

    def attribute(value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("class_name") == "__length__":
            return length(value)
        return tuple(map(attribute, value)) if isinstance(value, list) else attribute_from(value)

    def argument(value: Any) -> Any:
        if isinstance(value, Mapping):
            inner = value.get("config")
            if value.get("class_name") == "__length__":
                return counted(length(value), value["dtype"])
            if value.get("class_name") == "__slice__":
                return slice(inner["start"], inner["stop"], inner["step"])  # type: ignore[index]
            if value.get("class_name") == "__ellipsis__":
                return ...
            if value.get("class_name") == "__keras_tensor__":
                return tensor(inner["keras_history"])  # type: ignore[index]
            if value.get("class_name") == "__numpy__":
                return np.array(inner["value"], inner["dtype"])  # type: ignore[index]
            return {key: argument(entry) for key, entry in value.items()}
        return [argument(entry) for entry in value] if isinstance(value, list | tuple) else value

    described = zip(listed, makers.values(), strict=True)
    dtype = give_policies([(description, maker) for description, maker in described if isinstance(maker, Layer)])
    while waiting:
        later = []
        behind: set[str] = set()  # whose calls before are not made yet
        for name, node, arguments_of, needed in waiting:
            if name in behind or not all(_is_available(history, results) for history in needed):
                later.append((name, node, arguments_of, needed))
                behind.add(name)
                continue
            arguments, keywords = argument(node.get("args", [])), argument(node.get("kwargs") or {})
            maker = makers[name]
            if isinstance(maker, Op):
                attributes = {key: attribute(value) for key, value in arguments_of.items() if key != "name"}
                results[name].append([maker(*arguments, **attributes)])
            elif isinstance(maker, Operation):
                options = {key: argument(value) for key, value in arguments_of.items() if key != "name"}
                results[name].append(maker.call(arguments, keywords, options))
            else:
                results[name].append(tree.leaves(maker(*arguments, **keywords)))
        if len(later) == len(waiting):
            raise ConfigError(f"the inputs of {later[0][0][:80]!r} are made by no layer of the model")
        waiting = later

    def end(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: end(entry) for key, entry in value.items()}
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"expected the layers of inputs and outputs, found {str(value)[:80]!r}")
        if not isinstance(value[0], str):
            return [end(entry) for entry in value]
        name, call, output = value
        shifted = isinstance(makers.get(name), MODELS["Functional"])
        shifted = shifted and not isinstance(makers[name], MODELS["Sequential"])
        history = (name, call - 1 if shifted else call, output)
        if not _is_available(history, results):
            raise ConfigError(f"an output is made by no layer of the model: {str(value)[:80]}")
        return tensor(history)

    return end(config.get("input_layers")), end(config.get("output_layers")), dtype


def _histories(value: Any) -> list[Any]:
    """Return the histories [layer, call, output] of the tensors in a call's arguments."""
    if isinstance(value, Mapping):
        inner = value.get("config")
        if value.get("class_name") == "__keras_tensor__":
            return [inner.get("keras_history") if isinstance(inner, Mapping) else None]
        return [history for entry in value.values() for history in _histories(entry)]
    return [history for entry in value for history in _histories(entry)] if isinstance(value, list | tuple) else []


def _is_available(history: Any, results: Mapping[str, list[list[Any]]]) -> bool:
    if not isinstance(history, list | tuple) or len(history) != 3 or not isinstance(history[0], str):
        raise ConfigError(f"expected [layer, call, output], found {str(history)[:80]!r}")
    name, call, output = history
    calls = results.get(name, [])
    return type(call) is type(output) is int and 0 <= call < len(calls) and 0 <= output < len(calls[call])


def _op_config(tensor: Tensor, name: str, arguments: list[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    assert tensor.op is not None
    if OPS.get(tensor.op.name) is not tensor.op:
        raise ConfigError(f"not supported: {tensor.op} is no op of dptrain.ops and cannot be saved; use it in a layer")
    if tensor.op is getitem and (key := _keras_key(tensor)) is not None:
        description = described("keras.src.ops.numpy", "GetItem", {"name": name}, "GetItem")
        return description | {"name": name, "inbound_nodes": [{"args": [*arguments, key], "kwargs": {}}]}
    module, kind = None, tensor.op.name
    if tensor.op.keras is not None:
        module, kind = f"keras.src.ops.{tensor.op.keras}", "".join(part.capitalize() for part in kind.split("_"))
    config = {"name": name} | attributes
    description = described(module or "dptrain.ops", kind, config, None if module is None else kind)
    return description | {"name": name, "inbound_nodes": [{"args": arguments, "kwargs": {}}]}


def _keras_key(tensor: Tensor) -> list[Any] | None:
    """Return the key of a `getitem` as Keras writes it; None for a slice of symbolic rows."""
    key: list[Any] = []
    for part, length in zip(tensor.attributes["key"], tensor.inputs[0].shape, strict=True):
        if not isinstance(part, tuple):
            key.append(int(part))
            continue
        start, stop, step = part
        if not all(map(is_number, part)) and part != (0, length, 1):
            return None
        bounds = (int(start), int(stop), int(step)) if is_number(length) else (None, None, None)
        key.append({"class_name": "__slice__", "config": dict(zip(("start", "stop", "step"), bounds, strict=True))})
    return key


def _op(description: Config) -> Op | Operation:
    """Return the op of a description."""
    kind, is_ours = str(description.get("class_name")), description.get("module") == "dptrain.ops"
    if not is_ours:
        return operation(description)
    op = OPS.get(kind)
    if op is None:
        raise ConfigError(f"not supported: operation {kind[:80]!r}")
    return op
