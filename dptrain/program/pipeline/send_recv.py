"""Tensors that stages of a pipeline send each other in a step: a channel for each direction of each pair, in order.

Tensors arrive in the order in which they are sent, through a ring of slots. A stage that receives a tensor also
receives all that were sent before it: they were sent earlier, so this delays nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.order import Task


@dataclass(frozen=True, eq=False)
class SendRecv:
    """A tensor of a microbatch that the task `sender` computes and the task `receiver` of another stage receives."""

    name: str
    sender: Task
    receiver: Task

    @property
    def microbatch(self) -> int:
        """Number of its microbatch."""
        return self.sender.microbatch


@dataclass(frozen=True, eq=False)
class Channel:
    """Transfers from one stage to another, in order, through as many slots as they need not to wait."""

    source: int
    target: int
    items: list[SendRecv]
    slots: int


def channels_of(tasks: Sequence[Task]) -> list[Channel]:
    """Return the channels of a step by source and target, given the tasks of all stages by time."""
    items_by_channel: dict[tuple[int, int], list[tuple[str, Task]]] = {}
    takers: dict[tuple[int, int], list[Task]] = {}
    places: dict[tuple[int, int, str, int], int] = {}  # the last item with that name in its channel
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
    """Return the fewest slots such that by the clock each is read before it is filled again."""
    return next(
        count
        for count in range(1, len(items) + 1)
        if all(old.receiver.tick < new.sender.tick for old, new in zip(items, items[count:], strict=False))
    )
