"""Models as Keras' configurations: what `get_config` of a Sequential and of a functional model returns, and back.

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
    """Return what Keras' `Sequential.get_config` returns.

    Args:
        model: whose layers have names.
        start: of known shape, if the model is built.
    """
    listed = [layer_config(one) for one in model.layers]
    result = {"name": model.name, "trainable": model.trainable, "dtype": policy(model), "layers": listed}
    if start is not None:
        first = _input_config(start, model._data_dtype)
        first["config"]["name"] = first["config"]["name"] or "input_layer"
        listed.insert(0, first)
        result["build_input_shape"] = list(start.batch_shape)
    return result


def _input_config(start: InputLayer, dtype: str) -> dict[str, Any]:
    """Return an input layer, whose floating-point numbers are the model's."""
    found = layer_config(start)
    if start.dtype.startswith("float"):
        found["config"]["dtype"] = dtype
    return found


def sequential_layers(config: Config) -> tuple[list[Layer], str]:
    """Return layers and floating-point type of a `Sequential.get_config`.

    Raises:
        ConfigError: something that dptrain does not have; names all of it.
    """
    layers: list[Layer] = []
    problems = []
    listed = listed_layers(config, "Sequential")
    for position, one in enumerate(listed):
        try:
            layer = read_layer(one)
            if isinstance(layer, InputLayer) and position:
                raise ConfigError("an InputLayer can stand only before the first layer")
            layers.append(layer)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    if all(isinstance(one, InputLayer) for one in layers):
        raise ConfigError("a model needs at least one layer")
    policy = give_policies(list(zip(listed, layers, strict=True)))
    shape = config.get("build_input_shape")
    if not isinstance(layers[0], InputLayer) and shape is not None:
        layers.insert(0, InputLayer(batch_shape=batch_shape(shape)))
    return layers, policy


def functional_config(model: Any, graph: Graph) -> dict[str, Any]:
    """Return what Keras' `Functional.get_config` returns.

    Raises:
        ConfigError: the graph begins in the middle of another, or has what a file cannot hold.
    """
    if any(not isinstance(one, InputLayer) for one in graph.input_layers):
        raise ConfigError(f"model {model.name!r} begins in the middle of another one and cannot be saved")
    known = {id(one) for one in graph.nodes}
    nodes = {id(one): [node for node in one._nodes if id(node) in known] for one in graph.layers}
    makers = [one for one in graph.makers if isinstance(one, Tensor | OperationCall)]
    names: dict[int, str] = {}
    taken = {one.name for one in graph.layers}
    for one in makers:
        kind = snake_case(one.class_name) if isinstance(one, OperationCall) else one.op.name  # type: ignore[union-attr]
        numbered = (kind if not number else f"{kind}_{number}" for number in range(len(makers) + len(taken) + 1))
        names[id(one)] = next(name for name in numbered if name not in taken)
        taken.add(names[id(one)])

    def place(one: Tensor) -> list[Any]:
        maker = maker_of(one)
        if isinstance(maker, OperationCall):
            return [names[id(maker)], 0, [id(output) for output in tree.leaves(maker.outputs)].index(id(one))]
        if one.history is None:
            return [names[id(one)], 0, 0]
        layer = one.history.layer
        if isinstance(layer, InputLayer):
            return [layer.name, 0, 0]
        of_call = [id(output) for output in tree.leaves(one.history.outputs)]
        number = next(n for n, node in enumerate(nodes[id(layer)]) if node is one.history)
        return [layer.name, number, of_call.index(id(one))]

    outputs = [tree.leaves(maker if isinstance(maker, Tensor) else maker.outputs) for maker in graph.makers]
    symbols = [*tree.leaves(graph.inputs), *itertools.chain(*outputs)]
    homes = {n.name: (one, axis) for one in reversed(symbols) for axis, n in enumerate(one.shape) if isinstance(n, Dim)}

    def attribute(value: Any) -> Any:
        if isinstance(value, tuple):
            return [attribute(one) for one in value]
        if not isinstance(value, Dim):
            return attribute_of(value)
        factors = [factor(one) for one in value.names]
        return {"class_name": "__length__", "factors": factors, "scale": value.scale, "offset": value.offset}

    def factor(one: Any) -> Any:
        if not isinstance(one, str):
            return [one[0], *map(attribute, one[1:])]
        if one not in homes:  # the rows
            return None
        symbol, axis = homes[one]
        return {"class_name": "__keras_tensor__", "config": {"keras_history": place(symbol)}, "axis": axis}

    def end(one: Tensor) -> list[Any]:  # in Keras a functional model has a call more, its own
        name, number, output = place(one)
        shifted = one.history is not None and isinstance(one.history.layer, MODELS["Functional"])
        shifted = shifted and not isinstance(one.history.layer, MODELS["Sequential"])
        return [name, number + 1 if shifted else number, output]

    def argument(path: str, one: Any) -> Any:
        if one is ...:
            return {"class_name": "__ellipsis__", "config": {}}
        if isinstance(one, np.ndarray | slice):
            return serialize_keras_object(one)
        if not isinstance(one, Tensor):
            return plain(one)
        if one.is_length:
            return attribute(one.attributes["length"]) | {"dtype": one.dtype.name}
        if one.value is None:
            dtype = model._data_dtype if one.dtype.kind in "fV" else one.dtype.name
            about = {"shape": list(read(one.shape)), "dtype": dtype, "keras_history": place(one)}
            return {"class_name": "__keras_tensor__", "config": about}
        if one.variable is not None or one.counts_rows:
            raise ConfigError(f"model {model.name!r}: {one} is an argument that cannot be saved; use it in a layer")
        return {"class_name": "__numpy__", "config": {"value": one.numpy().tolist(), "dtype": one.dtype.name}}

    listed = []
    for layer in graph.layers:
        about = _input_config(layer, model._data_dtype) if isinstance(layer, InputLayer) else layer_config(layer)
        calls = [] if isinstance(layer, InputLayer) else nodes[id(layer)]
        inbound = [
            {"args": tree.map_leaves(argument, list(one.arguments)), "kwargs": tree.map_leaves(argument, one.keywords)}
            for one in calls
        ]
        listed.append(about | {"name": layer.name, "inbound_nodes": inbound})
    for one in makers:
        if isinstance(one, OperationCall):
            config = {"name": names[id(one)]} | tree.map_leaves(argument, one.config)
            call = {
                "args": tree.map_leaves(argument, list(one.arguments)),
                "kwargs": tree.map_leaves(argument, one.keywords),
            }
            about = described(one.module, one.class_name, config, one.class_name)
            listed.append(about | {"name": names[id(one)], "inbound_nodes": [call]})
            continue
        attributes = {key: attribute(value) for key, value in one.attributes.items()}
        listed.append(_op_config(one, names[id(one)], [argument("", each) for each in one.inputs], attributes))
    return {
        "name": model.name,
        "trainable": model.trainable,
        "layers": listed,
        "input_layers": tree.map_leaves(lambda path, one: end(one), graph.declared_inputs),
        "output_layers": tree.map_leaves(lambda path, one: end(one), graph.outputs),
    }


def functional_ends(config: Config) -> tuple[Any, Any, str]:
    """Return symbolic inputs and outputs, and the floating-point type, of a `Functional.get_config`.

    Raises:
        ConfigError: something that dptrain does not have; names all of it.
    """
    listed = listed_layers(config, "Functional")
    makers: dict[str, Layer | Op | Operation] = {}
    problems, waiting = [], []
    for one in listed:
        try:
            is_op = isinstance(one, Mapping) and ".ops" in str(one.get("module"))
            maker = _op(one) if is_op else read_layer(one)
            name = one.get("name") or one["config"].get("name")
            if not isinstance(name, str) or name in makers:
                raise ConfigError(f"layer names must be unique, found {str(name)[:80]!r} again")
            if isinstance(maker, Layer):
                maker.name = name
            makers[name] = maker
            about = one["config"]
            needed = about if is_op else {}
            waiting += [(name, node, about, _histories([node, needed])) for node in one.get("inbound_nodes") or ()]
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    made = {name: [[one.output]] if isinstance(one, InputLayer) else [] for name, one in makers.items()}
    if len(waiting) > MAX_LAYERS:
        raise ConfigError(f"{len(waiting)} calls of layers, at most {MAX_LAYERS} are read")

    def tensor(history: Any) -> Tensor:
        name, call, output = history
        found: Tensor = made[name][int(call)][int(output)]
        return found

    def length(about: Mapping[str, Any]) -> Any:
        factors = [one if one is None else factor(one) for one in about["factors"]]
        return length_of(factors, about["scale"], about["offset"])

    def factor(about: Any) -> Any:
        if isinstance(about, Mapping):
            return tensor(about["config"]["keras_history"]).shape[about["axis"]]
        function, *operands = about
        return (function, *(length(one) if isinstance(one, Mapping) else one for one in operands))

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
            return {key: argument(one) for key, one in value.items()}
        return [argument(one) for one in value] if isinstance(value, list | tuple) else value

    described = zip(listed, makers.values(), strict=True)
    dtype = give_policies([(one, maker) for one, maker in described if isinstance(maker, Layer)])
    while waiting:
        later = []
        behind: set[str] = set()  # whose calls before are not made yet
        for name, node, about, needed in waiting:
            if name in behind or not all(_is_made(one, made) for one in needed):
                later.append((name, node, about, needed))
                behind.add(name)
                continue
            arguments, keywords = argument(node.get("args", [])), argument(node.get("kwargs") or {})
            maker = makers[name]
            if isinstance(maker, Op):
                attributes = {key: attribute(one) for key, one in about.items() if key != "name"}
                made[name].append([maker(*arguments, **attributes)])
            elif isinstance(maker, Operation):
                options = {key: argument(value) for key, value in about.items() if key != "name"}
                made[name].append(maker.call(arguments, keywords, options))
            else:
                made[name].append(tree.leaves(maker(*arguments, **keywords)))
        if len(later) == len(waiting):
            raise ConfigError(f"the inputs of {later[0][0][:80]!r} are made by no layer of the model")
        waiting = later

    def end(given: Any) -> Any:
        if isinstance(given, Mapping):
            return {key: end(one) for key, one in given.items()}
        if not isinstance(given, list | tuple) or not given:
            raise ConfigError(f"expected the layers of inputs and outputs, found {str(given)[:80]!r}")
        if not isinstance(given[0], str):
            return [end(one) for one in given]
        name, call, output = given
        shifted = isinstance(makers.get(name), MODELS["Functional"])
        shifted = shifted and not isinstance(makers[name], MODELS["Sequential"])
        history = (name, call - 1 if shifted else call, output)
        if not _is_made(history, made):
            raise ConfigError(f"an output is made by no layer of the model: {str(given)[:80]}")
        return tensor(history)

    return end(config.get("input_layers")), end(config.get("output_layers")), dtype


def _histories(value: Any) -> list[Any]:
    """Return where the tensors in the arguments of a call come from."""
    if isinstance(value, Mapping):
        inner = value.get("config")
        if value.get("class_name") == "__keras_tensor__":
            return [inner.get("keras_history") if isinstance(inner, Mapping) else None]
        return [found for one in value.values() for found in _histories(one)]
    return [found for one in value for found in _histories(one)] if isinstance(value, list | tuple) else []


def _is_made(history: Any, made: Mapping[str, list[list[Any]]]) -> bool:
    if not isinstance(history, list | tuple) or len(history) != 3 or not isinstance(history[0], str):
        raise ConfigError(f"expected [layer, call, output], found {str(history)[:80]!r}")
    name, call, output = history
    calls = made.get(name, [])
    return type(call) is type(output) is int and 0 <= call < len(calls) and 0 <= output < len(calls[call])


def _op_config(one: Tensor, name: str, arguments: list[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    assert one.op is not None
    if OPS.get(one.op.name) is not one.op:
        raise ConfigError(f"not supported: {one.op} is no op of dptrain.ops and cannot be saved; use it in a layer")
    if one.op is getitem and (key := _keras_key(one)) is not None:
        found = described("keras.src.ops.numpy", "GetItem", {"name": name}, "GetItem")
        return found | {"name": name, "inbound_nodes": [{"args": [*arguments, key], "kwargs": {}}]}
    module, kind = None, one.op.name
    if one.op.keras is not None:
        module, kind = f"keras.src.ops.{one.op.keras}", "".join(part.capitalize() for part in kind.split("_"))
    config = {"name": name} | attributes
    found = described(module or "dptrain.ops", kind, config, None if module is None else kind)
    return found | {"name": name, "inbound_nodes": [{"args": arguments, "kwargs": {}}]}


def _keras_key(one: Tensor) -> list[Any] | None:
    """Return the key of a `getitem` as Keras writes it; None where it has none for a part of the rows."""
    key: list[Any] = []
    for part, length in zip(one.attributes["key"], one.inputs[0].shape, strict=True):
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
    """Return the op of a description.

    Raises:
        ConfigError: dptrain has none.
    """
    kind, own = str(description.get("class_name")), description.get("module") == "dptrain.ops"
    if not own:
        return operation(description)
    found = OPS.get(kind)
    if found is None:
        raise ConfigError(f"not supported: operation {kind[:80]!r}")
    return found
