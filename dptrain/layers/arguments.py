"""Arguments that several layers have, checked."""

from collections.abc import Sequence
from typing import Any

from dptrain import activations
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer

Pair = tuple[int, int]


class ActivationAttribute:
    """An attribute that is an activation: a name or None may be assigned, and programs traced before are not used."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Layer | None, owner: type | None = None) -> Any:
        return self if layer is None else vars(layer)[self._name]

    def __set__(self, layer: Layer, value: Any) -> None:
        vars(layer)[self._name] = activations.get(value)
        layer._changes += 1


def positive(name: str, value: Any) -> int:
    """Return an argument that must be a positive integer.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"Received an invalid value for `{name}`, expected a positive integer. Received: {name}={value}"
        )
    return value


def pair(name: str, value: Any) -> Pair:
    """Return an argument that is one positive integer for both axes, or two.

    Raises:
        ConfigError: it is neither.
    """
    found = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(found) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in found):
        raise ConfigError(
            f"The `{name}` argument must be a tuple of 2 integers. Received {name}={value}, including values "
            "that are no integers or do not satisfy `value > 0`"
        )
    return found[0], found[1]


def padding_mode(value: Any) -> str:
    """Return "valid" or "same".

    Raises:
        ConfigError: it is neither.
    """
    found = str(value).lower()
    if found not in ("valid", "same"):
        raise ConfigError(
            f"The `padding` argument must be a list/tuple or one of {{'valid', 'same'}}. Received: {value}"
        )
    return found


def channels_last(layer: Layer, data_format: str | None) -> str:
    """Return the data format, of which there is one.

    Raises:
        ConfigError: it is another.
    """
    if data_format not in (None, "channels_last"):
        layer.refuse(data_format=data_format)
    return "channels_last"
