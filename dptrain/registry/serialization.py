"""Objects as Keras' JSON, {"module", "class_name", "config", "registered_name"}, and back."""

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
    """Let files and configurations find the user's classes and functions by these names, and by an outer scope's."""
    token = _scope.set({**(_scope.get() or {}), **(custom_objects or {})})
    try:
        yield
    finally:
        _scope.reset(token)


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Callable[[T], T]:
    """Return a decorator that registers a class or a function for files as "package>name", by default its own name.

    Raises:
        ConfigError: the class has no `get_config`.
    """

    def register(cls: T) -> T:
        if isinstance(cls, type) and not hasattr(cls, "get_config"):
            raise ConfigError("Cannot register a class that does not have a get_config() method.")
        _registered[f"{package}>{name or getattr(cls, '__name__', '')}"] = cls
        return cls

    return register


def get_registered_name(cls: Any) -> str:
    """Return the name that a class or function is written under."""
    return next((name for name, registered in _registered.items() if registered is cls), cls.__name__)


def custom_object(*names: str | None) -> Any:
    """Return the object registered under one of these names; None if there is none."""
    classes = {**_registered, **(_scope.get() or {})}
    return next((classes[name] for name in names if name in classes), None)


def get_registered_object(name: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the object of a name in a scope, in `custom_objects` or by registration; None if there is none."""
    return (custom_objects or {}).get(name, custom_object(name))


def get_custom_objects() -> dict[str, Any]:
    """Return the registered classes and functions by name; additions to it are registered."""
    return _registered


def function_to_dict(function: Callable[..., Any]) -> dict[str, Any]:
    """Return Keras' description of a function, or raise ConfigError for a lambda, which has no name."""
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise ConfigError(f"not supported: writing the lambda {function!r} to a file; define it by `def`")
    is_ours = function.__module__.split(".")[0] == "dptrain"
    name = name if is_ours else get_registered_name(function)
    return {"module": "builtins", "class_name": "function", "config": name, "registered_name": "function"}


def custom_object_or_name(identifier: Any) -> Any:
    """Return the user's object of a name or of Keras' description of a function, else the name; others as they are."""
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
    value = custom_object(registered if isinstance(registered, str) else None, name)
    if value is None and isinstance(identifier, Mapping):
        value = _of_any_package(name)
    return name if value is None else value


def _of_any_package(name: str) -> Any:
    """Return the function registered under this name, which Keras 3.6 writes without its package; None if not one."""
    functions = [value for key, value in _registered.items() if key.partition(">")[2] == name]
    return functions[0] if len(functions) == 1 and not isinstance(functions[0], type) else None


class Configurable(Readable, ABC):
    """Base of objects that can be rebuilt from a configuration."""

    @abstractmethod
    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them, as JSON."""

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""
        return self._get_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return an object with the arguments of `get_config`."""
        return cls(**config)


# Modules whose classes Keras has in its own of that name.
LIKE_KERAS = {"dptrain.distillation": "keras.distillation"}


def to_dict(module: str, instance: Any, builtin: Iterable[type]) -> dict[str, Any]:
    """Return Keras' description of an object with `get_config`; `builtin` are the classes that Keras has too."""
    kind = type(instance)
    module = LIKE_KERAS.get(kind.__module__, module)
    is_builtin = kind in builtin or kind.__module__ in LIKE_KERAS
    return {
        "module": module if is_builtin else kind.__module__,
        "class_name": kind.__name__,
        "config": plain(instance.get_config()),
        "registered_name": None if is_builtin else get_registered_name(kind),
    }


def plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a configuration as JSON: NumPy values become Python's, objects descriptions; cycles raise ConfigError."""
    if isinstance(value, Mapping | list | tuple):
        if id(value) in around:
            raise ConfigError(f"a {type(value).__name__} of a configuration contains itself, which cannot be saved")
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


def function_named(value: Any) -> Any:
    """Return the function that a configuration names or describes; a function as it is."""
    if callable(value):
        return value
    from dptrain.saving import deserialize_keras_object  # above this module

    return deserialize_keras_object({"class_name": "function", "config": value} if isinstance(value, str) else value)


def from_description(kind: str, description: Any, classes: Mapping[str, type[Any]], *more: Any) -> Any:
    """Build an object from {"class_name": ..., "config": ...}, with names in lower case as a fallback."""
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
    """Classes of one of Keras' modules by name, and the module's functions over them.

    Args:
        kind: the objects' kind in messages ("loss").
        module: Keras' module of the classes ("keras.losses").
        base: base class of the objects.
        classes: by name; more may be added later.
        functions: by name; None if functions cannot stand for an object.
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
        """Return the object for a name or class, with Keras' defaults, or for a configuration; objects as they are.

        If functions are supported, also the function of that name, or a function as it is.

        Raises:
            ConfigError: there is none, or an argument is out of range.
        """
        result: Any = custom_object_or_name(identifier)
        if self._functions is not None:
            result = self._functions.get(result, result) if isinstance(result, str) else result
            if callable(result) and not isinstance(result, self._base | type):
                return result  # type: ignore[no-any-return]
        return get(self._kind, result, self._base, self._classes)  # type: ignore[no-any-return]

    def serialize(self, instance: T) -> dict[str, Any]:
        """Return Keras' JSON: {"module", "class_name", "config", "registered_name"}; ConfigError for a lambda."""
        if self._functions is not None and not hasattr(instance, "get_config") and callable(instance):
            return function_to_dict(instance)
        return to_dict(self._module, instance, self._classes.values())

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
            instance: T = from_description(self._kind, config, self._classes)
            return instance


def get(kind: str, identifier: Any, base: type[Any], classes: Mapping[str, type[Any]]) -> Any:
    """Return an argument's object: an instance as it is, a class or name with defaults, or a configuration."""
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
        return from_description(kind, identifier, classes)
    if callable(identifier):
        raise ConfigError(f"not supported: a function as {kind}; subclass {base.__name__}")
    raise ConfigError(f"Could not interpret {kind} identifier: {identifier}")
