"""Passes over the kernels of a program that move what loops compute into other loops."""

from dptrain.program.kernels import Fused, Kernel, Loop, Member, fitting, usable, varying
from dptrain.program.tensor import Tensor
from dptrain.program.views import View, space_of


def merge(fused: Fused, kernels: list[Kernel]) -> None:
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
    made = set(one.tensors)
    uses = any(view.root in made for view in other.reads)
    if not uses and one.space and not varying(one.reads) & varying(other.reads):
        return False
    between = kernels[first + 1 : second]
    needed = {fused.memory_of(view.root) for view in other.reads}
    up = not any(tensor in needed for kernel in between for tensor in kernel.tensors)
    down = not any(fused.memory_of(view.root) in made for kernel in between for view in kernel.reads)
    trial = Loop(spaces[1])
    for member in (*one.members, *other.members) if up or down else []:
        found = fitting(trial, member.tensor, [fused.views[read] for read in member.tensor.inputs])
        if found is None or any(_is_within(fused, view, made) for view in found.reads):
            return False
        trial.members.append(found)
    if up or down:
        kernels[first if up else second] = trial
        del kernels[second if up else first]
    return up or down


def _is_within(fused: Fused, view: View, made: set[Tensor]) -> bool:
    """Whether a view is another shape of something that is made here."""
    memory = fused.memory_of(view.root)
    return memory is not view.root and memory in made


def sink(fused: Fused, kernels: list[Kernel]) -> list[Kernel]:
    """Move members to the one later loop that reads them, where that costs no more memory; return what is left."""
    handed_out = fused.handed_out()
    readers: dict[Tensor, list[tuple[Kernel, Member | None]]] = {}
    here = set(kernels)
    for kernel in fused.kernels:
        pairs: list[tuple[Member | None, View]] = [(None, one) for one in kernel.reads]
        if isinstance(kernel, Loop):
            pairs = [(one, view) for one in kernel.members for view in one.reads]
        for member, view in pairs:
            memory = fused.memory_of(view.root)
            readers.setdefault(memory, []).append((kernel, member if memory is view.root else None))

    def chain(member: Member, loop: Loop, target: Loop, moving: list[Member]) -> bool:
        """Note a member and what must move with it; whether all that can move."""
        if member in moving:
            return True
        others = [reader for kernel, reader in readers.get(member.tensor, []) if kernel is not target]
        own = [reader for kernel, reader in readers.get(member.tensor, []) if kernel is target]
        can = member.kind != "sum" and member.tensor not in handed_out
        if not can or None in own or any(reader not in moving for reader in others):
            return False
        moving.append(member)
        for view in member.reads:
            read = loop.member(view.root)
            if read is None or read.tensor in handed_out:
                if member.kind == "reduce":
                    return False  # what it reads is more than what it makes
                continue
            lies = any(kernel is not loop and reader not in moving for kernel, reader in readers[read.tensor])
            if (lies and member.kind == "reduce") or (not lies and not chain(read, loop, target, moving)):
                return False
        return True

    for number in reversed(range(len(kernels))):
        loop = kernels[number]
        if not isinstance(loop, Loop):
            continue
        for member in reversed(list(loop.members)):
            targets = [kernel for kernel, _ in readers.get(member.tensor, []) if kernel is not loop]
            target = targets[0] if targets and all(one is targets[0] for one in targets) else None
            moving: list[Member] = []
            if not isinstance(target, Loop) or target not in here or member not in loop.members:
                continue
            if chain(member, loop, target, moving):
                _move([one for one in loop.members if one in moving], loop, target, fused, readers)
    return [one for one in kernels if not isinstance(one, Loop) or one.members]


def _move(
    moving: list[Member],
    loop: Loop,
    target: Loop,
    fused: Fused,
    readers: dict[Tensor, list[tuple[Kernel, Member | None]]],
) -> None:
    """Move members from one loop to another, if they fit there."""
    trial = Loop(target.space)
    for one in moving:
        found = fitting(trial, one.tensor, [fused.views[read] for read in one.tensor.inputs])
        if found is None:
            return
        trial.members.append(found)
    for one in target.members:
        for number, view in enumerate(one.reads):
            read = trial.member(view.root)
            if read is not None and not usable(read, one, number):
                return
    for old, new in zip(moving, trial.members, strict=True):
        loop.members.remove(old)
        for view in old.reads:
            pairs = readers[fused.memory_of(view.root)]
            pairs[pairs.index((loop, old if fused.memory_of(view.root) is view.root else None))] = (
                target,
                new if fused.memory_of(view.root) is view.root else None,
            )
    target.members[:0] = trial.members
