"""Calls of Keras' operations on symbolic tensors: one node of a functional model, however many ops it takes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeVar, cast

import numpy as np

from dptrain.program.dims import Dim
from dptrain.program.operand import Operand
from dptrain.program.tensor import Tensor, is_tracing
from dptrain.program.tree import leaves, map_leaves

F = TypeVar("F", bound=Callable[..., Any])
# What an argument that is no tensor may be. Others, such as generators, could hide a tensor, or change.
_CONSTANTS = (bool, int, float, str, slice, type, EllipsisType, np.dtype, np.ndarray, np.generic, Dim)


def is_symbolic(value: Any) -> bool:
    """Whether it is a tensor without a value that belongs to no trace: an `Input`, or computed from some."""
    return isinstance(value, Tensor) and value.value is None and not is_tracing()


@dataclass(eq=False)
class OperationCall:
    """A call of a Keras operation on symbolic tensors.

    Attributes:
        function: of `dptrain.ops`, which computes it.
        arguments, keywords, outputs: of the call.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: Any

    def __post_init__(self) -> None:
        """Mark the outputs that are not inputs."""
        inputs = {id(tensor) for tensor in self.inputs}
        for tensor in leaves(self.outputs):
            if id(tensor) not in inputs and is_symbolic(tensor):
                tensor.operation_call = self  # not that of a function which the function has called

    @property
    def inputs(self) -> list[Tensor]:
        """The symbolic tensors among the arguments."""
        return [tensor for tensor in leaves([self.arguments, self.keywords]) if is_symbolic(tensor)]

    @functools.cached_property
    def moves_values(self) -> bool:
        """Whether its ops only move values, or convert them."""
        ends = {id(tensor) for tensor in self.inputs}
        between = [tensor for tensor in leaves(self.outputs) if isinstance(tensor, Tensor)]
        while between:
            tensor = between.pop()
            if id(tensor) not in ends:
                if tensor.op is None or not tensor.op.moves or tensor.history is not None:
                    return False
                between += tensor.inputs
        return True


def operation(function: F) -> F:
    """Let the function of a Keras operation record its calls on symbolic tensors, as files list them."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        outputs = function(*arguments, **keywords)
        if outputs.__class__ is Tensor:
            if outputs.value is None and not is_tracing():
                _record(call, arguments, keywords, outputs)
        elif not is_tracing() and any(map(is_symbolic, leaves(outputs))):
            _record(call, arguments, keywords, outputs)
        return outputs

    return cast(F, call)


def _record(function: Callable[..., Any], arguments: Any, keywords: Any, outputs: Any) -> None:
    arguments, keywords = map_leaves(lambda _, leaf: leaf, (arguments, keywords))  # the caller may change its lists
    values = leaves([arguments, keywords])
    called = getattr(outputs, "operation_call", None)
    if called is not None and called.function is function:
        return  # the function has called itself with arguments that say more
    if any(map(is_symbolic, values)) and all(isinstance(value, (Operand, *_CONSTANTS)) for value in values):
        OperationCall(function, arguments, keywords, outputs)
