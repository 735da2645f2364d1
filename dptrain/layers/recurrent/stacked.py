"""StackedRNNCells: several cells as a cell."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from dptrain import ops, tree
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor
from dptrain.runtime.text import short


class StackedRNNCells(Layer):
    """A cell of several `cells`, each fed by the output of the one before; see `RNN`."""

    def __init__(self, cells: Sequence[Any], **options: Any) -> None:
        super().__init__(**options)
        for cell in cells:
            if not hasattr(cell, "call"):
                raise ConfigError(f"All cells must have a `call` method. Received cell without a `call` method: {cell}")
            if not hasattr(cell, "state_size"):
                raise ConfigError(
                    f"All cells must have a `state_size` attribute. Received cell without a `state_size`: {cell}"
                )
        self.cells = list(cells)

    @property
    def state_size(self) -> list[Any]:
        """The size of each cell's states."""
        return [cell.state_size for cell in self.cells]

    @property
    def output_size(self) -> Any:
        """The last cell's."""
        return _output_size(self.cells[-1])

    def get_initial_state(self, batch_size: Any = None) -> list[Any]:
        """Return the states before the first step, those of each cell in a list."""
        return [self._initial_state(cell, batch_size) for cell in self.cells]

    def _initial_state(self, cell: Any, batch_size: Any) -> Any:
        if hasattr(cell, "get_initial_state"):
            return cell.get_initial_state(batch_size=batch_size)
        return tree.map_structure(lambda size: ops.zeros((batch_size, size), self.compute_dtype), cell.state_size)

    def build(self, input_shape: Any) -> None:
        """Make the weights of all cells."""
        for cell in self.cells:
            if isinstance(cell, Layer) and not cell.built:
                cell.build(input_shape)
                cell.built = True
            input_shape = (input_shape[0], _output_size(cell))

    def call(self, inputs: Tensor, states: Sequence[Any], training: bool = False) -> tuple[Tensor, list[Any]]:
        """Return the output of the last cell, and the states of all after a step.

        `states` has a tensor or a list for each cell; `training` is passed to the cells.
        """
        after = []
        for cell, before in zip(self.cells, states, strict=True):
            takes_training = isinstance(cell, Layer) and "training" in cell._signature.parameters
            keywords = {"training": training} if takes_training else {}
            call = cell if callable(cell) else cell.call
            alone = not tree.is_nested(before)
            inputs, new = call(inputs, [before] if alone else list(before), **keywords)
            after.append(new[0] if alone and tree.is_nested(new) else new)
        return inputs, after

    def _get_own_config(self) -> dict[str, Any]:
        import dptrain  # its table of layers has this class

        return {"cells": [dptrain.layers.serialize(cell) for cell in self.cells]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the stack that `config` describes."""
        import dptrain

        if not isinstance(config["cells"], list | tuple):
            raise ConfigError(f"{cls.__name__}: cells = {short(config['cells'])}: expected a list of cells")
        cells = [
            dptrain.layers.deserialize(cell, custom_objects) if isinstance(cell, Mapping) else cell
            for cell in config["cells"]
        ]
        return super().from_config({**config, "cells": cells})


def _output_size(cell: Any) -> Any:
    size = getattr(cell, "output_size", None)
    if size is not None:
        return size
    return cell.state_size[0] if isinstance(cell.state_size, list | tuple) else cell.state_size


def with_bare_states(outputs: Any) -> Any:
    """Return symbolic outputs of a layer with each state that is alone in its list without the list, as in Keras."""
    if not isinstance(outputs, tuple):
        return outputs
    return tuple(part[0] if isinstance(part, list) and len(part) == 1 else part for part in outputs)
