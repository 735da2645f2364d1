"""Passes that move members between loops, found by what they share, in time linear in the number of ops."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from dptrain.program.codegen.kernels import Fused, Kernel, Loop, LoopMember, fitting, takes, usable, varying
from dptrain.program.codegen.views import View, space_of
from dptrain.program.tensor import Tensor


def merge(fused: Fused) -> None:
    """Merge loops that share an operand or result with the nearest earlier loop, if no kernel in between forbids it."""
    for stage in fused.stages:
        stage.kernels = _LoopMerger(fused, stage.kernels).left()


class _LoopMerger:
    """State of `merge`. Kernels have ascending numbers; a merged loop keeps one of its two."""

    def __init__(self, fused: Fused, kernels: Iterable[Kernel]) -> None:
        self._fused = fused
        self._kernels: dict[int, Kernel] = {}
        self._makers: dict[Tensor, int] = {}
        self._readers: dict[Tensor, set[int]] = {}  # by stored tensor
        self._sharing: dict[View, set[int]] = {}  # loops by the views that they read
        self._views: dict[int, list[View]] = {}  # the views that loops read
        self._singles: set[int] = set()  # loops without axes
        self._firsts: dict[int, int] = {}  # caches of `_first_reader` and `_last_needed`
        self._lasts: dict[int, int] = {}
        self._refused: set[tuple[Loop, Loop]] = set()
        self._waiting: list[int] = []  # a heap of loops that may have something to merge with
        self._awaited: set[int] = set()
        for number, kernel in enumerate(kernels):
            self._enter(number, kernel)
        self._numbers = range(len(self._kernels))

    def left(self) -> list[Kernel]:
        while self._waiting:
            number = heappop(self._waiting)
            self._awaited.remove(number)
            if isinstance(loop := self._kernels.get(number), Loop):
                any(self._merge(partner, number) for partner in reversed(self._partners(loop, number, range(number))))
        return [self._kernels[number] for number in sorted(self._kernels)]

    def _can_meet(self, first: int, second: int) -> bool:
        """Whether one of two loops can move to the other across the kernels in between."""
        return self._last_needed(second) <= first or second <= self._first_reader(first)

    def _merge(self, first: int, second: int) -> bool:
        earlier, later = self._kernels[first], self._kernels[second]
        assert isinstance(earlier, Loop)
        assert isinstance(later, Loop)
        if (earlier, later) in self._refused or not self._can_meet(first, second):
            return False
        joined = self._joined(earlier, later) if self._has_shared(first, second) else None
        if joined is None:
            self._refused.add((earlier, later))
            return False
        up = self._last_needed(second) <= first
        self._leave(first)
        self._leave(second)
        self._enter(first if up else second, joined)
        moved = [first if up else second]
        if up:  # readers of the second can move up with it
            self._await({reader for tensor in later.tensors for reader in self._readers.get(tensor, ())})
        else:  # kernels that compute the first's operands can move down with it
            moved += {self._makers.get(self._fused.memory_of(view.root), first) for view in earlier.reads}
        for number in moved:
            if isinstance(loop := self._kernels.get(number), Loop):
                beyond = self._partners(loop, number, range(first + 1, len(self._numbers)))
                self._await(partner for partner in beyond if number < partner and self._can_meet(number, partner))
        return True

    def _has_shared(self, first: int, second: int) -> bool:
        """Whether the later loop reads a result or an operand of the earlier one."""
        earlier, later = self._kernels[first], self._kernels[second]
        assert isinstance(earlier, Loop)
        if not earlier.space or any(earlier.member(view.root) for view in later.reads):
            return True
        return any(first in self._sharing[view] for view in self._views[second])

    def _joined(self, first: Loop, second: Loop) -> Loop | None:
        narrow, wide = sorted((first.space, second.space), key=len)
        key = space_of(wide)
        if space_of(narrow) not in (key, key[:-1]):
            return None
        joined = Loop(wide)
        for loop in (first, second):
            as_is = space_of(loop.space) == key
            for member in loop.members:
                fitted: LoopMember | None = member
                if not as_is:
                    fitted = fitting(joined, member.tensor, [self._fused.views[read] for read in member.tensor.inputs])
                elif not takes(joined, member):
                    return None
                if fitted is None or any(self._is_within(view, first) for view in fitted.reads):
                    return None
                joined.add(fitted)
        return joined

    def _is_within(self, view: View, loop: Loop) -> bool:
        """Whether a view is a reshaped tensor that the loop computes."""
        memory = self._fused.memory_of(view.root)
        return memory is not view.root and loop.member(memory) is not None

    # Facts about the kernels

    def _await(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._awaited:
                self._awaited.add(number)
                heappush(self._waiting, number)

    def _enter(self, number: int, kernel: Kernel) -> None:
        self._kernels[number] = kernel
        for tensor in kernel.tensors:
            self._makers[tensor] = number
            for reader in self._readers.get(tensor, ()):
                self._lasts.pop(reader, None)
        self._firsts.pop(number, None)
        self._lasts.pop(number, None)
        for view in kernel.reads:
            self._note_reader(view).add(number)
        if isinstance(kernel, Loop):
            self._views[number] = list(varying(kernel.reads))
            for view in self._views[number]:
                self._sharing.setdefault(view, set()).add(number)
            if not kernel.space:
                self._singles.add(number)
            self._await([number])

    def _leave(self, number: int) -> None:
        for view in self._kernels.pop(number).reads:
            self._note_reader(view).discard(number)
        for view in self._views.pop(number):
            self._sharing[view].discard(number)
        self._singles.discard(number)

    def _note_reader(self, view: View) -> set[int]:
        """Return the mutable set of readers of a view's memory."""
        memory = self._fused.memory_of(view.root)
        self._firsts.pop(self._makers.get(memory, -1), None)
        return self._readers.setdefault(memory, set())

    def _partners(self, loop: Loop, number: int, numbers: range) -> list[int]:
        """Return the loops, in order, among `numbers` that share something with a loop."""
        related = {self._makers[view.root] for view in loop.reads if view.root in self._makers}
        for tensor in loop.tensors:
            related |= self._readers.get(tensor, set())
        for view in self._views[number]:
            related |= self._sharing[view]
        if len(loop.space) < 2:
            related |= self._singles
        return sorted(
            number_of_partner
            for number_of_partner in related
            if number_of_partner in numbers and isinstance(self._kernels[number_of_partner], Loop)
        )

    def _last_needed(self, number: int) -> int:
        """Return the last other kernel that computes an operand of a loop."""
        if number not in self._lasts:
            operands = {self._fused.memory_of(view.root) for view in self._kernels[number].reads}
            makers = (at for tensor in operands if (at := self._makers.get(tensor, -1)) != number)
            self._lasts[number] = max(makers, default=-1)
        return self._lasts[number]

    def _first_reader(self, number: int) -> int:
        """Return the first other kernel that reads a result of a loop."""
        if number not in self._firsts:
            tensors = self._kernels[number].tensors
            readers = (at for tensor in tensors for at in self._readers.get(tensor, ()) if at != number)
            self._firsts[number] = min(readers, default=len(self._numbers))
        return self._firsts[number]


def sink(fused: Fused) -> None:
    """Move members to the only later loop of their stage that reads them, where that takes no more memory."""
    sinking = _MemberSinker(fused)
    for stage in fused.stages:
        sinking.sink(stage.kernels)
        stage.kernels = [kernel for kernel in stage.kernels if not isinstance(kernel, Loop) or kernel.members]


class _MemberSinker:
    def __init__(self, fused: Fused) -> None:
        self._fused, self._handed_out = fused, fused.handed_out()
        # Readers of stored tensors: kernels with their members, and whether they read them in the same shape.
        self._readers: dict[Tensor, dict[tuple[Kernel, LoopMember | None], bool]] = {}
        for kernel in fused.kernels:
            if isinstance(kernel, Loop):
                for member in kernel.members:
                    self._note(kernel, member, member.reads)
            else:
                self._note(kernel, None, kernel.reads)

    def _note(self, kernel: Kernel, member: LoopMember | None, reads: Iterable[View]) -> None:
        for view in reads:
            memory = self._fused.memory_of(view.root)
            readers = self._readers.setdefault(memory, {})
            directly = member is not None and memory is view.root
            readers[kernel, member] = readers.get((kernel, member), True) and directly

    def sink(self, kernels: Sequence[Kernel]) -> None:
        stage_kernels = set(kernels)
        for loop in reversed(kernels):
            if not isinstance(loop, Loop):
                continue
            order = {member: number for number, member in enumerate(loop.members)}
            for member in reversed(order):
                targets = {kernel for kernel, _ in self._readers.get(member.tensor, {}) if kernel is not loop}
                target = targets.pop() if len(targets) == 1 else None
                if (
                    not isinstance(target, Loop)
                    or target not in stage_kernels
                    or loop.member(member.tensor) is not member
                ):
                    continue
                moving = self._chain(member, loop, target)
                if moving is not None:
                    self._move(sorted(moving, key=order.__getitem__), loop, target)

    def _chain(self, first: LoopMember, loop: Loop, target: Loop) -> set[LoopMember] | None:
        """Return a member and those that must move with it; None if one of them has to stay."""
        moving: set[LoopMember] = set()
        stack: list[tuple[LoopMember, Iterator[View]]] = []

        def begin(member: LoopMember) -> bool:
            for (kernel, reader), directly in self._readers.get(member.tensor, {}).items():
                if not directly or (kernel is not target and reader not in moving):
                    return False
            if member.kind == "sum" or member.tensor in self._handed_out:
                return False
            moving.add(member)
            stack.append((member, iter(member.reads)))
            return True

        can = begin(first)
        while can and stack:
            member, views = stack[-1]
            view = next(views, None)
            read = loop.member(view.root) if view is not None else None
            if view is None:
                stack.pop()
            elif (
                read is None
                or read.tensor in self._handed_out
                or any(kernel is not loop for kernel, _ in self._readers[read.tensor])
            ):
                can = member.kind != "reduce"  # its operands are stored, and larger than its result
            elif read not in moving:
                can = begin(read)
        return moving if can else None

    def _move(self, moving: Sequence[LoopMember], loop: Loop, target: Loop) -> None:
        """Move members to another loop, if they fit there."""
        moved = Loop(target.space)
        for member in moving:
            member_there = fitting(moved, member.tensor, [self._fused.views[read] for read in member.tensor.inputs])
            if member_there is None:
                return
            moved.add(member_there)
        for moved_member in moved.members:
            readers = [reader for kernel, reader in self._readers.get(moved_member.tensor, {}) if kernel is target]
            for number, view, reading in (
                (n, view, member) for member in readers if member for n, view in enumerate(member.reads)
            ):
                if view.root is moved_member.tensor and not usable(moved_member, reading, number):
                    return
        for old, new in zip(moving, moved.members, strict=True):
            loop.remove(old)
            for view in old.reads:
                self._readers[self._fused.memory_of(view.root)].pop((loop, old), None)
            self._note(target, new, new.reads)
        target.add_before(moved.members)
