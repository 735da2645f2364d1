"""Kernels, the units that ops are grouped into: loops, matrix products and calls; `fuse.py` does the grouping."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dptrain.program.codegen.views import View, aligned_axes, space_of, whole
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, Gather, Reduction, lowering_of
from dptrain.program.op import Op
from dptrain.program.program import Program
from dptrain.program.schedule.loops import BUFFERS, Repeat
from dptrain.program.shapes import Shape, is_one
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Array, Tensor, Variable


def copy(x: Array, *, out: Array) -> None:
    """A copy of X in new memory."""
    np.copyto(out, x)


def _not_placed(*arguments: Any) -> Any:
    raise AssertionError("kernels are generated from placed programs")


COPY = Op(copy, _not_placed, _not_placed, _not_placed, lowering=Element("{0}"))


@dataclass(eq=False)
class LoopMember:
    """A tensor that a loop computes.

    Attributes:
        kind: "map", elementwise; "gather" of rows of the first operand at the indices of the second; "reduce" along
            the loop's last axis; "sum", a reduction over other axes, complete after the loop.
        reads: operands, by the loop's axes.
        axes: the loop's axis for each axis of the tensor, None for length 1.
        inner: computed for every element; else once for each row of the loop's last axis.
    """

    tensor: Tensor
    kind: Literal["map", "gather", "reduce", "sum"]
    reads: tuple[View, ...]
    axes: tuple[int | None, ...]
    inner: bool

    @cached_property
    def view(self) -> View:
        """The result by the loop's axes."""
        return whole(self.tensor).along(self.axes)


class Loop:
    """Tensors computed together over a space (lengths other than 1), in executable order."""

    def __init__(self, space: Shape, members: Iterable[LoopMember] = ()) -> None:
        self.space = space
        self._members = {member.tensor: member for member in members}

    @property
    def members(self) -> list[LoopMember]:
        """Members in order."""
        return list(self._members.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it computes."""
        return list(self._members)

    @property
    def reads(self) -> list[View]:
        """Operands, its own tensors included."""
        return [view for member in self._members.values() for view in member.reads]

    def member(self, tensor: Tensor) -> LoopMember | None:
        """Return the member that computes a tensor, or None."""
        return self._members.get(tensor)

    def add(self, member: LoopMember) -> None:
        """Append a member."""
        self._members[member.tensor] = member

    def add_before(self, members: Iterable[LoopMember]) -> None:
        """Prepend members."""
        self._members = {**{member.tensor: member for member in members}, **self._members}

    def remove(self, member: LoopMember) -> None:
        """Remove a member."""
        del self._members[member.tensor]

    def passes(self) -> dict[LoopMember, int]:
        """Return the pass over the last axis in which each member is computed.

        Members of each element are computed in that pass, those of a row after it; -1 means before the first pass.
        """
        passes: dict[LoopMember, int] = {}
        for member in self.members:
            number = 0 if member.inner else -1
            for view in member.reads:
                read = self.member(view.root)
                if read is not None:
                    of_row = not read.inner or read.kind == "reduce"
                    number = max(number, passes[read] + (1 if of_row and member.inner else 0))
            passes[member] = number
        return passes


@dataclass(eq=False)
class ProductKernel:
    """A matrix product over the last two axes; `tensor` may be the sum of `product` over its leading axes."""

    tensor: Tensor
    reads: tuple[View, View]
    product: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The result."""
        return [self.tensor]


@dataclass(eq=False)
class Call:
    """An op computed by its own function; `values` are those of several that are read, by number."""

    tensor: Tensor
    reads: tuple[View, ...]
    values: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """Values that it computes."""
        return list(self.values.values()) or [self.tensor]


@dataclass(eq=False)
class RepeatKernel:
    """The steps of a loop node, whose body is fused.

    Attributes:
        values: values of the node that are read, by number.
        reads: contiguous inputs.
        step: kernels of one step, in one stage; each result has a root of its own, but a next carry may also be
            stacked.
        buffers: both of each carry.
    """

    values: Mapping[int, Tensor]
    reads: tuple[View, ...]
    repeat: Repeat
    step: "Fused"
    buffers: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        leaves = [carry.leaf for carry in self.repeat.carries]
        self.buffers = [[Tensor(None, (), {}, leaf.shape, leaf.dtype) for _ in range(BUFFERS)] for leaf in leaves]

    @property
    def tensors(self) -> list[Tensor]:
        """Values that it computes."""
        return list(self.values.values())

    @property
    def results(self) -> list[Tensor]:
        """Roots of the next carries and of stacked results."""
        return [self.step.memory_of(view.root) for view in self.step.outputs.values()]

    @property
    def stacked(self) -> dict[int, int]:
        """The value that stacks a next carry, by the carry's index."""
        results = self.results
        values = {results[stack.value]: stack.value for stack in self.repeat.stacks if stack.value in self.values}
        pairs = ((carry.value, values.get(results[carry.value])) for carry in self.repeat.carries)
        return {carry: value for carry, value in pairs if value is not None}

    @property
    def moved(self) -> set[Tensor]:
        """Roots whose address differs from step to step, or from loop to loop."""
        results = self.results
        return {*self.repeat.body.placeholders, *(results[index] for index in self.repeat.writes(self.values))}


Kernel = Loop | ProductKernel | Call | RepeatKernel


@dataclass(eq=False)
class FusedStage:
    """Kernels between two sync points of the ranks, and the messages that follow; see `messages.Stage`.

    Each message is pairs of a part and its result. The part of an all-reduce is a root of no other message that
    nothing reads once it has been sent, so that the sum can overwrite it.
    """

    kernels: list[Kernel]
    messages: list[list[tuple[Tensor, Tensor]]]


@dataclass(eq=False)
class Fused:
    """A program as kernels.

    Attributes:
        views: of every tensor.
        aliases: roots that are another root's memory in another shape.
        outputs: by name; to be read before updates are copied.
        updates: roots of the variables' new values, none of them a placeholder.
        every_step: tensors that updates and messages need; only outputs need the rest.
    """

    program: Program
    stages: list[FusedStage]
    views: dict[Tensor, View]
    aliases: dict[Tensor, Tensor]
    outputs: dict[str, View]
    updates: dict[Variable, Tensor]
    every_step: set[Tensor]

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels of all stages in order."""
        return [kernel for stage in self.stages for kernel in stage.kernels]

    @property
    def may_not_end(self) -> bool:
        """Whether there is a loop of unknown length."""
        return any(isinstance(kernel, RepeatKernel) and kernel.repeat.length is None for kernel in self.all_kernels)

    @property
    def all_kernels(self) -> list[Kernel]:
        """`kernels`, with those inside loops."""
        kernels: list[Kernel] = []
        for kernel in self.kernels:
            kernels += [kernel, *(kernel.step.all_kernels if isinstance(kernel, RepeatKernel) else [])]
        return kernels

    def memory_of(self, root: Tensor) -> Tensor:
        """Follow aliases to the root that owns the memory."""
        while root in self.aliases:
            root = self.aliases[root]
        return root

    def kept(self) -> set[Tensor]:
        """Return the roots of new state and of messages."""
        kept = set(map(self.memory_of, self.updates.values()))
        parts = (part for stage in self.stages for message in stage.messages for part, _ in message)
        return kept | set(map(self.memory_of, parts))

    def handed_out(self) -> set[Tensor]:
        """Return the roots that outlive a step: those `kept`, and outputs."""
        return self.kept() | {self.memory_of(view.root) for view in self.outputs.values()}

    @property
    def reduced(self) -> set[Tensor]:
        """Parts of all-reduces."""
        pairs = (pair for stage in self.stages for message in stage.messages for pair in message)
        return {part for part, result in pairs if result.op is ALL_REDUCE}

    def stored(self) -> set[Tensor]:
        """Return the tensors that must be stored: read by other kernels, or handed out."""
        stored = self.handed_out()
        for kernel in self.kernels:
            tensors = set(kernel.tensors)
            stored |= {self.memory_of(view.root) for view in kernel.reads if view.root not in tensors}
            if not isinstance(kernel, Loop):
                stored |= tensors
        return stored


# Fitting members into loops


def fitting(loop: Loop, tensor: Tensor, inputs: Sequence[View]) -> LoopMember | None:
    """Return a tensor as a member of a loop; None if the loop cannot compute it."""
    space = space_of(iterated(tensor))
    inner = space == space_of(loop.space)
    if not inner and (len(loop.space) < 2 or space != space_of(loop.space)[:-1]):
        return None
    member = as_member(tensor, inputs, loop.space, inner=inner)
    return member if takes(loop, member) else None


def takes(loop: Loop, member: LoopMember) -> bool:
    """Whether a loop can compute a member of its space after those that it has."""
    if member.kind == "reduce" and not member.inner:
        return False
    reduction = lowering_of(member.tensor)
    if member.kind == "sum" and isinstance(reduction, Reduction) and reduction.join == "argmax":
        return False  # an argmax is known only at the end of its own row, not accumulated term by term
    if member.kind == "sum" and not member.inner and not (len(loop.space) == 2 and isinstance(loop.space[0], Dim)):
        return False  # the sum would have another order than in its own loop
    for number, view in enumerate(member.reads):
        read = loop.member(view.root)
        if read is not None and not usable(read, member, number):
            return False
    return True


def usable(read: LoopMember, reader: LoopMember, number: int) -> bool:
    """Whether a member's operand is another member's value at the same index."""
    is_table = reader.kind == "gather" and number == 0
    return read.kind != "sum" and not is_table and reader.reads[number] == read.view


def as_member(tensor: Tensor, inputs: Sequence[View], space: Shape, *, inner: bool) -> LoopMember:
    """Return a tensor as a loop member, computed for each element or for each row."""
    op, shape = tensor.op, iterated(tensor)
    assert op is not None
    count = iter(range(len(space)))
    loop_axes = [None if is_one(n) else next(count) for n in shape]
    shapes = [operand.shape for operand in tensor.inputs]
    if isinstance(op.lowering, Reduction):
        reduced = {axis for axis in reduced_axes(tensor) if loop_axes[axis] is not None}
        kind: Any = "map" if not reduced else "sum"
        if {loop_axes[axis] for axis in reduced} == {len(space) - 1}:
            kind = "reduce"
        result_axes = [
            None if axis in reduced_axes(tensor) else loop_axes[axis]
            for axis in range(len(shape))
            if tensor.attributes.get("keepdims") or axis not in reduced_axes(tensor)
        ]
        return LoopMember(tensor, kind, (inputs[0].along(loop_axes),), tuple(result_axes), inner)
    if isinstance(op.lowering, Gather):
        of_table = [*loop_axes[: op.lowering.batch], None, *loop_axes[len(shapes[1]) :]]
        return LoopMember(
            tensor,
            "gather",
            (inputs[0].along(of_table), inputs[1].along(loop_axes[: len(shapes[1])])),
            tuple(loop_axes),
            inner,
        )
    by_last = isinstance(op.lowering, Element) and op.lowering.by_last
    aligned = [
        list(range(len(operand_shape))) if by_last else aligned_axes(operand_shape, shape) for operand_shape in shapes
    ]
    reads = tuple(
        view.along([None if axis is None else loop_axes[axis] for axis in axes])
        for view, axes in zip(inputs, aligned, strict=True)
    )
    return LoopMember(tensor, "map", reads, tuple(loop_axes), inner)


def varying(reads: Iterable[View]) -> set[View]:
    """Return the views that are not uniform."""
    return {view for view in reads if not view.is_single}


def iterated(tensor: Tensor) -> Shape:
    """Return the shape that an op iterates over: of a reduction, its input's."""
    return tensor.inputs[0].shape if isinstance(lowering_of(tensor), Reduction) else tensor.shape


def reduced_axes(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes of a reduction."""
    axis = tensor.attributes.get("axis")
    axes: tuple[int, ...] = tensor.attributes["axes"] if axis is None else (axis,)
    return axes
