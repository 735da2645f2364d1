"""A program: what one execution reads, and what it makes of it; traced from a Python function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dptrain.program.gradient import topological
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor, Variable, as_tensors, placeholder, tracing

# The input that holds numbers of stored rows: an executable is given those of many steps, and reads its own at each.
ROWS = "rows"


@dataclass(frozen=True)
class Program:
    """The ops of one step as data.

    Attributes:
        inputs: placeholders of the data, by name.
        state: placeholders of the variables that are read or updated.
        outputs: what comes out, by name.
        updates: the new values of variables.
    """

    inputs: Mapping[str, Tensor]
    state: Mapping[Variable, Tensor]
    outputs: Mapping[str, Tensor]
    updates: Mapping[Variable, Tensor]

    @property
    def results(self) -> list[Tensor]:
        """Everything that an execution must compute."""
        return [*self.outputs.values(), *self.updates.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, each after its inputs."""
        return topological(self.results)


def trace(function: Callable[..., Mapping[str, Any]], inputs: Mapping[str, tuple[Shape, npt.DTypeLike]]) -> Program:
    """Return the program of a function, which is called once, on placeholders.

    Args:
        function: takes the inputs by position, and returns what comes out by name; it may read and assign variables,
            which stay as they are.
        inputs: shape and dtype by name; lengths that count rows of the batch are `Rows`.

    Raises:
        ConfigError: the function decides by a value.
    """
    data = {name: placeholder(shape, dtype, name) for name, (shape, dtype) in inputs.items()}
    with tracing() as seen:
        found = function(*data.values())
        outputs = dict(zip(found, as_tensors(list(found.values())), strict=True))
        for variable in seen.written:
            seen.placeholder_of(variable)
    updates = {variable: leaf.inputs[0] for variable, leaf in seen.written.items()}
    return Program(data, seen.read, outputs, updates)
