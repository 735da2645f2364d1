"""Keras 3's `.weights.h5`.

    vars/0, 1, ...                    the model's own weights, of most none; attribute "name": the model's name
    layers/<layer>/vars/0, 1, ...     a layer's weights in the order of `get_weights`, uncompressed
    layers/<model>/layers/<layer>/... of a model in a model
    <attribute>/vars/0, 1, ...        of a layer that is an attribute of a layer, or of a subclassed model and sorted
                                      before "layers"; <attribute>/<layer> where the attribute is a list or a
                                      dictionary, <attribute>/container/<layer> of a list in it
    .../seed_generator/vars/0         [seed, draws] of a layer with random numbers; Keras may do without
    optimizer/vars/0, 1, ...          see optimizer_variables; only where the model is compiled
    optimizer/optimizers/<optimizer>/vars/...  once more, of those within a MultiOptimizer

<layer> is the layer's class in snake case, the second of a class with "_1" behind it and so on, whatever the layer's
own name is. A Sequential's input layer does not count. Metrics, which Keras writes as well, are passed over.

Source: `H5IOStore` in keras/src/saving/saving_lib.py, Keras 3.15; `saveables` says how paths are found.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers import Layer
from dptrain.layers.weight import BatchState
from dptrain.metrics import Metric
from dptrain.ops.random import SeedGenerator
from dptrain.optimizers import Optimizer
from dptrain.program.tensor import Variable
from dptrain.registry.names import snake_case
from dptrain.saving import optimizer_variables
from dptrain.saving.reading import MAX_NAMES, Array, Loaded, Stored, fill, joined, portable, reading
from dptrain.saving.saveables import Saveable, Store, has_custom_store, require_all, saveables

MAGIC = b"\x89HDF\r\n\x1a\n"
# Deepest nesting of groups: HDF5 allows a group inside itself.
_DEEPEST = 64
# What Keras 2.12 and 2.13 called "layers".
_LAYERS_OF_2_13 = "_layer_checkpoint_dependencies"
_PROJECTION_OF_2 = re.compile(r"/_((?:query|key|value|output)_dense)$")  # of MultiHeadAttention
# Bytes of a chunk of an array; HDF5 allows 4 GiB.
_LARGEST_CHUNK = 1 << 30


def h5py_module() -> ModuleType:
    """Return h5py, or raise a ConfigError that says how to install it."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(f"Keras' files need h5py: pip install h5py ({error})") from error
    module: ModuleType = h5py
    return module


def encode(model: Any) -> bytes:
    """Return the content of a file."""
    content = io.BytesIO()
    h5py = h5py_module()
    # The newest format has checksums of everything but arrays: names, shapes, dtypes, attributes.
    with h5py.File(content, "w", libver="latest") as file:
        written: set[int] = set()
        for path, saveable in saveables(model).items():
            if isinstance(saveable, Metric):
                continue
            place = file.create_group(f"{path}/vars")
            if isinstance(saveable, Optimizer):
                place.attrs["name"] = snake_case(type(saveable).__name__)
                arrays = optimizer_variables.arrays(saveable, variables_of(model, path, saveable), model._data_dtype)
            elif isinstance(saveable, SeedGenerator):
                place.attrs["name"] = saveable.count.name
                arrays = [np.array([saveable.seed % 2**32, int(saveable.count) % 2**32], np.uint32)]
                written.add(id(saveable.count))
            else:
                place.attrs["name"] = saveable._display_name
                saveable.save_own_variables(store := Store(saveable))
                state_variables = [
                    variable for state in saveable._attributes(BatchState) for variable in state.variables
                ]
                written |= {
                    id(variable) for variable in [*saveable._own_weights, *state_variables]
                }  # files do not have states
                for name, array in store.items():
                    write_checked(h5py, place, name, array)
                continue
            for number, array in enumerate(arrays):
                write_checked(h5py, place, str(number), portable(array))
    require_all(model.variables, written, f"the file of model {model._display_name!r}")
    return content.getvalue()


def write_checked(h5py: ModuleType, place: Any, name: str, array: Array) -> None:
    """Write an array with HDF5's Fletcher 32 checksum; a scalar has the header's."""
    if array.ndim and array.size:
        chunks = True if array.nbytes > _LARGEST_CHUNK else array.shape
        place.create_dataset(name, data=array, chunks=chunks, fletcher32=True)
        return
    space = h5py.h5s.create_simple(array.shape) if array.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    compact.set_obj_track_times(False)  # equal models are equal files
    dataset = h5py.h5d.create(place.id, name.encode(), h5py.h5t.py_create(array.dtype), space, compact)
    if array.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)


def load(
    source: BinaryIO, where: str, model: Any, *, with_optimizer: bool = False, skip_mismatch: bool = False
) -> Loaded:
    """Read weights, states of random generators, and of optimizers where `with_optimizer`."""
    h5py = h5py_module()
    with reading(where), h5py.File(source, "r") as file:
        if "layer_names" in file.attrs or (model._stack and not {"layers", _LAYERS_OF_2_13} & set(file)):
            old = "; this is a Keras 2 file: its name should end in just .h5" if "layer_names" in file.attrs else ""
            raise DataError(f"{where}: not Keras 3's weights: no group 'layers'{old}")
        walked = _walk(h5py, file, "", where, [MAX_NAMES])
        groups = {path.replace(_LAYERS_OF_2_13, "layers"): arrays for path, arrays in walked}
        owners = saveables(model, groups.__contains__)
        paths = {id(weight): path for path, weight in model._weights_by_path().items()}
        stored: dict[str, Stored] = {}
        stores: dict[Layer, dict[str, Array]] = {}
        for path, arrays in groups.items():
            owner = owners.get(path) or owners.get(_PROJECTION_OF_2.sub(r"/\1", path))
            if isinstance(owner, Layer) and has_custom_store(owner):
                stores[owner] = {name: stored_array.read() for name, stored_array in arrays.items()}
                continue
            listed = _in_order(arrays, f"{path}/vars")
            if not isinstance(owner, Layer | None) or (owner is None and _is_passed_over(path, listed)):
                continue
            names = [paths[id(weight)] for weight in owner._stored_weights] if isinstance(owner, Layer) else []
            for number, array in enumerate(listed):
                stored[names[number] if number < len(names) else array.where] = array
        elsewhere = {id(weight) for layer in stores for weight in layer._own_weights}
        weights = {path: weight for path, weight in model._weights_by_path().items() if id(weight) not in elsewhere}
        loaded = Loaded(*fill(where, weights, stored, skip_mismatch=skip_mismatch))
        loaded.stores, loaded.skip_mismatch = stores, skip_mismatch
        if loaded.warnings:
            loaded.warnings = [f"{where}: skipped what does not fit the model: {joined(loaded.warnings)}"]
        iterations: Array | None = None
        for path, owner in owners.items():
            if isinstance(owner, Optimizer) and with_optimizer and groups.get(path) and not _is_within(path, owners):
                arrays_of = _in_order(groups[path], path)
                values, reason = optimizer_variables.read(where, owner, variables_of(model, path, owner), arrays_of)
                loaded.values |= values
                loaded.warnings += [reason] if reason else []
                iterations = values.get(owner.variables[0], iterations)
        for path, owner in owners.items():
            if isinstance(owner, SeedGenerator):
                drawn = _draws(where, _in_order(groups.get(path, {}), path), iterations)
                loaded.values |= {} if drawn is None else {owner.count: drawn}
        return loaded


def variables_of(model: Any, path: str, optimizer: Optimizer) -> list[Variable]:
    """Return an optimizer's variables in Keras' order, those of a model's trained weights, without pruning masks."""
    trained = model.trainable_weights
    if path.startswith("optimizer/"):  # one of several within the model's
        trained = [weight for weight in trained if weight in optimizer._slots]
    variables = optimizer._variables_for(trained) if path.partition("/")[0] == "optimizer" else optimizer.variables
    pruning = {id(variable) for variable in optimizer._pruning_variables}
    return [variable for variable in variables if id(variable) not in pruning]


def _is_passed_over(path: str, stored: list[Stored]) -> bool:
    """Whether the arrays belong to an optimizer (iterations first), a metric or a generator that the model lacks."""
    parts = path.split("/")
    counts = bool(stored) and stored[0].shape == () and "int" in stored[0].dtype
    return counts or parts[0] in ("optimizer", "metrics") or parts[-1] == "seed_generator"


def _draws(where: str, stored: list[Stored], iterations: Array | None) -> Array | None:
    """Return the number of draws; files of versions that did not store it had one draw an iteration."""
    if not stored:
        return iterations
    if stored[0].shape != (2,):
        raise DataError(f"{where}: {stored[0].where} has shape {stored[0].shape}, expected (2,)")
    return np.array(int(stored[0].read()[1]), np.int64)


def optimizers_of(model: Any) -> list[Optimizer]:
    """Return the optimizers whose states a file has, without those within another one."""
    owners = saveables(model)
    return [owner for path, owner in owners.items() if isinstance(owner, Optimizer) and not _is_within(path, owners)]


def _is_within(path: str, owners: Mapping[str, Saveable]) -> bool:
    """Whether this is the group of an optimizer within another one, which has its variables too."""
    return isinstance(owners.get(path.rpartition("/optimizers/")[0]), Optimizer)


def stored_variables(model: Any) -> list[Variable]:
    """Return everything that `load` may set, in the same order on all ranks."""
    return [*model.variables, *(variable for optimizer in optimizers_of(model) for variable in optimizer.variables)]


# Inside HDF5: links elsewhere, external storage and declared sizes that nothing backs are refused.


def _walk(
    h5py: ModuleType, group: Any, path: str, where: str, left: list[int], depth: int = 0
) -> Iterator[tuple[str, dict[str, Stored]]]:
    """Yield the arrays of every group that has a group "vars", by its path."""
    left[0] -= len(group)
    if left[0] < 0 or depth > _DEEPEST:
        raise DataError(f"{where}: more than {MAX_NAMES} names, or groups nested more than {_DEEPEST} deep")
    for name in group:
        here = f"{path}/{name}" if path else name
        member = inside(h5py, group, name, where)
        if not isinstance(member, h5py.Group):
            raise DataError(f"{where}: {here} is not a group")
        if name == "vars":
            yield path, _stored_vars(h5py, member, here)
        else:
            yield from _walk(h5py, member, here, where, left, depth + 1)


def inside(h5py: ModuleType, parent: Any, name: str, where: str) -> Any:
    """Return the member of a group; refuse links to other places."""
    if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{where}: {name} is a link to another file, which is not followed")
    return parent[name]


def _stored_vars(h5py: ModuleType, place: Any, where: str) -> dict[str, Stored]:
    if len(place) > MAX_NAMES:
        raise DataError(f"{where}: a group of {len(place)} names, at most {MAX_NAMES} are read")
    return {name: stored_array(h5py, place, name, f"{where}/{name}") for name in place}


def _in_order(arrays: Mapping[str, Stored], where: str) -> list[Stored]:
    expected = [str(number) for number in range(len(arrays))]
    if sorted(arrays) != sorted(expected):
        raise DataError(f"{where}: expected arrays 0 to {len(arrays) - 1}, found {', '.join(sorted(arrays)[:10])}")
    return [arrays[name] for name in expected]


def stored_array(h5py: ModuleType, place: Any, name: str, where: str) -> Stored:
    """Return an array of a group, unread; refuse external data, and more declared bytes than stored ones."""
    dataset = inside(h5py, place, name, where)
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise DataError(f"{where} is not an array")
    if dataset.external or dataset.is_virtual:
        raise DataError(f"{where}: its data is in another file, which is not read")
    shape = tuple(int(size) for size in dataset.shape)
    declared = math.prod(shape) * dataset.dtype.itemsize
    if dataset.id.get_storage_size() < declared:
        raise DataError(
            f"{where}: {declared} bytes declared, {dataset.id.get_storage_size()} stored; Keras does not compress"
        )
    dtype = dataset.dtype.name if dataset.dtype.kind in "iuf" else f"{dataset.dtype}"
    return Stored(shape, dtype, lambda: np.asarray(dataset[()]), where)
