"""Converts Keras 2's model configurations (`.h5`, JSON, the `.keras` of 2.12 to 2.15) to Keras 3's.

Keras 2 lists a layer's call as [[layer, call, output, {keywords}], ...], names no modules, counts the call that made a
nested model, and has arguments that Keras 3 renamed or dropped. Source: `deserialize_node` in
keras/src/models/functional.py and keras/src/legacy/saving, Keras 3.15.
"""

from collections.abc import Mapping
from typing import Any

from dptrain.errors import ConfigError
from dptrain.registry.serialization import custom_object
from dptrain.saving.keras_config import MODELS, kinds
from dptrain.saving.reading import MOST_LEVELS

# Arguments by class that Keras 3 has under another name.
_RENAMED = {"LeakyReLU": {"alpha": "negative_slope"}}
# Those of optimizers that Keras 3 has not, by what they must be for that to be the same.
_DROPPED: dict[str, tuple[Any, ...]] = {
    "decay": (0, None),
    "is_legacy_optimizer": (False, None),
    "jit_compile": (False, True, None),
}


def upgraded(value: Any, depth: int = 0) -> Any:
    """Return a configuration of Keras 2 as Keras 3 writes it; one of Keras 3 unchanged."""
    if depth > MOST_LEVELS:
        raise ConfigError(f"a configuration of more than {MOST_LEVELS} levels")
    if isinstance(value, list):
        return [upgraded(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    result = {key: upgraded(each, depth + 1) for key, each in value.items()}
    class_name, config = result.get("class_name"), result.get("config")
    if not isinstance(class_name, str) or not isinstance(config, dict):
        return result
    if class_name == "Model":
        result["class_name"] = "Functional"
    if "module" not in result:
        module = "keras.src.ops" if _is_operation(result) else _module(class_name)
        result |= {"module": module, "registered_name": result.get("registered_name")}
    result["config"] = _upgraded_arguments(class_name, config)
    if isinstance(config.get("layers"), list) and "input_layers" in config:
        _upgrade_calls(result["config"])
    return result


def _is_operation(description: Mapping[str, Any]) -> bool:
    """Whether Keras 3 wrote an operation to an `.h5`, where it names no module: `Add` of two tensors, not of a list.

    Unlike layers, they do not have `trainable`. Keras itself takes them for layers of the same names.
    """
    class_name = description["class_name"]
    if class_name == "InputLayer" or class_name in MODELS or custom_object(None, class_name) is not None:
        return False
    calls = description.get("inbound_nodes")
    in_keras_3 = isinstance(calls, list) and any(isinstance(call, Mapping) for call in calls)
    return in_keras_3 and "trainable" not in description["config"]


def _module(class_name: str) -> str:
    return next((module for module, classes in kinds().items() if class_name in classes), "keras")


def _upgraded_arguments(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    renamed = _RENAMED.get(class_name, {})
    arguments = {renamed.get(key, key): value for key, value in config.items()}
    for key, same in _DROPPED.items() if class_name in kinds()["keras.optimizers"] else ():
        if key in arguments and arguments[key] in same:
            del arguments[key]
    if isinstance(arguments.get("axis"), list) and len(arguments["axis"]) == 1 and class_name == "BatchNormalization":
        arguments["axis"] = arguments["axis"][0]
    if isinstance(arguments.get("dtype"), Mapping) and arguments["dtype"].get("class_name") == "Policy":
        arguments["dtype"] = {**arguments["dtype"], "class_name": "DTypePolicy", "module": "keras"}
    return arguments


def _upgrade_calls(config: dict[str, Any]) -> None:
    """Rewrite the calls of a functional model as Keras 3's."""
    layers = [layer for layer in config["layers"] if isinstance(layer, dict)]
    if all(isinstance(node, Mapping) for layer in layers for node in layer.get("inbound_nodes") or ()):
        return
    is_model = {layer.get("name"): layer.get("class_name") in MODELS for layer in layers}

    def tensor(entry: Any) -> dict[str, Any]:
        if not isinstance(entry, list) or len(entry) not in (3, 4) or not isinstance(entry[0], str):
            raise ConfigError(f"expected [layer, call, output], found {str(entry)[:80]!r}")
        name, call, output = entry[:3]
        if type(call) is int and is_model.get(name):
            call -= 1  # Keras 2 counts the call that made a nested model
        return {"class_name": "__keras_tensor__", "config": {"keras_history": [name, call, output]}}

    def called(node: Any) -> Any:
        if isinstance(node, Mapping):
            return node
        if not isinstance(node, list) or not node:
            raise ConfigError(f"expected the inputs of a call, found {str(node)[:80]!r}")
        entries = [node] if isinstance(node[0], str) else node
        tensors = [tensor(entry) for entry in entries]
        keywords: dict[str, Any] = next((entry[3] for entry in entries if len(entry) == 4), {})
        if any(_is_tensor(each) for each in keywords.values()):
            raise ConfigError(f"not supported: a tensor as a keyword of a call, {str(keywords)[:80]}")
        return {"args": [tensors[0] if len(tensors) == 1 else tensors], "kwargs": keywords}

    for layer in layers:
        layer["inbound_nodes"] = [called(node) for node in layer.get("inbound_nodes") or ()]
    sequential = {layer.get("name") for layer in layers if layer.get("class_name") == "Sequential"}
    config["output_layers"] = _shifted(config.get("output_layers"), sequential)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)


def _shifted(ends: Any, sequential: set[Any]) -> Any:
    """Return outputs with the calls of Sequentials counted from 0, as Keras 3 does; of other models from 1."""
    if _is_tensor(ends):
        return [ends[0], ends[1] - 1 if ends[0] in sequential and type(ends[1]) is int else ends[1], ends[2]]
    return [_shifted(each, sequential) for each in ends] if isinstance(ends, list) else ends


def compile_config(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `training_config` of an `.h5` file as Keras 3's `compile_config`."""
    result = {key: value for key, value in upgraded(dict(training)).items() if key != "optimizer_config"}
    optimizer = training.get("optimizer_config")
    if isinstance(optimizer, Mapping):
        name = str(optimizer.get("class_name")).removeprefix("Custom>")
        result["optimizer"] = upgraded({**optimizer, "class_name": name})
    return result
