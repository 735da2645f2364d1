"""Initial values of parameters: Keras' names and arguments, our own random streams."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.initializers.base import Initializer
from dptrain.initializers.constant import Constant, Identity, Ones, Zeros, of_tensor
from dptrain.initializers.distributions import Orthogonal, RandomNormal, RandomUniform, TruncatedNormal
from dptrain.initializers.fourier import STFT
from dptrain.initializers.variance_scaling import (
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    LecunNormal,
    LecunUniform,
    VarianceScaling,
)
from dptrain.program.tensor import Tensor
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Registry

__all__ = [
    "STFT",
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

# Keras' other names of the classes.
IdentityInitializer = identity = Identity
OrthogonalInitializer = orthogonal = Orthogonal
glorot_normal, glorot_uniform = GlorotNormal, GlorotUniform
he_normal, he_uniform = HeNormal, HeUniform
lecun_normal, lecun_uniform = LecunNormal, LecunUniform
ones, zeros = Ones, Zeros
STFTInitializer = stft = STFT
random_normal, random_uniform, truncated_normal = RandomNormal, RandomUniform, TruncatedNormal

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("initializers", __all__)

_CLASSES: tuple[type[Initializer], ...] = (
    STFT,
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
INITIALIZERS |= {"IdentityInitializer": Identity, "OrthogonalInitializer": Orthogonal}  # as Keras' files name them
INITIALIZERS |= {"normal": RandomNormal, "uniform": RandomUniform, "one": Ones, "zero": Zeros}

# A function `f(shape, dtype=None)` serves as well, as in Keras.
InitializerLike = Initializer | Callable[..., Any]

_registry: Registry[InitializerLike] = Registry(
    "initializer", "keras.initializers", Initializer, INITIALIZERS, functions={}
)
serialize, deserialize = _registry.serialize, _registry.deserialize


def get(identifier: Any) -> Any:
    """Return the initializer for a name, class, configuration, function or array; None for None; else ConfigError."""
    if identifier is None:
        return None
    is_tensor = isinstance(identifier, np.ndarray | np.generic | Tensor)
    return of_tensor(identifier) if is_tensor else _registry.get(identifier)
