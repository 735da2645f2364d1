"""Which ops of a program are computed together: loops, products of matrices, and calls.

A placed program becomes a list of **kernels**. A `Loop` goes once over a space of indices, such as (B, 10), and
computes any number of tensors there: ops of single elements (`Op.c`), gathered rows, reductions along the last axis,
whose results other members of the same loop can use (so a softmax is one loop), and sums over other axes, which are
complete when the loop is. A `Product` is a product of matrices. A `Call` is everything else: one op by its own
function.

Reshapes, transposes, slices and broadcasts are no kernels: what reads one reads the tensor beneath it, its **root**, at
other indices (`Source`). Only a reshape across axes that do not lie one behind the other is a copy.

Equal ops are computed once. Each op goes into the first loop that it fits and shares something with; then what only a
later loop reads moves there (`_sink`), if it can be computed from what lies in memory anyway, as the mask of a relu.

Lengths that count rows stay symbolic, so that what is generated from kernels holds for any batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dptrain.program.messages import Stage, stages
from dptrain.program.placement import ALL_REDUCE, OWN_ROWS
from dptrain.program.program import Program
from dptrain.program.shapes import Rows, Shape
from dptrain.program.sources import Key, Offset, Place, Source, compose, is_one, marked, matrix, offset, space_of, whole
from dptrain.program.tensor import Array, DType, Op, Tensor, Variable


def copy(x: Array, *, out: Array) -> None:
    """X as it is, in memory of its own."""
    np.copyto(out, x)


def _not_placed(*arguments: Any) -> Any:
    raise AssertionError("kernels are made of programs that have been placed")


COPY = Op(copy, _not_placed, _not_placed, _not_placed, c="{0}")

# Types that generated code has, and their names in C++.
C_TYPES = {"bool": "bool", "float32": "float", "float64": "double"} | {
    f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
REDUCTIONS = ("reduce_sum", "reduce_max", "argmax_along")


@dataclass(eq=False)
class Member:
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
    reads: tuple[Source, ...]
    axes: tuple[int | None, ...]
    inner: bool


@dataclass(eq=False)
class Loop:
    """Tensors that are computed in one go over a space.

    Attributes:
        space: its lengths, without those that are 1.
        members: in an order in which they can be computed.
    """

    space: Shape
    members: list[Member] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return [one.tensor for one in self.members]

    @property
    def reads(self) -> list[Source]:
        """What it reads, its own tensors among it."""
        return [source for one in self.members for source in one.reads]

    def member(self, tensor: Tensor) -> Member | None:
        """Return the member that computes a tensor, or None."""
        return next((one for one in self.members if one.tensor is tensor), None)

    def passes(self) -> dict[Member, int]:
        """Return how often the last axis must have been gone along before each member is known.

        Members of each element are computed in that pass; those of a row after it, -1 meaning before the first.
        """
        found: dict[Member, int] = {}
        for one in self.members:
            own = 0 if one.inner else -1
            for source in one.reads:
                read = self.member(source.root)
                if read is not None:
                    of_row = not read.inner or read.kind == "reduce"
                    own = max(own, found[read] + (1 if of_row and one.inner else 0))
            found[one] = own
        return found


@dataclass(eq=False)
class Product:
    """A product of matrices: the last two axes; those before are broadcast."""

    tensor: Tensor
    reads: tuple[Source, Source]

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return [self.tensor]


@dataclass(eq=False)
class Call:
    """An op by its own function."""

    tensor: Tensor
    reads: tuple[Source, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """What it makes."""
        return [self.tensor]


Kernel = Loop | Product | Call


@dataclass
class FusedStage:
    """What a rank does between two meetings with the others; see `messages.Stage`.

    Attributes:
        kernels: in an order in which they can be executed.
        messages: parts and the all-reduces of them. A part is a root that no other message has and that nothing reads
            once it has been sent, so that the sum can be written over it.
    """

    kernels: list[Kernel]
    messages: list[list[tuple[Tensor, Tensor]]]


@dataclass
class Fused:
    """A program as kernels.

    Attributes:
        program: its source.
        stages: as above.
        sources: of every tensor, by its `id`; see `source`.
        same: the tensor that is computed instead of an equal one, by that one's `id`.
        aliases: roots that are another root's memory in another shape, by their `id`.
        outputs: what comes out, by name; to be read before the updates are copied.
        updates: the roots whose elements are the variables' new values; none of them is a placeholder.
        every_step: `id`s of what updates and messages need; the rest is needed by the outputs alone.
    """

    program: Program
    stages: list[FusedStage]
    sources: dict[int, Source]
    same: dict[int, Tensor]
    aliases: dict[int, Tensor]
    outputs: dict[str, Source]
    updates: dict[Variable, Tensor]
    every_step: set[int]

    @property
    def kernels(self) -> list[Kernel]:
        """All of them, in order."""
        return [kernel for stage in self.stages for kernel in stage.kernels]

    def source(self, tensor: Tensor) -> Source:
        """Return where the elements of a tensor of the program lie."""
        return self.sources[id(self.same.get(id(tensor), tensor))]

    def memory_of(self, root: Tensor) -> Tensor:
        """Return the root whose memory a root has."""
        while id(root) in self.aliases:
            root = self.aliases[id(root)]
        return root

    def stored(self) -> set[int]:
        """Return the `id`s of tensors that must lie in memory: other kernels read them, or they are handed out."""
        found = {id(self.memory_of(one.root)) for one in self.outputs.values()}
        found |= {id(self.memory_of(one)) for one in self.updates.values()}
        found |= {id(part) for stage in self.stages for message in stage.messages for part, _ in message}
        for kernel in self.kernels:
            own = {id(one) for one in kernel.tensors}
            found |= {id(self.memory_of(one.root)) for one in kernel.reads if id(one.root) not in own}
            if not isinstance(kernel, Loop):
                found |= own
        return found

    def dependencies(self) -> list[set[int]]:
        """Return for each kernel the numbers of those whose tensors it reads; others may run beside each other."""
        maker = {id(one): number for number, kernel in enumerate(self.kernels) for one in kernel.tensors}
        found = []
        for number, kernel in enumerate(self.kernels):
            roots = {id(self.memory_of(one.root)) for one in kernel.reads}
            found.append({maker[root] for root in roots if root in maker} - {number})
        return found


def operand_dtypes(tensor: Tensor) -> list[DType]:
    """Return the types in which the inputs of an op of single elements enter its expression `Op.c`."""
    assert tensor.op is not None
    own = [one.dtype for one in tensor.inputs]
    if not own or tensor.op.name in ("cast_to", "copy"):
        return own
    if tensor.op.name == "where":
        return [np.dtype(bool), tensor.dtype, tensor.dtype]
    if tensor.op.name == "one_hot_last":
        return [np.dtype(np.float64 if own[0].kind == "f" else np.int64)]
    common = np.result_type(*own)
    if tensor.dtype.kind == "f" and common.kind != "f":
        common = np.dtype(np.float64)  # as NumPy, which rounds to float32 at the end
    return [common] * len(own)


def fuse(program: Program, *, ranks: bool = True, join: bool = True, products: bool = True) -> Fused:
    """Return a program as kernels.

    Args:
        program: a placed one, or one of a single device.
        ranks: whether all-reduces have others to meet; else they are nothing.
        join: let loops have several members; without, each op is a kernel of its own, with the same bits.
        products: whether there are products of matrices; else these are calls.
    """
    return _Fusing(program, ranks, join, products).fused


class _Fusing:
    """The work of `fuse`."""

    def __init__(self, program: Program, ranks: bool, join: bool, products: bool) -> None:
        self._join, self._products = join, products
        self._stages = stages(program) if ranks else [Stage(program.tensors, [])]
        self._same: dict[int, Tensor] = {}  # equal ops, by the id of the later one
        self._find_equal(program.tensors)
        self._last = self._last_reads(program)
        self._sent: set[int] = set()
        self._kernels: list[Kernel] = []
        self._ready: dict[int, int] = {}  # from which kernel of this stage on a root can be read from memory
        self._loops: dict[Key, list[int]] = {}  # of this stage, by their spaces and by those of their rows
        self.fused = Fused(program, [], {}, self._same, {}, {}, {}, set())
        for number, stage in enumerate(self._stages):
            if join:
                self._append(Loop(()))  # for single numbers that depend on nothing else
            for tensor in stage.tensors:
                self._add(tensor)
            messages = [[(self._part(one, number), one) for one in message] for message in stage.messages]
            if number == len(self._stages) - 1:
                self._finish(program)
            self.fused.stages.append(FusedStage(self._kernels, messages))
            self._kernels, self._ready, self._loops = [], {}, {}
            for one in (one for message in stage.messages for one in message):
                self.fused.sources[id(one)] = whole(one)
        if join:
            for fused_stage in self.fused.stages:
                _merge(self.fused, fused_stage.kernels)
                fused_stage.kernels = _sink(self.fused, fused_stage.kernels)
                _merge(self.fused, fused_stage.kernels)
        self.fused.every_step = _every_step(self.fused)

    def _find_equal(self, tensors: Iterable[Tensor]) -> None:
        known: dict[Any, Tensor] = {}
        for one in tensors:
            if one.op is None:
                if one.value is None or one.value.size != 1:
                    continue
                counts = tuple(sorted(one.attributes.items()))  # of a number of rows, see `Tensor.counts_rows`
                key: Any = (marked(one.shape), one.dtype, one.value.tobytes(), counts)
            else:
                attributes = tuple(sorted((name, _comparable(value)) for name, value in one.attributes.items()))
                of = tuple(id(self._canonical(read)) for read in one.inputs)
                key = (id(one.op), of, attributes, marked(one.shape), one.dtype)
            found = known.setdefault(key, one)
            if found is not one:
                self._same[id(one)] = found

    def _last_reads(self, program: Program) -> dict[int, int]:
        """Return the last stage in which each tensor, or a view of it, is read."""
        last = {id(self._canonical(one)): len(self._stages) for one in program.results}
        for number, stage in reversed(list(enumerate(self._stages))):
            for one in (*(x for message in stage.messages for x in message), *reversed(stage.tensors)):
                by_view = last.get(id(one), 0) if _is_view(one) and one.op is not ALL_REDUCE else 0
                for read in map(self._canonical, one.inputs):
                    last[id(read)] = max(last.get(id(read), 0), number, by_view)
        return last

    # Sources

    def _canonical(self, tensor: Tensor) -> Tensor:
        return self._same.get(id(tensor), tensor)

    def _source(self, tensor: Tensor) -> Source:
        return self.fused.sources[id(self._canonical(tensor))]

    def _add(self, tensor: Tensor) -> None:
        """Give a tensor a source, and a kernel if it needs one."""
        if id(tensor) in self._same:
            return
        op, known = tensor.op, self.fused.sources
        if op is not None and _is_view(tensor):
            known[id(tensor)] = self._source(tensor.inputs[0]) if op is ALL_REDUCE else self._view(op, tensor)
            return
        known[id(tensor)] = whole(tensor)
        if op is None:
            return
        inputs = [self._source(one) for one in tensor.inputs]
        if op.name == "batch_matmul" and self._products and tensor.dtype in (np.float32, np.float64):
            for number, (one, source) in enumerate(zip(tensor.inputs, inputs, strict=True)):
                if one.dtype != tensor.dtype or matrix(source, one.shape) is None:
                    inputs[number] = whole(self._copy(one, tensor.dtype))
            self._append(Product(tensor, (inputs[0], inputs[1])))
        elif _has_code(tensor, inputs):
            if self._join and space_of(tensor.shape) and _is_uniform(tensor, inputs):
                inputs = [Source(one.root, tuple(Place(None, place.first) for place in one.places)) for one in inputs]
                tensor = self._single(tensor, inputs)
            self._add_member(tensor, inputs)
        else:
            self._append(Call(tensor, tuple(inputs)))

    def _view(self, op: Op, tensor: Tensor) -> Source:
        beneath = tensor.inputs[0]
        source, attributes = self._source(beneath), tensor.attributes
        if op is OWN_ROWS:
            length = tensor.shape[attributes["axis"]]
            scale = length.scale if isinstance(length, Rows) else 0
            own = [Offset(first=scale if n == attributes["axis"] else 0) for n in range(tensor.ndim)]
            return compose(source, [Place(n, first) for n, first in enumerate(own)])
        if op.name == "stop_gradient":
            return source
        if op.name == "transpose_to":
            return source.along([attributes["axes"].index(n) for n in range(beneath.ndim)])
        if op.name == "broadcast_along":
            return source.along(_aligned(beneath.shape, tensor.shape))
        if op.name == "getitem":
            places, axis = [], 0
            for one in attributes["key"]:
                if isinstance(one, tuple):
                    places.append(Place(axis, offset(one[0]), one[2]))
                    axis += 1
                else:
                    places.append(Place(None, offset(one)))
            return compose(source, places)
        if space_of(beneath.shape) == space_of(tensor.shape):
            kept = iter([n for n, length in enumerate(tensor.shape) if not is_one(length)])
            return source.along([None if is_one(length) else next(kept) for length in beneath.shape])
        root = source.root if source.is_whole(beneath.shape) else self._copy(beneath)
        self.fused.aliases[id(tensor)] = root
        self._ready[id(tensor)] = self._ready.get(id(self.fused.memory_of(root)), 0)
        return whole(tensor)

    def _copy(self, tensor: Tensor, dtype: DType | None = None) -> Tensor:
        """Return a root that has the elements of a tensor in their order."""
        made = Tensor(COPY, (tensor,), {}, tensor.shape, dtype or tensor.dtype, name=tensor.name)
        self._add(made)
        return made

    def _single(self, tensor: Tensor, inputs: Sequence[Source]) -> Tensor:
        """Return the one element of a tensor whose elements are all the same, and let the tensor be a view of it."""
        stand_ins = [Tensor(None, (), {}, (), one.dtype) for one in tensor.inputs]
        for one, source in zip(stand_ins, inputs, strict=True):
            self.fused.sources[id(one)] = source
        made = Tensor(tensor.op, stand_ins, tensor.attributes, (), tensor.dtype)
        self.fused.sources[id(made)] = self.fused.sources[id(tensor)] = whole(made)
        return made

    def _part(self, reduced: Tensor, stage: int) -> Tensor:
        """Return a root with what an all-reduce sums, see `FusedStage`."""
        part = self._canonical(reduced.inputs[0])
        source = self._source(part)
        root = source.root
        own = root.op is not None and root.op is not ALL_REDUCE and source.is_whole(part.shape)
        if not own or id(root) in self.fused.aliases or id(root) in self._sent or self._last[id(root)] > stage:
            root = self._copy(part)
        self._sent.add(id(root))
        return root

    def _finish(self, program: Program) -> None:
        """Note what comes out, as roots that are not written over before it is read."""
        updated = {id(program.state[variable]) for variable in program.updates}
        for name, one in program.outputs.items():
            source = self._source(one)
            old = id(self.fused.memory_of(source.root)) in updated
            self.fused.outputs[name] = whole(self._copy(one)) if old else source
        for variable, one in program.updates.items():
            source = self._source(one)
            if source.root is program.state[variable] and source.is_whole(one.shape):
                continue
            made = source.is_whole(one.shape) and self.fused.memory_of(source.root).op is not None
            self.fused.updates[variable] = source.root if made else self._copy(one)

    # Groups

    def _append(self, kernel: Kernel) -> None:
        number = len(self._kernels)
        self._kernels.append(kernel)
        for one in kernel.tensors:
            self._ready[id(one)] = number + 1
        if isinstance(kernel, Loop):
            key = space_of(kernel.space)
            for found in {key, key[:-1]} if len(key) > 1 else {key}:
                self._loops.setdefault(found, []).append(number)

    def _add_member(self, tensor: Tensor, inputs: Sequence[Source]) -> None:
        space = iterated(tensor)
        begin = max((self._ready.get(id(one.root), 0) - 1 for one in inputs), default=-1)
        for number in self._loops.get(space_of(space), []) if self._join else []:
            loop = self._kernels[number]
            assert isinstance(loop, Loop)
            member = self._fit(loop, number, tensor, inputs) if number >= begin else None
            if member is not None:
                loop.members.append(member)
                self._ready[id(tensor)] = number + 1
                return
        space = tuple(n for n in space if not is_one(n))
        self._append(Loop(space, [_member(tensor, inputs, space, inner=True)]))

    def _fit(self, loop: Loop, number: int, tensor: Tensor, inputs: Sequence[Source]) -> Member | None:
        """Return a tensor as a member of a loop, None if it does not fit or has nothing to do with it."""
        made = _fitting(loop, tensor, inputs)
        if made is None:
            return None
        own = [loop.member(one.root) for one in made.reads]
        if any(self._ready.get(id(one.root), 0) > number for one, m in zip(made.reads, own, strict=True) if m is None):
            return None
        shares = made.inner and bool(_varying(loop.reads) & _varying(made.reads))
        return made if any(own) or shares or not loop.space else None


def _fitting(loop: Loop, tensor: Tensor, inputs: Sequence[Source]) -> Member | None:
    """Return a tensor as a member of a loop whose other tensors it can read, or None."""
    space = space_of(iterated(tensor))
    inner = space == space_of(loop.space)
    if not inner and (len(loop.space) < 2 or space != space_of(loop.space)[:-1]):
        return None
    made = _member(tensor, inputs, loop.space, inner=inner)
    if made.kind == "reduce" and not inner:
        return None
    if made.kind == "sum" and not inner and not (len(loop.space) == 2 and isinstance(loop.space[0], Rows)):
        return None  # the order of the sum would be another one than in a loop of its own
    for number, source in enumerate(made.reads):
        read = loop.member(source.root)
        if read is not None and (not _usable(read, source) or (made.kind == "gather" and number == 0)):
            return None
    return made


def _usable(member: Member, source: Source) -> bool:
    """Whether what a source reads of a member is its value at the same index."""
    if member.kind == "sum":
        return False
    pairs = zip(member.axes, source.places, strict=True)
    return all(axis is None or place == Place(axis) for axis, place in pairs)


def _member(tensor: Tensor, inputs: Sequence[Source], space: Shape, *, inner: bool) -> Member:
    """Return a tensor as a member of a loop, computed for each element of it or for each row."""
    op, shape = tensor.op, iterated(tensor)
    assert op is not None
    count = iter(range(len(space)))
    own = [None if is_one(n) else next(count) for n in shape]
    shapes = [one.shape for one in tensor.inputs]
    if op.name in REDUCTIONS:
        reduced = {axis for axis in _reduced(tensor) if own[axis] is not None}
        kind: Any = "map" if not reduced else "sum"
        if {own[axis] for axis in reduced} == {len(space) - 1}:
            kind = "reduce"
        kept = [
            None if axis in _reduced(tensor) else own[axis]
            for axis in range(len(shape))
            if tensor.attributes.get("keepdims") or axis not in _reduced(tensor)
        ]
        return Member(tensor, kind, (inputs[0].along(own),), tuple(kept), inner)
    if op.name == "take_rows":
        of_table = [None, *own[len(shapes[1]) :]]
        return Member(
            tensor, "gather", (inputs[0].along(of_table), inputs[1].along(own[: len(shapes[1])])), tuple(own), inner
        )
    by_last = op.c is not None and "{last}" in op.c
    aligned = [list(range(len(one))) if by_last else _aligned(one, shape) for one in shapes]
    reads = tuple(
        source.along([None if axis is None else own[axis] for axis in axes])
        for source, axes in zip(inputs, aligned, strict=True)
    )
    return Member(tensor, "map", reads, tuple(own), inner)


def _varying(reads: Iterable[Source]) -> set[tuple[int, tuple[Place, ...]]]:
    """Return what is read, but for single numbers."""
    return {(id(one.root), one.places) for one in reads if any(place.axis is not None for place in one.places)}


def _merge(fused: Fused, kernels: list[Kernel]) -> None:
    """Make one of two loops that share something, where nothing in between needs the one or is needed by the other."""
    number = 1
    while number < len(kernels):
        found = next((at for at in reversed(range(number)) if _merged(fused, kernels, at, number)), None)
        number = number + 1 if found is None else max(found, 1)


def _merged(fused: Fused, kernels: list[Kernel], first: int, second: int) -> bool:
    """Merge two kernels, if they can be."""
    one, other = kernels[first], kernels[second]
    if not isinstance(one, Loop) or not isinstance(other, Loop):
        return False
    spaces = sorted((one.space, other.space), key=len)
    if space_of(spaces[0]) not in (space_of(spaces[1]), space_of(spaces[1])[:-1]):
        return False
    made = {id(tensor) for tensor in one.tensors}
    uses = any(id(source.root) in made for source in other.reads)
    if not uses and one.space and not _varying(one.reads) & _varying(other.reads):
        return False
    between = kernels[first + 1 : second]
    needed = {id(fused.memory_of(source.root)) for source in other.reads}
    up = not any(id(tensor) in needed for kernel in between for tensor in kernel.tensors)
    down = not any(id(fused.memory_of(source.root)) in made for kernel in between for source in kernel.reads)
    trial = Loop(spaces[1])
    for member in (*one.members, *other.members) if up or down else []:
        found = _fitting(trial, member.tensor, [fused.source(read) for read in member.tensor.inputs])
        if found is None or any(_is_within(fused, source, made) for source in found.reads):
            return False
        trial.members.append(found)
    if up or down:
        kernels[first if up else second] = trial
        del kernels[second if up else first]
    return up or down


def _is_within(fused: Fused, source: Source, made: set[int]) -> bool:
    """Whether a source is another shape of something that is made here."""
    memory = fused.memory_of(source.root)
    return memory is not source.root and id(memory) in made


def _sink(fused: Fused, kernels: list[Kernel]) -> list[Kernel]:
    """Move members to the one later loop that reads them, where that costs no more memory; return what is left."""
    handed_out = {id(fused.memory_of(one.root)) for one in fused.outputs.values()}
    handed_out |= {id(fused.memory_of(one)) for one in fused.updates.values()}
    handed_out |= {id(part) for stage in fused.stages for message in stage.messages for part, _ in message}
    readers: dict[int, list[tuple[Kernel, Member | None]]] = {}
    here = {id(kernel) for kernel in kernels}
    for kernel in fused.kernels:
        pairs: list[tuple[Member | None, Source]] = [(None, one) for one in kernel.reads]
        if isinstance(kernel, Loop):
            pairs = [(one, source) for one in kernel.members for source in one.reads]
        for member, source in pairs:
            memory = fused.memory_of(source.root)
            readers.setdefault(id(memory), []).append((kernel, member if memory is source.root else None))

    def chain(member: Member, loop: Loop, target: Loop, moving: list[Member]) -> bool:
        """Note a member and what must move with it; whether all that can move."""
        if member in moving:
            return True
        others = [reader for kernel, reader in readers.get(id(member.tensor), []) if kernel is not target]
        own = [reader for kernel, reader in readers.get(id(member.tensor), []) if kernel is target]
        can = member.kind != "sum" and id(member.tensor) not in handed_out
        if not can or None in own or any(reader not in moving for reader in others):
            return False
        moving.append(member)
        for source in member.reads:
            read = loop.member(source.root)
            if read is None or id(read.tensor) in handed_out:
                if member.kind == "reduce":
                    return False  # what it reads is more than what it makes
                continue
            lies = any(kernel is not loop and reader not in moving for kernel, reader in readers[id(read.tensor)])
            if (lies and member.kind == "reduce") or (not lies and not chain(read, loop, target, moving)):
                return False
        return True

    for number in reversed(range(len(kernels))):
        loop = kernels[number]
        if not isinstance(loop, Loop):
            continue
        for member in reversed(list(loop.members)):
            targets = [kernel for kernel, _ in readers.get(id(member.tensor), []) if kernel is not loop]
            target = targets[0] if targets and all(one is targets[0] for one in targets) else None
            moving: list[Member] = []
            if not isinstance(target, Loop) or id(target) not in here or member not in loop.members:
                continue
            if chain(member, loop, target, moving):
                _move([one for one in loop.members if one in moving], loop, target, fused, readers)
    return [one for one in kernels if not isinstance(one, Loop) or one.members]


def _move(
    moving: list[Member],
    loop: Loop,
    target: Loop,
    fused: Fused,
    readers: dict[int, list[tuple[Kernel, Member | None]]],
) -> None:
    """Move members from one loop to another, if they fit there."""
    trial = Loop(target.space)
    for one in moving:
        found = _fitting(trial, one.tensor, [fused.source(read) for read in one.tensor.inputs])
        if found is None:
            return
        trial.members.append(found)
    for one in target.members:
        for source in one.reads:
            read = trial.member(source.root)
            if read is not None and not _usable(read, source):
                return
    for old, new in zip(moving, trial.members, strict=True):
        loop.members.remove(old)
        for source in old.reads:
            pairs = readers[id(fused.memory_of(source.root))]
            pairs[pairs.index((loop, old if fused.memory_of(source.root) is source.root else None))] = (
                target,
                new if fused.memory_of(source.root) is source.root else None,
            )
    target.members[:0] = trial.members


def _every_step(fused: Fused) -> set[int]:
    """Return the tensors that updates and messages are made of."""
    needed = {id(fused.memory_of(one)) for one in fused.updates.values()}
    for stage in reversed(fused.stages):
        needed |= {id(part) for message in stage.messages for part, _ in message}
        for kernel in reversed(stage.kernels):
            members: Sequence[Any] = kernel.members if isinstance(kernel, Loop) else [kernel]
            for member in reversed(members):
                if id(member.tensor) in needed:
                    needed |= {id(fused.memory_of(source.root)) for source in member.reads}
    return needed


# Shapes and sources


def iterated(tensor: Tensor) -> Shape:
    """Return the shape over which an op is computed: of a reduction, its input's."""
    assert tensor.op is not None
    return tensor.inputs[0].shape if tensor.op.name in REDUCTIONS else tensor.shape


def _reduced(tensor: Tensor) -> tuple[int, ...]:
    axis = tensor.attributes.get("axis")
    found: tuple[int, ...] = tensor.attributes["axes"] if axis is None else (axis,)
    return found


def _aligned(shape: Shape, out: Shape) -> list[int | None]:
    """Return the axis of a broadcast result that each axis of an operand goes along, None for those that are spread."""
    return [None if is_one(n) else axis + len(out) - len(shape) for axis, n in enumerate(shape)]


def _is_uniform(tensor: Tensor, inputs: Sequence[Source]) -> bool:
    op = tensor.op
    return op is not None and op.c is not None and "{last}" not in op.c and all(one.is_single for one in inputs)


def _is_view(tensor: Tensor) -> bool:
    return tensor.op is not None and (tensor.op.is_view or tensor.op in (OWN_ROWS, ALL_REDUCE))


def _has_code(tensor: Tensor, inputs: Sequence[Source]) -> bool:
    """Whether a loop can compute a tensor."""
    op = tensor.op
    assert op is not None
    if any(one.dtype.name not in C_TYPES for one in (tensor, *tensor.inputs)):
        return False
    if op.name == "argmax_along":
        behind = tensor.inputs[0].shape[tensor.attributes["axis"] :]
        return not is_one(behind[0]) and all(map(is_one, behind[1:]))
    if op.name == "take_rows":
        return inputs[0] == whole(inputs[0].root) and tensor.inputs[1].dtype.kind in "iu"
    return op.c is not None or op.name in REDUCTIONS


def _comparable(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    if isinstance(value, Rows):
        return ("rows", value.scale)
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value).__name__, value)
