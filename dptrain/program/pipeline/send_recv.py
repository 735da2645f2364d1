"""What the stages of a pipeline hand to each other in a step: for each pair of them, what goes one way, in order.

What a stage gives another one arrives in that order, through a ring of slots. A stage that needs something takes all
that was given before it as well: it was given earlier, so nobody waits longer for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.order import Turn


@dataclass(frozen=True, eq=False)
class HandOver:
    """A tensor of a microbatch that goes from one stage to another.

    Attributes:
        name: of the tensor, in the pieces.
        giver: in which it is made.
        taker: in which the other stage takes it.
    """

    name: str
    giver: Turn
    taker: Turn

    @property
    def microbatch(self) -> int:
        """Which one it is of."""
        return self.giver.microbatch


@dataclass(frozen=True, eq=False)
class Link:
    """What goes from one stage to another in a step.

    Attributes:
        source: the stage that gives.
        target: the stage that takes.
        items: in the order in which they are given and taken.
        slots: how many may be under way, so that by the clock a slot is free before it is filled again.
    """

    source: int
    target: int
    items: list[HandOver]
    slots: int


def links_of(turns: Sequence[Turn]) -> list[Link]:
    """Return the links of a step, by source and target.

    Args:
        turns: of all stages, in the order in which they begin.
    """
    given: dict[tuple[int, int], list[tuple[str, Turn]]] = {}
    takers: dict[tuple[int, int], list[Turn]] = {}
    places: dict[tuple[int, int, str, int], int] = {}  # where in its link lies what was given last by that name
    for turn in turns:
        stage = turn.piece.stage
        for name, source in turn.piece.gets.items():
            taken = takers[source, stage]
            taken += [turn] * (places[source, stage, name, turn.microbatch] + 1 - len(taken))
        for name, targets in turn.piece.gives.items():
            for target in targets:
                takers.setdefault((stage, target), [])
                items = given.setdefault((stage, target), [])
                places[stage, target, name, turn.microbatch] = len(items)
                items.append((name, turn))
    found = []
    for (source, target), pairs in sorted(given.items()):
        both = zip(pairs, takers[source, target], strict=True)
        handed = [HandOver(name, giver, taker) for (name, giver), taker in both]
        found.append(Link(source, target, handed, _slots(handed)))
    return found


def _slots(items: Sequence[HandOver]) -> int:
    """Return in how many slots items go in turn, each of which is taken before the next one in its slot is given."""
    return next(
        count
        for count in range(1, len(items) + 1)
        if all(old.taker.tick < new.giver.tick for old, new in zip(items, items[count:], strict=False))
    )
