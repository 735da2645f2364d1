"""Validates user settings against the annotations of frozen dataclasses, with Pydantic, imported on first use."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Pydantic's checker of each class, which takes a while to make.
_adapters: dict[type, Any] = {}


class Checked:
    """Base of dataclasses that `checked` fills: refuses unknown keys, infinities and NaN."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012


@dataclass(frozen=True)
class Before:
    """Annotation: a function that converts user input for the type, or raises ValueError."""

    function: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Act as `pydantic.BeforeValidator`."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.function, handler(source))


class NotValidError(ValueError):
    """A value does not fit its field; `place` is the path to it, `kind` Pydantic's name of the problem."""

    def __init__(self, place: tuple[str | int, ...], kind: str, value: Any, message: str) -> None:
        super().__init__(message)
        self.place, self.kind, self.value = place, kind, value


def checked(kind: type[T], tree: Mapping[str, Any]) -> T:
    """Return a dataclass, based on `Checked`, filled from a tree of values; NotValidError at the first wrong one."""
    from pydantic import TypeAdapter, ValidationError

    if kind not in _adapters:
        with _without_plugins():
            _adapters[kind] = TypeAdapter(kind)
    try:
        return cast(T, _adapters[kind].validate_python(tree))
    except ValidationError as error:
        problem = error.errors()[0]
    message = problem["msg"].removeprefix("Input ").removeprefix("Value error, ").replace("should be", "must be")
    raise NotValidError(problem["loc"], problem["type"], problem["input"], message)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep Pydantic from reading every installed package's metadata in search of plugins."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
