"""Executing a program op by op with NumPy: the plainest executor, which says what the faster ones must compute."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.program.mesh import OWN_PART, PlacedProgram, constant_of, own_part
from dptrain.program.messages import all_reduced, stages
from dptrain.program.program import Program
from dptrain.program.shapes import local
from dptrain.program.tensor import Array, Tensor, Variable, watch


def evaluate(
    program: Program,
    values: Mapping[str, Any],
    state: Mapping[Variable, Array] | None = None,
    *,
    rows: int | None = None,
    first_row: int = 0,
    comm: Communicator | None = None,
) -> tuple[dict[str, Array], dict[Variable, Array]]:
    """Return what comes out of a program, and the new values of its state. Collective where it is a placed one.

    Derived outputs are among it unless ranks have summands of the state.

    Args:
        program: what is executed.
        values: of its inputs, by name: this rank's rows of what is sharded.
        state: values of variables; those that are not in it have their own.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.

    Raises:
        ConfigError: an input is missing or has another shape.
    """
    rows = program.rows if rows is None else rows
    found: dict[int, Array] = {}
    for name, one in program.inputs.items():
        if name not in values:
            raise ConfigError(f"input {name!r} is missing")
        array = np.asarray(values[name], one.dtype)
        expected = local(one.shape, rows)
        if array.shape != expected:
            raise ConfigError(f"input {name!r} has shape {array.shape}: expected {expected}")
        found[id(one)] = array
    for variable, one in program.state.items():
        known = None if state is None else state.get(variable)
        found[id(one)] = variable.numpy() if known is None else known
    for stage in stages(program):
        for tensor in stage.tensors:
            if id(tensor) not in found:
                inputs = [found[id(one)] for one in tensor.inputs]
                found[id(tensor)] = _value(tensor, inputs, rows, first_row, program.rows)
                if tensor.op is not None:
                    watch(tensor, found[id(tensor)])
        for message in stage.messages:
            parts = [found[id(one.inputs[0])] for one in message]
            sums = all_reduced(parts, comm, message[0].attributes["over"])
            found |= {id(one): value for one, value in zip(message, sums, strict=True)}
    outputs = {name: found[id(one)] for name, one in program.outputs.items()}
    updates = {variable: found[id(one)] for variable, one in program.updates.items()}
    if program.derived is not None and not (isinstance(program, PlacedProgram) and program.summed):
        outputs |= evaluate(program.derived, {}, {**(state or {}), **updates})[0]
    return outputs, updates


def _value(tensor: Tensor, inputs: list[Array], rows: int, first_row: int, batch_rows: int) -> Array:
    if tensor.op is None:
        return constant_of(tensor, rows, batch_rows)
    if tensor.op is OWN_PART:
        return own_part(tensor, inputs[0], rows, first_row)
    return tensor.op.execute(inputs, tensor, rows, first_row)
