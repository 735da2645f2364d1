"""In which order the stages of a pipeline execute their pieces for each microbatch: 1F1B.

A stage goes on with the oldest microbatch that it can go on with, and begins a new one only where it has nothing else
to do: so it works on a backward pass as soon as there is one. The first of p stages has p microbatches under way at
most, the last one has one. Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2.

The order is simulated, with times in proportion to floating-point operations. Every stage finds the same one, and so
knows when it waits for what.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dptrain.program.pipeline.subgraphs import Piece


@dataclass(frozen=True, eq=False)
class Turn:
    """A piece that a stage executes.

    Attributes:
        tick: when, on a clock that all stages have in common.
        microbatch: which of them.
        piece: as above.
    """

    tick: int
    microbatch: int
    piece: Piece


def one_forward_one_backward(
    pieces: Sequence[Piece], microbatches: int, stages: int, times: Mapping[Piece, int]
) -> list[Turn]:
    """Return who executes what when, for all stages, by time.

    Args:
        pieces: of all stages, of one microbatch.
        microbatches: how many there are.
        stages: how many there are.
        times: how many ticks each piece takes, at least 1.
    """
    makers = {(piece.stage, name): piece for piece in pieces for name in piece.gives}
    waits = {piece: [makers[source, name] for name, source in piece.gets.items()] for piece in pieces}
    own = [[one for one in pieces if one.stage == stage] for stage in range(stages)]
    done: dict[tuple[int, Piece], int] = {}  # when
    places = [[0] * microbatches for _ in range(stages)]  # how many pieces of each microbatch have begun
    free = [0] * stages  # when
    found: list[Turn] = []
    tick = 0
    while len(found) < len(pieces) * microbatches:
        for stage in range(stages):
            if free[stage] > tick:
                continue
            there = {one for one, end in done.items() if end <= tick}
            microbatch = _next(own[stage], places[stage], stages - stage, waits, there)
            if microbatch is not None:
                piece = own[stage][places[stage][microbatch]]
                places[stage][microbatch] += 1
                found.append(Turn(tick, microbatch, piece))
                free[stage] = done[microbatch, piece] = tick + times[piece]
        tick += 1
    return found


def _next(
    own: Sequence[Piece],
    places: Sequence[int],
    most: int,
    waits: Mapping[Piece, Sequence[Piece]],
    there: Collection[tuple[int, Piece]],
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
