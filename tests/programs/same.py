"""Whether two traces are of one program."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.program.body import Body
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.program import Program
from dptrain.program.tensor import Tensor


def same_for_rows(first: Program, other: Program) -> bool:
    """Whether two traces of a function, for different numbers of rows, differ in nothing but that number."""
    mine, theirs = first.tensors, other.tensors
    places = [{id(tensor): place for place, tensor in enumerate(tensors)} for tensors in (mine, theirs)]

    def kind(tensor: Tensor, place: dict[int, int]) -> Any:
        inputs = [place[id(operand)] for operand in tensor.inputs]
        variable = None if tensor.variable is None else tensor.variable._path
        return id(tensor.op), inputs, variable, _scaled(tensor.shape), tensor.dtype, _scaled(tensor.attributes)

    def is_same(a: Tensor, b: Tensor) -> bool:
        if kind(a, places[0]) != kind(b, places[1]):
            return False
        is_computed = a.op is not None or a.value is None or a.counts_rows
        return is_computed or np.array_equal(a.value, np.asarray(b.value), equal_nan=a.dtype.kind == "f")

    results = [
        [place[id(result)] for result in program.results] for place, program in zip(places, (first, other), strict=True)
    ]
    return (
        len(mine) == len(theirs)
        and list(first.outputs) == list(other.outputs)
        and results[0] == results[1]
        and all(map(is_same, mine, theirs))
    )


def _scaled(value: Any) -> Any:
    """Return an attribute, with what counts rows as such."""
    if isinstance(value, Dim):
        return "rows", value.scale
    if isinstance(value, Body):
        return _steps(value)
    if isinstance(value, Mapping):
        return {name: _scaled(item) for name, item in value.items()}
    return tuple(map(_scaled, value)) if isinstance(value, tuple | list) else value


def _steps(body: Body) -> Any:
    """Return what bodies of loops have in common that differ in nothing but the number of rows."""
    tensors = topological(body.results)
    places = {id(tensor): place for place, tensor in enumerate((*body.placeholders, *tensors))}
    nodes = [
        (
            id(tensor.op),
            [places[id(operand)] for operand in tensor.inputs],
            _scaled(tensor.shape),
            tensor.dtype,
            _scaled(tensor.attributes),
            None if tensor.value is None else tensor.value.tobytes(),
        )
        for tensor in (*body.placeholders, *tensors)
    ]
    return nodes, [places[id(result)] for result in body.results], len(body.carries), len(body.slices), body.sums
