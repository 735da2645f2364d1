"""What a program is made of when ops are computed together: loops, products of matrices, and calls.

`fuse.py` says how ops become kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dptrain.program.body import Body
from dptrain.program.codegen.views import View, aligned_axes, space_of, whole
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, Gather, Reduction, lowering_of
from dptrain.program.op import Op
from dptrain.program.program import Program
from dptrain.program.shapes import Shape, is_one
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Array, Tensor, Variable


def copy(x: Array, *, out: Array) -> None:
    """X as it is, in memory of its own."""
    np.copyto(out, x)


def _not_placed(*arguments: Any) -> Any:
    raise AssertionError("kernels are made of programs that have been placed")


COPY = Op(copy, _not_placed, _not_placed, _not_placed, lowering=Element("{0}"))


@dataclass(eq=False)
class LoopMember:
    """What a loop computes of a tensor.

    Attributes:
        tensor: computed.
        kind: "map" of single elements; "gather" of rows, of the first read at the places of the second; "reduce" along
            the loop's last axis; "sum", a reduction over other axes, which is complete after the loop.
        reads: what it reads, by the loop's axes.
        axes: the loop's axis of each axis of the tensor, None for those of length 1.
        inner: whether it is computed for every element, or else once for each row of the loop's last axis.
    """

    tensor: Tensor
    kind: Literal["map", "gather", "reduce", "sum"]
    reads: tuple[View, ...]
    axes: tuple[int | None, ...]
    inner: bool

    @cached_property
    def view(self) -> View:
        """Where its elements lie, by the loop's axes."""
        return whole(self.tensor).along(self.axes)


class Loop:
    """Tensors that are computed in one go over a space.

    Args:
        space: its lengths, without those that are 1.
        members: what it computes, in an order in which they can be computed.
    """

    def __init__(self, space: Shape, members: Iterable[LoopMember] = ()) -> None:
        self.space = space
        self._members = {one.tensor: one for one in members}

    @property
    def members(self) -> list[LoopMember]:
        """What it computes, in order."""
        return list(self._members.values())

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return list(self._members)

    @property
    def reads(self) -> list[View]:
        """What it reads, its own tensors among it."""
        return [view for one in self._members.values() for view in one.reads]

    def member(self, tensor: Tensor) -> LoopMember | None:
        """Return the member that computes a tensor, or None."""
        return self._members.get(tensor)

    def add(self, member: LoopMember) -> None:
        """Compute one more, after the others."""
        self._members[member.tensor] = member

    def add_before(self, members: Iterable[LoopMember]) -> None:
        """Compute some more, before the others."""
        self._members = {**{one.tensor: one for one in members}, **self._members}

    def remove(self, member: LoopMember) -> None:
        """Compute one no more."""
        del self._members[member.tensor]

    def passes(self) -> dict[LoopMember, int]:
        """Return how often the last axis must have been gone along before each member is known.

        Members of each element are computed in that pass; those of a row after it, -1 meaning before the first.
        """
        found: dict[LoopMember, int] = {}
        for one in self.members:
            own = 0 if one.inner else -1
            for view in one.reads:
                read = self.member(view.root)
                if read is not None:
                    of_row = not read.inner or read.kind == "reduce"
                    own = max(own, found[read] + (1 if of_row and one.inner else 0))
            found[one] = own
        return found


@dataclass(eq=False)
class ProductKernel:
    """A product of matrices: the last two axes; those before are broadcast, or summed over.

    Attributes:
        tensor: what it makes.
        reads: its two factors.
        product: of which `tensor` is the sum over all axes but the last two; else `tensor` itself.
    """

    tensor: Tensor
    reads: tuple[View, View]
    product: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return [self.tensor]


@dataclass(eq=False)
class Call:
    """An op by its own function.

    Attributes:
        tensor: what it makes, or the first value that it makes.
        reads: as a `LoopMember`.
        values: those that are read, by their numbers, of an op that has several.
    """

    tensor: Tensor
    reads: tuple[View, ...]
    values: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return list(self.values.values()) or [self.tensor]


@dataclass(eq=False)
class RepeatKernel:
    """The steps of a loop whose body is kernels.

    Attributes:
        values: what it makes and is read, by number.
        reads: its inputs, each whole.
        body: of the loop.
        step: its kernels, in one stage: the results are roots of their own, but that a next carry may be stacked, too.
        length: how many steps there are.
        reverse: the last one first.
        buffers: memory for each carry, and for the next one.
    """

    values: Mapping[int, Tensor]
    reads: tuple[View, ...]
    body: Body
    step: "Fused"
    length: int
    reverse: bool
    buffers: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        made = [Tensor(None, (), {}, one.shape, one.dtype) for one in self.body.carries for _ in range(2)]
        self.buffers = list(zip(made[::2], made[1::2], strict=True))

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return list(self.values.values())

    @property
    def results(self) -> list[Tensor]:
        """Where a step leaves the next carries, and what is stacked."""
        return [self.step.memory_of(one.root) for one in self.step.outputs.values()]

    @property
    def moved(self) -> set[Tensor]:
        """Roots of the step whose place differs from step to step, or from loop to loop."""
        count = len(self.body.carries)
        stacked = {one for number, one in enumerate(self.results) if number < count or number in self.values}
        return {*self.body.placeholders, *stacked}


Kernel = Loop | ProductKernel | Call | RepeatKernel


@dataclass(eq=False)
class FusedStage:
    """What a rank does between two sync points with the others; see `messages.Stage`.

    Attributes:
        kernels: in an order in which they can be executed.
        messages: parts, and what comes of them. The part of an all-reduce is a root that no other message has and that
            nothing reads once it has been sent, so that the sum can be written over it.
    """

    kernels: list[Kernel]
    messages: list[list[tuple[Tensor, Tensor]]]


@dataclass(eq=False)
class Fused:
    """A program as kernels.

    Attributes:
        program: its source.
        stages: as above.
        views: of every tensor: where its elements lie.
        aliases: roots that are another root's memory in another shape.
        outputs: what comes out, by name; to be read before the updates are copied.
        updates: the roots whose elements are the variables' new values; none of them is a placeholder.
        every_step: what updates and messages need; the rest is needed by the outputs alone.
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
        """All of them, in order."""
        return [kernel for stage in self.stages for kernel in stage.kernels]

    @property
    def all_kernels(self) -> list[Kernel]:
        """As `kernels`, with those of the steps of loops."""
        found: list[Kernel] = []
        for kernel in self.kernels:
            found += [kernel, *(kernel.step.all_kernels if isinstance(kernel, RepeatKernel) else [])]
        return found

    def memory_of(self, root: Tensor) -> Tensor:
        """Return the root whose memory a root has."""
        while root in self.aliases:
            root = self.aliases[root]
        return root

    def kept(self) -> set[Tensor]:
        """Return what becomes of the state, and of what other ranks get."""
        found = set(map(self.memory_of, self.updates.values()))
        sent = (part for stage in self.stages for message in stage.messages for part, _ in message)
        return found | set(map(self.memory_of, sent))

    def handed_out(self) -> set[Tensor]:
        """Return what a step leaves behind: what is `kept`, and what comes out."""
        return self.kept() | {self.memory_of(one.root) for one in self.outputs.values()}

    @property
    def reduced(self) -> set[Tensor]:
        """The parts of all-reduces."""
        found = (pair for stage in self.stages for message in stage.messages for pair in message)
        return {part for part, result in found if result.op is ALL_REDUCE}

    def stored(self) -> set[Tensor]:
        """Return the tensors that must lie in memory: other kernels read them, or they are handed out."""
        found = self.handed_out()
        for kernel in self.kernels:
            own = set(kernel.tensors)
            found |= {self.memory_of(one.root) for one in kernel.reads if one.root not in own}
            if not isinstance(kernel, Loop):
                found |= own
        return found


# What fits into a loop


def fitting(loop: Loop, tensor: Tensor, inputs: Sequence[View]) -> LoopMember | None:
    """Return a tensor as a member of a loop whose other tensors it can read, or None."""
    space = space_of(iterated(tensor))
    inner = space == space_of(loop.space)
    if not inner and (len(loop.space) < 2 or space != space_of(loop.space)[:-1]):
        return None
    made = as_member(tensor, inputs, loop.space, inner=inner)
    return made if takes(loop, made) else None


def takes(loop: Loop, member: LoopMember) -> bool:
    """Whether a member of a loop's space can be computed after what is there."""
    if member.kind == "reduce" and not member.inner:
        return False
    reduction = lowering_of(member.tensor)
    if member.kind == "sum" and isinstance(reduction, Reduction) and reduction.join == "argmax":
        return False  # a place is known at the end of a row of its own, not joined from terms that come one by one
    if member.kind == "sum" and not member.inner and not (len(loop.space) == 2 and isinstance(loop.space[0], Dim)):
        return False  # the order of the sum would be another one than in a loop of its own
    for number, view in enumerate(member.reads):
        read = loop.member(view.root)
        if read is not None and not usable(read, member, number):
            return False
    return True


def usable(read: LoopMember, reader: LoopMember, number: int) -> bool:
    """Whether what a member reads, as its operand of this number, is another's value at the same index."""
    is_table = reader.kind == "gather" and number == 0
    return read.kind != "sum" and not is_table and reader.reads[number] == read.view


def as_member(tensor: Tensor, inputs: Sequence[View], space: Shape, *, inner: bool) -> LoopMember:
    """Return a tensor as a member of a loop, computed for each element of it or for each row."""
    op, shape = tensor.op, iterated(tensor)
    assert op is not None
    count = iter(range(len(space)))
    own = [None if is_one(n) else next(count) for n in shape]
    shapes = [one.shape for one in tensor.inputs]
    if isinstance(op.lowering, Reduction):
        reduced = {axis for axis in reduced_axes(tensor) if own[axis] is not None}
        kind: Any = "map" if not reduced else "sum"
        if {own[axis] for axis in reduced} == {len(space) - 1}:
            kind = "reduce"
        kept = [
            None if axis in reduced_axes(tensor) else own[axis]
            for axis in range(len(shape))
            if tensor.attributes.get("keepdims") or axis not in reduced_axes(tensor)
        ]
        return LoopMember(tensor, kind, (inputs[0].along(own),), tuple(kept), inner)
    if isinstance(op.lowering, Gather):
        of_table = [*own[: op.lowering.batch], None, *own[len(shapes[1]) :]]
        return LoopMember(
            tensor, "gather", (inputs[0].along(of_table), inputs[1].along(own[: len(shapes[1])])), tuple(own), inner
        )
    by_last = isinstance(op.lowering, Element) and op.lowering.by_last
    aligned = [list(range(len(one))) if by_last else aligned_axes(one, shape) for one in shapes]
    reads = tuple(
        view.along([None if axis is None else own[axis] for axis in axes])
        for view, axes in zip(inputs, aligned, strict=True)
    )
    return LoopMember(tensor, "map", reads, tuple(own), inner)


def varying(reads: Iterable[View]) -> set[View]:
    """Return what is read, but for single numbers."""
    return {one for one in reads if not one.is_single}


def iterated(tensor: Tensor) -> Shape:
    """Return the shape over which an op is computed: of a reduction, its input's."""
    return tensor.inputs[0].shape if isinstance(lowering_of(tensor), Reduction) else tensor.shape


def reduced_axes(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes over which a reduction goes."""
    axis = tensor.attributes.get("axis")
    found: tuple[int, ...] = tensor.attributes["axes"] if axis is None else (axis,)
    return found
