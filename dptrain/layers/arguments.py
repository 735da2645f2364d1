"""Checks of arguments shared by several layers."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from dptrain import activations
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.layers.base import Layer

Lengths = tuple[int, ...]


class ActivationAttribute:
    """An attribute that holds an activation; assigning a name converts it and invalidates traced programs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Layer | None, owner: type | None = None) -> Any:
        return self if layer is None else vars(layer)[self._name]

    def __set__(self, layer: Layer, value: Any) -> None:
        vars(layer)[self._name] = activations.get(value)
        layer._changes += 1


def positive(name: str, value: Any) -> int:
    """Check and return a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"Received an invalid value for `{name}`, expected a positive integer. Received: {name}={value}"
        )
    return value


def lengths(name: str, value: Any, count: int, least: int = 1) -> Lengths:
    """Return integers, each at least `least`, for all `count` axes from a single integer or a sequence."""
    values = (value,) * count if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(values) != count or any(isinstance(n, bool) or not isinstance(n, int) or n < least for n in values):
        raise ConfigError(
            f"The `{name}` argument must be a tuple of {count} integers. Received {name}={value}, including values "
            f"that are no integers or do not satisfy `value {'> 0' if least else '>= 0'}`"
        )
    return values


def axis_number(value: Any) -> int:
    """Check and return an axis, an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"Invalid value for `axis` argument: expected an int. Received: axis={value}")
    return int(value)


def axis_numbers(value: Any) -> int | list[int]:
    """Check and return an axis or a list of axes."""
    axes = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(axis, bool) or not isinstance(axis, Integral) for axis in axes):
        raise ArgumentTypeError(
            f"Invalid value for `axis` argument: expected an int or a list/tuple of ints. Received: axis={value}"
        )
    return [int(axis) for axis in axes] if isinstance(value, list | tuple) else int(axes[0])


def padding_mode(value: Any, causal: bool = False) -> str:
    """Return "valid", "same" or, where allowed, "causal" in lower case."""
    mode = str(value).lower()
    modes = ("valid", "same", *(("causal",) if causal else ()))
    if mode not in modes:
        raise ConfigError(
            f"The `padding` argument must be a list/tuple or one of {{{', '.join(map(repr, modes))}}}. "
            f"Received: {value}"
        )
    return mode
