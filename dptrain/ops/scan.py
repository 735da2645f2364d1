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
from dptrain.program.body import Body, body_of, closed, extend, guard_of
from dptrain.program.gradient import pulled_back, topological
from dptrain.program.lowering import Element, Product, Reduction, Repeat, ViewMap, lowering_of
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op
from dptrain.program.operand import OPERATORS
from dptrain.program.shapes import Shape
from dptrain.program.tensor import FLOATX, DType, Node, Tensor, placeholder, tracing
from dptrain.program.types import is_half


def _shapes(*inputs: Shape, body: Body, length: int, reverse: bool) -> Any:
    return body.shapes(length)


def _dtypes(*inputs: Any, body: Body, length: int, reverse: bool) -> list[Any]:
    return body.dtypes()


def _letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    # All axes are unsharded, unless the body is placed.
    body: Body = attributes["body"]
    letters = ["X" * len(shape) for shape in body.shapes(attributes["length"])]
    return f"{','.join('X' * len(shape) for shape in shapes)}->{','.join(letters)}"


def _compute(*arrays: Any, body: Body, length: int, reverse: bool, out: Any) -> None:
    raise AssertionError("executables run the body of a loop, not its op")


def _unrolled(node: Node, inputs: Sequence[Tensor], read: Collection[int]) -> tuple[Tensor, ...]:
    body, length, reverse = body_of(node), node.attributes["length"], node.attributes["reverse"]
    count, ends = len(body.begun), len(body.begun) + len(body.slices)
    carries, stacks, captures = list(inputs[:count]), inputs[count:ends], inputs[ends:]
    carries += [zeros(carry.shape, carry.dtype) for carry in body.carries[count:]]
    order = topological(body.results)
    outputs: list[list[Tensor]] = [[] for _ in body.stacked]
    for number in reversed(range(length)) if reverse else range(length):
        parts = [stacked[number] for stacked in stacks]
        new = dict(zip(body.placeholders, (*carries, *parts, *captures), strict=True))
        nested: dict[Node, tuple[Tensor, ...]] = {}
        for tensor in order:
            step_inputs = [new[source] for source in tensor.inputs]
            if tensor in new:
                continue
            lowering = lowering_of(tensor)
            if not isinstance(lowering, Repeat):
                new[tensor] = tensor.with_inputs(step_inputs)
                continue
            if tensor.node not in nested:
                if lowering.steps is not None and not (body.guarded or body_of(tensor).guarded):
                    nested[tensor.node] = lowering.steps(tensor.node, step_inputs, range(len(body_of(tensor).results)))
                else:
                    if lowering.steps is None and body.guarded:  # it may not end where the branch is not taken
                        step_inputs[0] = logical_and(captures[0], step_inputs[0])
                    nested[tensor.node] = tensor.node.op.values_of(step_inputs, tensor.attributes)
            new[tensor] = nested[tensor.node][tensor.index]
        carries = [new[carry] for carry in body.following]
        for values, output in zip(outputs, body.stacked, strict=True):
            values.append(new[output])
    results = carries
    for place, (values, output) in enumerate(zip(outputs, body.stacked, strict=True), len(body.carries)):
        if place not in read:
            results.append(output)
        elif body.guarded:
            results.append(where(captures[0], stack(values), zeros((1, *output.shape), output.dtype)))
        elif values:
            results.append(stack(values[::-1] if reverse else values))
        else:
            results.append(zeros((0, *output.shape), output.dtype))
    return tuple(results)


def _operations(value: Tensor) -> int:
    body = body_of(value)
    order = topological(body.results) if value.index == body.counted else []
    total = sum(tensor.op.operations(tensor) for tensor in order if tensor.op is not None and not tensor.op.is_view)
    return int(value.attributes["length"]) * total


SCAN = Op(_compute, _shapes, _letters, _dtypes, lowering=Repeat(_unrolled), has_values=True, operations=_operations)
SCAN.name = "scan"


@SCAN.onnx_lowering
def _onnx(graph: OnnxGraph, value: Tensor, *inputs: Value) -> Sequence[Value]:
    # No step and one are written down, as runtimes differ in what they make of none.
    body, length, reverse = body_of(value), value.attributes["length"], value.attributes["reverse"]
    count, ends, order = len(body.begun), len(body.begun) + len(body.slices), topological(body.results)
    starts = [graph.expand(graph.constant(0, carry.dtype), carry.shape) for carry in body.carries[count:]]
    carries, stacks, captures = [*inputs[:count], *starts], list(inputs[count:ends]), inputs[ends:]
    if length == 0:
        return [*carries, *(graph.expand(graph.constant(0, end.dtype), (0, *end.shape)) for end in body.stacked)]
    if length == 1:
        first_axis = graph.constant([0], np.int64)
        parts = [graph.node("Squeeze", stack, first_axis) for stack in stacks]
        values = dict(zip(body.placeholders, (*carries, *parts, *captures), strict=True))
        inside = OnnxGraph(graph, "then") if body.guarded else graph
        inside.add(order, values)
        stacked = [inside.node("Unsqueeze", values[end], first_axis) for end in body.stacked]
        if body.guarded:
            other = OnnxGraph(graph, "else")
            starts = [other.expand(other.constant(0, end.dtype), (1, *end.shape)) for end in body.stacked]
            return graph.choose(captures[0], inside.body([], stacked), other.body([], starts))
        return [*(values[end] for end in body.following), *stacked]
    step = OnnxGraph(graph)
    arguments = [step.argument(number, leaf.dtype) for number, leaf in enumerate((*body.carries, *body.slices))]
    values = dict(zip(body.placeholders, (*arguments, *captures), strict=True))
    if not stacks:  # which tell how many steps there are
        arguments.append(step.argument(len(arguments), np.dtype(np.bool_)))
        stacks = [graph.expand(graph.constant(False), (length,))]
    step.add(order, values)
    stacks = list(map(graph.flip, stacks)) if reverse else stacks
    of_step = step.body(arguments, [values[end] for end in body.results], body.results)
    results = graph.scan(carries, stacks, of_step)
    last, outputs = results[: len(carries)], results[len(carries) :]
    return [*last, *(map(graph.flip, outputs) if reverse else outputs)]


@SCAN.gradient
def _gradient(
    outputs: tuple[Tensor, ...], dys: tuple[Tensor | None, ...], *inputs: Tensor
) -> tuple[Tensor | None, ...]:
    # It carries the gradients of the carries and an accumulator for each capture. Factors of matrix products are
    # stacked instead of accumulated, and multiplied after the loop; sums of what is stacked are summed there. A single
    # step accumulates nothing.
    node = outputs[0].node
    body, is_single = body_of(node), outputs[0].attributes["length"] == 1
    count = len(body.carries)
    carried = {tensor: number for number, tensor in enumerate(body.carries) if tensor.dtype.kind in "fV"}
    with tracing():
        d_carries = {tensor: placeholder(*_spec(tensor), "gradient") for tensor in carried}
        requested = [number for number, _ in enumerate(body.stacked) if dys[count + number] is not None]
        d_stacked = {number: placeholder(*_spec(body.stacked[number]), "gradient") for number in requested}
        step_grads = _step_gradients(body, {carried[tensor]: dy for tensor, dy in d_carries.items()}, d_stacked)
        added = [] if is_single else [tensor for tensor in body.captures if tensor in step_grads]
        products = {tensor: factors for tensor in added if (factors := _factors(step_grads[tensor]))}
        multiplied = dict.fromkeys(tensor for factors in products.values() for tensor, _ in factors)
        in_any_case = {*multiplied, *(step_grads[tensor] for tensor in body.slices if tensor in step_grads)}
        summed = _sums_of(in_any_case, {tensor: step_grads[tensor] for tensor in added})
        sums = [tensor for tensor in added if tensor not in products and tensor not in summed]
        totals = {
            tensor: placeholder(tensor.shape, FLOATX if is_half(tensor.dtype) else tensor.dtype, "sum")
            for tensor in sums
        }
        started = [tensor for tensor, number in carried.items() if dys[number] is not None]
        zero_started = [tensor for tensor, number in carried.items() if dys[number] is None]  # they start from zeros
        following = [
            step_grads[tensor] if tensor in step_grads else zeros(tensor.shape, tensor.dtype)
            for tensor in (*started, *zero_started)
        ]
        following += [totals[tensor] + cast(step_grads[tensor], totals[tensor].dtype) for tensor in sums]
        parts = [tensor for tensor in (*body.slices, *(body.captures if is_single else ())) if tensor in step_grads]
        stacked = [step_grads[tensor] for tensor in parts]
    carried_in = [*(d_carries[tensor] for tensor in (*started, *zero_started)), *totals.values()]
    slices = {tensor: dys[count + number] for number, tensor in d_stacked.items()}
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
        guard_of(node),
    )
    values = SCAN.values(
        *(dys[carried[tensor]] for tensor in started),
        *slices.values(),
        *cut.slices.values(),
        *captured,
        body=backward,
        length=node.attributes["length"],
        reverse=not node.attributes["reverse"],
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


def _step_gradients(
    body: Body, d_carries: Mapping[int, Tensor], d_stacked: Mapping[int, Tensor]
) -> dict[Tensor, Tensor]:
    cotangents: dict[Tensor, Tensor] = {}
    of_carries = [(body.following[number], dy) for number, dy in d_carries.items()]
    for tensor, dy in (*of_carries, *((body.stacked[number], dy) for number, dy in d_stacked.items())):
        cotangents[tensor] = cotangents[tensor] + dy if tensor in cotangents else dy
    return pulled_back(cotangents, [tensor for tensor in body.placeholders if tensor.dtype.kind in "fV"])


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
        body, order = body_of(node), topological(results)
        self._carries, self._recomputes = set(body.carries), node.attributes["length"] == 1 and not body.guarded
        self.known = dict(zip(body.captures, node.inputs[len(node.inputs) - len(body.captures) :], strict=True))
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
        node_inputs = dict(zip(body.inputs, node.inputs, strict=True))
        stacks = {tensor: node_inputs[tensor] for tensor in body.slices}
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
