"""Keras' functions for nested data: lists, tuples, named tuples, deques and dictionaries.

Unlike in `dptrain.program.tree`, for the data of models, None is a leaf, and dictionaries are sorted by key, except an
OrderedDict. Structures that are not nested alike raise ConfigError.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.registry.names import not_there

__all__ = [
    "MAP_TO_NONE",
    "assert_same_paths",
    "assert_same_structure",
    "flatten",
    "flatten_with_path",
    "is_nested",
    "lists_to_tuples",
    "map_shape_structure",
    "map_structure",
    "map_structure_up_to",
    "pack_sequence_as",
    "traverse",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("tree", __all__)


class MAP_TO_NONE:  # noqa: N801 - Keras' name
    """Returned by a function of `traverse` to replace a part by None."""


def is_nested(structure: Any) -> bool:
    """Whether it is a list, a tuple, a deque or a dictionary."""
    return isinstance(structure, list | tuple | deque | dict)


def flatten(structure: Any) -> list[Any]:
    """Return the leaves."""
    return [leaf for _, leaf in flatten_with_path(structure)]


def flatten_with_path(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the leaves with their paths, tuples of keys and indices."""
    if not is_nested(structure):
        return [((), structure)]
    return [
        ((key, *path), leaf) for key, child in _children(structure).items() for path, leaf in flatten_with_path(child)
    ]


def map_structure(func: Callable[..., Any], *structures: Any, none_is_leaf: bool = True) -> Any:
    """Return a structure with a function of the leaves of others, which are nested alike.

    Without `none_is_leaf`, None stays and the function is not called for it.
    """
    if not structures:
        raise ConfigError("Must provide at least one structure")
    for other in structures[1:]:
        assert_same_structure(structures[0], other)

    def of_leaves(*leaves: Any) -> Any:
        return None if leaves[0] is None and not none_is_leaf else func(*leaves)

    return map_structure_up_to(structures[0], of_leaves, *structures)


def map_structure_up_to(shallow_structure: Any, func: Callable[..., Any], *structures: Any) -> Any:
    """Return a structure with a function of the parts of others at its leaves.

    `shallow_structure` says how deep to go; the others are nested like it, or deeper.
    """
    if not structures:
        raise ConfigError("Must provide at least one structure")
    if not is_nested(shallow_structure):
        return func(*structures)
    parts = []
    for structure in structures:
        _require_alike(shallow_structure, structure)
        parts.append(_children(structure))
    return _rebuilt(
        shallow_structure,
        {
            key: map_structure_up_to(child, func, *(part[key] for part in parts))
            for key, child in _children(shallow_structure).items()
        },
    )


def traverse(func: Callable[[Any], Any], structure: Any, top_down: bool = True) -> Any:
    """Replace a structure and its parts by what a function returns for them.

    Args:
        func: takes a part and returns its replacement: None to leave it, `MAP_TO_NONE` for None.
        structure: nested or not.
        top_down: call it for a part before its contents, which are skipped if the part is replaced.
    """

    def inside(part: Any) -> Any:
        if not is_nested(part):
            return part
        return _rebuilt(part, {key: traverse(func, child, top_down) for key, child in _children(part).items()})

    part = structure if top_down else inside(structure)
    result = func(part)
    if result is None:
        return inside(part) if top_down else part
    return None if result is MAP_TO_NONE else result


def pack_sequence_as(structure: Any, flat_sequence: Iterable[Any]) -> Any:
    """Return leaves nested like a structure, the inverse of `flatten`; ConfigError for too few or too many."""
    leaves = list(flat_sequence)
    if len(leaves) != len(flatten(structure)):
        raise ConfigError(
            f"The structure has {len(flatten(structure))} leaves, but flat_sequence has {len(leaves)} elements."
        )
    order = iter(leaves)
    return map_structure(lambda _: next(order), structure)


def lists_to_tuples(structure: Any) -> Any:
    """Return a structure with tuples in place of lists."""
    return traverse(lambda part: tuple(part) if isinstance(part, list) else None, structure, top_down=False)


def map_shape_structure(func: Callable[[Any], Any], structure: Any) -> Any:
    """Return a structure with a function of the shapes in it, lists and tuples of integers and None."""
    if isinstance(structure, list | tuple) and all(length is None or isinstance(length, int) for length in structure):
        return func(structure)
    if not is_nested(structure):
        return func(structure)
    return _rebuilt(structure, {key: map_shape_structure(func, child) for key, child in _children(structure).items()})


def assert_same_structure(a: Any, b: Any) -> None:
    """Raise ConfigError unless two structures are nested alike, in containers of the same types."""
    if is_nested(a) or is_nested(b):
        _require_alike(a, b)
        others = _children(b)
        for key, child in _children(a).items():
            assert_same_structure(child, others[key])


def assert_same_paths(a: Any, b: Any) -> None:
    """Raise ConfigError unless two structures have leaves at the same paths."""
    first, second = ({path for path, _ in flatten_with_path(structure)} for structure in (a, b))
    if first != second:
        raise ConfigError(
            "`a` and `b` don't have the same paths. "
            f"Paths in `a` missing in `b`: {first - second}. Paths in `b` missing in `a`: {second - first}"
        )


def _children(structure: Any) -> dict[Any, Any]:
    """Return the children of a structure by key or index, in order."""
    if isinstance(structure, OrderedDict):
        return dict(structure)
    return (
        {key: structure[key] for key in sorted(structure)}
        if isinstance(structure, dict)
        else dict(enumerate(structure))
    )


def _rebuilt(structure: Any, children: dict[Any, Any]) -> Any:
    """Return a container like a structure with other children."""
    if isinstance(structure, dict):
        copy = structure.copy()  # a defaultdict stays one, and keys keep their order
        copy.update({key: children[key] for key in structure})
        return copy
    if hasattr(structure, "_fields"):
        return type(structure)(*children.values())
    if isinstance(structure, deque):
        return deque(children.values(), structure.maxlen)
    return type(structure)(children.values())


def _require_alike(a: Any, b: Any) -> None:
    kinds = [dict if isinstance(structure, dict) else type(structure) for structure in (a, b)]
    if kinds[0] is not kinds[1] or _children(a).keys() != _children(b).keys():
        raise ConfigError(
            f"The two structures don't have the same nested structure. First structure: {a}. Second structure: {b}"
        )
