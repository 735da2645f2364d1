"""Loops and programs: a step of a loop as a program, and a program without loops, or without attention as one op."""

from dataclasses import replace

from dptrain.program.body import Body, has_body
from dptrain.program.lowering import Attention, Repeat, lowering_of
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.tensor import Node, Tensor, tracing


def step_of(body: Body, rows: int = 0) -> Program:
    """Return a step of a loop as a program, one for each body: its inputs and outputs are numbered.

    Args:
        body: of the loop.
        rows: of the global batch.
    """
    if "program" not in body.made:
        inputs = {str(number): one for number, one in enumerate(body.placeholders)}
        outputs = {str(number): one for number, one in enumerate(body.results)}
        body.made["program"] = Program(inputs, {}, outputs, {}, rows=rows)
    found: Program = body.made["program"]
    return found if found.rows == rows else found.for_rows(rows)


def unrolled(program: Program, only: Node | None = None) -> Program:
    """Return a program in which the steps of a loop stand one after the other.

    Args:
        program: any.
        only: the loop; by default all.
    """
    read: dict[Node, set[int]] = {}
    for tensor in program.tensors:
        if has_body(tensor) and only in (None, tensor.node):
            read.setdefault(tensor.node, set()).add(tensor.index)
    if not read:
        return program
    new: dict[Tensor, Tensor] = {}
    values: dict[Node, tuple[Tensor, ...]] = {}
    with tracing():
        for tensor in program.tensors:
            inputs = [new[one] for one in tensor.inputs]
            lowering = lowering_of(tensor)
            if not isinstance(lowering, Repeat) or tensor.node not in read:
                new[tensor] = tensor.with_inputs(inputs)
                continue
            if tensor.node not in values:
                values[tensor.node] = lowering.steps(tensor.node, inputs, read[tensor.node])
            new[tensor] = values[tensor.node][tensor.index]
    return replace(
        program,
        outputs={name: new[one] for name, one in program.outputs.items()},
        updates={variable: new[one] for variable, one in program.updates.items()},
        of_weights={new[one]: variable for one, variable in program.of_weights.items() if one in new},
        derived=None if program.derived is None else unrolled(program.derived),
    )


def without_attention(program: Program) -> Program:
    """Return a program in which attention is made of other ops, for backends that have no kernel for it."""
    made: dict[Node, tuple[Tensor, ...]] = {}

    def change(tensor: Tensor) -> Tensor:
        lowering = lowering_of(tensor)
        if not isinstance(lowering, Attention):
            return tensor
        if tensor.node not in made:
            made[tensor.node] = lowering.composed(tensor.inputs, tensor.attributes)
        return made[tensor.node][tensor.index]

    with tracing():
        return rewritten(program, change)
