"""What of a model has variables of its own in Keras' files, and the path of its group.

Keras goes through attributes by name, those that begin with "_" last, and through lists, tuples and dictionaries in
them, however deep: a container in a container is "container", the next "container_1". What it meets again is written
where it was met first.

Source: `_walk_saveable` and `_save_container_state` in keras/src/saving/saving_lib.py, Keras 3.15.
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
from dptrain.runtime.files import is_plain_name
from dptrain.saving.keras_config import MODELS
from dptrain.saving.reading import Array, portable

Saveable = Layer | SeedGenerator | Optimizer | Metric


def saveables(model: Any, is_group: Callable[[str], bool] | None = None) -> dict[str, Saveable]:
    """Return what of a model has variables in a file, each once, by the path of its group; the model's is "".

    Args:
        model: that is saved or loaded.
        is_group: whether a file that is read has a group. What is met at several paths is then at the first of those
            that the file has: earlier versions of Keras and dptrain did not go into containers in containers.
    """
    paths: dict[int, str] = {}
    met: dict[int, Saveable] = {}
    found: set[int] = set()

    def visit(path: str, saveable: Saveable) -> None:
        key = id(saveable)
        is_there = is_group is None or is_group(path)
        if key in found or (key in met and not is_there):
            return
        if is_there:
            found.add(key)
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
    """Refuse a file that lacks a variable.

    Args:
        variables: of the model that is saved.
        written: ids of the variables that the file has.
        where: what is written, for the message.

    Raises:
        ConfigError: it lacks one.
    """
    missing = [variable.path for variable in variables if id(variable) not in written]
    if missing:
        raise ConfigError(
            f"{where} would lack {len(missing)} of its {len(variables)} variables ({', '.join(missing[:5])}): keep the "
            "layers that have them as attributes, in lists or in dictionaries"
        )


class Store(dict[str, Array]):
    """What `save_own_variables` puts arrays and variables into.

    Args:
        layer: whose method it is, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def __setitem__(self, name: str, value: Any) -> None:
        """Take an array.

        Raises:
            ConfigError: it is none of numbers, or the name is none of a group's.
        """
        about = f"`save_own_variables` of layer {self._layer._display_name!r}: store[{name!r}]"
        if not is_plain_name(name):
            raise ConfigError(f"{about}: expected a name without '/'")
        array = portable(np.array(value))
        if array.dtype.kind not in "biufc":
            raise ConfigError(f"{about} is of dtype {array.dtype}, expected numbers")
        super().__setitem__(name, array)


def own_stores(model: Any) -> list[Layer]:
    """Return the layers of which a class of the user's says what is in their groups of files."""
    return [layer for layer in model._flatten_layers() if has_own_store(layer)]


def has_own_store(saveable: Any) -> bool:
    """Whether it is a layer of which a class of the user's says what is in its group of files."""
    return isinstance(saveable, Layer) and any(
        getattr(type(saveable), name) is not getattr(Layer, name)
        for name in ("save_own_variables", "load_own_variables")
    )


def _children(saveable: Saveable) -> Iterator[tuple[str, Any]]:
    """Yield what a layer is made of as Keras walks it: attributes by name, a model's list of layers among them.

    That of a Sequential and of a functional model comes first.
    """
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
        yield "optimizers", saveable.optimizers  # of which each is written once more, as Keras looks there too


@functools.cache
def _private_names() -> frozenset[str]:
    """Return the private attributes that every model or layer has, which hold nothing of the user's."""
    return frozenset(name for name in vars(MODELS["Sequential"]()) if name.startswith("_"))


def group_names(members: Sequence[Any]) -> list[str]:
    """Return the names of the groups of layers, and of containers, that are in a container; of others ""."""
    taken: Counter[str] = Counter()
    names = []
    for member in members:
        if holds_parts(member):
            kind = "container"
        elif isinstance(member, Saveable):
            kind = _group_name(member)
        else:
            names.append("")
            continue
        names.append(f"{kind}_{taken[kind]}" if taken[kind] else kind)
        taken[kind] += 1
    return names


def _group_name(member: Saveable) -> str:
    if type(member) is MODELS["Functional"]:
        return "functional"
    return member._default_name if isinstance(member, Layer) else snake_case(type(member).__name__)
