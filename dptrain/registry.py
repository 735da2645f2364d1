"""Looking names up, and objects as Keras describes them: one place for the messages that unknown ones get."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dptrain.errors import ConfigError

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`.

    Args:
        kind: what the table holds, for the message ("optimizer").
        name: as the user wrote it.
        table: the known names.

    Raises:
        ConfigError: the name is unknown; the message suggests the nearest.
    """
    if name in table:
        return table[name]
    raise ConfigError(f"unknown {kind} {name!r}{suggestion(str(name), table)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an 'unknown name' message: the nearest known name, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def serialized(thing: Any, module: str, own: Iterable[type]) -> dict[str, Any]:
    """Return an object as Keras writes it into its files.

    Args:
        thing: it has `get_config`.
        module: where Keras keeps classes of this kind.
        own: the classes that Keras has too; others are the user's, of a module of their own.
    """
    kind = type(thing)
    known = kind in own
    return {
        "module": module if known else kind.__module__,
        "class_name": kind.__name__,
        "config": thing.get_config(),
        "registered_name": None if known else kind.__name__,
    }


def described(kind: str, description: Any, table: Mapping[str, T]) -> tuple[T, dict[str, Any]]:
    """Return what a description as by `serialized` names, in any case, and a copy of its arguments.

    Raises:
        ConfigError: it is no such description, or the name is unknown.
    """
    name = description.get("class_name") if isinstance(description, Mapping) else None
    arguments = description.get("config") if isinstance(description, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ConfigError(f"{kind}: expected a dictionary with 'class_name' and 'config', found {description!r}")
    known = name.lower() if name not in table and name.lower() in table else name
    return lookup(kind, known, table), dict(arguments)


def made(make: Callable[..., T], *arguments: Any) -> T:
    """Return `make(*arguments)`.

    Raises:
        ConfigError: the arguments are not what it takes.
    """
    try:
        return make(*arguments)
    except TypeError as error:
        raise ConfigError(str(error)) from error
