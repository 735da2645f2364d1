"""Lengths that are tensors, and functions of symbolic tensors that run later where they ask for unknown lengths."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.shapes import Shape, is_open
from dptrain.program.tensor import Array, Tensor, Variable, is_tracing
from dptrain.program.tree import leaves

F = TypeVar("F", bound=Callable[..., Any])
# Calls a function later: takes it with its positional and keyword arguments. The layers, which are above, put it here.
DEFERRED: list[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = []


def for_open_shapes(function: F) -> F:
    """Let a function take symbolic tensors whose lengths it asks for: its call becomes a node of the graph."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except ConfigError:
            if is_tracing() or not DEFERRED or not any(map(_is_open, leaves([arguments, keywords]))):
                raise
            try:
                return DEFERRED[0](call, arguments, keywords)
            except ConfigError:
                pass  # the first error says more
            raise

    return cast(F, call)


def _is_open(value: Any) -> bool:
    return isinstance(value, Tensor) and value.value is None and is_open(value.shape)


def lengths_of(value: Any) -> tuple[Any, ...]:
    """Return lengths passed as a number, a sequence or a tensor: numbers, and dims where a tensor has a shape's.

    None in front is the rows of the batch.

    ConfigError if they depend on data, inside a trace.
    """
    if isinstance(value, Tensor | Variable):
        return tuple(_known(value if isinstance(value, Tensor) else value.value).ravel())
    lengths = (value,) if isinstance(value, int | np.integer | Dim) else with_unknown(tuple(value), ()) or tuple(value)
    return tuple(_known(n).item() if isinstance(n, Tensor) and not n.shape else n for n in lengths)


def with_unknown(lengths: Any, shape: Shape) -> tuple[Any, ...] | None:
    """Return lengths in which None, as `x.shape` has it, is replaced by an unknown length; None if there is none.

    It is that of `shape` along the same axis, or in front the rows of the batch; ConfigError elsewhere.
    """
    if not isinstance(lengths, list | tuple) or all(n is not None for n in lengths):
        return None
    return tuple(_unknown_length(lengths, axis, shape) if n is None else n for axis, n in enumerate(lengths))


def _unknown_length(lengths: Sequence[Any], axis: int, shape: Shape) -> Any:
    if axis < len(shape) and isinstance(shape[axis], Dim):
        return shape[axis]
    if axis or is_tracing():
        raise ConfigError(
            f"shape {tuple(lengths)}: the length None at axis {axis} is not known; take it from `ops.shape(x)`, which "
            "has a number for each batch, or leave one length out by -1"
        )
    return Dim.rows()


def _known(tensor: Tensor) -> Array:
    """Return a tensor's elements, dims among them, as an array of objects."""
    if hasattr(tensor, "length"):
        element = np.empty((), object)
        element[()] = tensor.length
        return element
    fold = None if tensor.op is None else _FOLDS.get(tensor.op.name)
    if tensor.value is not None or fold is None:
        return tensor.numpy().astype(object)
    return np.asarray(fold(*map(_known, tensor.inputs), **tensor.attributes), object)


# What computes lengths from lengths: on arrays of numbers and dims.
_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "cast_to": lambda x, dtype: x,
    "concatenate_along": lambda *parts, axis: np.concatenate(parts, axis),
    "floor_divide": np.floor_divide,
    "identity": lambda x: x,
    "multiply": np.multiply,
    "reshape_to": lambda x, shape: x.reshape(shape),
    "subtract": np.subtract,
}
