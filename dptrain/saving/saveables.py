"""Which objects of a model have variables of their own in Keras' files, and the paths of their groups.

Keras walks attributes by name, those that begin with "_" last, and lists, tuples and dictionaries in them, at any
depth: a container in a container is "container", the next "container_1". An object with several paths is written at the
first. Source: `_walk_saveable` and `_save_container_state` in keras/src/saving/saving_lib.py, Keras 3.15.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.metrics import Metric
from dptrain.ops.random import SeedGenerator
from dptrain.optimizers import MultiOptimizer, Optimizer
from dptrain.optimizers.absent import AbsentOptimizer
from dptrain.program.tensor import Variable
from dptrain.program.tree import holds_parts
from dptrain.registry.names import snake_case
from dptrain.runtime.storage.files import is_plain_name
from dptrain.saving.keras_config import MODELS
from dptrain.saving.reading import Array, portable

Saveable = Layer | SeedGenerator | Optimizer | Metric


def saveables(model: Any, is_group: Callable[[str], bool] | None = None) -> dict[str, Saveable]:
    """Return a model's objects with variables, each once, by the path of its group; the model's is "".

    An object with several paths has the first that is a group of the file being read, where `is_group` tells: earlier
    versions of Keras and dptrain did not walk containers in containers.
    """
    paths: dict[int, str] = {}
    met: dict[int, Saveable] = {}
    in_file: set[int] = set()

    def visit(path: str, saveable: Saveable) -> None:
        key = id(saveable)
        is_there = is_group is None or is_group(path)
        if key in in_file or (key in met and not is_there):
            return
        if is_there:
            in_file.add(key)
        met[key] = saveable
        paths[key] = path if is_there else paths.get(key, path)
        for name, child in _children(saveable):
            below = f"{path}/{name}" if path else name
            if isinstance(child, Saveable):
                visit(below, child)
            elif holds_parts(child):
                visit_container(below, child, set())

    def visit_container(path: str, container: Any, around: set[int]) -> None:
        if id(container) in around:
            return
        around.add(id(container))
        members = list(container.values() if isinstance(container, Mapping) else container)
        for name, member in zip(group_names(members), members, strict=True):
            if isinstance(member, Saveable):
                visit(f"{path}/{name}", member)
            elif holds_parts(member):
                visit_container(f"{path}/{name}", member, around)

    visit("", model)
    return {paths[key]: saveable for key, saveable in met.items()}


def require_all(variables: Sequence[Variable], written: Collection[int], where: str) -> None:
    """Refuse to write a file without some of the variables; `written` has the ids of those in it."""
    missing = [variable._path for variable in variables if id(variable) not in written]
    if missing:
        raise ConfigError(
            f"{where} would lack {len(missing)} of its {len(variables)} variables ({', '.join(missing[:5])}): make the "
            "layers that own them attributes, or members of lists or dictionaries that are"
        )


class Store(dict[str, Array]):
    """The mapping into which `save_own_variables` puts arrays and variables."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def __setitem__(self, name: str, value: Any) -> None:
        label = f"`save_own_variables` of layer {self._layer._display_name!r}: store[{name!r}]"
        if not is_plain_name(name):
            raise ConfigError(f"{label}: expected a name without '/'")
        array = portable(np.array(value))
        if array.dtype.kind not in "biufc":
            raise ConfigError(f"{label} is of dtype {array.dtype}, expected numbers")
        super().__setitem__(name, array)


def layers_with_stores(model: Any) -> list[Layer]:
    """Return the layers whose class, the user's, defines the content of their groups."""
    return [layer for layer in model._flatten_layers() if has_custom_store(layer)]


def has_custom_store(saveable: Any) -> bool:
    """Whether it is a layer whose class, the user's, defines the content of its group."""
    return isinstance(saveable, Layer) and any(
        getattr(type(saveable), name) is not getattr(Layer, name)
        for name in ("save_own_variables", "load_own_variables")
    )


def _children(saveable: Saveable) -> Iterator[tuple[str, Any]]:
    """Yield a layer's attributes as Keras walks them; a model's list of layers is one, and first in a Sequential."""
    if isinstance(saveable, Layer):
        attributes = {name: value for name, value in vars(saveable).items() if name not in _private_names()}
        if isinstance(saveable, MODELS["Functional"]):
            attributes["layers"] = saveable.layers
            if saveable._stack:
                yield "layers", saveable.layers
        for name in sorted(attributes, key=lambda name: f"~{name}" if name.startswith("_") else name):
            yield name, attributes[name]
        compiled = vars(saveable).get("_compiled")
        if compiled is not None and not isinstance(compiled.optimizer, AbsentOptimizer):
            yield "optimizer", compiled.optimizer
    elif isinstance(saveable, MultiOptimizer):
        yield "optimizers", saveable.optimizers  # each is written twice, because Keras looks there too


@functools.cache
def _private_names() -> frozenset[str]:
    """Return the private attributes of every model or layer, which hold nothing of the user's."""
    return frozenset(name for name in vars(MODELS["Sequential"]()) if name.startswith("_"))


def group_names(members: Sequence[Any]) -> list[str]:
    """Return the group names of layers and containers in a container; "" for other members."""
    counts: Counter[str] = Counter()
    names = []
    for member in members:
        if holds_parts(member):
            kind = "container"
        elif isinstance(member, Saveable):
            kind = _group_name(member)
        else:
            names.append("")
            continue
        names.append(f"{kind}_{counts[kind]}" if counts[kind] else kind)
        counts[kind] += 1
    return names


def _group_name(member: Saveable) -> str:
    if type(member) is MODELS["Functional"]:
        return "functional"
    return member._default_name if isinstance(member, Layer) else snake_case(type(member).__name__)
