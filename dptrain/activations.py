"""Activation functions by name, as Keras names them; what they compute is in backend/base.py.

`dptrain.activations.relu` and "relu" mean the same wherever a layer takes an activation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.registry.names import lookup, not_there

__all__ = [
    "Activation",
    "deserialize",
    "elu",
    "exponential",
    "gelu",
    "get",
    "leaky_relu",
    "linear",
    "relu",
    "selu",
    "serialize",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "swish",
    "tanh",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("activations", __all__)


@dataclass(frozen=True)
class Activation:
    """A function of each element (softmax: of each row), with Keras' default arguments.

    Attributes:
        name: Keras' name.
    """

    name: str

    @property
    def __name__(self) -> str:
        """The name, as a function has it."""
        return self.name


elu = Activation("elu")
exponential = Activation("exponential")
gelu = Activation("gelu")
leaky_relu = Activation("leaky_relu")
linear = Activation("linear")
relu = Activation("relu")
selu = Activation("selu")
sigmoid = Activation("sigmoid")
silu = Activation("silu")
softmax = Activation("softmax")
softplus = Activation("softplus")
swish = silu
tanh = Activation("tanh")

_ALL = (elu, exponential, gelu, leaky_relu, linear, relu, selu, sigmoid, silu, softmax, softplus, tanh)
BY_NAME = {one.name: one for one in _ALL} | {"swish": silu}


def get(identifier: str | Activation | None) -> Activation:
    """Return the activation of that name, or the one given; None is `linear`, as in Keras.

    Raises:
        ConfigError: no activation has that name, or it is neither a name nor an activation of this module.
    """
    if identifier is None:
        return linear
    if isinstance(identifier, Activation):
        return identifier
    if not isinstance(identifier, str):
        raise ConfigError(
            f"not supported: activation = {identifier!r}; expected one of dptrain.activations or its name"
        )
    return lookup("activation", identifier, BY_NAME)


def serialize(activation: Activation) -> Any:
    """Return its name, as Keras does."""
    return activation.name


def deserialize(config: Any) -> Activation:
    """Return the activation of a name as `serialize` returns it."""
    return get(config)
