"""A live Keras model's layers, weights and optimizer, without importing Keras: only its own methods are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers import Layer
from dptrain.losses import Loss
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.saving import keras_config, optimizer_variables
from dptrain.saving.reading import Stored, fill
from dptrain.saving.snapshot import Loaded


@dataclass
class LiveModel:
    """What a Keras model is made of.

    Attributes:
        name: the model's.
        layers: as dptrain's.
        architecture: their shapes; None where the Keras model is not built.
        dtype: "float32" or "float64".
        trainable: the model's own, beside that of its layers.
        compiled: optimizer, loss and metrics, where the model is compiled.
        loaded: weights and optimizer; None where the Keras model is not built.
    """

    name: str
    layers: list[Layer]
    architecture: Architecture | None
    dtype: str
    trainable: bool
    compiled: tuple[Optimizer, Loss, list[Any], list[Any]] | None
    loaded: Loaded | None


def take(model: Any, *, compiled: bool) -> LiveModel:
    """Take a Keras model apart.

    Args:
        model: a Sequential, or a Functional that is a chain.
        compiled: whether optimizer, loss and metrics are wanted.

    Raises:
        ConfigError: something that dptrain does not have, or no Keras model at all.
        DataError: the weights are not those of the layers.
    """
    needed = ("get_config", "get_weights", "layers", "name")
    if missing := [name for name in needed if not hasattr(model, name)]:
        raise ConfigError(f"expected a Keras model, found {type(model).__name__} without {', '.join(missing)}")
    config = model.get_config()
    if not isinstance(config, Mapping) or not isinstance(config.get("layers"), list):
        raise ConfigError(f"not supported: {type(model).__name__} {model.name!r} has no list of layers")
    if "input_layers" in config:
        config = {**config, "layers": _chain(config)}
    name, layers, dtype, trainable = keras_config.layers_of(config)
    found = None
    if compiled and hasattr(model, "get_compile_config"):
        found = keras_config.compiled_of(model.get_compile_config())
    if layers[0].input_shape is None:
        return LiveModel(name, layers, None, dtype, trainable, found, None)
    architecture = Architecture(layers, trainable=trainable)
    loaded = _weights(model, architecture)
    if found is not None:
        _optimizer(model, found[0], architecture, loaded)
    return LiveModel(name, layers, architecture, dtype, trainable, found, loaded)


def _chain(config: Mapping[str, Any]) -> list[Any]:
    """Return a Functional's layers in order.

    Raises:
        ConfigError: they are not a chain from one input to one output.
    """
    layers = config["layers"]
    names = [layer.get("name") or layer["config"]["name"] for layer in layers]
    sources = {name: _source(name, layer) for name, layer in zip(names, layers, strict=True)}
    by_name = dict(zip(names, layers, strict=True))
    ends = [_ends(config.get(key)) for key in ("input_layers", "output_layers")]
    if any(len(end) != 1 for end in ends):
        raise ConfigError("not supported: a model with several inputs or outputs")
    chain = [ends[1][0]]
    while (source := sources.get(chain[-1])) is not None and len(chain) <= len(names):
        chain.append(source)
    if chain[-1] != ends[0][0] or sorted(chain) != sorted(names):
        raise ConfigError("not supported: a Functional model whose layers are not a chain")
    return [by_name[name] for name in reversed(chain)]


def _source(name: str, layer: Mapping[str, Any]) -> str | None:
    """Return the name of the layer that a layer takes its input from; None for an input layer."""
    nodes = layer.get("inbound_nodes") or []
    if not nodes:
        return None
    if len(nodes) != 1:
        raise ConfigError(f"not supported: layer {name!r} is used {len(nodes)} times")
    arguments = nodes[0].get("args", ())
    if len(arguments) != 1 or not isinstance(arguments[0], Mapping) or "config" not in arguments[0]:
        raise ConfigError(f"not supported: layer {name!r} has several inputs")
    return str(arguments[0]["config"]["keras_history"][0])


def _ends(ends: Any) -> list[str]:
    """Return the layers of input_layers or output_layers: one [name, node, tensor] or a list of them."""
    if not ends:
        return []
    return [str(ends[0])] if isinstance(ends[0], str) else [str(end[0]) for end in ends]


def _weights(model: Any, architecture: Architecture) -> Loaded:
    layout = architecture.layout
    arrays = [np.asarray(weight) for weight in model.get_weights()]
    if len(arrays) != len(layout.entries):
        raise DataError(
            f"Keras model {model.name!r}: {len(arrays)} weights, its layers have {len(layout.entries)} in dptrain"
        )
    stored = {
        entry.name: Stored(array.shape, array.dtype.name, lambda array=array: array, entry.name)  # type: ignore[misc]
        for entry, array in zip(layout.entries, arrays, strict=True)
    }
    flat = np.zeros(layout.full_size)
    fill(f"Keras model {model.name!r}", layout, stored, flat, skip_mismatch=False)
    return Loaded(flat)


def _optimizer(model: Any, optimizer: Optimizer, architecture: Architecture, loaded: Loaded) -> None:
    """Take over the optimizer's variables, where they are as dptrain's."""
    variables = getattr(getattr(model, "optimizer", None), "variables", None) or []
    wanted = optimizer_variables.shapes(optimizer, architecture.layout)
    shapes = [tuple(variable.shape) for variable in variables]
    if not shapes or len(shapes) <= 2 < len(wanted):
        return  # it was never used
    if shapes != wanted:
        loaded.warnings.append(f"the optimizer starts afresh: {len(shapes)} variables, expected {len(wanted)}")
        return
    arrays = [np.asarray(variable.numpy()) for variable in variables]
    loaded.state = optimizer_variables.state_of(f"Keras model {model.name!r}", optimizer, architecture.layout, arrays)
