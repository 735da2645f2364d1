"""Passes over loops and attention: a step as a program, unrolling, attention as simpler ops."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.body import Body, body_of, has_body, steps_of, with_steps
from dptrain.program.gradient import topological
from dptrain.program.lowering import AttentionLowering, LoopLowering, in_order, lowering_of
from dptrain.program.operand import METHODS, OPERATORS
from dptrain.program.passes import halves_of, rewritten, without_all_reduce
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule.loops import repeat_of
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Node, Tensor, placeholder, tracing

# The most ops that unrolling a loop may make.
_MOST_UNROLLED = 1 << 18


def step_of(body: Body, rows: int = 0) -> Program:
    """Return a step of a loop as a program with numbered inputs and outputs, cached in the body."""
    if "program" not in body.made:
        inputs = {str(number): tensor for number, tensor in enumerate(body.placeholders)}
        outputs = {str(number): tensor for number, tensor in enumerate(body.results)}
        body.made["program"] = Program(inputs, {}, outputs, {}, rows=rows)
    program: Program = body.made["program"]
    return program if program.rows == rows else program.for_rows(rows)


def with_branches_selected(program: Program) -> Program:
    """Compute all branches, also in steps of loops, and select their results."""

    def change(step: Program) -> Program:
        while any(has_body(tensor) and body_of(tensor).guarded for tensor in step.tensors):
            step = unrolled(step, lambda node: body_of(node).guarded)
        return step

    return with_steps_changed(program, change)


def unrolled(program: Program, chooses: Callable[[Node], bool] = lambda _: True) -> Program:
    """Write the steps of loops of known length down, and branches; ConfigError if that makes too many ops."""
    read: dict[Node, set[int]] = {}
    for tensor in program.tensors:
        if has_body(tensor) and steps_of(tensor) is not None and chooses(tensor.node):
            read.setdefault(tensor.node, set()).add(tensor.index)
    if not read:
        return program
    if (count := sum(map(_count, read))) > _MOST_UNROLLED:
        raise ConfigError(f"not supported: unrolling a loop into {count:,} ops, at most {_MOST_UNROLLED:,}")
    new: dict[Tensor, Tensor] = {}
    values: dict[Node, tuple[Tensor, ...]] = {}
    with tracing():
        for tensor in program.tensors:
            inputs = [new[operand] for operand in tensor.inputs]
            lowering = lowering_of(tensor)
            if not isinstance(lowering, LoopLowering) or lowering.steps is None or tensor.node not in read:
                new[tensor] = tensor.with_inputs(inputs)
                continue
            if tensor.node not in values:
                values[tensor.node] = lowering.steps(tensor.node, inputs, read[tensor.node])
            new[tensor] = values[tensor.node][tensor.index]
    derived = None if program.derived is None else unrolled(program.derived)
    return replace(program.with_substitutes(new), derived=derived)


def _count(loop: Node) -> int:
    order = topological(body_of(loop).results)
    nested = {tensor.node for tensor in order if has_body(tensor) and steps_of(tensor) is not None}
    of_step = sum(tensor.op is not None for tensor in order) + sum(map(_count, nested))
    return int(loop.attributes["length"]) * of_step


def with_attention_on_gpu(program: Program, precision_of: Callable[[Sequence[Tensor]], str | None]) -> Program:
    """Replace attention by kernels of a GPU, whose gradients share the forward pass, or by simpler ops."""
    values: dict[Node, tuple[Tensor, ...]] = {}
    passes: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
    halves: dict[Tensor, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        lowering = lowering_of(tensor)
        if not isinstance(lowering, AttentionLowering):
            return tensor
        if tensor.node not in values:
            inputs, attributes, count = tensor.inputs, tensor.attributes, 4 if lowering.gradient else 3
            operands = [half(read) for read in inputs[:count]]
            if any(operand.dtype != operands[0].dtype for operand in operands):
                operands = list(inputs[:count])
            if (precision := precision_of(operands)) is not None:
                attributes = {**attributes, "precision": precision}
                inputs = tuple(
                    read if _lies_whole(read) else copies.setdefault(read, _copy(read))
                    for read in (*operands, *inputs[count:])
                )
                values[tensor.node] = lowering.on_gpu(inputs, attributes, partial(forward, lowering.forward))
            else:
                values[tensor.node] = lowering.composed(inputs, attributes)
        return values[tensor.node][tensor.index]

    def half(read: Tensor) -> Tensor:
        if read not in halves:
            halves[read] = (halves_of([read]) or [read])[0]
        return halves[read]

    def forward(
        compute: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], attributes: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        key = (*map(id, inputs), *sorted(attributes.items()))
        if key not in passes:
            passes[key] = compute(inputs, attributes)
        return passes[key]

    with tracing():
        return rewritten(program, change)


def with_halves_in_loops(program: Program) -> Program:
    """Give loops half-precision tensors instead of float32 copies of them, which steps then make themselves.

    What steps stack stays in half precision as well, and is copied behind the loop. So products in steps, and of what
    steps have stacked, have half-precision factors.
    """
    loops: dict[Node, tuple[Sequence[Tensor], dict[str, Any]]] = {}
    halves: dict[Tensor, Tensor | None] = {}

    def half(read: Tensor) -> Tensor | None:
        if read not in halves:
            halves[read] = next(iter(halves_of([read]) or []), None)
        return halves[read]

    def change(tensor: Tensor) -> Tensor:
        if not has_body(tensor):
            return tensor
        if (node := tensor.node) not in loops:
            narrow_inputs, body = _with_halves(node, half, change)
            is_same = body is body_of(node)
            loops[node] = narrow_inputs, node.attributes if is_same else {**node.attributes, "body": body}
        inputs, attributes = loops[node]
        if attributes is node.attributes:
            return tensor
        dtype = attributes["body"].results[tensor.index].dtype
        value = Tensor(tensor.op, inputs, attributes, tensor.shape, dtype, name=tensor.name, index=tensor.index)
        return value if dtype == tensor.dtype else METHODS["cast"](value, tensor.dtype.name)

    if not any(map(has_body, program.tensors)):
        return program
    with tracing():
        return rewritten(program, change)


def _with_halves(
    node: Node, half: Callable[[Tensor], Tensor | None], change: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Body]:
    """Return the inputs and the body of a loop that reads and stacks what `half` returns, if it returns something.

    `change` returns the new tensor for one of the body.
    """
    body = body_of(node)
    inputs, placeholders, new = list(node.inputs), dict[Tensor, Tensor](), dict[Tensor, Tensor]()
    for operand in repeat_of(node).operands:
        if (narrow := half(node.inputs[operand.input])) is not None:
            inputs[operand.input], leaf = narrow, operand.leaf
            placeholders[leaf] = placeholder(leaf.shape, narrow.dtype, leaf.name)
            new[leaf] = METHODS["cast"](placeholders[leaf], leaf.dtype.name)
    for tensor in topological(body.results):
        if tensor not in new:
            new[tensor] = change(tensor.with_inputs([new[read] for read in tensor.inputs]))
    wide_stacked = [new[result] for result in body.stacked]
    stacked = tuple(wide if (narrow := half(wide)) is None else narrow for wide in wide_stacked)
    following = tuple(new[carry] for carry in body.following)
    if all(map(operator.is_, (*following, *stacked), body.results)):
        return inputs, body
    slices, captures = (tuple(placeholders.get(leaf, leaf) for leaf in group) for group in (body.slices, body.captures))
    return inputs, replace(body, slices=slices, captures=captures, following=following, stacked=stacked)


def with_steps_changed(program: Program, change: Callable[[Program], Program]) -> Program:
    """Apply a pass to a program and to the steps of its loops."""
    attributes: dict[Node, dict[str, Any]] = {}

    def of_loop(tensor: Tensor) -> Tensor:
        if not has_body(tensor):
            return tensor
        if (node := tensor.node) not in attributes:
            body = body_of(node)
            results = list(with_steps_changed(step_of(body), change).outputs.values())
            count = len(body.carries)
            body = replace(body, following=tuple(results[:count]), stacked=tuple(results[count:]))
            attributes[node] = {**node.attributes, "body": body}
        loop_attributes = attributes[node]
        return Tensor(
            tensor.op, tensor.inputs, loop_attributes, tensor.shape, tensor.dtype, name=tensor.name, index=tensor.index
        )

    return rewritten(change(program), of_loop)


def without_ranks(program: Program) -> Program:
    """Drop all-reduces, for a single rank."""
    if any(tensor.op is ALL_REDUCE for tensor in with_steps(program.tensors)):
        return with_steps_changed(program, lambda step: rewritten(step, without_all_reduce))
    return program


def with_loops_in_memory(program: Program) -> Program:
    """Give all values that loops carry from step to step their own memory.

    Each carry begins with a tensor that nothing else reads, and other inputs are contiguous. Each result of a step is
    computed and distinct. No two loops share a tensor of their steps.
    """
    loops: dict[Node, tuple[Sequence[Tensor], dict[str, Any]]] = {}

    def change(tensor: Tensor) -> Tensor:
        if not has_body(tensor):
            return tensor
        if (node := tensor.node) not in loops:
            repeat = repeat_of(node)
            carries = [
                zero_carry(carry.leaf) if carry.input is None else _copy(node.inputs[carry.input])
                for carry in repeat.carries
            ]
            others = [in_order(node.inputs[operand.input]) for operand in repeat.operands]
            others = [operand if _lies_whole(operand) else _copy(operand) for operand in others]
            loops[node] = [*carries, *others], {**node.attributes, "body": _of_its_own(repeat.body)}
        inputs, attributes = loops[node]
        return Tensor(tensor.op, inputs, attributes, tensor.shape, tensor.dtype, name=tensor.name, index=tensor.index)

    return rewritten(program, change)


def _of_its_own(body: Body) -> Body:
    # With distinct, computed results; all carries have inputs.
    new = {tensor: placeholder(tensor.shape, tensor.dtype, tensor.name) for tensor in body.placeholders}
    for tensor in topological(body.results):
        if tensor not in new:
            new[tensor] = tensor.with_inputs([new[read] for read in tensor.inputs])
    used: set[Tensor] = set()

    def distinct(result: Tensor) -> Tensor:
        made = new[result]
        if made.op is None or has_body(made) or made in used:
            return _copy(made)
        used.add(made)
        return made

    carries, slices, captures = (
        tuple(map(new.__getitem__, group)) for group in (body.carries, body.slices, body.captures)
    )
    following, stacked = (tuple(map(distinct, group)) for group in (body.following, body.stacked))
    return Body(carries, slices, captures, following, stacked, 0, body.counted, body.guarded)


def _copy(tensor: Tensor) -> Tensor:
    return Tensor(OPERATORS["identity"], (tensor,), {}, tensor.shape, tensor.dtype)


def zero_carry(like: Tensor) -> Tensor:
    """Return the zeros with which a carry begins."""
    attributes = {"shape": like.shape, "value": 0, "dtype": like.dtype.name}
    return Tensor(OPERATORS["fill"], (), attributes, like.shape, like.dtype)


def _lies_whole(tensor: Tensor) -> bool:
    """Whether a tensor can be stored: neither a literal nor the rows, which differ by step."""
    if tensor.op is not None:
        return True
    return tensor.variable is not None or (tensor.name != ROWS if tensor.value is None else tensor.value.size > 1)
