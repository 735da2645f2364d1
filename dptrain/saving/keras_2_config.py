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

# Arguments by class that Keras 3 has renamed.
_RENAMED = {"LeakyReLU": {"alpha": "negative_slope"}}
# Arguments of layers that Keras 3 lacks, with the values that change nothing; an empty tuple: any value.
_RECURRENT = {"implementation": (), "time_major": (False,)}
_KERNEL = {
    f"kernel_{part}": () for part in ("initializer", "regularizer", "constraint")
}  # beside depthwise_* and pointwise_*
_DROPPED_OF_LAYERS: dict[str, dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN", "LSTMCell", "GRUCell"), _RECURRENT),
    **dict.fromkeys((f"ConvLSTM{n}D" for n in (1, 2, 3)), _RECURRENT),
    **dict.fromkeys(
        (f"{kind}Conv{n}D" for kind in ("Depthwise", "Separable") for n in (1, 2)), {"groups": (1,)} | _KERNEL
    ),
    **{f"Conv{n}DTranspose": {"groups": (1,)} for n in (1, 2, 3)},
    "Embedding": {"input_length": ()},
    **{name: {"dtype": ("int64",)} for name in ("Discretization", "Hashing", "IntegerLookup", "StringLookup")},
    "MultiHeadAttention": {"query_shape": (), "key_shape": (), "value_shape": ()},
}
# TensorFlow's functions in Keras 2's graphs, as Keras 3's operations.
_FUNCTIONS = {
    "__operators__.add": ("numpy", "Add"),
    "math.add": ("numpy", "Add"),
    "math.subtract": ("numpy", "Subtract"),
    "math.multiply": ("numpy", "Multiply"),
    "math.truediv": ("numpy", "Divide"),
    "math.divide": ("numpy", "Divide"),
    "math.pow": ("numpy", "Power"),
    "math.maximum": ("numpy", "Maximum"),
    "math.minimum": ("numpy", "Minimum"),
    "math.negative": ("numpy", "Negative"),
    "math.abs": ("numpy", "Absolute"),
    "math.exp": ("numpy", "Exp"),
    "math.log": ("numpy", "Log"),
    "math.sqrt": ("numpy", "Sqrt"),
    "math.square": ("numpy", "Square"),
    "math.tanh": ("numpy", "Tanh"),
    "math.sigmoid": ("nn", "Sigmoid"),
    "nn.relu": ("nn", "Relu"),
    "nn.relu6": ("nn", "Relu6"),
}
# Arguments of optimizers that Keras 3 lacks, with the values that change nothing.
_DROPPED: dict[str, tuple[Any, ...]] = {
    "decay": (0, None),
    "is_legacy_optimizer": (False, None),
    "jit_compile": (False, True, None),
}


def upgraded(value: Any, depth: int = 0) -> Any:
    """Return a configuration of Keras 2 as Keras 3 writes it; one of Keras 3 unchanged."""
    if depth > MOST_LEVELS:
        raise ConfigError(f"a configuration nested more than {MOST_LEVELS} levels deep")
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
    if class_name == "MeanMetricWrapper" and isinstance(config.get("fn"), str):
        class_name = result["class_name"] = "".join(word.capitalize() for word in config["fn"].split("_"))
        config = {key: value for key, value in config.items() if key != "fn"}
    if "module" not in result:
        module = "keras.src.ops" if _is_operation(result) else _module(class_name)
        result |= {"module": module, "registered_name": result.get("registered_name")}
    result["config"] = _upgraded_arguments(class_name, config)
    if isinstance(config.get("layers"), list) and "input_layers" in config:
        _upgrade_calls(result["config"])
    return result


def refuse_other_functions(config: Any, version: Any, depth: int = 0) -> None:
    """Refuse what Keras 2, by a file's `version`, computes differently from Keras 3 under the same name.

    Its `hard_sigmoid`, by default that of ConvLSTM's gates, is 0.2 x + 0.5 from 0 to 1; Keras 3 has x / 6 + 0.5.
    """
    if not str(version).startswith("2.") or depth > MOST_LEVELS:
        return
    for value in config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ():
        if value == "hard_sigmoid":
            raise ConfigError("not supported: hard_sigmoid of Keras 2, which differs from Keras 3's")
        refuse_other_functions(value, version, depth + 1)


def _is_operation(description: Mapping[str, Any]) -> bool:
    """Whether Keras 3 wrote an operation to an `.h5`, where it names no module: unlike a layer, without `trainable`."""
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
    if class_name != "InputLayer":
        arguments.pop("batch_input_shape", None)  # it becomes a separate InputLayer
    for key, same in _DROPPED_OF_LAYERS.get(class_name, {}).items():
        if key in arguments and (not same or arguments[key] in same):
            del arguments[key]
    if isinstance(arguments.get("axis"), list) and len(arguments["axis"]) == 1 and class_name == "BatchNormalization":
        arguments["axis"] = arguments["axis"][0]
    if isinstance(arguments.get("dtype"), Mapping) and arguments["dtype"].get("class_name") == "Policy":
        arguments["dtype"] = {**arguments["dtype"], "class_name": "DTypePolicy", "module": "keras"}
    return arguments


def _upgrade_calls(config: dict[str, Any]) -> None:
    layers = [layer for layer in config["layers"] if isinstance(layer, dict)]
    if all(isinstance(node, Mapping) for layer in layers for node in layer.get("inbound_nodes") or ()):
        return
    is_model = {layer.get("name"): layer.get("class_name") in MODELS for layer in layers}

    def tensor(entry: Any) -> Any:
        if not isinstance(entry, list) or len(entry) not in (3, 4) or not isinstance(entry[0], str):
            raise ConfigError(f"expected [layer, call, output], found {str(entry)[:80]!r}")
        name, call, output = entry[:3]
        if name == "_CONSTANT_VALUE":
            return output
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
        keywords = {key: tensor(value) if _is_tensor(value) else value for key, value in keywords.items()}
        return {"args": [tensors[0] if len(tensors) == 1 else tensors], "kwargs": keywords}

    for layer in layers:
        layer["inbound_nodes"] = [called(node) for node in layer.get("inbound_nodes") or ()]
        if layer.get("class_name") == "TFOpLambda":
            _upgrade_function(layer)
    sequential = {layer.get("name") for layer in layers if layer.get("class_name") == "Sequential"}
    config["output_layers"] = _alone(_shifted(config.get("output_layers"), sequential))
    config["input_layers"] = _alone(config.get("input_layers"))


def _alone(ends: Any) -> Any:
    """Return a model's single input or output without the list around it, which Keras 2 writes and does not return."""
    return ends[0] if isinstance(ends, list) and len(ends) == 1 and _is_tensor(ends[0]) else ends


def _upgrade_function(layer: dict[str, Any]) -> None:
    function = layer["config"].get("function")
    if function not in _FUNCTIONS:
        raise ConfigError(f"not supported: TensorFlow's function {str(function)[:80]!r} as a layer, of Keras 2")
    module, class_name = _FUNCTIONS[function]
    layer |= {"class_name": class_name, "module": f"keras.src.ops.{module}", "config": {"name": layer.get("name")}}
    for call in layer["inbound_nodes"]:
        keywords = {key: value for key, value in call["kwargs"].items() if value is not None}
        call["args"] += [keywords.pop("y")] if "y" in keywords else []
        if keywords:
            raise ConfigError(
                f"not supported: TensorFlow's {function} with {', '.join(map(str, keywords))[:80]}, of Keras 2"
            )
        call["kwargs"] = {}


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
