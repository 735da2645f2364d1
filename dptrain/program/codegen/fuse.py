"""Groups the ops of a program into kernels: loops, matrix products and calls.

A placed program becomes a list of **kernels**. A `Loop` goes once over a space of indices, such as (B, 10), and
computes any number of tensors there: elementwise ops (`Element`), gathered rows, reductions along the last axis, which
other members of the same loop can use (so a softmax is one loop), and sums over other axes, which are complete when the
loop is. A `ProductKernel` is a matrix product. A `Call` is any other op, computed by its own function.

Reshapes, transposes, slices and broadcasts are no kernels: their readers read the tensor beneath, the **root**, at
other indices (a `View`). Only a reshape across axes that are not contiguous is a copy.

Equal ops have been merged before (`passes.py`). Each op joins the first loop that it fits and shares an operand with;
afterwards a tensor that only a later loop reads moves there (`merge.py`) if it can be computed from stored tensors, as
the mask of a relu.

Lengths that count rows stay symbolic, so that generated code holds for any batch.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.program import lowering
from dptrain.program.codegen.cpp import has_types
from dptrain.program.codegen.kernels import (
    COPY,
    Call,
    Fused,
    FusedStage,
    Kernel,
    Loop,
    LoopMember,
    ProductKernel,
    RepeatKernel,
    as_member,
    fitting,
    iterated,
    varying,
)
from dptrain.program.codegen.merge import merge, sink
from dptrain.program.codegen.views import Key, View, compose, marked, matrix, space_of, whole
from dptrain.program.lowering import lowering_of
from dptrain.program.passes import rewritten, sums_of_products, with_half_factors, without_repeats
from dptrain.program.program import Program
from dptrain.program.schedule.loops import repeat_of
from dptrain.program.shapes import Shape, is_one
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.messages import SENT, Stage, stages
from dptrain.program.steps import step_of
from dptrain.program.tensor import DType, Node, Tensor
from dptrain.runtime.types import type_of


def fuse(program: Program, *, join: bool = True) -> Fused:
    """Group a placed program into kernels; without `join` each op is its own kernel, with the same bits."""
    return _Fuser(without_repeats(rewritten(program, with_half_factors)), join).fused


def _fused_step(program: Program, carries: int, join: bool) -> Fused:
    """Group one step of a loop with so many carries into kernels."""
    fused = _Fuser(without_repeats(rewritten(program, with_half_factors)), join, carries).fused
    fused.every_step = {fused.memory_of(tensor) for kernel in fused.kernels for tensor in kernel.tensors}
    return fused


class _Fuser:
    def __init__(self, program: Program, join: bool, carries: int | None = None) -> None:
        self._join, self._carries = join, carries
        self._stages = stages(program)
        self._last = self._last_reads(program)
        self._sent: set[Tensor] = set()
        self._kernels: list[Kernel] = []
        self._ready: dict[Tensor, int] = {}  # the kernel of this stage from which a root can be read from memory
        self._copies: dict[tuple[Tensor, DType], Tensor] = {}
        self._makers: dict[Tensor, int] = {}  # loops of this stage by the tensors that they compute
        self._readers: dict[tuple[Key, View], list[int]] = {}  # and by their space and the views that they read there
        self._singles: list[int] = []  # loops of single numbers
        self._values: dict[Node, dict[int, Tensor]] = {}  # values of ops with several
        for tensor in program.tensors:
            if tensor.op is not None and tensor.op.has_values:
                self._values.setdefault(tensor.node, {})[tensor.index] = tensor
        # Products by the sums over leading axes that alone read them, and these products.
        self._sums = _summed_products(program, self._stages)
        self._summed = set(self._sums.values())
        self.fused = Fused(program, [], {}, {}, {}, {}, set())
        for number, stage in enumerate(self._stages):
            if join:
                self._append(Loop(()))  # for single numbers without operands
            for tensor in stage.tensors:
                self._add(tensor)
            # Sums overwrite their parts, so other messages come first.
            kinds = sorted(stage.messages, key=lambda message: message[0].op is ALL_REDUCE)
            parts = {tensor: self._travelling(tensor, number) for message in kinds for tensor in message}
            messages = [[(parts[tensor], tensor) for tensor in message] for message in stage.messages]
            if number == len(self._stages) - 1:
                self._finish(program)
            self.fused.stages.append(FusedStage(self._kernels, messages))
            self._kernels, self._ready, self._makers, self._readers, self._singles = [], {}, {}, {}, []
            for result in (result for message in stage.messages for result in message):
                self.fused.views[result] = whole(result)
        if join:
            merge(self.fused)
            sink(self.fused)
            merge(self.fused)
        self.fused.every_step = _every_step(self.fused)

    def _last_reads(self, program: Program) -> dict[Tensor, int]:
        """Return the last stage that reads each tensor, or a view of it."""
        last = dict.fromkeys(program.results, len(self._stages))
        for number, stage in reversed(list(enumerate(self._stages))):
            for tensor in reversed(stage.order):
                by_view = last.get(tensor, 0) if tensor.op is not None and tensor.op.is_view else 0
                for read in tensor.inputs:
                    last[read] = max(last.get(read, 0), number, by_view)
        return last

    # Views

    def _view(self, tensor: Tensor) -> View:
        return self.fused.views[tensor]

    def _add(self, tensor: Tensor) -> None:
        """Give a tensor its view, and a kernel if it needs one."""
        op, views = tensor.op, self.fused.views
        if op is not None and op.is_view:
            views[tensor] = self._as_view(tensor)
            return
        views[tensor] = whole(tensor)
        if op is None:
            return
        inputs = [self._view(operand) for operand in tensor.inputs]
        if op.has_values:
            values = self._values[tensor.node]
            if tensor is next(iter(values.values())):
                self._append(self._node(tensor, inputs, values))
        elif tensor in self._summed:
            pass  # computed by the product kernel of its sum
        elif tensor in self._sums or _is_product(tensor):
            self._append(self._product(tensor, self._sums.get(tensor, tensor)))
        elif _has_code(tensor, inputs):
            if self._join and op is not COPY and space_of(tensor.shape) and _is_uniform(tensor, inputs):
                tensor = self._single(tensor, inputs)
            self._add_member(tensor, inputs)
        else:
            if isinstance(op.lowering, lowering.WHOLE):
                inputs = self._whole(tensor, inputs)
            self._append(Call(tensor, tuple(inputs)))

    def _whole(self, tensor: Tensor, inputs: list[View]) -> list[View]:
        """Return the inputs as contiguous arrays, copied where they are not."""
        return [
            view if view.is_whole(operand.shape) else self._stored(operand, operand.dtype)
            for view, operand in zip(inputs, tensor.inputs, strict=True)
        ]

    def _product(self, tensor: Tensor, product: Tensor) -> ProductKernel:
        """Return a matrix product, or its sum over the leading axes."""
        inputs = [self._view(factor) for factor in product.inputs]
        a, b = (factor.dtype for factor in product.inputs)
        dtype = a if a == b and type_of(a).is_factor else product.dtype
        for number, (factor, view) in enumerate(zip(product.inputs, inputs, strict=True)):
            if factor.dtype != dtype or matrix(view, factor.shape) is None:
                inputs[number] = self._stored(factor, dtype)
        return ProductKernel(tensor, (inputs[0], inputs[1]), product)

    def _node(self, tensor: Tensor, inputs: list[View], values: Mapping[int, Tensor]) -> Kernel:
        self.fused.views |= {value: whole(value) for value in values.values()}
        if isinstance(lowering_of(tensor), (lowering.LoopLowering, *lowering.WHOLE)):
            inputs = self._whole(tensor, inputs)
        if not isinstance(lowering_of(tensor), lowering.LoopLowering):
            return Call(tensor, tuple(inputs), values)
        repeat = repeat_of(tensor)
        step = _fused_step(step_of(repeat.body), len(repeat.carries), self._join)
        return RepeatKernel(values, tuple(inputs), repeat, step)

    def _as_view(self, tensor: Tensor) -> View:
        beneath, view_map = tensor.inputs[0], lowering_of(tensor)
        view = self._view(beneath)
        assert isinstance(view_map, lowering.ViewMap)
        if view_map.maps is not None:
            return compose(view, view_map.maps(tensor), tensor.ndim)
        if space_of(beneath.shape) == space_of(tensor.shape):
            axes = iter([n for n, length in enumerate(tensor.shape) if not is_one(length)])
            return view.along([None if is_one(length) else next(axes) for length in beneath.shape])
        root = view.root if view.is_whole(beneath.shape) else self._copy(beneath)
        self.fused.aliases[tensor] = root
        self._ready[tensor] = self._ready.get(self.fused.memory_of(root), 0)
        return whole(tensor)

    def _copy(self, tensor: Tensor, dtype: DType | None = None) -> Tensor:
        """Return a root with a contiguous copy of a tensor."""
        duplicate = Tensor(COPY, (tensor,), {}, tensor.shape, dtype or tensor.dtype, name=tensor.name)
        self._add(duplicate)
        return duplicate

    def _stored(self, tensor: Tensor, dtype: DType) -> View:
        """Return a view of a read-only copy, shared by all readers."""
        if (tensor, dtype) not in self._copies:
            self._copies[tensor, dtype] = self._copy(tensor, dtype)
        return whole(self._copies[tensor, dtype])

    def _single(self, tensor: Tensor, inputs: Sequence[View]) -> Tensor:
        """Compute a uniform tensor as one element, of which it becomes a view."""
        stand_ins = [Tensor(None, (), {}, (), operand.dtype) for operand in tensor.inputs]
        for stand_in, view in zip(stand_ins, inputs, strict=True):
            self.fused.views[stand_in] = view
        element = Tensor(tensor.op, stand_ins, tensor.attributes, (), tensor.dtype)
        self.fused.views[element] = self.fused.views[tensor] = whole(element)
        return element

    def _travelling(self, result: Tensor, stage: int) -> Tensor:
        """Return the root that a rank sends in a collective, see `FusedStage`."""
        if result.op is ALL_REDUCE:
            return self._part(result, stage)
        operand = result.inputs[0]
        view = self._view(operand)
        root = view.root if view.is_whole(operand.shape) else self._copy(operand)
        self._sent.add(self.fused.memory_of(root))
        return root

    def _part(self, reduced: Tensor, stage: int) -> Tensor:
        """Return the root that an all-reduce sums in place, see `FusedStage`."""
        part = reduced.inputs[0]
        view = self._view(part)
        root = view.root
        is_own_memory = root.op is not None and root.op not in SENT and view.is_whole(part.shape)
        if (
            not is_own_memory
            or root in self.fused.aliases
            or self.fused.memory_of(root) in self._sent
            or self._last[root] > stage
        ):
            root = self._copy(part)
        self._sent.add(self.fused.memory_of(root))
        return root

    def _finish(self, program: Program) -> None:
        """Record outputs and updates as roots that nothing overwrites before they are read."""
        if self._carries is not None:
            self._finish_step(program, self._carries)
            return
        updated = {program.state[variable] for variable in program.updates}
        for name, tensor in program.outputs.items():
            view = self._view(tensor)
            old = self.fused.memory_of(view.root) in updated
            self.fused.outputs[name] = whole(self._copy(tensor)) if old else view
        for variable, tensor in program.updates.items():
            view = self._view(tensor)
            if view.root is program.state[variable] and view.is_whole(tensor.shape):
                continue
            is_computed = view.is_whole(tensor.shape) and self.fused.memory_of(view.root).op is not None
            self.fused.updates[variable] = view.root if is_computed else self._copy(tensor)

    def _finish_step(self, program: Program, carries: int) -> None:
        """Record the results of a loop's step as distinct roots; a next carry may also be stacked."""
        roots_in_use: dict[bool, set[Tensor]] = {True: set(), False: set()}
        for number, (name, tensor) in enumerate(program.outputs.items()):
            view, is_carry = self._view(tensor), number < carries
            memory = self.fused.memory_of(view.root)
            if not view.is_whole(tensor.shape) or memory.op is None or memory in roots_in_use[is_carry]:
                view = whole(self._copy(tensor))
                memory = self.fused.memory_of(view.root)
            roots_in_use[is_carry].add(memory)
            self.fused.outputs[name] = view

    # Groups

    def _append(self, kernel: Kernel) -> None:
        number = len(self._kernels)
        self._kernels.append(kernel)
        for tensor in kernel.tensors:
            self._ready[tensor] = number + 1
        if isinstance(kernel, Loop) and not kernel.space:
            self._singles.append(number)
        for member in kernel.members if isinstance(kernel, Loop) else []:
            self._note(member, number)

    def _note(self, member: LoopMember, number: int) -> None:
        """Index a member's loop by the tensor that it computes and by the views that it reads."""
        loop = self._kernels[number]
        assert isinstance(loop, Loop)
        self._makers[member.tensor] = number
        for view in varying(member.reads):
            loops = self._readers.setdefault((space_of(loop.space), view), [])
            if not _holds(loops, number):
                insort(loops, number)

    def _add_member(self, tensor: Tensor, inputs: Sequence[View]) -> None:
        space = tuple(n for n in iterated(tensor) if not is_one(n))
        candidate = as_member(tensor, inputs, space, inner=True)
        for number in self._related(candidate, space) if self._join else []:
            member = self._fit(number, tensor, inputs)
            if member is not None:
                loop = self._kernels[number]
                assert isinstance(loop, Loop)
                loop.add(member)
                self._ready[tensor] = number + 1
                self._note(member, number)
                return
        self._append(Loop(space, [candidate]))

    def _related(self, member: LoopMember, space: Shape) -> list[int]:
        """Return, in order, the loops that share or make an operand of a member and start late enough."""
        begin = max((self._ready.get(view.root, 0) - 1 for view in member.reads), default=-1)
        numbers = {self._makers[view.root] for view in member.reads if view.root in self._makers}
        for loops in [self._readers.get((space_of(space), view), []) for view in varying(member.reads)]:
            numbers |= set(loops[bisect_left(loops, begin) :])
        return sorted(number for number in (numbers if space else {*numbers, *self._singles}) if number >= begin)

    def _fit(self, number: int, tensor: Tensor, inputs: Sequence[View]) -> LoopMember | None:
        """Return a tensor as a member of a loop; None if it does not fit or shares nothing."""
        loop = self._kernels[number]
        assert isinstance(loop, Loop)
        member = fitting(loop, tensor, inputs)
        if member is None:
            return None
        producers = [loop.member(view.root) for view in member.reads]
        if any(
            self._ready.get(view.root, 0) > number for view, m in zip(member.reads, producers, strict=True) if m is None
        ):
            return None
        space = space_of(loop.space)
        shares = member.inner and any(
            _holds(self._readers.get((space, view), []), number) for view in varying(member.reads)
        )
        return member if any(producers) or shares or not loop.space else None


def _holds(numbers: Sequence[int], number: int) -> bool:
    at = bisect_left(numbers, number)
    return at < len(numbers) and numbers[at] == number


def _every_step(fused: Fused) -> set[Tensor]:
    """Return the tensors that updates and messages depend on."""
    needed = fused.kept()
    for stage in reversed(fused.stages):
        for kernel in reversed(stage.kernels):
            members: Sequence[Any] = kernel.members if isinstance(kernel, Loop) else [kernel]
            for member in reversed(members):
                tensors = [member.tensor] if isinstance(member, LoopMember) else member.tensors
                if not needed.isdisjoint(tensors):
                    needed |= {fused.memory_of(view.root) for view in member.reads}
    return needed


def _is_product(tensor: Tensor) -> bool:
    return isinstance(lowering_of(tensor), lowering.Product) and tensor.dtype in (np.float32, np.float64)


def _summed_products(program: Program, of: Iterable[Stage]) -> dict[Tensor, Tensor]:
    """Return products that only a sum of the same stage reads, by the sum."""
    stage = {tensor: number for number, each_stage in enumerate(of) for tensor in each_stage.tensors}
    pairs = sums_of_products(program).items()
    return {
        total: product for total, product in pairs if stage.get(total) == stage.get(product) and _is_product(product)
    }


def _is_uniform(tensor: Tensor, inputs: Sequence[View]) -> bool:
    element = lowering_of(tensor)
    return isinstance(element, lowering.Element) and not element.by_last and all(view.is_single for view in inputs)


def _has_code(tensor: Tensor, inputs: Sequence[View]) -> bool:
    if not has_types(tensor):
        return False
    match lowering_of(tensor):
        case lowering.Reduction("argmax"):
            behind = tensor.inputs[0].shape[tensor.attributes["axis"] :]
            return not is_one(behind[0]) and all(map(is_one, behind[1:]))
        case lowering.Gather():
            table, places = tensor.inputs
            root = inputs[0].root
            if marked(table.shape) != marked(root.shape):  # such as a row broadcast to many
                return False
            return inputs[0] == whole(root) and places.dtype.kind in "iu"
        case lowering.Element() | lowering.Reduction():
            return True
    return False
