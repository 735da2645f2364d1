"""Nested data: tuples, lists and dictionaries of arrays, for models with several inputs and outputs."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

from dptrain.errors import ConfigError
from dptrain.runtime.text import short

T = TypeVar("T")


@functools.lru_cache(maxsize=4096)
def _is_container(kind: Any) -> bool:
    """Return whether data of a type is nested; cached, since checks of abstract classes are slow."""
    return issubclass(kind, tuple | list | Mapping)


def is_nested(data: Any) -> bool:
    """Whether it is a tuple, a list or a dictionary."""
    kind: Any = type(data)
    return _is_container(kind)


def holds_parts(data: Any) -> bool:
    """Whether it is a container for an object's parts: nested data, or a deque."""
    return isinstance(data, tuple | list | Mapping | deque)


def flatten(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with their paths, such as "x/image" or "y/0"; None is not a leaf."""
    if data is None:
        return
    if not is_nested(data):
        yield path, data
        return
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    for key, value in items:
        yield from flatten(value, f"{path}/{key}" if path else str(key))


def leaves(data: Any) -> list[Any]:
    """Return the leaves."""
    result: list[Any] = []
    try:
        _gather(data, result)
    except RecursionError:
        _refuse_cycle(data)
        raise
    return result


def _refuse_cycle(data: Any) -> None:
    """Raise ConfigError for data that contain themselves."""
    open_ids: set[int] = set()
    stack: list[tuple[Any, bool]] = [(data, False)]
    while stack:
        value, is_finished = stack.pop()
        if is_finished:
            open_ids.discard(id(value))
        elif is_nested(value):
            if id(value) in open_ids:
                raise ConfigError(f"a {type(value).__name__} contains itself; expected nested data without cycles")
            open_ids.add(id(value))
            stack.append((value, True))
            stack += [(part, False) for part in (value.values() if isinstance(value, Mapping) else value)]


def _gather(data: Any, result: list[Any]) -> None:
    if data is None:
        return
    if not is_nested(data):
        result.append(data)
        return
    for value in data if isinstance(data, tuple | list) else data.values():
        _gather(value, result)


def map_leaves(function: Callable[..., Any], data: Any, path: str = "") -> Any:
    """Return the same structure with `function(path, leaf)` for each leaf."""
    try:
        return _mapped(function, data, path)
    except RecursionError:
        _refuse_cycle(data)
        raise


def _mapped(function: Callable[..., Any], data: Any, path: str) -> Any:
    if data is None:
        return None
    if not is_nested(data):
        return function(path, data)
    if isinstance(data, Mapping):
        return {key: _mapped(function, value, f"{path}/{key}" if path else str(key)) for key, value in data.items()}
    mapped = [_mapped(function, value, f"{path}/{key}" if path else str(key)) for key, value in enumerate(data)]
    return tuple_like(data, mapped) if isinstance(data, tuple) else mapped


def tuple_like(like: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class, which may be a named tuple."""
    kind: Any = type(like)
    return kind(*values) if hasattr(like, "_fields") else tuple(values)


# Members of a container from which their types are looked at first.
_FEW = 64


@functools.lru_cache(maxsize=4096)
def _is_of(data_type: Any, kind: Any) -> bool | None:
    """Return whether data of a type is of a kind; None if it may contain such data."""
    # Models look for layers and weights at every call, among attributes that are mostly neither: checking each value
    # against an abstract class takes longer than all the rest of a prediction of one row.
    return (
        True
        if issubclass(data_type, kind)
        else None
        if issubclass(data_type, tuple | list | Mapping | deque | Set)
        else False
    )


def attributes(holder: Any, kind: type[T]) -> list[T]:
    """Return an object's (nested) attributes of a kind, each once, in order; ConfigError for those in a set."""
    parts: dict[int, T] = {}
    _collect(list(vars(holder).values()), kind, parts, set())  # another thread may add one meanwhile
    return list(parts.values())


def _collect(values: Iterable[Any], kind: Any, parts: dict[int, Any], around: set[int]) -> None:
    """Add values of a kind, by id, but not from the containers `around`: a list may contain itself."""
    for value in values:
        data_type: Any = type(value)
        is_of = _is_of(data_type, kind)
        if is_of:
            parts[id(value)] = value
        elif is_of is None and value and id(value) not in around:
            around.add(id(value))
            count_before = len(parts)
            members = list(value.values() if isinstance(value, Mapping) else value)
            if len(members) > _FEW and all(_is_of(member, kind) is False for member in set(map(type, members))):
                continue  # a vocabulary, say, is passed over a hundred times as fast
            _collect(members, kind, parts, around)
            if isinstance(value, Set) and len(parts) > count_before:
                part = type(next(reversed(parts.values()))).__name__
                raise ConfigError(
                    f"a {data_type.__name__} holds {part}: use a list instead, because sets have no order that all "
                    "ranks and files share"
                )


def with_sorted_keys(data: Any) -> Any:
    """Return the same structure with sorted keys of dictionaries: Keras' order."""
    if isinstance(data, Mapping):
        return {key: with_sorted_keys(data[key]) for key in sorted(data)}
    if isinstance(data, tuple):
        return tuple_like(data, [with_sorted_keys(value) for value in data])
    return [with_sorted_keys(value) for value in data] if isinstance(data, list) else data


def has_sorted_keys(data: Any) -> bool:
    """Whether dictionaries have the order of `with_sorted_keys`."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return (not isinstance(data, Mapping) or list(data) == sorted(data)) and all(map(has_sorted_keys, parts))


# Shapes of samples, nested as the data: tuples of numbers and None are leaves.


def is_shape(data: Any) -> bool:
    """Whether it is one shape: a tuple of numbers, and of None for unknown lengths."""
    return isinstance(data, tuple) and all(n is None or isinstance(n, int) for n in data)


def flat_shapes(shapes: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return nested shapes, or other leaves, with their paths."""
    if is_shape(shapes) or not is_nested(shapes):
        return [(path, shapes)]
    items = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes)
    return [leaf for key, part in items for leaf in flat_shapes(part, f"{path}/{key}" if path else str(key))]


def refilled(shapes: Any, values: Iterator[Any]) -> Any:
    """Nest values as these shapes, or as other leaves."""
    if is_shape(shapes) or not is_nested(shapes):
        return next(values)
    if isinstance(shapes, Mapping):
        return {key: refilled(shape, values) for key, shape in shapes.items()}
    parts = [refilled(shape, values) for shape in shapes]
    return tuple_like(shapes, parts) if isinstance(shapes, tuple) else parts


def structure_warning(data: Any, like: Any) -> str:
    """Return Keras' warning of fields that `like` lacks, or of a list in the place of a dictionary; else ""."""
    if is_shape(like) or not isinstance(like, Mapping):
        return ""
    if not is_nested(data) or hasattr(data, "_fields") or (isinstance(data, Mapping) and not set(data) - set(like)):
        return ""
    parts = list(data) if isinstance(data, Mapping) else f"a {type(data).__name__} of {len(data)}"
    return (
        f"The structure of `inputs` doesn't match the expected structure.\nExpected: {list(like)}\n"
        f"Received: inputs={parts}"
    )


def matched(data: Any, like: Any, names: Sequence[str] = (), *, by_key: bool = False) -> list[Any]:
    """Return the leaves of data in the order of `like` (shapes, say): dictionaries by key, lists by position.

    A list of one may stand for its element, and vice versa. None is returned for what a dictionary lacks if `like` has
    None there. `names` are those of a list's leaves, or of the only leaf, by which a dictionary may replace it.
    Named tuples of these names go by them, not by place. `by_key`: a list may not replace a dictionary, as its order
    is undefined.

    Raises:
        ConfigError: the nesting differs.
    """
    if is_shape(like) or not is_nested(like):
        if isinstance(data, Mapping) and len(names) == 1 and list(data) == list(names):
            return list(data.values())
        return [data[0] if isinstance(data, list | tuple) and len(data) == 1 else data]
    parts = dict(like if isinstance(like, Mapping) else enumerate(like))
    fields = getattr(data, "_fields", ())
    if fields and set(fields) == set(like if isinstance(like, Mapping) else names):
        data = data._asdict()  # a named tuple may have another order
    if isinstance(data, Mapping):
        if not isinstance(like, Mapping) and len(names) == len(parts):
            parts = dict(zip(names, parts.values(), strict=True))
        if all(key in data or part is None for key, part in parts.items()):
            return [leaf for key, part in parts.items() for leaf in matched(data.get(key), part)]
    elif (
        isinstance(data, list | tuple)
        and len(data) == len(parts)
        and not (by_key and isinstance(like, Mapping) and len(parts) > 1)
    ):
        return [leaf for value, part in zip(data, parts.values(), strict=True) for leaf in matched(value, part)]
    elif len(parts) == 1 and not is_nested(data):
        return matched(data, *parts.values())
    if isinstance(data, list | tuple):
        description = f"{len(data)} arrays"
    else:
        description = f"a dictionary with {list(data)}" if isinstance(data, Mapping) else short(data)
    raise ConfigError(
        "The structure of `inputs` doesn't match the expected structure. Expected: "
        f"{list(like) if isinstance(like, Mapping) else list(range(len(like)))}. Received: {description}"
    )
