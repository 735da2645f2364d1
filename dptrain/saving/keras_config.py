"""Layers, models, optimizers, losses and metrics as Keras 3's configurations, and back.

An object is {"module": "keras.layers", "class_name": "Dense", "config": {...}, "registered_name": null}; its config has
the constructor's arguments. `get_config()` gives what is written; what is read goes to the constructor of the class
registered under that name. So a new layer, optimizer, loss or metric needs no line here, a new kind of object (`kinds`)
one. Users' classes are written by their names and found by `custom_objects`.

An argument that the constructor lacks is ignored only if it says what dptrain does anyway (None, False, or
`_SAME_AS_HERE`); any other is refused by name.

Source: keras/src/saving/serialization_lib.py, Keras 3.15.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np

from dptrain import activations, constraints, initializers, losses, metrics, optimizers, regularizers
from dptrain.errors import ConfigError
from dptrain.layers import LAYERS, InputLayer, Layer
from dptrain.layers.base import build_as_described
from dptrain.layers.core.layer_scale import LayerScale
from dptrain.losses import LOSSES
from dptrain.losses.base import LossFunctionWrapper
from dptrain.metrics import METRICS
from dptrain.mixed_precision import POLICIES, dtype_policy, policy_name
from dptrain.ops.random import SeedGenerator
from dptrain.optimizers import CLASSES as OPTIMIZER_CLASSES
from dptrain.optimizers import schedules
from dptrain.optimizers.absent import AbsentOptimizer
from dptrain.program.tensor import Tensor, constant
from dptrain.registry.names import suggestion
from dptrain.registry.serialization import (
    LIKE_KERAS,
    custom_object,
    custom_object_or_name,
    custom_object_scope,
    function_to_dict,
    plain,
    to_dict,
)

Config = Mapping[str, Any]
# The classes of models by Keras' names, from the room above: "Sequential" and "Functional".
MODELS: dict[str, type[Any]] = {}
# Keras' modules and registered names.
_MODULES = {"Sequential": ("keras", None), "Functional": ("keras.src.models.functional", "Functional")}
# Layers that Keras keeps in a network's own module, and writes under its name.
_OF_NETWORKS: dict[str, tuple[str, type[Layer]]] = {"LayerScale": ("keras.src.applications.convnext", LayerScale)}
# Ignored arguments that change no stored number: seeds (values are drawn already, or by another generator), and options
# that another argument switches off; then arguments that constructors here do not have.
_NO_MATTER = ("seed", "ema_momentum", "vocabulary_size")
_HANDLED = ("name", "dtype")
# dptrain's fixed values of Keras' arguments that it lacks.
_SAME_AS_HERE: dict[str, Any] = {
    "trainable": True,
    "data_format": "channels_last",
    "reduction": "sum_over_batch_size",
    "momentum": 0.0,
    "axis": -1,
}
_MAX_DIMENSION = 2**31
MAX_LAYERS = 10_000
# Key by which several descriptions in a file refer to the same layer.
_SHARED = "shared_object_id"
# Ids of layers that have been written, by Python's; and layers that have been read, by id. None outside of a file.
_written_ids: ContextVar[dict[int, int] | None] = ContextVar("written_ids", default=None)
_read_layers: ContextVar[dict[int, Layer] | None] = ContextVar("read_layers", default=None)


def kinds() -> dict[str, Mapping[str, Any]]:
    """Return the classes that can be in a file, by Keras' module and the class's name."""
    tables: dict[str, Mapping[str, Any]] = {
        "keras.layers": LAYERS,
        "keras.optimizers": {**OPTIMIZER_CLASSES, "optimizermap": optimizers.OptimizerMap},
        "keras.losses": LOSSES,
        "keras.metrics": METRICS,
        "keras.initializers": initializers.INITIALIZERS,
        "keras.optimizers.schedules": schedules.SCHEDULES,
        "keras.regularizers": regularizers.REGULARIZERS,
        "keras.constraints": constraints.CONSTRAINTS,
        "keras.random": {"SeedGenerator": SeedGenerator},
    }
    return {module: {cls.__name__: cls for cls in table.values()} for module, table in tables.items()}


# Layers in several places of a file, such as in two models in a model


def with_shared_layers(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a description in which each shared layer has one "shared_object_id", as in Keras."""
    token = _written_ids.set({})
    try:
        description = describe()
    finally:
        _written_ids.reset(token)
    numbers = Counter(inner[_SHARED] for inner in _descriptions(description))
    for inner in _descriptions(description):
        if numbers[inner[_SHARED]] == 1:
            del inner[_SHARED]
    return description


def _descriptions(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries in nested data that have an id."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _descriptions(inner)
        if _SHARED in value:
            yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _descriptions(inner)


@contextmanager
def sharing_layers() -> Iterator[None]:
    """Make `read_layer` return the same layer for descriptions with the same "shared_object_id"."""
    token = _read_layers.set({})
    try:
        yield
    finally:
        _read_layers.reset(token)


# Writing


def described(module: str, class_name: str, config: Config, registered: str | None = None) -> dict[str, Any]:
    """Return an object's description as Keras' `serialize_keras_object` does."""
    return {"module": module, "class_name": class_name, "config": dict(config), "registered_name": registered}


def policy(layer: Layer) -> dict[str, Any]:
    """Return the description of a layer's policy."""
    return described("keras", "DTypePolicy", {"name": layer.dtype_policy.name})


def layer_config(layer: Layer) -> dict[str, Any]:
    """Return the description of a layer, or a model, with the shape that it was built for."""
    description = _layer_description(layer)
    ids = _written_ids.get()
    if ids is not None:
        description[_SHARED] = ids.setdefault(id(layer), len(ids))
    return description


def _layer_description(layer: Layer) -> dict[str, Any]:
    for name, (module, registered) in _MODULES.items():
        if type(layer) is MODELS[name]:
            description = described(module, name, plain(layer.get_config()), registered)
            break
    else:
        if isinstance(layer, InputLayer):
            config = {"batch_shape": list(layer.batch_shape), "dtype": layer.dtype, "sparse": False, "ragged": False}
            config |= {"optional": True} if layer.optional else {}
            return described("keras.layers", "InputLayer", config | {"name": layer._name})
        description = to_dict("keras.layers", layer, LAYERS.values())
        module, cls = _OF_NETWORKS.get(type(layer).__name__, ("", None))
        if type(layer) is cls:
            description |= {"module": module, "registered_name": cls.__name__}
        if "layers" not in description["config"]:
            arguments = description["config"]
            description["config"] = {"name": layer.name, "trainable": True, "dtype": policy(layer)} | arguments
            if type(layer) in LAYERS.values() and "trainable" not in arguments:  # no argument of its constructor
                description["config"].pop("trainable")
    build_config = layer.get_build_config()
    if build_config is not None:
        description["build_config"] = plain(build_config)
    return description


def compile_config(compiled: Any) -> dict[str, Any]:
    """Return the arguments of `compile` as Keras writes them."""
    return {
        "optimizer": None
        if isinstance(compiled.optimizer, AbsentOptimizer)
        else to_dict("keras.optimizers", compiled.optimizer, OPTIMIZER_CLASSES.values()),
        "loss": _mapped(compiled.loss, lambda loss: _name_or_description("keras.losses", loss, LOSSES)),
        "loss_weights": compiled.loss_weights,
        "metrics": _mapped(compiled.metrics, lambda metric: _name_or_description("keras.metrics", metric, METRICS)),
        "weighted_metrics": _mapped(
            compiled.weighted_metrics, lambda metric: _name_or_description("keras.metrics", metric, METRICS)
        ),
        "run_eagerly": compiled.run_eagerly,
        "steps_per_execution": compiled.steps_per_execution or 1,
        "jit_compile": "auto",
    }


def _name_or_description(module: str, value: Any, table: Mapping[str, Any]) -> Any:
    """Return a name unchanged, or the description of an object or a function."""
    if isinstance(value, str):
        return value
    function = value.fn if type(value) is LossFunctionWrapper else value
    if inspect.isfunction(function):
        return function_to_dict(function)
    return to_dict(module, value, table.values())


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping) and "class_name" not in value:
        return {key: _mapped(entry, function) for key, entry in value.items()}
    return [_mapped(entry, function) for entry in value] if isinstance(value, list | tuple) else function(value)


def serialize_keras_object(value: Any) -> Any:
    """Return an object as Keras' function of that name does: what JSON has, and descriptions of the rest."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: serialize_keras_object(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(serialize_keras_object, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | Tensor):
        kind = "__numpy__" if isinstance(value, np.ndarray) else "__tensor__"
        return {"class_name": kind, "config": {"value": np.asarray(value).tolist(), "dtype": value.dtype.name}}
    if isinstance(value, slice):
        ends = {"start": value.start, "stop": value.stop, "step": value.step}
        return {"class_name": "__slice__", "config": serialize_keras_object(ends)}
    if isinstance(value, Layer):
        return layer_config(value)
    if hasattr(value, "get_config") and not isinstance(value, type):
        module, table = next(
            ((module, table) for module, table in kinds().items() if type(value) in table.values()), ("", {})
        )
        return to_dict(module, value, table.values())
    if isinstance(value, type) or not callable(value):
        raise ConfigError(
            f"Cannot serialize object {value!r} of type {type(value)}. To be serializable, a class must implement the "
            "`get_config()` method."
        )
    name = next((name for name, function in activations.BY_NAME.items() if function is value), None)
    return (
        function_to_dict(value)
        if name is None
        else described("builtins", "function", {}, "function") | {"config": name}
    )


# Reading


def deserialize_keras_object(
    config: Any, custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
) -> Any:
    """Return the object that `serialize_keras_object`, or Keras', described."""
    if not safe_mode:
        raise ConfigError("not supported: safe_mode=False; dptrain runs no code from files")
    with custom_object_scope(custom_objects):
        return _object(config)


def _object(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_object, value))
    if not isinstance(value, Mapping):
        return value
    kind, inner = value.get("class_name"), value.get("config")
    if kind is None or "config" not in value:
        return {key: _object(entry) for key, entry in value.items()}
    if kind in _PLAIN_KINDS:
        return _plain_value(kind, inner)
    result = _value(value, str(kind))
    if isinstance(result, Layer) and not isinstance(result, InputLayer | MODELS["Functional"]):
        name = _policy(value["config"].get("dtype"))  # the layer has no model to set it
        if name in POLICIES and name != dtype_policy().name:
            result._keep_dtype(name)
    if not isinstance(result, str) or kind != "function":
        return result
    function = vars(losses).get(result, vars(metrics).get(result))
    return function or (losses.get(result) if result in LOSSES else activations.get(result))


# Keras' names for what is no object with a configuration.
_PLAIN_KINDS = ("__numpy__", "__tensor__", "__slice__", "__tuple__")


def _plain_value(kind: str, config: Any) -> Any:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{kind!r} has no config")
    if kind == "__slice__":
        return slice(*(config.get(key) for key in ("start", "stop", "step")))
    if kind == "__tuple__":
        return tuple(map(_object, config.get("value") or ()))
    try:
        array = np.array(config.get("value"), np.dtype(str(config.get("dtype"))))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind!r}: {error}") from error
    return array if kind == "__numpy__" else constant(array)


def read_layer(description: Any) -> Layer:
    """Return the layer, or model, that `layer_config` or Keras described."""
    class_name, config, cls = _open(description)
    layers, key = _read_layers.get(), description.get(_SHARED)
    if layers is None or type(key) is not int:
        return _new_layer(class_name, config, cls, description.get("build_config"))
    if key not in layers:
        layers[key] = _new_layer(class_name, config, cls, description.get("build_config"))
    return layers[key]


def _new_layer(class_name: str, config: Config, cls: Any, build_config: Any) -> Layer:
    name = config.get("name")
    if name is not None and (not isinstance(name, str) or not name or "/" in name):
        raise ConfigError(f"layer name {name!r}: expected a word without '/'")
    if cls is None and class_name in MODELS:
        model: Layer = MODELS[class_name].from_config(config)
        return model
    if cls is None and class_name == "InputLayer":
        _check_input(config)
        dtype = config.get("dtype")
        return InputLayer(
            batch_shape=_batch_shape(config),
            name=name,
            dtype=dtype if isinstance(dtype, str) else None,
            optional=config.get("optional") is True,
        )
    if cls is None:
        built = _build("keras.layers", "layer", class_name, config, f"{name!r} ({class_name})")
        built.name = name
    else:
        built = _custom(cls, config)
    if not isinstance(built, Layer):
        raise ConfigError(f"{class_name[:80]!r} is not a layer")
    build_as_described(built, build_config)
    return built


def give_policies(described: Sequence[tuple[Config, Layer]]) -> str:
    """Return the policy that most layers are described with, and set it on the others only where theirs differs."""
    named = {}
    for description, layer in described:
        if "dtype" in description["config"] and not isinstance(layer, InputLayer):
            named[layer] = _policy(description["config"]["dtype"])
        elif "layers" in description["config"]:
            named[layer] = layer.dtype_policy.name
    for name in named.values():
        if name not in POLICIES:
            raise ConfigError(f"not supported: layers of dtype {name}; expected one of {', '.join(POLICIES)}")
    usual = Counter(named.values()).most_common(1)[0][0] if named else "float32"
    for _, layer in described:
        if (name := named.get(layer, usual)) == usual:
            layer._set_dtype(name)
        elif isinstance(layer, tuple(MODELS.values())):
            raise ConfigError(f"not supported: a model of dtype {name} inside one of dtype {usual}")
        else:
            layer._keep_dtype(name)
    return usual


def listed_layers(config: Config, kind: str) -> list[Any]:
    """Return the described layers of a model; refuse none, or too many."""
    listed = config.get("layers")
    if not isinstance(listed, list) or not isinstance(config.get("name"), str) or len(listed) > MAX_LAYERS:
        raise ConfigError(f"A {kind} model configuration must be a dictionary containing the 'name' and 'layers' keys.")
    return listed


def compile_arguments(config: Any) -> dict[str, Any] | None:
    """Return the arguments of `compile` in a compile_config; None where the model was not compiled."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError("compile_config: expected a JSON object")
    try:
        steps, optimizer = config.get("steps_per_execution", 1), config.get("optimizer")
        return {
            "optimizer": None if optimizer is None else optimizers.get(_named_or_built("keras.optimizers", optimizer)),
            "loss": _mapped(config.get("loss"), lambda loss: losses.as_loss(_named_or_built("keras.losses", loss))),
            "loss_weights": config.get("loss_weights"),
            "metrics": _mapped(config.get("metrics"), _metric),
            "weighted_metrics": _mapped(config.get("weighted_metrics"), _metric),
            "run_eagerly": bool(config.get("run_eagerly")),
            "steps_per_execution": "auto" if steps in (1, None) else steps,  # dptrain writes 1 for "auto"
        }
    except ConfigError as error:
        raise ConfigError(f"{error} (compile=False loads the model without it)") from error


def _metric(config: Any) -> Any:
    """Return a metric, or its name where it was given as one: "accuracy" has a meaning only in a model."""
    metric = _named_or_built("keras.metrics", config)
    if isinstance(metric, str) and metric not in ("accuracy", "acc", "crossentropy", "ce"):
        metrics.get(metric)
    return metric


def _open(description: Any) -> tuple[str, Config, Any]:
    """Return class name and config of a description, and its class where that is the user's."""
    if not isinstance(description, Mapping) or not isinstance(description.get("class_name"), str):
        raise ConfigError(f"expected an object with class_name and config, found {str(description)[:80]!r}")
    name, config = description["class_name"], description.get("config")
    module, registered = description.get("module") or "keras", description.get("registered_name") or None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name[:80]!r} has no config")
    room = next((own for own, keras in LIKE_KERAS.items() if keras == module), None)
    if room is not None and name in (own := import_module(room)).__all__:
        return name, config, getattr(own, name)
    if str(module).split(".")[0] == "keras" and registered in (None, name):
        in_module, cls = _OF_NETWORKS.get(name, ("", None))
        return name, config, cls if module in (in_module, "keras") else None  # .h5 files say no module
    cls = custom_object(registered if isinstance(registered, str) else None, name)
    if cls is None:
        raise ConfigError(
            f"not supported: custom object {str(registered or name)[:80]!r} of module {str(module)[:80]!r}; pass its "
            "class in custom_objects (on the command line --custom-objects FILE.py)"
        )
    return name, config, cls


def _custom(cls: Any, config: Config) -> Any:
    """Return an object of the user's class, whose constructor may lack arguments that every layer has."""
    accepted = inspect.signature(cls.__init__).parameters
    arguments, rest = dict(config), {}
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in accepted.values()):
        rest = {
            key: arguments.pop(key) for key in ("name", "trainable", "dtype") if key not in accepted and key in config
        }
    instance = cls.from_config(arguments)
    if isinstance(rest.get("name"), str):
        instance.name = rest["name"]
    if rest.get("trainable") is False:
        instance.trainable = False
    if isinstance(instance, Layer) and _policy(config.get("dtype")) in POLICIES:
        instance._set_dtype(_policy(config["dtype"]))
    return instance


def _named_or_built(module: str, value: Any) -> Any:
    """Return a name unchanged, a described function or its name, or the described object."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.get("class_name") == "function":
        return _function(value)
    class_name, config, cls = _open(value)
    if cls is not None:
        return _custom(cls, config)
    return _build(module, module.removeprefix("keras.").removesuffix("s"), class_name, config, class_name)


def _build(module: str, kind: str, class_name: str, config: Config, label: str) -> Any:
    classes = kinds()[module]
    if class_name not in classes:
        raise ConfigError(f"not supported: {kind} {label[:80]}{suggestion(class_name, classes)}")
    cls = classes[class_name]
    accepted = _parameters(cls)
    arguments = {}
    for key, value in config.items():
        if key in _HANDLED and (module == "keras.layers" or key not in accepted):
            continue
        if key in accepted:
            arguments[key] = _value(value, f"{label}: {key}")
        elif not (key in _NO_MATTER or value is None or value == _SAME_AS_HERE.get(key, False)):
            raise ConfigError(f"not supported: {label}: {key} = {str(value)[:80]}")
    if isinstance(arguments.get("dtype"), Mapping):  # a policy
        arguments["dtype"] = _policy(arguments["dtype"])
    try:
        return cls.from_config(arguments) if issubclass(cls, Layer) else cls(**arguments)
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"{label}: {error}") from error


@functools.cache
def _parameters(cls: type) -> set[str]:
    names: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names |= {
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"self"}


def _value(value: Any, label: str) -> Any:
    if isinstance(value, list):
        return [_value(entry, label) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if "class_name" not in value:
        return {key: _value(entry, label) for key, entry in value.items()}
    if value["class_name"] in ("function", "__lambda__"):
        return _function(value)
    if value["class_name"] == "DTypePolicy":
        return value
    if value["class_name"] in _PLAIN_KINDS:
        return _plain_value(value["class_name"], value.get("config"))
    class_name, config, cls = _open(value)
    if isinstance(cls, type) and issubclass(cls, Layer):
        return read_layer(value)
    if cls is not None:
        return _custom(cls, config)
    module = str(value.get("module"))
    if module.startswith("keras.src.backend.torch.optimizers."):  # as Keras on PyTorch writes one within another
        module = "keras.optimizers"
    if module == "keras.layers" or class_name in MODELS:
        return read_layer(value)
    if module not in kinds():
        raise ConfigError(f"not supported: {label} = {class_name}")
    return _build(module, module.removeprefix("keras.").removesuffix("s"), class_name, config, class_name)


def _function(description: Config) -> Any:
    """Return the name of one of Keras' functions, or the user's function."""
    function = custom_object_or_name(description)
    if isinstance(function, str) and function in _names_of_functions():
        return function
    if isinstance(function, str | Mapping):
        raise ConfigError(
            f"not supported: custom function {str(description.get('config'))[:80]!r} of module "
            f"{str(description.get('module'))[:80]!r}; pass it in custom_objects (on the command line --custom-objects "
            "FILE.py)"
        )
    return function


@functools.cache
def _names_of_functions() -> set[str]:
    tables: list[Mapping[str, Any]] = [activations.BY_NAME, LOSSES, METRICS, vars(losses), vars(metrics)]
    return {name for table in tables for name, value in table.items() if callable(value)} | set(activations.ALIASES)


def _check_input(config: Config) -> None:
    for key in ("sparse", "ragged"):
        if config.get(key):
            raise ConfigError(f"not supported: InputLayer: {key} = {config[key]!r}")


def _batch_shape(config: Config) -> tuple[int | None, ...]:
    return batch_shape(config.get("batch_shape", config.get("batch_input_shape")))


def batch_shape(shape: Any) -> tuple[int | None, ...]:
    """Return a shape of batches after checking it."""
    if (
        not isinstance(shape, list | tuple)
        or not shape
        or not all(size is None or (type(size) is int and 0 < size < _MAX_DIMENSION) for size in shape)
    ):
        raise ConfigError(f"not supported: input of shape {str(shape)[:80]}; expected (None, positive integers ...)")
    return tuple(shape)


def _policy(dtype: Any) -> str:
    """Return the name of a dtype policy, which may be any text of a file."""
    return str(policy_name(dtype))[:80]
