"""Weights and models as Keras 2 wrote them, and as Keras keeps weights of its `applications`: `.h5`.

    attribute "layer_names"           the layers in the model's order; "layer_names0", "layer_names1", ... of many
    <layer>/                          attribute "weight_names": its arrays, those that are trained first
    top_level_model_weights/          the model's own
    model_weights/                    all of this, where the file is that of a whole model
    attribute "model_config"          JSON: the model, see keras_2_config
    attribute "training_config"       JSON: optimizer, loss and metrics
    optimizer_weights/                attribute "weight_names", as a layer; see optimizer_variables
    attribute "dptrain"               JSON: the seed, in files of dptrain's

Layers with weights go by their order, whatever their names are.

Source: `load_weights_from_hdf5_group` in keras/src/legacy/saving/legacy_h5_format.py, Keras 3.15.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers import Layer
from dptrain.layers.parts import name_layers
from dptrain.program.tensor import Variable
from dptrain.saving import keras_2_config, keras_zip, optimizer_variables
from dptrain.saving.keras_h5 import MAGIC, h5py_module, inside, stored_array, variables_of, write_checked
from dptrain.saving.keras_zip import ModelFile
from dptrain.saving.reading import MAX_NAMES, Array, Loaded, Stored, fill, joined, opened, parse_json, portable, reading
from dptrain.saving.saveables import require_all
from dptrain.utils import check_seed

_WHOLE_MODEL, _TOP_LEVEL, _OPTIMIZER = "model_weights", "top_level_model_weights", "optimizer_weights"
# An attribute for the seed, for which Keras has no place.
_METADATA = "dptrain"
# Most bytes of a list of names in one attribute.
_LARGEST_ATTRIBUTE = 64_000


def encode(model: Any) -> bytes:
    """Return the content of a whole model's file."""
    h5py, content = h5py_module(), io.BytesIO()
    config = keras_zip.model_config(model)
    compiled = config.pop("compile_config")
    with h5py.File(content, "w", libver="latest") as file:
        file.attrs["keras_version"], file.attrs["backend"] = keras_zip.KERAS, "dptrain"
        file.attrs["model_config"] = _as_json(model, config)
        file.attrs[_METADATA] = json.dumps({"seed": model._model_seed})
        paths = {id(weight): path for path, weight in model._weights_by_path().items()}
        root, layers = file.create_group(_WHOLE_MODEL), model.layers
        name_layers(layers)
        _write_names(root, "layer_names", [str(layer.name) for layer in layers])
        root.attrs["keras_version"], root.attrs["backend"] = keras_zip.KERAS, "dptrain"
        written: set[int] = set()
        for layer in sorted(layers, key=lambda layer: str(layer.name)):
            weights = layer.trainable_weights + layer.non_trainable_weights
            _write_arrays(
                h5py, root.create_group(layer.name), {paths[id(weight)]: weight.numpy() for weight in weights}
            )
            written |= {id(weight) for weight in weights}
        arrays = {paths[id(weight)]: weight.numpy() for weight in model._own_weights}
        _write_arrays(h5py, root.create_group(_TOP_LEVEL), arrays)
        require_all(
            model.weights,
            written | {id(weight) for weight in model._own_weights},
            f"the file of model {model._display_name!r}",
        )
        if compiled:
            _write_compiled(h5py, file, model, compiled)
    return content.getvalue()


def _write_compiled(h5py: ModuleType, file: Any, model: Any, compiled: dict[str, Any]) -> None:
    optimizer = compiled.pop("optimizer")
    if optimizer is None:
        file.attrs["training_config"] = _as_json(model, compiled)
        return
    description = {"class_name": optimizer["class_name"], "config": optimizer["config"]}
    file.attrs["training_config"] = _as_json(model, {**compiled, "optimizer_config": description})
    variables = variables_of(model, "optimizer", model.optimizer)
    arrays = optimizer_variables.arrays(model.optimizer, variables, model._data_dtype)
    place = file.create_group(_OPTIMIZER)
    _write_arrays(h5py, place, {f"optimizer/{number}": array for number, array in enumerate(arrays)})


def _as_json(model: Any, config: Any) -> str:
    try:
        return json.dumps(config)
    except TypeError as error:
        raise ConfigError(f"model {model.name!r} has a configuration that JSON cannot hold: {error}") from error


def _write_arrays(h5py: ModuleType, group: Any, arrays: Mapping[str, Array]) -> None:
    _write_names(group, "weight_names", list(arrays))
    for name, array in arrays.items():
        *folders, last = name.split("/")
        place = group
        for folder in folders:
            place = place.require_group(folder)
        write_checked(h5py, place, last, portable(array))


def _write_names(group: Any, attribute: str, names: Sequence[str]) -> None:
    """Write a list of names, split into several attributes where it is long."""
    whole = np.array([name.encode() for name in names], "S") if names else np.zeros(0, "S1")
    count = -(-whole.nbytes // _LARGEST_ATTRIBUTE) or 1
    for number, part in enumerate(np.array_split(whole, count)):
        group.attrs[f"{attribute}{number}" if count > 1 else attribute] = part


def load(
    source: BinaryIO,
    where: str,
    model: Any,
    *,
    with_optimizer: bool = False,
    skip_mismatch: bool = False,
    by_name: bool = False,
) -> Loaded:
    """Read weights, and with `with_optimizer` the optimizer's state; `by_name` matches layers by name."""
    h5py = h5py_module()
    with reading(where), h5py.File(source, "r") as file:
        root = inside(h5py, file, _WHOLE_MODEL, where) if _WHOLE_MODEL in file else file
        names = _attribute(root, "layer_names", where)
        if not names:
            raise DataError(f"{where}: not Keras 2's weights: no attribute 'layer_names'")
        groups = [(name, inside(h5py, root, name, where)) for name in names]
        layers: list[Layer] = model.layers
        name_layers(layers)
        if by_name:
            named = {layer.name: layer for layer in layers}
            pairs = [(name, group, named[name]) for name, group in groups if name in named]
        else:
            listed = [(name, group) for name, group in groups if _attribute(group, "weight_names", where)]
            layers = [layer for layer in layers if layer.weights]
            if len(listed) != len(layers):
                raise DataError(
                    f"{where}: {len(listed)} layers with weights, the model {model.name!r} has {len(layers)}"
                )
            pairs = [(name, group, layer) for (name, group), layer in zip(listed, layers, strict=True)]
        paths = {id(weight): path for path, weight in model._weights_by_path().items()}
        stored: dict[str, Stored] = {}
        named_ids = {id(weight) for _, _, layer in pairs for weight in layer.weights}
        for name, group, layer in pairs:
            stored |= _of_layer(h5py, group, name, layer.trainable_weights + layer.non_trainable_weights, paths)
        if _TOP_LEVEL in root:
            group_of_model = inside(h5py, root, _TOP_LEVEL, where)
            stored |= _of_layer(h5py, group_of_model, _TOP_LEVEL, model._own_weights, paths)
            named_ids |= {id(weight) for weight in model._own_weights}
        weights = {
            path: weight for path, weight in model._weights_by_path().items() if not by_name or id(weight) in named_ids
        }
        loaded = Loaded(*fill(where, weights, stored, skip_mismatch=skip_mismatch))
        if loaded.warnings:
            loaded.warnings = [f"{where}: skipped what does not fit the model: {joined(loaded.warnings)}"]
        if with_optimizer and _OPTIMIZER in file and model.compiled:
            variables = model._compiled_optimizer._variables_for(model.trainable_weights)
            of_file = _arrays(h5py, inside(h5py, file, _OPTIMIZER, where), _OPTIMIZER)
            values, reason = optimizer_variables.read(where, model._compiled_optimizer, variables, of_file)
            loaded.values |= values
            loaded.warnings += [reason] if reason else []
        return loaded


def read(path: Path) -> ModelFile:
    """Read a whole model's file."""
    h5py = h5py_module()
    where = str(path)
    with opened(path, MAGIC, "a model of Keras' (HDF5)") as file:
        content = file.read()
    with reading(where), h5py.File(io.BytesIO(content), "r") as opened_file:
        config = _json(opened_file, "model_config", where)
        if config is None:
            raise DataError(
                f"{where}: No model config found in the file: it has only weights; build the model and call "
                "load_weights"
            )
        version = opened_file.attrs.get("keras_version")
        keras_2_config.refuse_other_functions(config, version.decode() if isinstance(version, bytes) else version)
        training = _json(opened_file, "training_config", where)
        config["compile_config"] = None if training is None else keras_2_config.compile_config(training)
        metadata = _json(opened_file, _METADATA, where) or {}
        seed = metadata.get("seed")
        return ModelFile(config, check_seed(seed) if type(seed) is int else None, io.BytesIO(content), load=load)


def _json(file: Any, name: str, where: str) -> dict[str, Any] | None:
    text = file.attrs.get(name)
    if text is None:
        return None
    return parse_json(f"{where}:{name}", text if isinstance(text, bytes) else str(text).encode())


def _arrays(h5py: ModuleType, group: Any, name: str) -> list[Stored]:
    arrays = []
    for array in _attribute(group, "weight_names", name):
        *folders, last = array.split("/")
        place = group
        for folder in folders:
            place = inside(h5py, place, folder, name)
        arrays.append(stored_array(h5py, place, last, f"{name}/{array}"))
    return arrays


def _of_layer(
    h5py: ModuleType, group: Any, name: str, weights: Sequence[Variable], paths: dict[int, str]
) -> Iterator[tuple[str, Stored]]:
    """Yield the arrays of a layer, in its weights' order, by the weights' paths."""
    for number, array in enumerate(_arrays(h5py, group, name)):
        if number >= len(weights):
            yield array.where, array
            continue
        dtype = weights[number].dtype
        if dtype.kind == "i" and array.dtype.startswith("int"):  # counts, which TensorFlow keeps in 64 bits
            array = replace(array, dtype=dtype.name)
        yield paths[id(weights[number])], array


def _attribute(group: Any, name: str, where: str) -> list[str]:
    """Return a list of names, which several attributes hold where it is long."""
    parts = [group.attrs[name]] if name in group.attrs else []
    while name not in group.attrs and f"{name}{len(parts)}" in group.attrs:
        parts.append(group.attrs[f"{name}{len(parts)}"])
    names = [
        text.decode() if isinstance(text, bytes) else str(text) for part in parts for text in np.ravel(part).tolist()
    ]
    if len(names) > MAX_NAMES:
        raise DataError(f"{where}: {len(names)} names, at most {MAX_NAMES} are read")
    return names
