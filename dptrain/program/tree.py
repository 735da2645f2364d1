"""Nested data: tuples, lists and dictionaries of arrays, as models of several inputs and outputs take them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def is_nested(data: Any) -> bool:
    """Whether it is a tuple, a list or a dictionary."""
    return isinstance(data, tuple | list | Mapping)


def flatten(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with their paths, such as "x/image" or "y/0"; None is no leaf."""
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
    return [leaf for _, leaf in flatten(data)]


def map_leaves(function: Callable[..., Any], data: Any, path: str = "") -> Any:
    """Return the same structure with `function(path, leaf)` for each leaf."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {key: map_leaves(function, one, f"{path}/{key}" if path else str(key)) for key, one in data.items()}
    if isinstance(data, tuple | list):
        made = [map_leaves(function, one, f"{path}/{key}" if path else str(key)) for key, one in enumerate(data)]
        return tuple(made) if isinstance(data, tuple) else made
    return function(path, data)


def with_sorted_keys(data: Any) -> Any:
    """Return the same structure with the keys of dictionaries sorted: the order in which Keras goes through them."""
    if isinstance(data, Mapping):
        return {key: with_sorted_keys(data[key]) for key in sorted(data)}
    return type(data)(map(with_sorted_keys, data)) if isinstance(data, list | tuple) else data
