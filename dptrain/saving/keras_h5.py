"""Keras 3's `.weights.h5`, for models of layers in a row.

    vars                              group, attribute "name": the model's name; empty
    layers/<layer>/vars               group, attribute "name": the layer's name
    layers/<layer>/vars/0, 1, ...     its weights in the order of `get_weights`, uncompressed
    optimizer/vars/0, 1, ...          see optimizer_variables; only where the model is compiled

<layer> is the layer's class in snake case, the second of a class with "_1" behind it and so on, whatever the layer's
own name is. Input layers do not count. Groups that Keras writes besides ("seed_generator" in a layer, "metrics") have
nothing that dptrain has and are passed over.

Source: `H5IOStore` and `_save_container_state` in keras/src/saving/saving_lib.py, Keras 3.15.
"""

import io
import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers import Layer
from dptrain.optimizers import Optimizer
from dptrain.params import ParamLayout
from dptrain.registry.names import snake_case
from dptrain.saving import optimizer_variables
from dptrain.saving.reading import MAX_NAMES, Array, Stored, fill, joined, reading
from dptrain.saving.snapshot import Loaded, OptimizerState, Snapshot

MAGIC = b"\x89HDF\r\n\x1a\n"
# Groups inside a layer's that hold no weights.
_NO_WEIGHTS = ("vars", "seed_generator")


def h5py_module() -> ModuleType:
    """Return h5py.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(f"Keras' files need h5py: pip install 'dptrain[keras-files]' ({error})") from error
    module: ModuleType = h5py
    return module


def layer_groups(layers: Sequence[Layer]) -> list[str]:
    """Return the name of each layer's group in "layers"."""
    seen: Counter[str] = Counter()
    names = []
    for layer in layers:
        kind = snake_case(type(layer).__name__)
        names.append(f"{kind}_{seen[kind]}" if seen[kind] else kind)
        seen[kind] += 1
    return names


def encode(snapshot: Snapshot) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: h5py is not installed.
    """
    content = io.BytesIO()
    with h5py_module().File(content, "w") as file:
        file.create_group("vars").attrs["name"] = snapshot.name
        weights = snapshot.named_weights()
        layers = snapshot.architecture.layers
        for layer, group in zip(layers, layer_groups(layers), strict=True):
            place = file.create_group(f"layers/{group}/vars")
            place.attrs["name"] = layer.name
            for number, name in enumerate(_names_of(layer, snapshot.architecture.layout)):
                place[str(number)] = weights[name]
        if snapshot.compiled is not None:
            optimizer = snapshot.compiled[1]
            place = file.create_group("optimizer/vars")
            place.attrs["name"] = snake_case(type(optimizer).__name__)
            arrays = optimizer_variables.variables(
                optimizer, snapshot.architecture.layout, snapshot.state, snapshot.dtype
            )
            for number, array in enumerate(arrays):
                place[str(number)] = array
    return content.getvalue()


def load(
    source: BinaryIO,
    where: str,
    layers: Sequence[Layer],
    layout: ParamLayout,
    flat: Array,
    *,
    optimizer: Optimizer | None = None,
    skip_mismatch: bool = False,
) -> Loaded:
    """Read weights, and the optimizer's state if an optimizer is given.

    Args:
        source: the open file, or its content.
        where: for messages.
        layers: of the model, named.
        layout: of the model.
        flat: the flat parameters, what stays where the file does not fit; overwritten.
        optimizer: takes the state in the file. Where that is another optimizer's, it is left out with a warning, as
            in Keras.
        skip_mismatch: leave layers that do not fit as they are.

    Raises:
        ConfigError: h5py is not installed.
        DataError: damaged, another layout, or names or shapes differ: lists every difference.
    """
    h5py = h5py_module()
    with reading(where), h5py.File(source, "r") as file:
        if "layers" not in _names(file, where):
            old = "; this is a file of Keras 2: save it again with Keras 3" if "layer_names" in file.attrs else ""
            raise DataError(f"{where}: not Keras 3's weights: no group 'layers'{old}")
        stored = _stored_weights(h5py, file, where, layers, layout)
        warnings = fill(where, layout, stored, flat, skip_mismatch=skip_mismatch)
        if warnings:
            warnings = [f"{where}: skipped what does not fit the model: {joined(warnings)}"]
        if optimizer is None or "optimizer" not in _names(file, where):
            return Loaded(flat, None, warnings)
        found = _stored_vars(h5py, _group(h5py, file, "optimizer", where), f"{where}:optimizer")
        state = _optimizer_state(where, found, optimizer, layout, warnings)
        return Loaded(flat, state, warnings)


def _stored_weights(
    h5py: ModuleType, file: Any, where: str, layers: Sequence[Layer], layout: ParamLayout
) -> dict[str, Stored]:
    """Return what the file holds by name in the model; what the model does not have, by its path."""
    place = _group(h5py, file, "layers", where)
    owners = dict(zip(layer_groups(layers), layers, strict=True))
    stored = {}
    for group_name in _names(place, where):
        group = _group(h5py, place, group_name, f"{where}:layers")
        found = _stored_vars(h5py, group, f"layers/{group_name}")
        owner = owners.get(group_name)
        names = [] if owner is None else _names_of(owner, layout)
        for number, one in enumerate(found):
            stored[names[number] if number < len(names) else one.where] = one
        for inner in _names(group, where):
            if inner not in _NO_WEIGHTS:
                raise DataError(f"{where}: layers/{group_name}/{inner}: nested layers are not supported")
    return stored


def _optimizer_state(
    where: str, found: list[Stored], optimizer: Optimizer, layout: ParamLayout, warnings: list[str]
) -> OptimizerState | None:
    wanted = optimizer_variables.shapes(optimizer, layout)
    unused = wanted[: len(wanted) - len(optimizer.all_slots) * len(layout.trained)]
    shapes = [one.shape for one in found]
    if shapes == unused != wanted and int(found[0].read()) == 0:
        return None  # it was never used, as it is here
    if shapes != wanted:
        name = snake_case(type(optimizer).__name__)
        if len(shapes) != len(wanted):
            reason = f"it has {len(wanted)} variables whereas the saved optimizer has {len(shapes)} variables."
        else:
            number = next(n for n, pair in enumerate(zip(shapes, wanted, strict=True)) if pair[0] != pair[1])
            reason = f"its variable {number} has shape {wanted[number]}, the saved optimizer's {shapes[number]}."
        warnings.append(f"Skipping variable loading for optimizer '{name}', because {reason}")
        return None
    return optimizer_variables.state_of(where, optimizer, layout, [one.read() for one in found])


# Inside HDF5: links elsewhere, external storage and declared sizes that nothing backs are refused.


def _names(group: Any, where: str) -> list[str]:
    if len(group) > MAX_NAMES:
        raise DataError(f"{where}: a group of {len(group)} names, at most {MAX_NAMES} are read")
    return list(group)


def _group(h5py: ModuleType, parent: Any, name: str, where: str) -> Any:
    found = _inside(h5py, parent, name, where)
    if not isinstance(found, h5py.Group):
        raise DataError(f"{where}: {name} is not a group")
    return found


def _inside(h5py: ModuleType, parent: Any, name: str, where: str) -> Any:
    if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{where}: {name} is a link to another place, which is not followed")
    return parent[name]


def _stored_vars(h5py: ModuleType, group: Any, where: str) -> list[Stored]:
    """Return the arrays 0, 1, ... of a group's group "vars"."""
    if "vars" not in _names(group, where):
        return []
    place = _group(h5py, group, "vars", where)
    names = _names(place, where)
    expected = [str(number) for number in range(len(names))]
    if sorted(names) != sorted(expected):
        raise DataError(f"{where}/vars: expected arrays 0 to {len(names) - 1}, found {', '.join(sorted(names)[:10])}")
    return [_stored(h5py, place, name, f"{where}/vars/{name}") for name in expected]


def _stored(h5py: ModuleType, place: Any, name: str, where: str) -> Stored:
    dataset = _inside(h5py, place, name, where)
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise DataError(f"{where} is not an array")
    if dataset.external or dataset.is_virtual:
        raise DataError(f"{where}: its data lie in another file, which is not followed")
    shape = tuple(int(size) for size in dataset.shape)
    declared = math.prod(shape) * dataset.dtype.itemsize
    if dataset.id.get_storage_size() < declared:
        raise DataError(
            f"{where}: {declared} bytes declared, {dataset.id.get_storage_size()} stored; Keras does not compress"
        )
    dtype = dataset.dtype.name if dataset.dtype.kind in "iuf" else f"{dataset.dtype}"
    return Stored(shape, dtype, lambda: np.asarray(dataset[()]), where)


def _names_of(layer: Layer, layout: ParamLayout) -> list[str]:
    return [entry.name for entry in layout.entries if entry.name.startswith(f"{layer.name}/")]
