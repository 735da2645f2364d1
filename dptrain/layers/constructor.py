"""Records the constructor arguments of a user's layer, its configuration if the class has no `get_config`.

Source: `Operation.__new__` in keras/src/ops/operation.py, Keras 3.15, which keeps arguments of JSON types. Here they
may be layers too, and may be forwarded to dptrain's classes by `*args` and `**kwargs`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ConstructorArguments:
    """Arguments of a constructor, in an object that is not searched for layers.

    Attributes:
        arguments: of the user's classes, by name, defaults included.
        forwarded: names of arguments that dptrain's base class received.
    """

    def __init__(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.arguments: dict[str, Any] = {}
        self.forwarded: list[str] = []
        self._attributes: dict[str, Any] = {}
        for base in cls.__mro__:
            if "__init__" not in vars(base):
                continue
            if vars(base).get("_is_base"):  # whose arguments are written elsewhere
                return
            signature = _signature(vars(base)["__init__"])
            try:
                bound = signature.bind_partial(None, *args, **kwargs)
            except TypeError:  # the constructor reports the error
                return
            if not is_dptrain_class(base):
                bound.apply_defaults()
            args, kwargs = (), {}
            for name, parameter in list(signature.parameters.items())[1:]:
                if parameter.kind == parameter.VAR_POSITIONAL:
                    args = bound.arguments.get(name, ())
                elif parameter.kind == parameter.VAR_KEYWORD:
                    kwargs = bound.arguments.get(name, {})
                elif name in bound.arguments and is_dptrain_class(base):
                    self.forwarded.append(name)
                elif name in bound.arguments:
                    self.arguments.setdefault(name, _copied(bound.arguments[name]))
            if not args and not kwargs:
                return

    def remember(self, layer: Any) -> None:
        """Remember the attributes named like arguments, to notice later changes."""
        names = [name for name in self.arguments if name in vars(layer) and is_plain(vars(layer)[name])]
        self._attributes = {name: _copied(vars(layer)[name]) for name in names}

    def was_changed(self, layer: Any, name: str) -> bool:
        """Whether an argument's attribute has changed since construction."""
        now = vars(layer).get(name)
        return name in self._attributes and not (is_plain(now) and now == self._attributes[name])


def remembering(constructor: Callable[..., None]) -> Callable[..., None]:
    """Wrap a user's constructor so that it keeps its arguments in `_constructed_with`."""

    @functools.wraps(constructor)
    def remembers(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_constructed_with" in vars(self):  # a subclass's constructor has recorded them
            constructor(self, *args, **kwargs)
            return
        vars(self)["_constructed_with"] = remembered = ConstructorArguments(type(self), args, kwargs)
        constructor(self, *args, **kwargs)
        remembered.remember(self)

    return remembers


def is_dptrain_class(cls: type) -> bool:
    """Whether a class is dptrain's, not a user's."""
    return cls.__module__.split(".")[0] == "dptrain"


def named_parameters(cls: type) -> list[str]:
    """Return the names of a constructor's parameters, without `self` and variadic ones."""
    parameters = list(_signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]


@functools.lru_cache(maxsize=1024)
def _signature(constructor: Any) -> inspect.Signature:
    return inspect.signature(constructor)


def is_plain(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether JSON can hold a value as it is: numbers, strings, None, nested in lists and dictionaries."""
    if isinstance(value, list | tuple | dict):
        inner = value.values() if isinstance(value, dict) else value
        return id(value) not in around and all(is_plain(item, (*around, id(value))) for item in inner)
    return value is None or isinstance(value, str | int | float)


def _copied(value: Any) -> Any:
    """Copy plain lists and dictionaries, which a constructor may change."""
    if type(value) in (list, tuple) and is_plain(value):
        return type(value)(map(_copied, value))
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict and is_plain(value) else value
