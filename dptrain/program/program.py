"""A program: what one execution reads, and what it makes of it; traced from a Python function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.program.gradient import topological
from dptrain.program.shapes import Rows, Shape
from dptrain.program.tensor import Tensor, Trace, Variable, as_tensors, placeholder, tracing

# The input that holds numbers of stored rows: an executable is given those of many steps, and reads its own at each.
ROWS = "rows"


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one step as data.

    Attributes:
        inputs: placeholders of the data, by name.
        state: placeholders of the variables that are read or updated.
        outputs: what comes out, by name.
        updates: the new values of variables.
        derived: outputs that follow from the new state alone, such as metrics' results: a program
            of that state, to be executed when somebody looks.
    """

    inputs: Mapping[str, Tensor]
    state: Mapping[Variable, Tensor]
    outputs: Mapping[str, Tensor]
    updates: Mapping[Variable, Tensor]
    derived: "Program | None" = None

    @property
    def results(self) -> list[Tensor]:
        """Everything that an execution must compute."""
        return [*self.outputs.values(), *self.updates.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, each after its inputs."""
        return topological(self.results)

    @property
    def rows(self) -> int:
        """The number of rows of the global batch, as it was traced; 0 where nothing counts them."""
        for one in (*self.tensors, *self.inputs.values()):
            if one.counts_rows:
                return int(one.numpy()) // int(one.attributes["rows"])
            for length in one.shape:
                if isinstance(length, Rows):
                    return length.rows
        return 0


def same_for_rows(one: Program, other: Program) -> bool:
    """Whether two traces of a function, for different numbers of rows, differ in nothing but that number.

    If so, nothing in the function depends on the number but lengths that say so.
    """
    mine, theirs = one.tensors, other.tensors
    places = [{id(tensor): place for place, tensor in enumerate(each)} for each in (mine, theirs)]

    def kind(tensor: Tensor, place: dict[int, int]) -> Any:
        inputs = [place[id(each)] for each in tensor.inputs]
        variable = None if tensor.variable is None else id(tensor.variable)
        return id(tensor.op), inputs, variable, _scaled(tensor.shape), tensor.dtype, _scaled(tensor.attributes)

    def is_same(a: Tensor, b: Tensor) -> bool:
        if kind(a, places[0]) != kind(b, places[1]):
            return False
        return a.op is not None or a.value is None or a.counts_rows or np.array_equal(a.value, np.asarray(b.value))

    results = [
        [place[id(each)] for each in program.results] for place, program in zip(places, (one, other), strict=True)
    ]
    return (
        len(mine) == len(theirs)
        and list(one.outputs) == list(other.outputs)
        and results[0] == results[1]
        and all(map(is_same, mine, theirs))
    )


def _scaled(value: Any) -> Any:
    """Return an attribute, with what counts rows as such."""
    if isinstance(value, Rows):
        return "rows", value.scale
    if isinstance(value, Mapping):
        return {name: _scaled(one) for name, one in value.items()}
    return tuple(map(_scaled, value)) if isinstance(value, tuple | list) else value


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
    derived = _derived(outputs, seen)
    updates = {variable: leaf.inputs[0] for variable, leaf in seen.written.items()}
    own = {name: one for name, one in outputs.items() if name not in derived.outputs}
    return Program(data, seen.read, own, updates, derived)


def _derived(outputs: Mapping[str, Tensor], seen: Trace) -> Program:
    """Return the program of those outputs that follow from the state after the step."""
    unchanged = {variable: one for variable, one in seen.read.items() if variable not in seen.written}
    state = {**unchanged, **seen.written}
    known = {id(one): placeholder(one.shape, one.dtype, variable.path, variable) for variable, one in state.items()}
    told: dict[int, Tensor | None] = dict(known)  # None for what needs the step's own data

    def tell(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in told:
            inputs = [tell(one) for one in tensor.inputs]
            if tensor.op is None:
                told[id(tensor)] = None if tensor.value is None or tensor.counts_rows else tensor
            elif any(one is None for one in inputs) or any(isinstance(n, Rows) for n in tensor.shape):
                told[id(tensor)] = None
            else:
                same = [one for one in inputs if one is not None]
                told[id(tensor)] = tensor.with_inputs(same)
        return told[id(tensor)]

    found = {name: one for name, tensor in outputs.items() if (one := tell(tensor)) is not None}
    needed = {id(one) for one in topological(found.values())}  # whose values are fetched from the device
    read = {variable: known[id(one)] for variable, one in state.items() if id(known[id(one)]) in needed}
    return Program({}, read, found, {})
