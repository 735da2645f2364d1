"""A program: what one execution reads, and what it makes of it; traced from a Python function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.program.gradient import topological
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor, Variable, as_tensors, placeholder, tracing


@dataclass(frozen=True)
class Program:
    """The ops of one step as data.

    Attributes:
        inputs: placeholders by name: the data, and the state that is read, such as "dense/kernel".
        outputs: what comes out, by name.
        updates: the new values of the state, by name.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]

    @property
    def results(self) -> list[Tensor]:
        """Everything that an execution must compute."""
        return [*self.outputs.values(), *self.updates.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, each after its inputs."""
        return topological(self.results)


def trace(
    function: Callable[..., Mapping[str, Any]],
    inputs: Mapping[str, tuple[Shape, npt.DTypeLike]],
    variables: Sequence[Variable] = (),
) -> Program:
    """Return the program of a function, which is called once, on placeholders.

    Args:
        function: takes the inputs by position, and returns what comes out by name; it may read and assign variables.
        inputs: shape and dtype by name; lengths that count rows of the batch are `Rows`.
        variables: the state, whose names differ; afterwards it is as before.

    Raises:
        ConfigError: names are not unique, or the function decides by a value.
    """
    names = [*inputs, *(one.name for one in variables)]
    if len(set(names)) < len(names):
        raise ConfigError(f"names of inputs and variables must differ: {sorted(names)}")
    data = {name: placeholder(shape, dtype, name) for name, (shape, dtype) in inputs.items()}
    state = {one.name: placeholder(one.shape, one.dtype, one.name, one) for one in variables}
    before = [(one, one.tensor, one.grad) for one in variables]
    try:
        for one in variables:
            one.tensor, one.grad = state[one.name], None
        with tracing():
            found = function(*data.values())
        outputs = dict(zip(found, as_tensors(list(found.values())), strict=True))
        updates = {one.name: one.tensor for one in variables if one.tensor is not state[one.name]}
    finally:
        for one, tensor, grad in before:
            one.tensor, one.grad = tensor, grad
    return Program({**data, **state}, outputs, updates)
