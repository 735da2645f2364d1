"""Functions of symbolic tensors that ask for lengths which are not known: as they are run on real ones later."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dptrain.errors import ConfigError
from dptrain.program.shapes import is_open
from dptrain.program.tensor import Tensor, is_tracing
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
