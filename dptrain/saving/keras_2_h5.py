"""Weights as Keras 2 wrote them, and as Keras keeps those of its `applications`: `.h5`.

    attribute "layer_names"           the layers in the model's order; "layer_names0", "layer_names1", ... of many
    <layer>/                          attribute "weight_names": its arrays, those that are trained first
    top_level_model_weights/          the model's own
    model_weights/                    all of this, where the file is that of a whole model

Layers with weights go by their order, whatever their names are.

Source: `load_weights_from_hdf5_group` in keras/src/legacy/saving/legacy_h5_format.py, Keras 3.15.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from dptrain.errors import DataError
from dptrain.layers import Layer
from dptrain.program.tensor import Variable
from dptrain.saving.keras_h5 import h5py_module, inside, stored_array
from dptrain.saving.reading import MAX_NAMES, Loaded, Stored, fill, joined, reading

_WHOLE_MODEL, _OWN = "model_weights", "top_level_model_weights"


def load(source: BinaryIO, where: str, model: Any, *, skip_mismatch: bool = False) -> Loaded:
    """Read weights.

    Args:
        source: the open file.
        where: for messages.
        model: whose they are to be.
        skip_mismatch: leave layers that do not fit as they are.

    Raises:
        ConfigError: h5py is not installed.
        DataError: damaged, another layout, or another number of layers, weights or other shapes: lists every one.
    """
    h5py = h5py_module()
    with reading(where), h5py.File(source, "r") as file:
        root = inside(h5py, file, _WHOLE_MODEL, where) if _WHOLE_MODEL in file else file
        names = _attribute(root, "layer_names", where)
        if not names:
            raise DataError(f"{where}: not Keras 2's weights: no attribute 'layer_names'")
        groups = [(name, inside(h5py, root, name, where)) for name in names]
        listed = [(name, group) for name, group in groups if _attribute(group, "weight_names", where)]
        layers: list[Layer] = [one for one in model.layers if one.weights]
        if len(listed) != len(layers):
            raise DataError(f"{where}: {len(listed)} layers with weights, the model {model.name!r} has {len(layers)}")
        paths = {id(one): path for path, one in model._weights_by_path().items()}
        stored: dict[str, Stored] = {}
        for (name, group), layer in zip(listed, layers, strict=True):
            stored |= _of_layer(h5py, group, name, layer.trainable_weights + layer.non_trainable_weights, paths)
        if _OWN in root:
            own = inside(h5py, root, _OWN, where)
            stored |= _of_layer(h5py, own, _OWN, model._own, paths)
        loaded = Loaded(*fill(where, model._weights_by_path(), stored, skip_mismatch=skip_mismatch))
        if loaded.warnings:
            loaded.warnings = [f"{where}: skipped what does not fit the model: {joined(loaded.warnings)}"]
        return loaded


def _of_layer(
    h5py: ModuleType, group: Any, name: str, weights: Sequence[Variable], paths: dict[int, str]
) -> Iterator[tuple[str, Stored]]:
    """Yield the arrays of a layer by the paths of its weights, which they follow in order."""
    for number, array in enumerate(_attribute(group, "weight_names", name)):
        *folders, last = array.split("/")
        place = group
        for folder in folders:
            place = inside(h5py, place, folder, name)
        found = stored_array(h5py, place, last, f"{name}/{array}")
        if number >= len(weights):
            yield found.where, found
            continue
        own = weights[number].dtype
        if own.kind == "i" and found.dtype.startswith("int"):  # counts, which TensorFlow keeps in 64 bits
            found = replace(found, dtype=own.name)
        yield paths[id(weights[number])], found


def _attribute(group: Any, name: str, where: str) -> list[str]:
    """Return a list of names, which lies in several attributes where it is long."""
    parts = [group.attrs[name]] if name in group.attrs else []
    while name not in group.attrs and f"{name}{len(parts)}" in group.attrs:
        parts.append(group.attrs[f"{name}{len(parts)}"])
    names = [one.decode() if isinstance(one, bytes) else str(one) for part in parts for one in np.ravel(part).tolist()]
    if len(names) > MAX_NAMES:
        raise DataError(f"{where}: {len(names)} names, at most {MAX_NAMES} are read")
    return names
