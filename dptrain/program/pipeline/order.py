"""The order in which stages of a pipeline execute their subgraphs for each microbatch: 1F1B.

A stage goes on with the oldest microbatch that is ready, and begins a new one only where it has nothing else to do, so
backward passes start as early as possible. The first of p stages has at most p microbatches under way, the last one.
Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
arXiv:2104.04473, section 2.2.

The order is simulated, with times proportional to floating-point operations. Every stage computes the same order, and
so knows when it waits for which tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.subgraphs import Subgraph


@dataclass(frozen=True, eq=False)
class Task:
    """A subgraph that a stage executes.

    Attributes:
        tick: when, on a clock that all stages have in common.
        microbatch: which of them.
        subgraph: as above.
    """

    tick: int
    microbatch: int
    subgraph: Subgraph


def one_forward_one_backward(
    subgraphs: Sequence[Subgraph], microbatches: int, stages: int, times: Mapping[Subgraph, int]
) -> list[Task]:
    """Return who executes what when, for all stages, by time.

    Args:
        subgraphs: of all stages, of one microbatch.
        microbatches: how many there are.
        stages: how many there are.
        times: how many ticks each subgraph takes, at least 1.
    """
    makers = {(subgraph.stage, name): subgraph for subgraph in subgraphs for name in subgraph.sends}
    waits = {subgraph: [makers[source, name] for name, source in subgraph.receives.items()] for subgraph in subgraphs}
    own = [[one for one in subgraphs if one.stage == stage] for stage in range(stages)]
    done: dict[tuple[int, Subgraph], int] = {}  # when
    places = [[0] * microbatches for _ in range(stages)]  # how many subgraphs of each microbatch have begun
    free = [0] * stages  # when
    found: list[Task] = []
    tick = 0
    while len(found) < len(subgraphs) * microbatches:
        for stage in range(stages):
            if free[stage] > tick:
                continue
            there = {one for one, end in done.items() if end <= tick}
            microbatch = _next(own[stage], places[stage], stages - stage, waits, there)
            if microbatch is not None:
                subgraph = own[stage][places[stage][microbatch]]
                places[stage][microbatch] += 1
                found.append(Task(tick, microbatch, subgraph))
                free[stage] = done[microbatch, subgraph] = tick + times[subgraph]
        tick += 1
    return found


def _next(
    own: Sequence[Subgraph],
    places: Sequence[int],
    most: int,
    waits: Mapping[Subgraph, Sequence[Subgraph]],
    there: Collection[tuple[int, Subgraph]],
) -> int | None:
    """Return the microbatch with which a stage goes on, or None where it waits."""
    under_way = sum(0 < place < len(own) for place in places)
    for microbatch, place in enumerate(places):
        if place < len(own) and (place or under_way < most):
            if all((microbatch, one) in there for one in waits[own[place]]):
                return microbatch
            if not place:
                return None  # microbatches begin in their order
    return None
