"""Bodies: a step of a loop, as a program.

A step takes **carries** from the step before, a **slice** of each stacked input, and **captures**, which all steps
share. It computes the next carries, and results that are stacked. A node's inputs are the first carries, the stacked
inputs and the captures; carries without an input begin as zeros, as sums do. A loop of unknown length goes on as long
as its first carry, a boolean, is true; it has no slices and stacks nothing.

What depends on captures alone is not part of a body: it is computed once, before the loop, and captured itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.context import TRACE
from dptrain.program.gradient import topological
from dptrain.program.lowering import LoopLowering, lowering_of
from dptrain.program.shapes import Shape
from dptrain.program.tensor import DType, Node, Tensor, Variable, placeholder, tracing


@dataclass(frozen=True, eq=False)
class Body:
    """A step of a loop; `carries`, `slices` and `captures` are placeholders, `following` the next carries.

    Attributes:
        sums: how many carries, the last ones, begin as zeros.
        counted: the value that counts the operations of all steps: the first that is read.
        guarded: a branch: one step without carries or, if its first capture is false, none, and all values are zeros.
        made: cached derivatives, see `step_of`.
    """

    carries: tuple[Tensor, ...]
    slices: tuple[Tensor, ...]
    captures: tuple[Tensor, ...]
    following: tuple[Tensor, ...]
    stacked: tuple[Tensor, ...]
    sums: int = 0
    counted: int = 0
    guarded: bool = False
    made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def begun(self) -> tuple[Tensor, ...]:
        """Carries that begin with an input."""
        return self.carries[: len(self.carries) - self.sums]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Placeholders of the node's inputs, in order."""
        return (*self.begun, *self.slices, *self.captures)

    @property
    def placeholders(self) -> tuple[Tensor, ...]:
        """All leaves of a step."""
        return (*self.carries, *self.slices, *self.captures)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """All results of a step, in the order of the node's values."""
        return (*self.following, *self.stacked)

    def shapes(self, length: int = 0) -> list[Shape]:
        """Return the shapes of the node's values."""
        return [*(tensor.shape for tensor in self.following), *((length, *tensor.shape) for tensor in self.stacked)]

    def dtypes(self) -> list[DType]:
        """Return the types of the node's values."""
        return [tensor.dtype for tensor in self.results]


Step = Callable[[list[Tensor], list[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


def traced(step: Step, inits: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[Body, list[Tensor], list[Variable]]:
    """Trace a loop's step, within a trace; return the body, the node's inputs, and variables of its last carries.

    `step` takes carries and slices, and returns the next carries and the results to stack. A variable that it assigns
    becomes a further carry. ConfigError if a carry changes its shape or type.
    """
    outer = TRACE.get()
    assert outer is not None
    carries = [placeholder(tensor.shape, tensor.dtype, f"carry {number}") for number, tensor in enumerate(inits)]
    parts = [placeholder(tensor.shape[1:], tensor.dtype, f"slice {number}") for number, tensor in enumerate(slices)]
    with tracing() as inner:
        following, stacked = map(list, step(carries, parts))
        written = list(inner.written)
        for variable in written:
            carries.append(inner.placeholder_of(variable))
            following.append(inner.written[variable].inputs[0])
    for number, (old, new) in enumerate(zip(carries, following, strict=True)):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ConfigError(
                f"a loop changes its carry {number} (an RNN's state) from {old.dtype.name} {old.shape} to "
                f"{new.dtype.name} {new.shape}; expected the same shape and dtype after each step"
            )
    outer_values = {
        leaf: outer.value_of(variable) for variable, leaf in inner.read.items() if variable not in inner.written
    }
    for variable in written:
        inner.read[variable].variable = None  # now an ordinary carry
    firsts = [*inits, *(outer.value_of(variable) for variable in written)]
    body, captured, _ = closed(carries, parts, following, stacked, outer_values, since=0)
    return body, [*firsts, *slices, *captured], written


def closed(
    carries: Sequence[Tensor],
    slices: Sequence[Tensor],
    following: Sequence[Tensor],
    stacked: Sequence[Tensor],
    outer_tensors: Mapping[Tensor, Tensor],
    sums: int = 0,
    guard: Tensor | None = None,
    since: int = -1,
) -> tuple[Body, list[Tensor], Mapping[Tensor, Tensor]]:
    """Return the body with these results, its captures, and the body's tensor for each tensor.

    `outer_tensors` are of the surrounding program, by their stand-ins; `sums` as in `Body`. `guard` makes a branch, of
    what was made `since` a serial number. A body that has just been traced, with `since`, keeps `custom_gradient`s.
    """
    results = [*following, *stacked]
    new = dict(outer_tensors)
    depends = {*carries, *slices}
    captures = {} if guard is None else {guard: placeholder((), guard.dtype, "guard")}

    def inside(tensor: Tensor) -> Tensor:
        if tensor in depends or is_number(tensor):
            return new[tensor]
        outside = new[tensor]
        if outside not in captures:
            captures[outside] = placeholder(outside.shape, outside.dtype, f"capture {len(captures)}")
        return captures[outside]

    def operands(tensor: Tensor) -> Sequence[Tensor]:
        return () if tensor in outer_tensors or tensor.serial < since else tensor.inputs

    def add(tensors: Iterable[Tensor]) -> None:
        for tensor in topological(tensors, operands):
            if tensor in new:
                continue
            is_branch = guard is not None and tensor.op is not None and tensor.serial >= since
            if is_branch or any(operand in depends for operand in tensor.inputs):
                depends.add(tensor)
                new[tensor] = tensor.with_inputs([inside(operand) for operand in tensor.inputs])
            elif tensor in depends or tensor.serial < since:
                new[tensor] = tensor
            else:
                new[tensor] = tensor.with_inputs([new[operand] for operand in tensor.inputs])

    add(results)
    own_gradients = [tensor for tensor in new if tensor in depends and hasattr(tensor, "own_gradient")]
    for tensor in own_gradients if since >= 0 else ():
        sources, rule = tensor.own_gradient
        dy = placeholder(tensor.shape, tensor.dtype, "gradient")
        depends.add(dy)
        new[dy] = dy
        grads = rule(dy)
        add([*sources, *(grad for grad in grads if grad is not None)])
        inner_grads = [None if grad is None else inside(grad) for grad in grads]
        new[tensor].own_gradient = [inside(source) for source in sources], partial(_of_gradient, inner_grads, dy)
    new_results = [inside(operand) for operand in results]
    ends = (tuple(new_results[: len(following)]), tuple(new_results[len(following) :]))
    body = Body(tuple(carries), tuple(slices), tuple(captures.values()), *ends, sums, guarded=guard is not None)
    return body, list(captures), new


def _of_gradient(grads: Sequence[Tensor | None], placeholder_of_dy: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    new = {placeholder_of_dy: dy}
    for tensor in topological(grad for grad in grads if grad is not None):
        if tensor not in new:
            new[tensor] = tensor.with_inputs([new[operand] for operand in tensor.inputs])
    return tuple(None if grad is None else new[grad] for grad in grads)


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor is a scalar constant, which bodies contain themselves."""
    return tensor.op is None and tensor.value is not None and tensor.value.size == 1 and not tensor.counts_rows


def body_of(node: Tensor | Node) -> Body:
    """Return the body of a loop node."""
    body = node.attributes["body"]
    assert isinstance(body, Body)
    return body


def steps_of(node: Tensor | Node) -> int | None:
    """Return the number of a loop's steps; None if that is not known."""
    length: int | None = node.attributes.get("length")
    return length


def extend(node: Node, stacked: Iterable[Tensor]) -> list[Tensor]:
    """Stack further tensors of an unplaced node's body; return the new values, which other users do not see."""
    body = body_of(node)
    added = list(stacked)
    node.attributes["body"] = replace(body, stacked=(*body.stacked, *added))
    values = node.values
    return list(values[len(values) - len(added) :])


def has_body(tensor: Tensor) -> bool:
    """Whether a tensor is a value of a loop."""
    return isinstance(lowering_of(tensor), LoopLowering)


def with_steps(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors, and those in the bodies of loops among them."""
    loops: set[Node] = set()
    for tensor in tensors:
        yield tensor
        if has_body(tensor) and tensor.node not in loops:
            loops.add(tensor.node)
            yield from with_steps(topological(body_of(tensor).results))


def has_loops(results: Iterable[Tensor]) -> bool:
    """Whether tensors depend on loops."""
    return any(map(has_body, topological(results)))


def trimmed(results: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Drop unread values of loops, and capture constant carries; return the new tensor for each."""
    results = list(results)
    order = topological(results)
    firsts: dict[Node, Tensor] = {}
    for tensor in order:
        if has_body(tensor):
            firsts.setdefault(tensor.node, tensor)
    live, read, trims = set(results), dict[Node, set[int]](), dict[Node, _Trim]()
    for tensor in reversed(order):
        if not has_body(tensor):
            live.update(tensor.inputs if tensor in live else ())
            continue
        node = tensor.node
        read.setdefault(node, set()).update([tensor.index] if tensor in live else [])
        if firsts[node] is tensor and read[node]:  # all readers of its values have been visited
            trims[node] = _Trim(node, read[node])
            live.update(trims[node].inputs)
    new: dict[Tensor, Tensor] = {}
    for tensor in order:
        if not has_body(tensor):
            new[tensor] = tensor.with_inputs([new[operand] for operand in tensor.inputs])
        elif tensor.node in trims:
            new[tensor] = trims[tensor.node].value(tensor.index, new)
        else:
            new[tensor] = tensor  # unread
    return new


class _Trim:
    """A loop without its unread values; `inputs` are those of the old node that remain."""

    def __init__(self, node: Node, read: set[int]) -> None:
        self._node, body = node, body_of(node)
        count = len(body.carries)
        kept_carries = {number for number in read if number < count}
        stacked = [number for number in range(len(body.stacked)) if count + number in read]
        conditions = {0} if steps_of(node) is None else set[int]()
        kept_carries |= conditions
        constant = {number for number, carry in enumerate(body.begun) if body.following[number] is carry} - conditions
        before = dict(zip(body.carries, body.following, strict=True))  # a carry depends on the step before
        stacks = [body.stacked[number] for number in stacked]
        roots = [*(body.following[number] for number in sorted(kept_carries)), *stacks]
        operands = set(topological(roots, lambda tensor: (before[tensor],) if tensor in before else tensor.inputs))
        kept_carries |= {number for number in range(count) if body.carries[number] in operands}
        new = trimmed([*(body.following[number] for number in sorted(kept_carries)), *stacks])
        of_inputs = dict(zip(body.inputs, node.inputs, strict=True))
        changing = kept_carries - constant
        carried = sorted(changing)
        following = [new[body.following[number]] for number in carried]
        stacked_results = [new[stack] for stack in stacks]
        self._constant = {number: of_inputs[body.carries[number]] for number in constant}
        used = {*topological([*following, *stacked_results]), *body.captures[: int(body.guarded)]}
        carries = [body.carries[number] for number in carried]
        slices = [part for part in body.slices if part in used]
        other_carries = [carry for number, carry in enumerate(body.carries) if number not in changing]
        captures = [leaf for leaf in (*other_carries, *body.captures) if leaf in used]
        sums = sum(number >= len(body.begun) for number in carried)
        numbers = [*carried, *(count + index for index in stacked)]
        counted = next((place for place, number in enumerate(numbers) if number in read), 0)
        placeholders = (tuple(carries), tuple(slices), tuple(captures))
        self._body = Body(*placeholders, tuple(following), tuple(stacked_results), sums, counted, body.guarded)
        self._own = [of_inputs[leaf] for leaf in self._body.inputs]
        self.inputs = [*self._own, *(carry for number, carry in self._constant.items() if number in read)]
        self._numbers = {number: place for place, number in enumerate(numbers)}
        self._values: tuple[Tensor, ...] = ()

    def value(self, index: int, new: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the new tensor for a value, given new tensors for the inputs."""
        if index in self._constant:
            return new[self._constant[index]]
        if not self._values:
            inputs = [new[operand] for operand in self._own]
            attributes = {**self._node.attributes, "body": self._body}
            self._values = self._node.op.values_of(inputs, attributes)
        return self._values[self._numbers[index]] if index in self._numbers else self._node.values[index]
