"""The op of all loops: steps of a body, forwards or in reverse.

A node's inputs are the initial carries, stacked inputs and captures; its values the final carries and the stacked
outputs. Its gradient is a loop in the other direction.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.ops.elementwise import cast, logical_and, where
from dptrain.ops.manipulation import reshape, stack, transpose, zeros
from dptrain.ops.products import batch_matmul
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.body import Body, closed, extend, has_body, steps_of, with_steps
from dptrain.program.gradient import pulled_back, topological
from dptrain.program.lowering import Element, LoopLowering, Product, Reduction, ViewMap, lowering_of
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op
from dptrain.program.operand import OPERATORS
from dptrain.program.schedule.loops import operations_of, repeat_of
from dptrain.program.shapes import Shape
from dptrain.program.tensor import DType, Node, Tensor, placeholder, tracing
from dptrain.runtime.types import is_floating, type_of


def _shapes(*inputs: Shape, body: Body, length: int, reverse: bool) -> Any:
    return body.shapes(length)


def _dtypes(*inputs: Any, body: Body, length: int, reverse: bool) -> list[Any]:
    return body.dtypes()


def letters_of_loop(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """Return letters of unsharded axes, as those of loops are, unless the body is placed."""
    body: Body = attributes["body"]
    letters = ("X" * len(shape) for shape in body.shapes())
    return f"{','.join('X' * len(shape) for shape in shapes)}->{','.join(letters)}"


def _compute(*arrays: Any, body: Body, length: int, reverse: bool, out: Any) -> None:
    raise AssertionError("executables run the body of a loop, not its op")


def _unrolled(
    node: Node, inputs: Sequence[Tensor], read: Collection[int], around: Tensor | None = None
) -> tuple[Tensor, ...]:
    # `around` is true if these steps are executed, where they stand in a branch that is written down.
    repeat = repeat_of(node)
    assert repeat.length is not None
    carries = [
        zeros(carry.leaf.shape, carry.leaf.dtype) if carry.input is None else inputs[carry.input]
        for carry in repeat.carries
    ]
    captures = {capture.leaf: inputs[capture.input] for capture in repeat.captures}
    guard = None if repeat.guard is None else inputs[repeat.guard]
    order = topological(repeat.body.results)
    outputs: list[dict[int, Tensor]] = [{} for _ in repeat.stacks]
    for position in map(repeat.position, range(repeat.length)):
        new = {carry.leaf: tensor for carry, tensor in zip(repeat.carries, carries, strict=True)} | captures
        new |= {part.leaf: inputs[part.input][position] for part in repeat.slices}
        nested: dict[Node, tuple[Tensor, ...]] = {}
        for tensor in order:
            step_inputs = [new[source] for source in tensor.inputs]
            if tensor in new:
                continue
            lowering = lowering_of(tensor)
            if not isinstance(lowering, LoopLowering):
                new[tensor] = tensor.with_inputs(step_inputs)
                continue
            if tensor.node not in nested:
                nested[tensor.node] = _nested(tensor.node, lowering, step_inputs, around if guard is None else guard)
            new[tensor] = nested[tensor.node][tensor.index]
        carries = [new[carry.result] for carry in repeat.carries]
        for tensors, output in zip(outputs, repeat.stacks, strict=True):
            tensors[position] = new[output.result]
    results = carries
    for tensors, output in zip(outputs, repeat.stacks, strict=True):
        of_step = output.result
        if output.value not in read:
            results.append(of_step)
        elif not tensors:
            results.append(zeros((0, *of_step.shape), of_step.dtype))
        else:
            stacked = stack([tensors[position] for position in range(repeat.length)])
            results.append(
                stacked if guard is None else where(guard, stacked, zeros((1, *of_step.shape), of_step.dtype))
            )
    return tuple(results)


def _nested(node: Node, lowering: LoopLowering, inputs: list[Tensor], guard: Tensor | None) -> tuple[Tensor, ...]:
    """Return the values of a loop in a step that is written down, which a branch executes only if its guard is true."""
    repeat = repeat_of(node)
    within = [steps_of(tensor) for tensor in with_steps(topological(repeat.body.results)) if has_body(tensor)]
    may_not_end = guard is not None and None in (repeat.length, *within)  # where the branch is not taken
    if lowering.steps is not None and repeat.guard is None and (guard is None or may_not_end):
        return _unrolled(node, inputs, range(len(repeat.body.results)), guard)
    condition = repeat.guard if repeat.length is not None else repeat.condition.input
    if condition is not None and may_not_end:
        inputs[condition] = logical_and(guard, inputs[condition])
    return node.op.values_of(inputs, node.attributes)


SCAN = Op(
    _compute,
    _shapes,
    letters_of_loop,
    _dtypes,
    lowering=LoopLowering(_unrolled),
    has_values=True,
    operations=operations_of,
)
SCAN.name = "scan"


@SCAN.onnx_lowering
def _onnx(graph: OnnxGraph, value: Tensor, *inputs: Value) -> Sequence[Value]:
    # No step and one are written down, as runtimes differ in what they make of none.
    repeat = repeat_of(value)
    body, length, order = repeat.body, repeat.length, topological(repeat.body.results)
    carries = [
        graph.expand(graph.constant(0, carry.leaf.dtype), carry.leaf.shape)
        if carry.input is None
        else inputs[carry.input]
        for carry in repeat.carries
    ]
    stacks = [inputs[part.input] for part in repeat.slices]
    captures = {capture.leaf: inputs[capture.input] for capture in repeat.captures}
    if length == 0:
        return [*carries, *(graph.expand(graph.constant(0, end.dtype), (0, *end.shape)) for end in body.stacked)]
    if length == 1:
        first_axis = graph.constant([0], np.int64)
        parts = [graph.node("Squeeze", stack, first_axis) for stack in stacks]
        values = dict(zip((*body.carries, *body.slices), (*carries, *parts), strict=True)) | captures
        inside = graph if repeat.guard is None else OnnxGraph(graph, "then")
        inside.add(order, values)
        stacked = [inside.node("Unsqueeze", values[end], first_axis) for end in body.stacked]
        if repeat.guard is not None:
            other = OnnxGraph(graph, "else")
            starts = [other.expand(other.constant(0, end.dtype), (1, *end.shape)) for end in body.stacked]
            return graph.choose(inputs[repeat.guard], inside.body([], stacked), other.body([], starts))
        return [*(values[end] for end in body.following), *stacked]
    step = OnnxGraph(graph)
    leaves = (*body.carries, *body.slices)
    arguments = [step.argument(number, leaf.dtype) for number, leaf in enumerate(leaves)]
    values = dict(zip(leaves, arguments, strict=True)) | captures
    if not stacks:  # which tell how many steps there are
        arguments.append(step.argument(len(arguments), np.dtype(np.bool_)))
        stacks = [graph.expand(graph.constant(False), (length,))]
    step.add(order, values)
    stacks = list(map(graph.flip, stacks)) if repeat.reverse else stacks
    of_step = step.body(arguments, [values[end] for end in body.results], body.results)
    results = graph.scan(carries, stacks, of_step)
    last, outputs = results[: len(carries)], results[len(carries) :]
    return [*last, *(map(graph.flip, outputs) if repeat.reverse else outputs)]


@SCAN.gradient
def _gradient(
    outputs: tuple[Tensor, ...], dys: tuple[Tensor | None, ...], *inputs: Tensor
) -> tuple[Tensor | None, ...]:
    # It carries the gradients of the carries and an accumulator for each capture. Factors of matrix products are
    # stacked instead of accumulated, and multiplied after the loop; sums of what is stacked are summed there. A single
    # step accumulates nothing.
    node = outputs[0].node
    repeat = repeat_of(node)
    body, is_single = repeat.body, repeat.length == 1
    carried = {carry.leaf: carry for carry in repeat.carries if is_floating(carry.leaf.dtype)}
    with tracing():
        d_carries = {tensor: placeholder(*_spec(tensor), "gradient") for tensor in carried}
        requested = [stack for stack in repeat.stacks if dys[stack.value] is not None]
        d_stacked = {stack: placeholder(*_spec(stack.result), "gradient") for stack in requested}
        of_carries = [(carried[tensor].result, dy) for tensor, dy in d_carries.items()]
        step_grads = _step_gradients(body, [*of_carries, *((stack.result, dy) for stack, dy in d_stacked.items())])
        added = [] if is_single else [tensor for tensor in body.captures if tensor in step_grads]
        products = {tensor: factors for tensor in added if (factors := _factors(step_grads[tensor]))}
        multiplied = dict.fromkeys(tensor for factors in products.values() for tensor, _ in factors)
        in_any_case = {*multiplied, *(step_grads[tensor] for tensor in body.slices if tensor in step_grads)}
        summed = _sums_of(in_any_case, {tensor: step_grads[tensor] for tensor in added})
        sums = [tensor for tensor in added if tensor not in products and tensor not in summed]
        totals = {tensor: placeholder(tensor.shape, type_of(tensor.dtype).compute, "sum") for tensor in sums}
        started = [tensor for tensor, carry in carried.items() if dys[carry.value] is not None]
        zero_started = [tensor for tensor, carry in carried.items() if dys[carry.value] is None]  # start from zeros
        following = [
            step_grads[tensor] if tensor in step_grads else zeros(tensor.shape, tensor.dtype)
            for tensor in (*started, *zero_started)
        ]
        following += [totals[tensor] + cast(step_grads[tensor], totals[tensor].dtype) for tensor in sums]
        parts = [tensor for tensor in (*body.slices, *(body.captures if is_single else ())) if tensor in step_grads]
        stacked = [step_grads[tensor] for tensor in parts]
    carried_in = [*(d_carries[tensor] for tensor in (*started, *zero_started)), *totals.values()]
    slices = {tensor: dys[stack.value] for stack, tensor in d_stacked.items()}
    cut = _BackwardReads(node, {*carried_in, *slices}, [*following, *stacked, *multiplied], multiplied)
    in_stacks = {*cut.stacks, *stacked}
    stacked += dict.fromkeys(tensor for tensor in multiplied if tensor not in in_stacks)
    backward, captured, _ = closed(
        carried_in,
        [*slices, *cut.slices],
        [cut.new[tensor] for tensor in following],
        [cut.new[tensor] for tensor in stacked],
        cut.known,
        len(zero_started) + len(sums),
        None if repeat.guard is None else node.inputs[repeat.guard],
    )
    values = SCAN.values(
        *(dys[carried[tensor].value] for tensor in started),
        *slices.values(),
        *cut.slices.values(),
        *captured,
        body=backward,
        length=repeat.length,
        reverse=not repeat.reverse,
    )
    grads = dict(zip([*started, *zero_started, *sums, *parts], values, strict=False))
    stacks = dict(zip(stacked, values[len(following) :], strict=True)) | cut.stacks
    grads |= _after_loop(products, summed, stacks)
    grads |= {tensor: reshape(grads[tensor], tensor.shape) for tensor in body.captures if is_single and tensor in grads}
    return tuple(cast(grads[tensor], tensor.dtype) if tensor in grads else None for tensor in body.inputs)


def _sums_of(stacked: Container[Tensor], grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    # The gradients that are sums of what is stacked in any case.
    return {
        tensor: grad
        for tensor, grad in grads.items()
        if lowering_of(grad) == Reduction("sum") and grad.inputs[0] in stacked
    }


def _after_loop(
    products: Mapping[Tensor, Sequence[tuple[Tensor, bool]]],
    summed: Mapping[Tensor, Tensor],
    stacks: Mapping[Tensor, Tensor],
) -> dict[Tensor, Tensor]:
    # The gradients of captures that follow from what all steps have stacked: products of factors, and sums.
    grads = {}
    for capture, factors in products.items():
        operands = [_stack(stacks[factor], is_transposed) for factor, is_transposed in factors]
        grads[capture] = sum_over(batch_matmul(*operands), 0)
    for capture, total in summed.items():
        axes = (0, *(axis + 1 for axis in total.attributes["axes"]))
        grads[capture] = reshape(sum_over(stacks[total.inputs[0]], axes), capture.shape)
    return grads


def _spec(tensor: Tensor) -> tuple[Shape, DType]:
    return tensor.shape, tensor.dtype


def _step_gradients(body: Body, dys: Iterable[tuple[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
    """Return the gradients of a step's leaves, given those of its results."""
    cotangents: dict[Tensor, Tensor] = {}
    for tensor, dy in dys:
        cotangents[tensor] = cotangents[tensor] + dy if tensor in cotangents else dy
    return pulled_back(cotangents, [tensor for tensor in body.placeholders if is_floating(tensor.dtype)])


def _factors(grad: Tensor) -> list[tuple[Tensor, bool]]:
    # The matrices whose product a gradient is, each with whether to transpose it; or nothing.
    if not isinstance(lowering_of(grad), Product) or grad.ndim != 2:
        return []
    factors = []
    for matrix in grad.inputs:
        is_transposed = matrix.op is OPERATORS["transpose"] and matrix.attributes["axes"] == (1, 0)
        factors.append((matrix.inputs[0] if is_transposed else matrix, is_transposed))
    return factors


def _stack(matrices: Tensor, is_transposed: bool) -> Tensor:
    return transpose(matrices, (0, 2, 1)) if is_transposed else matrices


class _BackwardReads:
    """What the backward body reads of the forward one: slices of stacks, existing or added."""

    # stacks: of each tensor of the forward body; slices: the stack behind each placeholder of the backward body; known:
    # tensors of the outer program that are captures; new: tensors of the backward body by those of the forward one.

    def __init__(
        self,
        node: Node,
        backward_inputs: Collection[Tensor],
        results: Sequence[Tensor],
        always_stacked: Iterable[Tensor],
    ) -> None:
        repeat, order = repeat_of(node), topological(results)
        body = repeat.body
        self._carries, self._recomputes = set(body.carries), repeat.length == 1 and repeat.guard is None
        self.known = {capture.leaf: node.inputs[capture.input] for capture in repeat.captures}
        self._of_step, backward = {*body.carries, *body.slices}, set(backward_inputs)
        self._of_step.update(body.captures if body.guarded else ())
        for tensor in order:
            if any(source in self._of_step for source in tensor.inputs):
                self._of_step.add(tensor)
            if any(source in backward for source in tensor.inputs):
                backward.add(tensor)
        in_any_case = [tensor for tensor in always_stacked if tensor in self._of_step and tensor not in backward]
        read = [source for tensor in order if tensor in backward for source in tensor.inputs]
        read = [tensor for tensor in (*read, *results) if tensor in self._of_step and tensor not in backward]
        stacks = {part.leaf: node.inputs[part.input] for part in repeat.slices}
        stacks |= _stack_residuals(node, [tensor for tensor in dict.fromkeys(in_any_case) if tensor not in stacks])
        stacks |= _stack_residuals(
            node, [tensor for tensor in self._residuals(dict.fromkeys(read), stacks) if tensor not in stacks]
        )
        self.stacks = stacks
        self.new = {tensor: placeholder(tensor.shape, tensor.dtype, "slice") for tensor in stacks}
        for tensor in order:
            if tensor not in self.new:
                self.new[tensor] = tensor.with_inputs([self.new[source] for source in tensor.inputs])
        used = set(topological(self.new[tensor] for tensor in results))
        self.slices = {self.new[tensor]: stacked for tensor, stacked in stacks.items() if self.new[tensor] in used}

    def _residuals(self, read: Iterable[Tensor], stacks: Collection[Tensor]) -> Iterable[Tensor]:
        """Return what to stack: tensors read, or those that make them cheap to recompute; of `remat` only carries."""
        if self._recomputes:
            return [tensor for tensor in topological(read) if tensor in self._carries]
        sources: dict[Tensor, set[Tensor]] = {}
        residuals: dict[Tensor, None] = {}
        for tensor in read:
            for current in topological([tensor]):
                lowering = lowering_of(current)
                cheap = isinstance(lowering, ViewMap | Element) and current.op is not None and not current.op.expensive
                if current in sources:
                    continue
                if current not in self._of_step or current in stacks or current in self.known:
                    sources[current] = set()
                else:
                    sources[current] = (
                        set().union(*(sources[source] for source in current.inputs)) if cheap else {current}
                    )
            added = sources[tensor] - residuals.keys()
            residuals |= dict.fromkeys(added if len(added) <= 1 else [tensor])
        return residuals


def _stack_residuals(node: Node, residuals: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    return dict(zip(residuals, extend(node, residuals), strict=True))
