"""Symbolic tensors, on which layers are called before there is a batch, and the calls that made them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.operation_calls import OperationCall, is_symbolic
from dptrain.program.dims import symbolic
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor, mask_of, placeholder
from dptrain.program.tree import leaves, map_leaves

if TYPE_CHECKING:
    from dptrain.layers.base import Layer


@dataclass(eq=False)
class LayerCall:
    """A call of a layer on symbolic tensors.

    Attributes:
        layer: that was called.
        arguments, keywords: by position and name, with tensors nested in lists, tuples and dictionaries.
        outputs: symbolic tensors whose `history` this is.
    """

    layer: "Layer"
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None

    @property
    def inputs(self) -> list[Tensor]:
        """The symbolic tensors among the arguments."""
        return [
            leaf for leaf in leaves([self.arguments, self.keywords]) if isinstance(leaf, Tensor) and leaf.value is None
        ]

    def output(self, shape: Shape, dtype: npt.DTypeLike, name: str) -> Tensor:
        """Return a new symbolic tensor as an output of this call."""
        tensor = placeholder(shape, dtype, name)
        tensor.history = self
        return tensor

    def finish(self, results: Any) -> Any:
        """Return, and keep, symbolic tensors like the tensors that the layer's `call` returned."""
        name = self.layer._name or type(self.layer).__name__

        def fresh(path: str, result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            symbol, mask = self.output(result.shape, result.dtype, name), mask_of(result)
            if mask is not None:
                symbol._keras_mask = self.output(mask.shape, mask.dtype, f"{name}_mask")
            return symbol

        self.outputs = map_leaves(fresh, results)
        return self.outputs


def maker_of(tensor: Tensor) -> LayerCall | OperationCall | Tensor:
    """Return the call that made a symbolic tensor; the tensor itself if an op did."""
    return getattr(tensor, "operation_call", None) or tensor.history or tensor


class _KerasTensorType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return is_symbolic(instance)


class KerasTensor(metaclass=_KerasTensorType):
    """Symbolic tensors, under Keras' name: they are its instances; a call makes one that no layer has made.

    Args:
        shape: None stands for an unknown length, in front for the rows of the batch.
        dtype: of its elements.
        sparse, ragged: None or False.
        record_history: not used.
        name: for messages.
    """

    def __new__(  # type: ignore[misc]
        cls,
        shape: Sequence[int | None],
        dtype: npt.DTypeLike = "float32",
        sparse: bool | None = None,
        ragged: bool | None = None,
        record_history: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return a symbolic tensor; ConfigError if it is to be sparse or ragged."""
        if sparse or ragged:
            raise ConfigError(f"not supported: KerasTensor of shape {tuple(shape)}, sparse={sparse}, ragged={ragged}")
        return placeholder(symbolic(shape), dtype, name or "keras_tensor")


def get_source_inputs(tensor: Tensor) -> list[Tensor]:
    """Return the inputs of a symbolic tensor, in the order in which a walk from it meets them."""
    sources: list[Tensor] = []
    visited: set[int] = set()
    stack = [tensor]
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        makers = current.inputs if current.history is None else current.history.inputs
        parents = [
            maker for maker in makers if isinstance(maker, Tensor) and maker.value is None and not maker.is_length
        ]
        if not parents:
            sources.append(current)
        stack += reversed(parents)
    return sources
