"""Activation functions under Keras' names; `dptrain.activations.relu` and "relu" mean the same to a layer."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.elementwise import elu, saturate_to, silu, softplus, tanh
from dptrain.ops.nn.activation import (
    celu,
    hard_shrink,
    hard_sigmoid,
    hard_silu,
    hard_tanh,
    log_sigmoid,
    mish,
    relu6,
    selu,
    sigmoid,
    soft_shrink,
    softmax,
    softsign,
    sparse_plus,
    sparse_sigmoid,
    sparsemax,
    squareplus,
    tanh_shrink,
    threshold,
)
from dptrain.ops.reduction import log_softmax
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.registry.names import lookup, not_there
from dptrain.registry.serialization import custom_object_or_name, custom_object_scope, function_to_dict

Activation = Callable[..., Any]


def relu(x: Any, negative_slope: float = 0.0, max_value: float | None = None, threshold: float = 0.0) -> Tensor:
    """Return x from the threshold up to `max_value` (None for no limit), below it negative_slope (x - threshold)."""
    (x,) = as_tensors([x])
    if threshold:
        below = (x - threshold) * negative_slope if negative_slope else 0.0
        y = ops.where(x > threshold, x, below)
    else:
        y = ops.leaky_relu(x, negative_slope=float(negative_slope)) if negative_slope else ops.relu(x)
    return y if max_value is None else saturate_to(y, -math.inf, float(max_value))


def leaky_relu(x: Any, negative_slope: float = 0.2) -> Tensor:
    """Return x where it is positive, else negative_slope x."""
    return ops.leaky_relu(x, negative_slope=float(negative_slope))


def gelu(x: Any, approximate: bool = False) -> Tensor:
    """Return x Phi(x), exactly or by its tanh approximation; see `ops.gelu`."""
    return ops.gelu(x, approximate)


def exponential(x: Any) -> Tensor:
    """Return e^x."""
    return ops.exp(x)


def glu(x: Any, axis: int = -1) -> Tensor:
    """Return a sigmoid(b), a and b the halves of x along an axis. Source: Y. Dauphin et al., ICML 2017."""
    (x,) = as_tensors([x])
    length = int(x.shape[axis])
    if length % 2:
        raise ConfigError(f"glu: axis {axis} has length {length}: expected an even one")
    before = (slice(None),) * (axis % x.ndim)
    return ops.multiply(x[(*before, slice(0, length // 2))], sigmoid(x[(*before, slice(length // 2, None))]))


def linear(x: Any) -> Any:
    """Return x."""
    return x


swish, hard_swish = silu, hard_silu

_FUNCTIONS: tuple[Activation, ...] = (
    *(
        celu,
        elu,
        exponential,
        gelu,
        glu,
        hard_shrink,
        hard_sigmoid,
        hard_silu,
        hard_tanh,
        leaky_relu,
        linear,
        log_sigmoid,
    ),
    *(log_softmax, mish, relu, relu6, selu, sigmoid, silu, soft_shrink, softmax, softplus, softsign, sparse_plus),
    *(sparse_sigmoid, sparsemax, squareplus, tanh, tanh_shrink, threshold),
)
BY_NAME: dict[str, Activation] = {
    getattr(function, "name", None) or function.__name__: function for function in _FUNCTIONS
}
ALIASES: dict[str, Activation] = {"swish": silu, "hard_swish": hard_silu}

__all__ = ["Activation", "deserialize", "get", "hard_swish", "serialize", "swish", *BY_NAME]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("activations", __all__)


def get(identifier: Any) -> Activation:
    """Return the activation for a name, a layer or a `serialize` result; functions unchanged; `linear` for None.

    Raises:
        ConfigError: an unknown name, or something else.
    """
    if identifier is None:
        return linear
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    identifier = custom_object_or_name(identifier)
    if isinstance(identifier, str):
        return lookup("activation", identifier, BY_NAME | ALIASES)
    if callable(identifier):
        function: Activation = identifier
        return function
    raise ConfigError(f"Could not interpret activation function identifier: {identifier}")


def serialize(activation: Activation) -> str | dict[str, Any]:
    """Return its name, or like Keras the description of a user's function or layer; ConfigError for a lambda."""
    for name, function in BY_NAME.items():
        if function is activation:
            return name
    if hasattr(activation, "get_config"):
        from dptrain.saving import serialize_keras_object  # a higher layer than this module

        described: dict[str, Any] = serialize_keras_object(activation)
        return described
    return function_to_dict(activation)


def deserialize(config: Any, custom_objects: Mapping[str, Activation] | None = None) -> Activation:
    """Return the activation for a name, or for Keras' description of a function or layer; else ConfigError.

    `custom_objects` are the user's functions by name.
    """
    with custom_object_scope(custom_objects):
        if isinstance(config, Mapping) and config.get("class_name") not in (None, "function"):
            from dptrain.saving import deserialize_keras_object  # a higher layer than this module

            return get(deserialize_keras_object(config))
        description = custom_object_or_name(config)
        return get(str(description.get("config")) if isinstance(description, Mapping) else description)
