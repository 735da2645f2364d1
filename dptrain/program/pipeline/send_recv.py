"""Tensors that stages of a pipeline send each other in a step: a channel for each direction of each pair, in order.

Tensors arrive in the order in which they are sent, through a ring of slots. A stage that receives a tensor also
receives all that were sent before it: they were sent earlier, so this delays nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.order import Task


@dataclass(frozen=True, eq=False)
class SendRecv:
    """A tensor of a microbatch that goes from one stage to another.

    Attributes:
        name: of the tensor, in the subgraphs.
        sender: in which it is made.
        receiver: in which the other stage takes it.
    """

    name: str
    sender: Task
    receiver: Task

    @property
    def microbatch(self) -> int:
        """Which one it is of."""
        return self.sender.microbatch


@dataclass(frozen=True, eq=False)
class Channel:
    """What goes from one stage to another in a step.

    Attributes:
        source: the stage that gives.
        target: the stage that takes.
        items: in the order in which they are given and taken.
        slots: how many may be under way, so that by the clock a slot is free before it is filled again.
    """

    source: int
    target: int
    items: list[SendRecv]
    slots: int


def channels_of(tasks: Sequence[Task]) -> list[Channel]:
    """Return the channels of a step, by source and target.

    Args:
        tasks: of all stages, in the order in which they begin.
    """
    items_by_channel: dict[tuple[int, int], list[tuple[str, Task]]] = {}
    takers: dict[tuple[int, int], list[Task]] = {}
    places: dict[tuple[int, int, str, int], int] = {}  # where in its channel lies what was given last by that name
    for task in tasks:
        stage = task.subgraph.stage
        for name, source in task.subgraph.receives.items():
            received = takers[source, stage]
            received += [task] * (places[source, stage, name, task.microbatch] + 1 - len(received))
        for name, targets in task.subgraph.sends.items():
            for target in targets:
                takers.setdefault((stage, target), [])
                items = items_by_channel.setdefault((stage, target), [])
                places[stage, target, name, task.microbatch] = len(items)
                items.append((name, task))
    channels = []
    for (source, target), pairs in sorted(items_by_channel.items()):
        pairs_and_receivers = zip(pairs, takers[source, target], strict=True)
        handed = [SendRecv(name, giver, taker) for (name, giver), taker in pairs_and_receivers]
        channels.append(Channel(source, target, handed, _slots(handed)))
    return channels


def _slots(items: Sequence[SendRecv]) -> int:
    """Return in how many slots items go in task, each of which is taken before the next one in its slot is given."""
    return next(
        count
        for count in range(1, len(items) + 1)
        if all(old.receiver.tick < new.sender.tick for old, new in zip(items, items[count:], strict=False))
    )
