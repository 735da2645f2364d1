"""Methods that change variables as functions of their values, Keras' `stateless_...`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor, Variable, constant, is_tracing


@contextmanager
def lending(variables: Sequence[Variable], values: Sequence[Any], name: str, owner: object) -> Iterator[None]:
    """Give an owner's variables the values of its argument `name`; ConfigError if there is not one for each."""
    kind = type(owner).__name__
    if not isinstance(values, list | tuple) or len(values) != len(variables):
        raise ConfigError(
            f"Argument `{name}` must be a list of tensors corresponding 1:1 to {kind}().variables. "
            f"Received: {len(values) if isinstance(values, list | tuple) else values}, expected {len(variables)} values"
        )
    before = values_of(variables)
    try:
        _assign(variables, values)
        yield
    finally:
        _assign(variables, before)


def values_of(variables: Sequence[Variable]) -> list[Tensor]:
    """Return the values, which stay when the variables get others."""
    return [variable.value if is_tracing() else constant(variable.numpy()) for variable in variables]


def _assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
