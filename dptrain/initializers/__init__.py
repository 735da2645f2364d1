"""Initial values of parameters: Keras' names and arguments, our own random streams."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.initializers.base import Initializer
from dptrain.initializers.constant import Constant, Identity, Ones, Zeros
from dptrain.initializers.distributions import Orthogonal, RandomNormal, RandomUniform, TruncatedNormal
from dptrain.initializers.variance_scaling import (
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    LecunNormal,
    LecunUniform,
    VarianceScaling,
)
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Registry

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Identity",
    "Initializer",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
    "deserialize",
    "get",
    "serialize",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("initializers", __all__)

_CLASSES: tuple[type[Initializer], ...] = (
    Constant,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    Identity,
    LecunNormal,
    LecunUniform,
    Ones,
    Orthogonal,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    VarianceScaling,
    Zeros,
)
# Names as Keras accepts them: the class's, and the same in snake case.
INITIALIZERS = by_name(_CLASSES)
INITIALIZERS |= {"normal": RandomNormal, "uniform": RandomUniform, "one": Ones, "zero": Zeros}

_registry: Registry[Initializer] = Registry("initializer", "keras.initializers", Initializer, INITIALIZERS)
deserialize = _registry.deserialize
# As Keras, a function `f(shape, dtype=None)` serves as well.
InitializerLike = Initializer | Callable[..., Any]


def get(identifier: Any) -> InitializerLike:
    """Return the initializer of that name or class with Keras' defaults, of that configuration, or the one given.

    Args:
        identifier: a name, a class, a configuration, an initializer, or a function `f(shape, dtype=None)`.

    Raises:
        ConfigError: no initializer has that name, or an argument is out of range.
    """
    if callable(identifier) and not isinstance(identifier, type):
        found: InitializerLike = identifier
        return found
    return _registry.get(identifier)


def serialize(initializer: InitializerLike) -> dict[str, Any]:
    """Return the initializer as Keras writes it to JSON.

    Raises:
        ConfigError: it is a function.
    """
    if not isinstance(initializer, Initializer):
        raise ConfigError(f"not supported: writing the function {initializer!r} to a file; subclass Initializer")
    return _registry.serialize(initializer)
