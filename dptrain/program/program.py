"""Programs: the ops of a step as data, traced from a Python function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.program.body import has_loops, trimmed
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.shapes import Shape, local
from dptrain.program.tensor import Tensor, Trace, Variable, as_tensors, placeholder, tracing

# The input with numbers of stored rows: an executable has those of many steps, and each step reads its own.
ROWS = "rows"


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of a step as data.

    Attributes:
        inputs: placeholders of the data, by name.
        state: placeholders of the variables that are read or updated.
        outputs: results by name.
        updates: the new values of variables.
        derived: a program of the new state for outputs that depend on it alone, such as metrics' results, to execute
            when they are read.
        rows: of the global batch; 0 if nothing counts them.
        shape_specialised: whether the program depends on that number beyond its dims.
        weight_gradients: gradients in trainable variables, and the variables.
        lowered: backends' cache for any number of rows; `for_rows` shares it.
    """

    inputs: Mapping[str, Tensor]
    state: Mapping[Variable, Tensor]
    outputs: Mapping[str, Tensor]
    updates: Mapping[Variable, Tensor]
    derived: "Program | None" = None
    rows: int = 0
    shape_specialised: bool = False
    weight_gradients: Mapping[Tensor, Variable] = field(default_factory=dict)
    lowered: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def results(self) -> list[Tensor]:
        """Everything that an execution must compute."""
        return [*self.outputs.values(), *self.updates.values()]

    @cached_property
    def reads(self) -> frozenset[Variable]:
        """Variables whose values an execution reads."""
        return frozenset(self.state)

    @cached_property
    def writes(self) -> frozenset[Variable]:
        """Variables that an execution changes."""
        return frozenset(self.updates)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in topological order."""
        return tuple(topological(self.results))

    def check_input(self, name: str, shape: Shape, rows: int | None) -> None:
        """Raise ConfigError if an array has another shape than an input; a step may have fewer stored rows."""
        expected = local(self.inputs[name].shape, rows)
        is_stored = ROWS in self.inputs and name != ROWS and len(shape) == len(expected) > 0
        if shape != expected and not (is_stored and shape[1:] == expected[1:] and shape[0] < expected[0]):
            raise ConfigError(f"input {name!r} has shape {shape}: expected {expected}")

    def with_substitutes(self, new: Mapping[Tensor, Tensor]) -> Self:
        """Return the program of other tensors in place of its own; gradients without a substitute are left out."""
        gradients = self.weight_gradients.items()
        return replace(
            self,
            outputs={name: new[tensor] for name, tensor in self.outputs.items()},
            updates={variable: new[tensor] for variable, tensor in self.updates.items()},
            weight_gradients={new[tensor]: variable for tensor, variable in gradients if tensor in new},
        )

    def for_rows(self, rows: int) -> Self:
        """Return the program for another global batch size."""
        copy = replace(self, rows=rows)
        object.__setattr__(copy, "lowered", self.lowered)
        return copy


def trace(function: Callable[..., Mapping[str, Any]], inputs: Mapping[str, tuple[Shape, npt.DTypeLike]]) -> Program:
    """Return the program of a function, which is called once, on placeholders.

    Args:
        function: takes the inputs by position, and returns outputs by name; it may read and assign variables, which
            keep their values.
        inputs: shape and dtype by name; lengths that count rows of the batch are `Dim`s.

    Raises:
        ConfigError: the function branches on a value.
    """
    data = {name: placeholder(shape, dtype, name) for name, (shape, dtype) in inputs.items()}
    with tracing() as recorded:
        results = function(*data.values())
        outputs = dict(zip(results, as_tensors(list(results.values())), strict=True))
        for variable in recorded.written:
            recorded.placeholder_of(variable)
    updates = {variable: leaf.inputs[0] for variable, leaf in recorded.written.items()}
    derived = _derived(outputs, recorded)
    placeholders = {name: tensor for name, tensor in outputs.items() if name not in derived.outputs}
    weight_gradients = recorded.weight_gradients
    if has_loops([*placeholders.values(), *updates.values()]):
        new = trimmed([*placeholders.values(), *updates.values()])
        placeholders = {name: new[tensor] for name, tensor in placeholders.items()}
        updates = {variable: new[tensor] for variable, tensor in updates.items()}
        weight_gradients = {new[tensor]: variable for tensor, variable in weight_gradients.items() if tensor in new}
    sizes = [n.size for shape, _ in inputs.values() for n in shape if isinstance(n, Dim) and n.size is not None]
    rows = sizes[0].number if sizes else 0
    missing = any(batch_size.asked for batch_size in sizes)
    return Program(data, recorded.read, placeholders, updates, derived, rows, missing, weight_gradients)


def _derived(outputs: Mapping[str, Tensor], recorded: Trace) -> Program:
    """Return the program of outputs that depend only on the state after the step."""
    unchanged = {variable: leaf for variable, leaf in recorded.read.items() if variable not in recorded.written}
    state = {**unchanged, **recorded.written}
    leaves = {leaf: placeholder(leaf.shape, leaf.dtype, variable._path, variable) for variable, leaf in state.items()}
    replacements: dict[Tensor, Tensor | None] = dict(leaves)  # None if it needs the step's data

    for tensor in topological(outputs.values()):
        if tensor in replacements:
            continue
        inputs = [replacements[operand] for operand in tensor.inputs]
        if tensor.op is None:
            replacements[tensor] = None if tensor.value is None or tensor.counts_rows else tensor
        elif any(operand is None for operand in inputs) or any(isinstance(n, Dim) for n in tensor.shape):
            replacements[tensor] = None
        else:
            replacements[tensor] = tensor.with_inputs([operand for operand in inputs if operand is not None])
    derived = {name: operand for name, tensor in outputs.items() if (operand := replacements[tensor]) is not None}
    behind_derived = set(topological(derived.values()))  # their values are fetched from the device
    read = {variable: leaves[leaf] for variable, leaf in state.items() if leaves[leaf] in behind_derived}
    return Program({}, read, derived, {})
