"""Names: looking them up, with one message for unknown ones, and what Keras calls objects of a class."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from dptrain.errors import ConfigError

T = TypeVar("T")

# Tables of no more names than this are shown whole; of larger ones at most so many of the nearest names.
_SHORT, _NEAREST = 6, 3
# Keras' modules of the kinds of objects that have names.
_MODULES = {
    **{kind: f"{kind}s" for kind in ("activation", "constraint", "initializer", "layer", "metric", "optimizer")},
    **{"loss": "losses", "regularizer": "regularizers", "schedule": "optimizers.schedules"},
}
# How alike two names are (difflib's ratio) of which one may be meant by the other.
_ALIKE = 0.65


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`.

    Args:
        kind: what the table holds, for the message ("optimizer").
        name: as the user wrote it.
        table: the known names.

    Raises:
        ConfigError: the name is unknown; the message says whether Keras has it, or suggests the nearest.
    """
    if name in table:
        return table[name]
    if isinstance(name, str) and keras_has(_MODULES.get(kind, ""), name) and _letters(name) not in map(_letters, table):
        raise ConfigError(f"not supported: {kind} {name!r}: Keras has it, dptrain does not yet")
    raise ConfigError(f"unknown {kind} {name!r}{suggestion(str(name), table)}")


def keras_has(module: str, name: str) -> bool:
    """Whether Keras knows an object of a module by a name, its own or that in snake case.

    Args:
        module: such as "layers"; "" for what stands at the top.
        name: such as "LSTM", "lstm".
    """
    from dptrain.registry.keras_names import KERAS_NAMES

    known = KERAS_NAMES.get(module, frozenset())
    return name in known or (bool(module) and any(name in (one.lower(), snake_case(one)) for one in known))


def by_name(classes: Iterable[type[T]], short: Mapping[str, type[T]] | None = None) -> dict[str, type[T]]:
    """Return classes by what Keras calls them: their names, these in snake case, and short ones, also in capitals."""
    names = {one.__name__: one for one in classes}
    given = short or {}
    return {
        **{snake_case(name): one for name, one in names.items()},
        **names,
        **given,
        **{name.upper(): one for name, one in given.items()},
    }


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an 'unknown name' message: the nearest known names, or all where these are few."""
    known = sorted(known)
    if not known:
        return ""
    in_lower_case = {one.lower(): one for one in known}
    import difflib

    near = difflib.get_close_matches(name.lower(), in_lower_case, _NEAREST, _ALIKE)
    if near:
        return f"; did you mean {' or '.join(repr(in_lower_case[one]) for one in near)}?"
    return f"; known: {', '.join(known)}" if len(known) <= _SHORT else ""


def snake_case(name: str) -> str:
    """Return a class's name as Keras spells it in names and files: "ReLU" becomes "re_lu"."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def numbered(name: str, taken: dict[str, int]) -> str:
    """Return a name with the first number behind it that makes it unique, none for the first.

    Args:
        name: that is wanted.
        taken: the names before, which it becomes one of, with the numbers to go on with.
    """
    number = taken.get(name, 0)
    while (unique := f"{name}_{number}" if number else name) in taken:
        number += 1
    taken[unique] = 1
    taken[name] = number + 1
    return unique


def not_supported(what: str, instead: str) -> property:
    """Return what stands for one of Keras' methods that a class lacks: asking for it is an error that says so.

    Args:
        what: the method.
        instead: what serves the purpose.
    """

    def missing(self: object) -> NoReturn:
        raise AttributeError(f"not supported: {what} of {type(self).__name__}; {instead}")

    return property(missing)


def not_there(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which says of what the module lacks that it is not supported.

    Args:
        module: under which users know it ("layers").
        names: what it has for users.
    """

    def missing(name: str) -> NoReturn:
        if name.startswith("_"):  # what Python and its tools ask any module for: __path__, __wrapped__, _repr_html_
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if keras_has("" if module == "dptrain" else module, name):
            raise AttributeError(f"not supported: {module}.{name}: Keras has it, dptrain does not yet")
        raise AttributeError(f"not supported: {module}.{name}{suggestion(name, names)}")

    return missing
