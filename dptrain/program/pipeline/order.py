"""The order in which stages of a pipeline execute their subgraphs for each microbatch: 1F1B.

A stage goes on with the oldest microbatch that is ready, and begins a new one only where it has nothing else to do, so
backward passes start as early as possible. The first of p stages has at most p microbatches under way, the last has
one. Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC
2021, arXiv:2104.04473, section 2.2.

The order is simulated, with times proportional to floating-point operations. Every stage computes the same order, and
so knows when it waits for which tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.subgraphs import Subgraph


@dataclass(frozen=True, eq=False)
class Task:
    """A subgraph that a stage executes for a microbatch, at a tick of a clock that all stages share."""

    tick: int
    microbatch: int
    subgraph: Subgraph


def one_forward_one_backward(
    subgraphs: Sequence[Subgraph], microbatches: int, stages: int, times: Mapping[Subgraph, int]
) -> list[Task]:
    """Return the tasks of all stages by time, given the ticks, at least 1, that each subgraph takes."""
    makers = {(subgraph.stage, name): subgraph for subgraph in subgraphs for name in subgraph.sends}
    senders = {subgraph: [makers[source, name] for name, source in subgraph.receives.items()] for subgraph in subgraphs}
    subgraphs_of = [[subgraph for subgraph in subgraphs if subgraph.stage == stage] for stage in range(stages)]
    finished: dict[tuple[int, Subgraph], int] = {}  # when
    places = [[0] * microbatches for _ in range(stages)]  # how many subgraphs of each microbatch have begun
    free = [0] * stages  # when
    tasks: list[Task] = []
    tick = 0
    while len(tasks) < len(subgraphs) * microbatches:
        for stage in range(stages):
            if free[stage] > tick:
                continue
            available = {key for key, end in finished.items() if end <= tick}
            microbatch = _next(subgraphs_of[stage], places[stage], stages - stage, senders, available)
            if microbatch is not None:
                subgraph = subgraphs_of[stage][places[stage][microbatch]]
                places[stage][microbatch] += 1
                tasks.append(Task(tick, microbatch, subgraph))
                free[stage] = finished[microbatch, subgraph] = tick + times[subgraph]
        tick += 1
    return tasks


def _next(
    subgraphs: Sequence[Subgraph],
    places: Sequence[int],
    most: int,
    senders: Mapping[Subgraph, Sequence[Subgraph]],
    available: Collection[tuple[int, Subgraph]],
) -> int | None:
    under_way = sum(0 < place < len(subgraphs) for place in places)
    for microbatch, place in enumerate(places):
        if place < len(subgraphs) and (place or under_way < most):
            if all((microbatch, sender) in available for sender in senders[subgraphs[place]]):
                return microbatch
            if not place:
                return None  # microbatches begin in their order
    return None
