"""Which ops of a program are computed together: loops, products of matrices, and calls.

A placed program becomes a list of **kernels**. A `Loop` goes once over a space of indices, such as (B, 10), and
computes any number of tensors there: ops of single elements (`Element`), gathered rows, reductions along the last axis,
whose results other members of the same loop can use (so a softmax is one loop), and sums over other axes, which are
complete when the loop is. A `Product` is a product of matrices. A `Call` is everything else: one op by its own
function.

Reshapes, transposes, slices and broadcasts are no kernels: what reads one reads the tensor beneath it, its **root**, at
other indices (a `View`). Only a reshape across axes that do not lie one behind the other is a copy.

Equal ops have become one (`passes.py`). Each op goes into the first loop that it fits and shares something with; then
what only a later loop reads moves there (`merge.py`), if it can be computed from what lies in memory anyway, as the
mask of a relu.

Lengths that count rows stay symbolic, so that what is generated from kernels holds for any batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.program import lowering
from dptrain.program.cpp import TYPES
from dptrain.program.kernels import (
    COPY,
    Call,
    Fused,
    FusedStage,
    Kernel,
    Loop,
    Member,
    Product,
    as_member,
    fitting,
    iterated,
    varying,
)
from dptrain.program.lowering import lowering_of
from dptrain.program.merge import merge, sink
from dptrain.program.mesh import ALL_REDUCE
from dptrain.program.messages import SENT, stages
from dptrain.program.passes import rewritten, with_half_factors, without_repeats
from dptrain.program.program import Program
from dptrain.program.shapes import is_one
from dptrain.program.tensor import DType, Tensor, is_half
from dptrain.program.views import Key, View, compose, marked, matrix, space_of, whole


def fuse(program: Program, *, join: bool = True) -> Fused:
    """Return a program as kernels.

    Args:
        program: a placed one, or one of a single device.
        join: let loops have several members; without, each op is a kernel of its own, with the same bits.
    """
    return _Fusing(without_repeats(rewritten(program, with_half_factors)), join).fused


class _Fusing:
    """The work of `fuse`."""

    def __init__(self, program: Program, join: bool) -> None:
        self._join = join
        self._stages = stages(program)
        self._last = self._last_reads(program)
        self._sent: set[Tensor] = set()
        self._kernels: list[Kernel] = []
        self._ready: dict[Tensor, int] = {}  # from which kernel of this stage on a root can be read from memory
        self._copies: dict[tuple[Tensor, DType], Tensor] = {}
        self._loops: dict[Key, list[int]] = {}  # of this stage, by their spaces and by those of their rows
        self.fused = Fused(program, [], {}, {}, {}, {}, set())
        for number, stage in enumerate(self._stages):
            if join:
                self._append(Loop(()))  # for single numbers that depend on nothing else
            for tensor in stage.tensors:
                self._add(tensor)
            # Sums are written over their parts: what else is sent is known before them.
            kinds = sorted(stage.messages, key=lambda message: message[0].op is ALL_REDUCE)
            parts = {one: self._travelling(one, number) for message in kinds for one in message}
            messages = [[(parts[one], one) for one in message] for message in stage.messages]
            if number == len(self._stages) - 1:
                self._finish(program)
            self.fused.stages.append(FusedStage(self._kernels, messages))
            self._kernels, self._ready, self._loops = [], {}, {}
            for one in (one for message in stage.messages for one in message):
                self.fused.views[one] = whole(one)
        if join:
            for fused_stage in self.fused.stages:
                merge(self.fused, fused_stage.kernels)
                fused_stage.kernels = sink(self.fused, fused_stage.kernels)
                merge(self.fused, fused_stage.kernels)
        self.fused.every_step = _every_step(self.fused)

    def _last_reads(self, program: Program) -> dict[Tensor, int]:
        """Return the last stage in which each tensor, or a view of it, is read."""
        last = dict.fromkeys(program.results, len(self._stages))
        for number, stage in reversed(list(enumerate(self._stages))):
            for one in reversed(stage.order):
                by_view = last.get(one, 0) if one.op is not None and one.op.is_view else 0
                for read in one.inputs:
                    last[read] = max(last.get(read, 0), number, by_view)
        return last

    # Views

    def _view(self, tensor: Tensor) -> View:
        return self.fused.views[tensor]

    def _add(self, tensor: Tensor) -> None:
        """Give a tensor a view, and a kernel if it needs one."""
        op, known = tensor.op, self.fused.views
        if op is not None and op.is_view:
            known[tensor] = self._as_view(tensor)
            return
        known[tensor] = whole(tensor)
        if op is None:
            return
        inputs = [self._view(one) for one in tensor.inputs]
        if isinstance(op.lowering, lowering.Product) and tensor.dtype in (np.float32, np.float64):
            a, b = (one.dtype for one in tensor.inputs)
            wanted = a if a == b and is_half(a) else tensor.dtype
            for number, (one, view) in enumerate(zip(tensor.inputs, inputs, strict=True)):
                if one.dtype != wanted or matrix(view, one.shape) is None:
                    inputs[number] = self._stored(one, wanted)
            self._append(Product(tensor, (inputs[0], inputs[1])))
        elif _has_code(tensor, inputs):
            if self._join and op is not COPY and space_of(tensor.shape) and _is_uniform(tensor, inputs):
                tensor = self._single(tensor, inputs)
            self._add_member(tensor, inputs)
        else:
            if isinstance(op.lowering, lowering.WHOLE):
                inputs = [
                    view if view.is_whole(one.shape) else self._stored(one, one.dtype)
                    for view, one in zip(inputs, tensor.inputs, strict=True)
                ]
            self._append(Call(tensor, tuple(inputs)))

    def _as_view(self, tensor: Tensor) -> View:
        beneath, shown = tensor.inputs[0], lowering_of(tensor)
        view = self._view(beneath)
        assert isinstance(shown, lowering.ViewMap)
        if shown.maps is not None:
            return compose(view, shown.maps(tensor), tensor.ndim)
        if space_of(beneath.shape) == space_of(tensor.shape):
            kept = iter([n for n, length in enumerate(tensor.shape) if not is_one(length)])
            return view.along([None if is_one(length) else next(kept) for length in beneath.shape])
        root = view.root if view.is_whole(beneath.shape) else self._copy(beneath)
        self.fused.aliases[tensor] = root
        self._ready[tensor] = self._ready.get(self.fused.memory_of(root), 0)
        return whole(tensor)

    def _copy(self, tensor: Tensor, dtype: DType | None = None) -> Tensor:
        """Return a root that has the elements of a tensor in their order."""
        made = Tensor(COPY, (tensor,), {}, tensor.shape, dtype or tensor.dtype, name=tensor.name)
        self._add(made)
        return made

    def _stored(self, tensor: Tensor, dtype: DType) -> View:
        """Return the view of a copy that kernels only read, one for all of them."""
        if (tensor, dtype) not in self._copies:
            self._copies[tensor, dtype] = self._copy(tensor, dtype)
        return whole(self._copies[tensor, dtype])

    def _single(self, tensor: Tensor, inputs: Sequence[View]) -> Tensor:
        """Return the one element of a tensor whose elements are all the same, and let the tensor be a view of it."""
        stand_ins = [Tensor(None, (), {}, (), one.dtype) for one in tensor.inputs]
        for one, view in zip(stand_ins, inputs, strict=True):
            self.fused.views[one] = view
        made = Tensor(tensor.op, stand_ins, tensor.attributes, (), tensor.dtype)
        self.fused.views[made] = self.fused.views[tensor] = whole(made)
        return made

    def _travelling(self, result: Tensor, stage: int) -> Tensor:
        """Return a root with what a rank gives for what travels, see `FusedStage`."""
        if result.op is ALL_REDUCE:
            return self._part(result, stage)
        given = result.inputs[0]
        view = self._view(given)
        root = view.root if view.is_whole(given.shape) else self._copy(given)
        self._sent.add(self.fused.memory_of(root))
        return root

    def _part(self, reduced: Tensor, stage: int) -> Tensor:
        """Return a root with what an all-reduce sums, see `FusedStage`."""
        part = reduced.inputs[0]
        view = self._view(part)
        root = view.root
        own = root.op is not None and root.op not in SENT and view.is_whole(part.shape)
        if (
            not own
            or root in self.fused.aliases
            or self.fused.memory_of(root) in self._sent
            or self._last[root] > stage
        ):
            root = self._copy(part)
        self._sent.add(self.fused.memory_of(root))
        return root

    def _finish(self, program: Program) -> None:
        """Note what comes out, as roots that are not written over before it is read."""
        updated = {program.state[variable] for variable in program.updates}
        for name, one in program.outputs.items():
            view = self._view(one)
            old = self.fused.memory_of(view.root) in updated
            self.fused.outputs[name] = whole(self._copy(one)) if old else view
        for variable, one in program.updates.items():
            view = self._view(one)
            if view.root is program.state[variable] and view.is_whole(one.shape):
                continue
            made = view.is_whole(one.shape) and self.fused.memory_of(view.root).op is not None
            self.fused.updates[variable] = view.root if made else self._copy(one)

    # Groups

    def _append(self, kernel: Kernel) -> None:
        number = len(self._kernels)
        self._kernels.append(kernel)
        for one in kernel.tensors:
            self._ready[one] = number + 1
        if isinstance(kernel, Loop):
            key = space_of(kernel.space)
            for found in {key, key[:-1]} if len(key) > 1 else {key}:
                self._loops.setdefault(found, []).append(number)

    def _add_member(self, tensor: Tensor, inputs: Sequence[View]) -> None:
        space = iterated(tensor)
        begin = max((self._ready.get(one.root, 0) - 1 for one in inputs), default=-1)
        for number in self._loops.get(space_of(space), []) if self._join else []:
            loop = self._kernels[number]
            assert isinstance(loop, Loop)
            member = self._fit(loop, number, tensor, inputs) if number >= begin else None
            if member is not None:
                loop.members.append(member)
                self._ready[tensor] = number + 1
                return
        space = tuple(n for n in space if not is_one(n))
        self._append(Loop(space, [as_member(tensor, inputs, space, inner=True)]))

    def _fit(self, loop: Loop, number: int, tensor: Tensor, inputs: Sequence[View]) -> Member | None:
        """Return a tensor as a member of a loop, None if it does not fit or has nothing to do with it."""
        made = fitting(loop, tensor, inputs)
        if made is None:
            return None
        own = [loop.member(one.root) for one in made.reads]
        if any(self._ready.get(one.root, 0) > number for one, m in zip(made.reads, own, strict=True) if m is None):
            return None
        shares = made.inner and bool(varying(loop.reads) & varying(made.reads))
        return made if any(own) or shares or not loop.space else None


def _every_step(fused: Fused) -> set[Tensor]:
    """Return the tensors that updates and messages are made of."""
    needed = fused.kept()
    for stage in reversed(fused.stages):
        for kernel in reversed(stage.kernels):
            members: Sequence[Any] = kernel.members if isinstance(kernel, Loop) else [kernel]
            for member in reversed(members):
                if member.tensor in needed:
                    needed |= {fused.memory_of(view.root) for view in member.reads}
    return needed


def _is_uniform(tensor: Tensor, inputs: Sequence[View]) -> bool:
    element = lowering_of(tensor)
    return isinstance(element, lowering.Element) and not element.by_last and all(one.is_single for one in inputs)


def _has_code(tensor: Tensor, inputs: Sequence[View]) -> bool:
    """Whether a loop can compute a tensor."""
    if any(one.dtype.name not in TYPES for one in (tensor, *tensor.inputs)):
        return False
    match lowering_of(tensor):
        case lowering.Reduction("argmax"):
            behind = tensor.inputs[0].shape[tensor.attributes["axis"] :]
            return not is_one(behind[0]) and all(map(is_one, behind[1:]))
        case lowering.Gather():
            table, places = tensor.inputs
            root = inputs[0].root
            if marked(table.shape) != marked(root.shape):  # such as one row that is spread over many
                return False
            return inputs[0] == whole(root) and places.dtype.kind in "iu"
        case lowering.Element() | lowering.Reduction():
            return True
    return False
