"""What a layer shows of itself under a name that Keras does not keep for itself."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class hideable_property(Generic[T]):  # noqa: N801  # a decorator
    """A property that an attribute of the same name hides, which a user may set; dptrain itself never reads it.

    Args:
        read: returns the value.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type[Any]) -> T: ...
    def __get__(self, owner: object | None, kind: type[Any]) -> Self | T:
        """Return the value; of a class the descriptor."""
        return self if owner is None else self._read(owner)
