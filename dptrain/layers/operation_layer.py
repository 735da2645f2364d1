"""Calls of functions of `dptrain.ops` on symbolic tensors whose lengths they ask for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dptrain.layers.base import Layer
from dptrain.ops.open_shapes import DEFERRED
from dptrain.ops.operation_calls import is_symbolic
from dptrain.program.tree import map_leaves


class _Operand:
    """Stands for the tensor of a call at a position."""

    def __init__(self, position: int) -> None:
        self.position = position


class OperationLayer(Layer):
    """A call of a function, which is run again on real tensors. No layer to its users: a file has it as an operation.

    Args:
        function: of `dptrain.ops`.
        arguments: of the call, by position, with operands instead of tensors.
        keywords: of the call, by name, likewise.
    """

    _casts_inputs = False

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        super().__init__(autocast=False)
        self.function = function
        self._arguments, self._keywords = arguments, keywords

    @property
    def _default_name(self) -> str:
        return self.function.__name__

    def call(self, operands: list[Any]) -> Any:
        """Return what the function makes of tensors."""
        arguments, keywords = self._with(operands)
        return self.function(*arguments, **keywords)

    def _with(self, operands: Sequence[Any]) -> Any:
        return map_leaves(
            lambda _, leaf: operands[leaf.position] if isinstance(leaf, _Operand) else leaf,
            (self._arguments, self._keywords),
        )


def _defer(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    operands: list[Any] = []

    def operand(path: str, leaf: Any) -> Any:
        if not is_symbolic(leaf):
            return leaf
        operands.append(leaf)
        return _Operand(len(operands) - 1)

    nested, named = map_leaves(operand, (list(arguments), dict(keywords)))
    return OperationLayer(function, nested, named)(operands)


DEFERRED.append(_defer)
