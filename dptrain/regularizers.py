"""Regularizers: penalties on parameters that are added to the loss, as in Keras."""

import math
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Configurable, Registry

__all__ = ["L1", "L1L2", "L2", "REGULARIZERS", "Regularizer", "deserialize", "get", "serialize"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("regularizers", __all__)


class Regularizer(Configurable):
    """The penalty l1 * sum |p| + l2 * sum p^2 of a parameter p, and its gradient l1 * sign(p) + 2 * l2 * p.

    Attributes:
        l1: factor of the absolute values, 0 or more.
        l2: factor of the squares, 0 or more.
    """

    def __init__(self, l1: float, l2: float) -> None:
        self.l1 = _factor(l1, "l1")
        self.l2 = _factor(l2, "l2")


class L1(Regularizer):
    """l1 * sum |p|.

    Args:
        l1: finite, 0 or more; None is 0.01.

    Raises:
        ConfigError: the factor is out of range.
    """

    def __init__(self, l1: float | None = 0.01) -> None:
        super().__init__(0.01 if l1 is None else l1, 0.0)

    def config(self) -> dict[str, Any]:
        """Return l1."""
        return {"l1": self.l1}


class L2(Regularizer):
    """l2 * sum p^2.

    Args:
        l2: finite, 0 or more; None is 0.01.

    Raises:
        ConfigError: the factor is out of range.
    """

    def __init__(self, l2: float | None = 0.01) -> None:
        super().__init__(0.0, 0.01 if l2 is None else l2)

    def config(self) -> dict[str, Any]:
        """Return l2."""
        return {"l2": self.l2}


class L1L2(Regularizer):
    """l1 * sum |p| + l2 * sum p^2.

    Args:
        l1: finite, 0 or more; None is 0.
        l2: finite, 0 or more; None is 0.

    Raises:
        ConfigError: a factor is out of range.
    """

    def __init__(self, l1: float | None = 0.0, l2: float | None = 0.0) -> None:
        super().__init__(0.0 if l1 is None else l1, 0.0 if l2 is None else l2)

    def config(self) -> dict[str, Any]:
        """Return l1 and l2."""
        return {"l1": self.l1, "l2": self.l2}


# Keras' other names of the classes.
l1, l2, l1_l2 = L1, L2, L1L2

# Names as Keras accepts them.
_CLASSES: dict[str, type[L1] | type[L2] | type[L1L2]] = {"L1": L1, "L2": L2, "L1L2": L1L2}
REGULARIZERS = _CLASSES | {name.lower(): cls for name, cls in _CLASSES.items()}

_registry: Registry[Regularizer] = Registry("regularizer", "keras.regularizers", Regularizer, REGULARIZERS)
deserialize = _registry.deserialize


def get(identifier: str | dict[str, Any] | type[Regularizer] | Regularizer | None) -> Regularizer | None:
    """Return the regularizer of that name or class with Keras' defaults, of that configuration, or the one given.

    Raises:
        ConfigError: no regularizer has that name, or an argument is out of range.
    """
    if identifier is None:
        return None
    return _registry.get(identifier)


def serialize(regularizer: Regularizer | None) -> dict[str, Any] | None:
    """Return the regularizer as Keras writes it to JSON."""
    return None if regularizer is None else _registry.serialize(regularizer)


def _factor(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"Invalid value for argument {name}: expected a non-negative float. Received: {name}={value}")
    return float(value)
