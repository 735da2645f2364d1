"""Methods that change variables as functions of their values, Keras' `stateless_...`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.context import LENT, TRACE
from dptrain.program.operand import METHODS
from dptrain.program.tensor import Tensor, Variable, as_tensors, constant
from dptrain.program.tree import map_leaves


@contextmanager
def lending(variables: Sequence[Variable], values: Any, name: str, whose: str) -> Iterator[None]:
    """Give variables other values in this context, after which all variables have what they had before.

    Gradients flow to the values; they end where a variable is assigned.

    Args:
        variables: those of `whose`, such as "Adam().variables".
        values: a tensor, an array or a variable for each.
        name: of the argument that has them.

    Raises:
        ConfigError: there is not one value for each variable, or one has another shape.
    """
    if not isinstance(values, list | tuple):
        received = f"a {type(values).__name__}"
    else:
        received = f"list with length {len(values)}"
    if not isinstance(values, list | tuple) or len(values) != len(variables):
        raise ConfigError(
            f"Argument `{name}` must be a list of tensors corresponding 1:1 to {whose}. Received {received}, but "
            f"expected {len(variables)} variables."
        )
    lent = {
        variable: _as_value_of(variable, value, f"`{name}[{number}]`")
        for number, (variable, value) in enumerate(zip(variables, values, strict=True))
    }
    trace = TRACE.get()
    if trace is None:
        token = LENT.set((LENT.get() or {}) | lent)
        try:
            yield
        finally:
            LENT.reset(token)
        return
    before = trace.written
    trace.written = before | lent
    try:
        yield
    finally:
        trace.written = before


def _as_value_of(variable: Variable, value: Any, subject: str) -> Tensor:
    try:
        tensor = as_tensors([value])[0]
    except ConfigError as error:
        raise ConfigError(f"{subject}, the value of variable {variable.path!r}: {error}") from None
    if tensor.shape != variable.shape:
        raise ConfigError(
            f"{subject}, the value of variable {variable.path!r}, has shape {tensor.shape}; expected {variable.shape}"
        )
    return tensor if tensor.dtype == variable.dtype else METHODS["cast"](tensor, variable.dtype)


def with_values(results: Any) -> Any:
    """Replace variables in nested results by their values, which stay when the variables get others."""
    return map_leaves(lambda _, leaf: values_of([leaf])[0] if isinstance(leaf, Variable) else leaf, results)


def values_of(variables: Sequence[Variable]) -> list[Tensor]:
    """Return the values, in their own types, which stay when the variables get others."""
    trace = TRACE.get()
    if trace is not None:
        return [trace.value_of(variable) for variable in variables]
    lent = LENT.get() or {}
    return [lent[variable] if variable in lent else constant(variable.numpy()) for variable in variables]
