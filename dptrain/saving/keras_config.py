"""Models, layers, optimizers, losses and metrics as Keras 3's configurations, and back.

An object is {"module": "keras.layers", "class_name": "Dense", "config": {...}, "registered_name": null}; its config has
the constructor's arguments. What is written comes from `config()`; what is read goes to the constructor of the class
that the registry has under that name. So a new layer, optimizer, loss or metric needs no line here, a new kind of
object (`_kinds`) one.

An argument that the constructor does not know is passed over only where it says what dptrain does anyway (None,
False, or `_SAME_AS_HERE`); anything else is refused by name.

Source: keras/src/saving/serialization_lib.py, Keras 3.15.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain import initializers, losses, metrics, optimizers, regularizers
from dptrain.errors import ConfigError
from dptrain.layers import LAYERS, Layer
from dptrain.losses import LOSSES, Loss
from dptrain.metrics import METRICS, Metric
from dptrain.model import Architecture
from dptrain.optimizers import OPTIMIZERS, Optimizer, schedules
from dptrain.registry.names import suggestion
from dptrain.registry.serialization import plain
from dptrain.saving.snapshot import Compiled, Measures

Config = Mapping[str, Any]
# Arguments that change no number that a file could hold: seeds (values are drawn already, or by another generator),
# and what another argument switches off; then those that are no constructor's business here.
_NO_MATTER = ("seed", "ema_momentum")
_HANDLED = ("name", "dtype")
# What Keras' arguments are where dptrain has no such argument.
_SAME_AS_HERE: dict[str, Any] = {
    "trainable": True,
    "data_format": "channels_last",
    "reduction": "sum_over_batch_size",
    "momentum": 0.0,
    "axis": -1,
}
_MAX_DIMENSION = 2**31
_MAX_LAYERS = 10_000


def _kinds() -> dict[str, Mapping[str, Any]]:
    """Return the classes that can be in a file, by Keras' module and the class's name."""
    tables: dict[str, Mapping[str, Any]] = {
        "keras.layers": LAYERS,
        "keras.optimizers": OPTIMIZERS,
        "keras.losses": LOSSES,
        "keras.metrics": METRICS,
        "keras.initializers": initializers.INITIALIZERS,
        "keras.optimizers.schedules": schedules.SCHEDULES,
        "keras.regularizers": regularizers.REGULARIZERS,
    }
    return {module: {cls.__name__: cls for cls in table.values()} for module, table in tables.items()}


# Writing


def sequential_config(
    name: str, layers: Sequence[Layer], architecture: Architecture | None, dtype: str, trainable: bool
) -> dict[str, Any]:
    """Return what Keras' `Sequential.get_config` returns.

    Args:
        name: the model's.
        layers: its layers.
        architecture: its shapes; None where they are not known yet.
        dtype: "float32" or "float64".
        trainable: the model's own.
    """
    policy = _object("keras", "DTypePolicy", {"name": dtype})
    listed: list[dict[str, Any]] = []
    result = {"name": name, "trainable": trainable, "dtype": policy, "layers": listed}
    if architecture is not None:
        batch_shape = [None, *architecture.input_shape]
        about = {"batch_shape": batch_shape, "dtype": dtype, "sparse": False, "ragged": False, "name": "input_layer"}
        listed.append(_object("keras.layers", "InputLayer", about))
        result["build_input_shape"] = batch_shape
    for position, layer in enumerate(layers):
        config = {"name": layer.name, "trainable": True, "dtype": policy} | plain(layer.config())
        described = _object("keras.layers", _registered_name("keras.layers", layer), config)
        if architecture is not None:
            described["build_config"] = {"input_shape": [None, *architecture.input_shapes[position]]}
        listed.append(described)
    return result


def model_config(config: dict[str, Any], compiled: Compiled | None) -> dict[str, Any]:
    """Return the whole of a model's config.json: `sequential_config` and how the model is compiled."""
    result = _object("keras", "Sequential", config)
    if "build_input_shape" in config:
        result["build_config"] = {"input_shape": config["build_input_shape"]}
    result["compile_config"] = {} if compiled is None else _compile_config(*compiled)
    return result


def _compile_config(loss: Loss, optimizer: Optimizer, measured: Measures) -> dict[str, Any]:
    unweighted, weighted = measured[:2]
    return {
        "optimizer": _object(
            "keras.optimizers", _registered_name("keras.optimizers", optimizer), plain(optimizer.config())
        ),
        "loss": _object(
            "keras.losses", _registered_name("keras.losses", loss), {"name": loss.name} | plain(loss.config())
        ),
        "loss_weights": None,
        "metrics": [_metric_config(one) for one in unweighted or ()],
        "weighted_metrics": [_metric_config(one) for one in weighted] if weighted else None,
        "run_eagerly": False,
        "steps_per_execution": 1,
        "jit_compile": "auto",
    }


def _metric_config(metric: str | Metric) -> Any:
    """Return the name that the metric was asked for by, or its configuration."""
    if isinstance(metric, str):
        return metric
    return _object("keras.metrics", _registered_name("keras.metrics", metric), plain(metric.config()))


def _object(module: str, class_name: str, config: Config) -> dict[str, Any]:
    return {"module": module, "class_name": class_name, "config": dict(config), "registered_name": None}


def _registered_name(module: str, one: object) -> str:
    """Return the class's name.

    Raises:
        ConfigError: the registry does not have it: a file with it could not be read.
    """
    name = type(one).__name__
    if _kinds()[module].get(name) is not type(one):
        raise ConfigError(
            f"not supported: {name} is no class of {module.replace('keras', 'dptrain')} and cannot be saved"
        )
    return name


# Reading


def layers_of(config: Config) -> tuple[str, list[Layer], str, bool]:
    """Return name, layers, dtype and `trainable` of a `Sequential.get_config`; the first layer gets the input's shape.

    Raises:
        ConfigError: something that dptrain does not have; names all of it.
    """
    listed = config.get("layers")
    if not isinstance(listed, list) or not isinstance(config.get("name"), str) or len(listed) > _MAX_LAYERS:
        raise ConfigError(
            "A Sequential model configuration must be a dictionary containing the 'name' and 'layers' keys."
        )
    shape: tuple[int, ...] | None = None
    layers: list[Layer] = []
    dtypes: set[str] = set()
    problems = []
    for position, described in enumerate(listed):
        try:
            class_name, about = _open(described)
            if class_name == "InputLayer":
                if position:
                    raise ConfigError("an InputLayer can stand only before the first layer")
                shape = _input_shape(about)
                continue
            if "dtype" in about:
                dtypes.add(_policy(about["dtype"]))
            layers.append(_layer(described))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    if not layers:
        raise ConfigError("a model needs at least one layer")
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise ConfigError(
            f"not supported: layers of dtype {', '.join(sorted(dtypes))}; expected float32 or float64 alone"
        )
    if shape is None and (build_shape := config.get("build_input_shape")) is not None:
        shape = _input_shape({"batch_shape": build_shape})
    if shape is not None:
        layers[0].input_shape = shape
    dtype = dtypes.pop() if dtypes else "float32"
    return str(config["name"]), layers, dtype, bool(config.get("trainable", True))


def compiled_of(config: Any) -> tuple[Optimizer, Loss, list[Any], list[Any]] | None:
    """Return what a compile_config says; None where the model was not compiled.

    Raises:
        ConfigError: something that dptrain does not have.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError("compile_config is no JSON object")
    if config.get("loss_weights"):
        raise ConfigError(
            f"not supported: loss_weights = {config['loss_weights']!r}; load with compile=False and call compile()"
        )
    measured = [config.get(key) or [] for key in ("metrics", "weighted_metrics")]
    for key, found in zip(("metrics", "weighted_metrics"), measured, strict=True):
        if not isinstance(found, list):
            raise ConfigError(f"not supported: {key} = {found!r}; load with compile=False and call compile()")
    if config.get("loss") is None or config.get("optimizer") is None:
        raise ConfigError("compiled without a loss; load with compile=False and call compile()")
    try:
        loss = losses.get(_named_or_built("keras.losses", config["loss"]))
        optimizer = optimizers.get(_named_or_built("keras.optimizers", config["optimizer"]))
        unweighted, weighted = ([_metric(one) for one in found] for found in measured)
        return optimizer, loss, unweighted, weighted
    except ConfigError as error:
        raise ConfigError(f"{error} (load with compile=False to have the model without it)") from error


def _metric(described: Any) -> Any:
    """Return a metric, or its name where that is how it was asked for: "accuracy" has a meaning only in a model."""
    found = _named_or_built("keras.metrics", described)
    if isinstance(found, str) and found not in ("accuracy", "acc"):
        metrics.get(found)
    return found


def _open(described: Any) -> tuple[str, Config]:
    """Return class name and config of a described object of Keras' own.

    Raises:
        ConfigError: it is not described as Keras does, or is somebody's own.
    """
    if not isinstance(described, Mapping) or not isinstance(described.get("class_name"), str):
        raise ConfigError(f"expected an object with class_name and config, found {str(described)[:80]!r}")
    name, config, module = described["class_name"], described.get("config"), described.get("module") or "keras"
    registered = described.get("registered_name")
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name[:80]!r} has no config")
    if not str(module).split(".")[0] == "keras" or registered not in (None, name):
        raise ConfigError(
            f"not supported: custom object {str(registered or name)[:80]!r} of module {str(module)[:80]!r}"
        )
    return name, config


def _layer(described: Any) -> Layer:
    class_name, config = _open(described)
    name = config.get("name")
    if name is not None and (not isinstance(name, str) or not name or "/" in name):
        raise ConfigError(f"layer name {name!r}: expected a word without '/'")
    built = _build("keras.layers", "layer", class_name, config, f"{name!r} ({class_name})")
    assert isinstance(built, Layer)
    built.name = name
    return built


def _named_or_built(module: str, described: Any) -> Any:
    """Return a name as it is, the name of a described function, or the object that is described."""
    if isinstance(described, str):
        return described
    if isinstance(described, Mapping) and described.get("class_name") == "function":
        return _function_name(described)
    class_name, config = _open(described)
    built = _build(module, module.removeprefix("keras.").removesuffix("s"), class_name, config, class_name)
    if isinstance(built, Metric) and isinstance(config.get("name"), str):
        built.name = config["name"]
    return built


def _build(module: str, kind: str, class_name: str, config: Config, label: str) -> Any:
    classes = _kinds()[module]
    if class_name not in classes:
        raise ConfigError(f"not supported: {kind} {label[:80]}{suggestion(class_name, classes)}")
    cls = classes[class_name]
    known = _parameters(cls)
    arguments = {}
    for key, value in config.items():
        if key in _HANDLED:
            continue
        if key in known:
            arguments[key] = _value(value, f"{label}: {key}")
        elif not (key in _NO_MATTER or value is None or value == _SAME_AS_HERE.get(key, False)):
            raise ConfigError(f"not supported: {label}: {key} = {str(value)[:80]}")
    try:
        return cls(**arguments)
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"{label}: {error}") from error


@functools.cache
def _parameters(cls: type) -> set[str]:
    """Return the names of a constructor's arguments, those that it hands on to its base classes included."""
    names: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return names - {"self"}


def _value(value: Any, label: str) -> Any:
    """Return an argument; one that is described as an object is built."""
    if isinstance(value, list):
        return [_value(one, label) for one in value]
    if not isinstance(value, Mapping) or "class_name" not in value:
        return value
    if value["class_name"] == "function":
        return _function_name(value)
    class_name, config = _open(value)
    module = str(value.get("module"))
    if module not in _kinds() or module == "keras.layers":
        raise ConfigError(f"not supported: {label} = {class_name}")
    return _build(module, module.removeprefix("keras.").removesuffix("s"), class_name, config, class_name)


def _function_name(described: Config) -> str:
    """Return the name of one of Keras' functions.

    Raises:
        ConfigError: it is somebody's own.
    """
    name = described.get("config")
    module = str(described.get("module") or "builtins")
    if not isinstance(name, str) or module.split(".")[0] not in ("keras", "builtins"):
        raise ConfigError(f"not supported: custom function {str(name)[:80]!r} of module {module[:80]!r}")
    return name


def _input_shape(config: Config) -> tuple[int, ...]:
    """Return the shape of one sample of an InputLayer."""
    shape = config.get("batch_shape", config.get("batch_input_shape"))
    for key in ("sparse", "ragged", "optional"):
        if config.get(key):
            raise ConfigError(f"not supported: InputLayer: {key} = {config[key]!r}")
    if (
        not isinstance(shape, list | tuple)
        or len(shape) < 2
        or not all(type(size) is int and 0 < size < _MAX_DIMENSION for size in shape[1:])
    ):
        raise ConfigError(f"not supported: input of shape {str(shape)[:80]}; expected (None, sizes from 1 ...)")
    return tuple(shape[1:])


def _policy(dtype: Any) -> str:
    """Return the name of a dtype policy."""
    if isinstance(dtype, Mapping):
        inner = dtype.get("config")
        dtype = inner.get("name") if isinstance(inner, Mapping) else None
    return str(dtype)[:80]
