"""Objects as Keras writes them to JSON: {"module", "class_name", "config", "registered_name"}, and back."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from dptrain.errors import ConfigError
from dptrain.registry import lookup


class Configurable(Protocol):
    """What can say how it was made."""

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them, in types that JSON has."""
        ...


T = TypeVar("T")


def to_dict(module: str, one: Configurable) -> dict[str, Any]:
    """Return what Keras' `serialize_keras_object` returns for it.

    Args:
        module: where Keras has the class ("keras.layers").
        one: of a class of the same name as Keras'.
    """
    return {"module": module, "class_name": type(one).__name__, "config": one.config(), "registered_name": None}


def class_and_config(kind: str, described: Any, classes: Mapping[str, type[T]]) -> tuple[type[T], dict[str, Any]]:
    """Return the class and the constructor's arguments that {"class_name": ..., "config": ...} describes.

    Args:
        kind: what the table holds, for messages ("layer").
        described: as `to_dict` returns it; keys besides "class_name" and "config" are ignored.
        classes: by class name.

    Raises:
        ConfigError: no such class, or not such a dictionary.
    """
    if not isinstance(described, dict) or not isinstance(described.get("class_name"), str):
        raise ConfigError(f'{kind}: expected {{"class_name": ..., "config": ...}}, found {described!r}')
    config = described.get("config", {})
    if not isinstance(config, dict):
        raise ConfigError(f"{kind} {described['class_name']!r}: expected a dictionary as config, found {config!r}")
    return lookup(kind, described["class_name"], classes), dict(config)
