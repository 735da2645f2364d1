"""Initial values of parameters: Keras' names and arguments, our own random streams."""

from typing import TYPE_CHECKING, Any

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
from dptrain.registry import serialization
from dptrain.registry.names import not_there, snake_case

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
INITIALIZERS: dict[str, type[Initializer]] = {cls.__name__: cls for cls in _CLASSES}
INITIALIZERS |= {snake_case(name): cls for name, cls in INITIALIZERS.items()}
INITIALIZERS |= {"normal": RandomNormal, "uniform": RandomUniform, "one": Ones, "zero": Zeros}


def get(identifier: str | dict[str, Any] | type[Initializer] | Initializer) -> Initializer:
    """Return the initializer of that name or class with Keras' defaults, of that configuration, or the one given.

    Raises:
        ConfigError: no initializer has that name, or an argument is out of range.
    """
    initializer: Initializer = serialization.get("initializer", identifier, Initializer, INITIALIZERS)
    return initializer


def serialize(initializer: Initializer) -> dict[str, Any]:
    """Return the initializer as Keras writes it to JSON."""
    return serialization.to_dict("keras.initializers", initializer, _CLASSES)


def deserialize(config: dict[str, Any]) -> Initializer:
    """Return the initializer that `serialize` described.

    Raises:
        ConfigError: it describes none, or an argument is unknown or out of range.
    """
    initializer: Initializer = serialization.made("initializer", config, INITIALIZERS)
    return initializer
