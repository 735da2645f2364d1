"""Objects as Keras writes them to JSON: {"module", "class_name", "config", "registered_name"}, and back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Self, TypeVar

import numpy as np

from dptrain.errors import ConfigError
from dptrain.registry.names import lookup
from dptrain.registry.reads import Readable

T = TypeVar("T")
# The user's own classes and functions by the name that they are registered under, and those of a scope.
_registered: dict[str, Any] = {}
_scope: ContextVar[Mapping[str, Any] | None] = ContextVar("custom_objects", default=None)


@contextmanager
def custom_object_scope(custom_objects: Mapping[str, Any] | None) -> Iterator[None]:
    """Let classes and functions of the user's own be found by these names in files and configurations.

    Args:
        custom_objects: by name; those of an outer scope are found too.
    """
    token = _scope.set({**(_scope.get() or {}), **(custom_objects or {})})
    try:
        yield
    finally:
        _scope.reset(token)


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Callable[[T], T]:
    """Return a decorator that lets a class or a function be found in files as "package>name".

    Args:
        package: the user's.
        name: by default its own.

    Raises:
        ConfigError: the class has no `get_config`.
    """

    def register(one: T) -> T:
        if isinstance(one, type) and not hasattr(one, "get_config"):
            raise ConfigError("Cannot register a class that does not have a get_config() method.")
        _registered[f"{package}>{name or getattr(one, '__name__', '')}"] = one
        return one

    return register


def get_registered_name(one: Any) -> str:
    """Return the name that a class or a function is written under."""
    return next((name for name, known in _registered.items() if known is one), one.__name__)


def custom_object(*names: str | None) -> Any:
    """Return what is known under one of these names; None where nothing is."""
    known = {**_registered, **(_scope.get() or {})}
    return next((known[name] for name in names if name in known), None)


def get_registered_object(name: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return what is known under a name in a scope, in `custom_objects` or by registration; None where nothing is."""
    return (custom_objects or {}).get(name, custom_object(name))


def get_custom_objects() -> dict[str, Any]:
    """Return the classes and functions that are registered, by name; what is put into it is registered."""
    return _registered


def function_to_dict(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what Keras' `serialize_keras_object` returns for a function.

    Raises:
        ConfigError: a lambda, which has no name to be found by.
    """
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise ConfigError(f"not supported: writing the lambda {function!r} to a file; define it by `def`")
    own = function.__module__.split(".")[0] == "dptrain"
    name = name if own else get_registered_name(function)
    return {"module": "builtins", "class_name": "function", "config": name, "registered_name": "function"}


def own_or_name(identifier: Any) -> Any:
    """Return the user's own object that a name, or Keras' description of a function, means; else the name.

    Anything else is returned as it is.

    Raises:
        ConfigError: a Python lambda, which files hold as code.
    """
    name, registered = identifier, None
    if isinstance(identifier, Mapping) and identifier.get("class_name") == "__lambda__":
        raise ConfigError(
            "not supported: a Python lambda from a file, which is code, and dptrain runs none from files; define the "
            "function by `def` and pass it in custom_objects"
        )
    if isinstance(identifier, Mapping) and identifier.get("class_name") == "function":
        name, registered = identifier.get("config"), identifier.get("registered_name")
    if not isinstance(name, str):
        return identifier
    found = custom_object(registered if isinstance(registered, str) else None, name)
    return name if found is None else found


class Configurable(Readable, ABC):
    """What can say how it was made, and be made again from that."""

    @abstractmethod
    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them, in types that JSON has."""

    def get_config(self) -> dict[str, Any]:
        """Return `config`, under Keras' name."""
        return self._get_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return an object with the arguments that `config` gave."""
        return cls(**config)


def to_dict(module: str, one: Any, own: Iterable[type]) -> dict[str, Any]:
    """Return what Keras' `serialize_keras_object` returns for an object.

    Args:
        module: where Keras has its classes of this kind ("keras.layers").
        one: it has `get_config`.
        own: the classes that Keras has too; others are the user's, of a module of their own.
    """
    kind = type(one)
    known = kind in own
    return {
        "module": module if known else kind.__module__,
        "class_name": kind.__name__,
        "config": plain(one.get_config()),
        "registered_name": None if known else get_registered_name(kind),
    }


def plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a configuration in types that JSON has: numbers and arrays of NumPy become Python's, objects descriptions.

    Args:
        value: the configuration, or a part of it.
        around: ids of the lists and dictionaries that it is in.

    Raises:
        ConfigError: a list or a dictionary contains itself.
    """
    if isinstance(value, Mapping | list | tuple):
        if id(value) in around:
            raise ConfigError(f"a {type(value).__name__} of a configuration contains itself, which no file can hold")
        inside = (*around, id(value))
        if isinstance(value, Mapping):
            return {key: plain(each, inside) for key, each in value.items()}
        return [plain(each, inside) for each in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, type) or not (hasattr(value, "get_config") or callable(value)):
        return value
    from dptrain.saving import serialize_keras_object  # above this module

    return serialize_keras_object(value)


def made(kind: str, description: Any, classes: Mapping[str, type[Any]], *more: Any) -> Any:
    """Return the object that {"class_name": ..., "config": ...} describes; further keys are ignored.

    Args:
        kind: what the table holds, for messages ("layer").
        description: as `to_dict` returns it.
        classes: by name; where one is not there as it is written, it is looked for in lower case.
        more: further arguments of the class's `from_config`.

    Raises:
        ConfigError: no such class, not such a dictionary, or not the class's arguments.
    """
    name = description.get("class_name") if isinstance(description, Mapping) else None
    config = description.get("config") if isinstance(description, Mapping) else None
    if not isinstance(name, str) or not isinstance(config, Mapping):
        raise ConfigError(f"{kind}: expected a dictionary with 'class_name' and 'config', found {description!r}")
    registered = description.get("registered_name")
    cls = custom_object(registered if isinstance(registered, str) else None, name)
    if not isinstance(cls, type):
        cls = lookup(kind, name.lower() if name not in classes and name.lower() in classes else name, classes)
    try:
        return cls.from_config(dict(config), *more)
    except TypeError as error:
        raise ConfigError(f"{kind} {cls.__name__}: {error}") from error


class Registry(Generic[T]):
    """The classes of one of Keras' modules by name, and the module's functions over them.

    Args:
        kind: what the objects are, for messages ("loss").
        module: where Keras has the classes ("keras.losses").
        base: the class of all such objects.
        classes: by name; further ones may be added later.
        functions: by name; None where functions, the user's own as well, cannot stand for an object.
    """

    def __init__(
        self,
        kind: str,
        module: str,
        base: type[Any],
        classes: Mapping[str, type[Any]],
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._kind, self._module, self._base, self._classes = kind, module, base, classes
        self._functions = functions

    def get(self, identifier: str | Mapping[str, Any] | type[Any] | Callable[..., Any] | T) -> T:
        """Return the object of that name or class with Keras' defaults, of that configuration, or the one given.

        Where functions are supported, the function of that name, or the one given.

        Raises:
            ConfigError: there is none, or an argument is out of range.
        """
        found: Any = own_or_name(identifier)
        if self._functions is not None:
            found = self._functions.get(found, found) if isinstance(found, str) else found
            if callable(found) and not isinstance(found, self._base | type):
                return found  # type: ignore[no-any-return]
        return get(self._kind, found, self._base, self._classes)  # type: ignore[no-any-return]

    def serialize(self, one: T) -> dict[str, Any]:
        """Return an object as Keras writes it to JSON: {"module", "class_name", "config", "registered_name"}.

        Raises:
            ConfigError: it is a lambda.
        """
        if self._functions is not None and not hasattr(one, "get_config") and callable(one):
            return function_to_dict(one)
        return to_dict(self._module, one, self._classes.values())

    def deserialize(self, config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> T:
        """Return the object that `serialize`, or Keras, described; keys besides "class_name" and "config" are ignored.

        Args:
            config: with "class_name" and "config"; or a name, as of `get`.
            custom_objects: classes, and functions where these are supported, of the user's own by name.

        Raises:
            ConfigError: the class is unknown, or an argument is unknown, out of range or not supported.
        """
        with custom_object_scope(custom_objects):
            if isinstance(config, str) or (self._functions is not None and config.get("class_name") == "function"):
                return self.get(config)
            found: T = made(self._kind, config, self._classes)
            return found


def get(kind: str, identifier: Any, base: type[Any], classes: Mapping[str, type[Any]]) -> Any:
    """Return what an argument means: an object as it is, a class's or name's with its defaults, a described one.

    Args:
        kind: what it should be, for messages ("layer").
        identifier: the argument.
        base: the class of all such objects.
        classes: by name.

    Raises:
        ConfigError: it means none.
    """
    if isinstance(identifier, base):
        return identifier
    if isinstance(identifier, str):
        cls = lookup(kind, identifier, classes)
        try:
            return cls()
        except TypeError as error:  # of a class without defaults
            raise ConfigError(f"{kind} {cls.__name__}: {error}") from error
    if isinstance(identifier, type) and issubclass(identifier, base):
        return identifier()
    if isinstance(identifier, Mapping):
        return made(kind, identifier, classes)
    if callable(identifier):
        raise ConfigError(f"not supported: a function as {kind}; subclass {base.__name__}")
    raise ConfigError(f"Could not interpret {kind} identifier: {identifier}")
