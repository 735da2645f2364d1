"""Settings that users write, checked by the annotations of frozen dataclasses. Pydantic does it.

Pydantic is imported when there is something to check: a quarter of the time that a training takes to start.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Pydantic's checker of each class, which takes a while to make.
_adapters: dict[type, Any] = {}


class Checked:
    """Base of dataclasses that `checked` fills: it refuses unknown keys, infinities and NaN."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012


@dataclass(frozen=True)
class Before:
    """In an annotation: a function that turns what users write into what the type expects, or raises ValueError."""

    function: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Do what `pydantic.BeforeValidator` does."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.function, handler(source))


class NotValidError(ValueError):
    """A value does not fit its field.

    Attributes:
        place: names and positions that lead to the value.
        kind: Pydantic's name of the problem.
        value: what was found.
    """

    def __init__(self, place: tuple[str | int, ...], kind: str, value: Any, message: str) -> None:
        super().__init__(message)
        self.place, self.kind, self.value = place, kind, value


def checked(kind: type[T], tree: Mapping[str, Any]) -> T:
    """Return a dataclass filled with these values.

    Args:
        kind: the dataclass, based on `Checked`; its fields are of such classes too, or of plain types.
        tree: values by name, as a file or the command line has them.

    Raises:
        NotValidError: at the first value of the wrong type or out of range; the message says what it must be.
    """
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
    """Keep Pydantic from looking for plugins, for which it reads the metadata of every installed package."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
