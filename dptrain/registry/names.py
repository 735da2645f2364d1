"""Lookup of names, with one message for unknown ones, and Keras' spelling of class names."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn, TypeVar

from dptrain.errors import ConfigError

T = TypeVar("T")

# Tables up to this size are shown whole; of larger ones at most so many of the nearest names.
_SHORT, _NEAREST = 6, 3
# Keras' modules of the kinds of objects that have names.
_MODULES = {
    **{kind: f"{kind}s" for kind in ("activation", "constraint", "initializer", "layer", "metric", "optimizer")},
    **{"loss": "losses", "regularizer": "regularizers", "schedule": "optimizers.schedules"},
}
# Least similarity (difflib's ratio) of a suggestion.
_ALIKE = 0.65


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`, or raise ConfigError that Keras has it, or with the nearest names."""
    if name in table:
        return table[name]
    if isinstance(name, str) and keras_has(_MODULES.get(kind, ""), name) and _letters(name) not in map(_letters, table):
        raise ConfigError(f"not supported: {kind} {name!r}: Keras has it, dptrain does not yet")
    raise ConfigError(f"unknown {kind} {name!r}{suggestion(str(name), table)}")


def keras_has(module: str, name: str) -> bool:
    """Return whether Keras has a name, or its snake case, in a module such as "layers"; "" for the top."""
    names = keras_names().get(module, frozenset())
    return name in names or (
        bool(module) and any(name in (keras_name.lower(), snake_case(keras_name)) for keras_name in names)
    )


@cache
def keras_names() -> dict[str, frozenset[str]]:
    """Return the public names of Keras by module; "" for the top."""
    text = Path(__file__).with_name("keras_names.txt").read_text(encoding="utf-8")
    sections = (section.partition("]") for section in text.partition("\n")[2].split("[")[1:])
    return {module: frozenset(names.split()) for module, _, names in sections}


def by_name(classes: Iterable[type[T]], short: Mapping[str, type[T]] | None = None) -> dict[str, type[T]]:
    """Return classes by Keras' names: class names, snake case, and abbreviations, also in capitals."""
    names = {cls.__name__: cls for cls in classes}
    abbreviations = short or {}
    return {
        **{snake_case(name): cls for name, cls in names.items()},
        **names,
        **abbreviations,
        **{name.upper(): cls for name, cls in abbreviations.items()},
    }


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return the end of an 'unknown name' message: the nearest choices, or all of a few."""
    choices = sorted(choices)
    if not choices:
        return ""
    in_lower_case = {choice.lower(): choice for choice in choices}
    import difflib

    near = difflib.get_close_matches(name.lower(), in_lower_case, _NEAREST, _ALIKE)
    if near:
        return f"; did you mean {' or '.join(repr(in_lower_case[match]) for match in near)}?"
    return f"; known: {', '.join(choices)}" if len(choices) <= _SHORT else ""


def snake_case(name: str) -> str:
    """Return a class name as Keras spells it in names and files: "ReLU" becomes "re_lu"."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def numbered(name: str, counts: dict[str, int]) -> str:
    """Return a name made unique by a number, none for the first; updates `counts`, name -> next number."""
    number = counts.get(name, 0)
    while (unique := f"{name}_{number}" if number else name) in counts:
        number += 1
    counts[unique] = 1
    counts[name] = number + 1
    return unique


def not_supported(what: str, instead: str) -> property:
    """Return a property that stands for a missing method of Keras: reading it raises AttributeError."""

    def missing(self: object) -> NoReturn:
        raise AttributeError(f"not supported: {what} of {type(self).__name__}; {instead}")

    return property(missing)


def not_there(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which raises that a name is not supported."""

    def missing(name: str) -> NoReturn:
        if name.startswith("_"):  # Python and its tools ask every module for __path__, __wrapped__, _repr_html_
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if keras_has("" if module == "dptrain" else module, name):
            raise AttributeError(f"not supported: {module}.{name}: Keras has it, dptrain does not yet")
        raise AttributeError(f"not supported: {module}.{name}{suggestion(name, names)}")

    return missing
