"""A property that users may replace by an attribute."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class hideable_property(Generic[T]):  # noqa: N801  # a decorator
    """A read-only property that users may hide by an attribute of the same name; dptrain never reads it."""

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type[Any]) -> T: ...
    def __get__(self, owner: object | None, kind: type[Any]) -> Self | T:
        """Return the value, or for a class the descriptor."""
        return self if owner is None else self._read(owner)
