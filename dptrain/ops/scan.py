"""The op of all loops: steps of a body, from the first to the last or the other way round.

A node's inputs are the first carries, stacked inputs and captures; its values the last carries and what the steps have
made, stacked. Its gradient is a loop in the other direction.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dptrain.ops.elementwise import cast
from dptrain.ops.linear_algebra import batch_matmul
from dptrain.ops.manipulation import reshape, stack, transpose, zeros
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.body import Body, body_of, closed, extend
from dptrain.program.gradient import pulled_back, topological
from dptrain.program.lowering import Element, Product, Repeat, ViewMap, lowering_of
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
    """All axes must be whole, but for who places the body."""
    body: Body = attributes["body"]
    made = ["X" * len(shape) for shape in body.shapes(attributes["length"])]
    return f"{','.join('X' * len(shape) for shape in shapes)}->{','.join(made)}"


def _repeated(*arrays: Any, body: Body, length: int, reverse: bool, out: Any) -> None:
    raise AssertionError("loops are executed by whoever executes a program")


def _steps(node: Node, inputs: Sequence[Tensor], read: Collection[int]) -> tuple[Tensor, ...]:
    """See `Repeat.steps`."""
    body, length, reverse = body_of(node), node.attributes["length"], node.attributes["reverse"]
    count, ends = len(body.begun), len(body.begun) + len(body.slices)
    carries, stacks, captures = list(inputs[:count]), inputs[count:ends], inputs[ends:]
    carries += [zeros(one.shape, one.dtype) for one in body.carries[count:]]
    order = topological(body.results)
    made: list[list[Tensor]] = [[] for _ in body.stacked]
    for number in reversed(range(length)) if reverse else range(length):
        parts = [one[number] for one in stacks]
        new = dict(zip(body.placeholders, (*carries, *parts, *captures), strict=True))
        nested: dict[Node, tuple[Tensor, ...]] = {}
        for one in order:
            own = [new[each] for each in one.inputs]
            if one in new:
                continue
            if one.op is not None and isinstance(one.op.lowering, Repeat):
                if one.node not in nested:
                    nested[one.node] = one.op.lowering.steps(one.node, own, range(len(body_of(one).results)))
                new[one] = nested[one.node][one.index]
            else:
                new[one] = one.with_inputs(own)
        carries = [new[one] for one in body.following]
        for values, one in zip(made, body.stacked, strict=True):
            values.append(new[one])
    found = carries
    for place, (values, one) in enumerate(zip(made, body.stacked, strict=True), len(body.carries)):
        if place not in read:
            found.append(one)
        elif values:
            found.append(stack(values[::-1] if reverse else values))
        else:
            found.append(zeros((0, *one.shape), one.dtype))
    return tuple(found)


def _operations(made: Tensor) -> int:
    """Return the operations of a loop, for one of its values."""
    body = body_of(made)
    order = topological(body.results) if made.index == body.counted else []
    found = sum(one.op.operations(one) for one in order if one.op is not None and not one.op.is_view)
    return int(made.attributes["length"]) * found


SCAN = Op(_repeated, _shapes, _letters, _dtypes, lowering=Repeat(_steps), has_values=True, operations=_operations)
SCAN.name = "scan"


@SCAN.gradient
def _gradient(made: tuple[Tensor, ...], dys: tuple[Tensor | None, ...], *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """A loop in the other direction.

    Its carries are the gradients in the carries, and one accumulator a capture, which begins with zeros. Where a step
    would add a product of matrices to it, the factors are stacked instead, and multiplied after the loop. A loop of one
    step has nothing to add up.
    """
    node = made[0].node
    body, is_single = body_of(node), made[0].attributes["length"] == 1
    count = len(body.carries)
    carried = {one: number for number, one in enumerate(body.carries) if one.dtype.kind in "fV"}
    with tracing():
        d_carries = {one: placeholder(*_form(one), "gradient") for one in carried}
        asked = [number for number, _ in enumerate(body.stacked) if dys[count + number] is not None]
        d_stacked = {number: placeholder(*_form(body.stacked[number]), "gradient") for number in asked}
        found = _pulled_back(body, {carried[one]: dy for one, dy in d_carries.items()}, d_stacked)
        added = [] if is_single else [one for one in body.captures if one in found]
        products = {one: factors for one in added if (factors := _factors(found[one]))}
        sums = [one for one in added if one not in products]
        totals = {one: placeholder(one.shape, FLOATX if is_half(one.dtype) else one.dtype, "sum") for one in sums}
        begun = [one for one, number in carried.items() if dys[number] is not None]
        rest = [one for one, number in carried.items() if dys[number] is None]  # which begin with zeros
        following = [found[one] if one in found else zeros(one.shape, one.dtype) for one in (*begun, *rest)]
        following += [totals[one] + cast(found[one], totals[one].dtype) for one in sums]
        parts = [one for one in (*body.slices, *(body.captures if is_single else ())) if one in found]
        stacked = [found[one] for one in parts]
    multiplied = [one for factors in products.values() for one, _ in factors]
    own = [*(d_carries[one] for one in (*begun, *rest)), *totals.values()]
    slices = {one: dys[count + number] for number, one in d_stacked.items()}
    cut = _Cut(node, {*own, *slices}, [*following, *stacked, *multiplied], multiplied)
    places = {one: number for number, one in enumerate(stacked)}
    for one in multiplied:
        if one not in cut.stacks and one not in places:
            places[one] = len(stacked)
            stacked.append(one)
    backward, captured, _ = closed(
        own,
        [*slices, *cut.slices],
        [cut.new[one] for one in following],
        [cut.new[one] for one in stacked],
        cut.known,
        len(rest) + len(sums),
    )
    values = SCAN.values(
        *(dys[carried[one]] for one in begun),
        *slices.values(),
        *cut.slices.values(),
        *captured,
        body=backward,
        length=node.attributes["length"],
        reverse=not node.attributes["reverse"],
    )
    grads = dict(zip([*begun, *rest, *sums, *parts], values, strict=False))
    first = len(following)
    for capture, factors in products.items():
        stacks = [cut.stacks[each] if each in cut.stacks else values[first + places[each]] for each, _ in factors]
        both = [_stack(matrices, turned) for matrices, (_, turned) in zip(stacks, factors, strict=True)]
        grads[capture] = sum_over(batch_matmul(*both), 0)
    grads |= {one: reshape(grads[one], one.shape) for one in body.captures if is_single and one in grads}
    return tuple(cast(grads[one], one.dtype) if one in grads else None for one in body.inputs)


def _form(tensor: Tensor) -> tuple[Shape, DType]:
    return tensor.shape, tensor.dtype


def _pulled_back(body: Body, d_carries: Mapping[int, Tensor], d_stacked: Mapping[int, Tensor]) -> dict[Tensor, Tensor]:
    """Return the gradients in what a step reads, of those in what it makes, by number."""
    cotangents: dict[Tensor, Tensor] = {}
    of_carries = [(body.following[number], dy) for number, dy in d_carries.items()]
    for one, dy in (*of_carries, *((body.stacked[number], dy) for number, dy in d_stacked.items())):
        cotangents[one] = cotangents[one] + dy if one in cotangents else dy
    return pulled_back(cotangents, [one for one in body.placeholders if one.dtype.kind in "fV"])


def _factors(grad: Tensor) -> list[tuple[Tensor, bool]]:
    """Return the matrices whose product a gradient is, each with whether it is to be transposed; none of others."""
    if not isinstance(lowering_of(grad), Product) or grad.ndim != 2:
        return []
    found = []
    for one in grad.inputs:
        is_transposed = one.op is OPERATORS["transpose"] and one.attributes["axes"] == (1, 0)
        found.append((one.inputs[0] if is_transposed else one, is_transposed))
    return found


def _stack(matrices: Tensor, is_transposed: bool) -> Tensor:
    return transpose(matrices, (0, 2, 1)) if is_transposed else matrices


class _Cut:
    """What the backward body reads of the forward one: slices of what is stacked already, or is from now on.

    Args:
        node: of the forward loop, which is extended.
        own: placeholders of the backward body.
        results: of the backward body.
        wanted: tensors of which what the forward loop makes is stacked in any case.

    Attributes:
        stacks: what is stacked, by tensors of the forward body.
        slices: what is stacked, by its placeholder in the backward body.
        known: tensors of the program around, by the tensors of the body that they are.
        new: tensors of the backward body, by those that have been differentiated.
    """

    def __init__(
        self, node: Node, own: Collection[Tensor], results: Sequence[Tensor], wanted: Iterable[Tensor]
    ) -> None:
        body, order = body_of(node), topological(results)
        self._carries, self._is_single = set(body.carries), node.attributes["length"] == 1
        self.known = dict(zip(body.captures, node.inputs[len(node.inputs) - len(body.captures) :], strict=True))
        self._of_step, backward = {*body.carries, *body.slices}, set(own)
        for one in order:
            if any(each in self._of_step for each in one.inputs):
                self._of_step.add(one)
            if any(each in backward for each in one.inputs):
                backward.add(one)
        in_any_case = [one for one in wanted if one in self._of_step and one not in backward]
        read = [each for one in order if one in backward for each in one.inputs]
        read = [one for one in (*read, *results) if one in self._of_step and one not in backward]
        given = dict(zip(body.inputs, node.inputs, strict=True))
        stacks = {one: given[one] for one in body.slices}
        stacks |= _stacked(node, [one for one in dict.fromkeys(in_any_case) if one not in stacks])
        stacks |= _stacked(node, [one for one in self._residuals(dict.fromkeys(read), stacks) if one not in stacks])
        self.stacks = stacks
        self.new = {one: placeholder(one.shape, one.dtype, "slice") for one in stacks}
        for one in order:
            if one not in self.new:
                self.new[one] = one.with_inputs([self.new[each] for each in one.inputs])
        used = set(topological(self.new[one] for one in results))
        self.slices = {self.new[one]: stacked for one, stacked in stacks.items() if self.new[one] in used}

    def _residuals(self, read: Iterable[Tensor], stacks: Collection[Tensor]) -> Iterable[Tensor]:
        """Return what is to be stacked: what is read, or what it is cheap to compute it again from.

        All of a single step is computed again: other loops of one step are written down, see `remat`.
        """
        if self._is_single:
            return [one for one in topological(read) if one in self._carries]
        sources: dict[Tensor, set[Tensor]] = {}
        wanted: dict[Tensor, None] = {}
        for tensor in read:
            for one in topological([tensor]):
                lowering = lowering_of(one)
                cheap = isinstance(lowering, ViewMap | Element) and one.op is not None and not one.op.expensive
                if one in sources:
                    continue
                if one not in self._of_step or one in stacks:
                    sources[one] = set()
                else:
                    sources[one] = set().union(*(sources[each] for each in one.inputs)) if cheap else {one}
            more = sources[tensor] - wanted.keys()
            wanted |= dict.fromkeys(more if len(more) <= 1 else [tensor])
        return wanted


def _stacked(node: Node, residuals: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Let a forward loop stack tensors of its body; return the stacks."""
    return dict(zip(residuals, extend(node, residuals), strict=True))
