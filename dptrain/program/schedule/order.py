"""The order of a schedule: which new values overwrite old ones, what waits for that, and the level of each nest."""

from bisect import bisect_right
from functools import partial

from dptrain.program.codegen.memory import Access, in_place
from dptrain.program.schedule.nest import Nest, may_overwrite
from dptrain.program.schedule.policy import Policy
from dptrain.program.schedule.schedule import Schedule
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Tensor


def overwrite(schedule: Schedule) -> None:
    """Let new values overwrite old ones, once these have been read, and append copies of those that cannot."""
    program, parts = schedule.program, schedule.parts
    old = {new: program.state[variable] for variable, new in program.updates.items()}
    kernels: dict[Nest, Access] = {}
    accesses: list[Access] = []
    for stage, messages in enumerate(schedule.messages):
        first = len(accesses)
        for nest in (nest for nest in schedule.nests if nest.stage == stage):
            replaces = partial(may_overwrite, nest)
            kernels[nest] = Access(nest.reads.keys(), nest.writes.keys(), first, replaces=replaces)
            accesses.append(kernels[nest])
        for message in messages:
            if message[0].op is not ALL_REDUCE:
                accesses.append(Access({parts[tensor] for tensor in message}, message, len(accesses)))
    for nest, kernel in kernels.items():
        kernel.after = {kernels[earlier] for earlier in nest.after}
    schedule.in_place = in_place(old.items(), accesses).keys()
    nests = {kernel: nest for nest, kernel in kernels.items()}
    for nest, kernel in kernels.items():
        nest.after = {nests[earlier] for earlier in kernel.after}
    readers: dict[Tensor, set[Nest]] = {}
    for nest in schedule.nests:
        for tensor in nest.reads:
            readers.setdefault(tensor, set()).add(nest)
    for new in [new for new in old if new not in schedule.in_place]:
        maker = schedule.nest_of.get(new)
        copy = schedule.append_copy(new)
        copy.after = readers.get(old[new], set()) | ({maker} if maker is not None else set())


def assign_levels(schedule: Schedule, policy: Policy) -> None:
    """Give nests the lowest possible levels, or later ones that suit them better."""
    nests, height = schedule.nests, dict[Nest, int]()

    def of(nest: Nest) -> int:
        if nest not in height:
            height[nest] = 1 + max((of(earlier) for earlier in nest.after if earlier.stage == nest.stage), default=0)
        return height[nest]

    for nest in nests:
        nest.level = 0 if nest in schedule.early else of(nest)
    awaited = {earlier for nest in nests for earlier in nest.after if earlier.stage == nest.stage}
    awaited |= {nest for nest in nests if not nest.members.keys().isdisjoint(schedule.parts.values())}
    frames: dict[tuple[int, int], set[str]] = {}
    for nest in nests:
        frames.setdefault((nest.stage, nest.level), set()).add(nest.frame)
    light: dict[int, list[int]] = {}
    for stage, level in sorted(at for at, frames_there in frames.items() if frames_there.isdisjoint(policy.earliest)):
        light.setdefault(stage, []).append(level)
    for nest in nests:
        heavy = not frames[nest.stage, nest.level].isdisjoint(policy.heavy)
        if heavy and nest not in awaited and nest.frame not in policy.earliest:
            levels = light.get(nest.stage, [])
            nest.level = next(iter(levels[bisect_right(levels, nest.level) :]), nest.level)
