"""What all stages of a pipeline do in a step: which pieces, for which microbatches, when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dptrain.errors import ConfigError
from dptrain.program.explain import flops
from dptrain.program.pipeline.order import Turn, one_forward_one_backward
from dptrain.program.pipeline.stage_assignment import assigned
from dptrain.program.pipeline.stages import MICROBATCHES
from dptrain.program.pipeline.subgraphs import Piece, in_microbatches, pieces_of
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Variable

# The most ticks that a piece takes.
_LONGEST = 16


def microbatches_of(rows: int, stages: int, asked: int | None) -> int:
    """Return into how many microbatches the rows of a replica are cut; alike ones if possible, where nobody asks.

    Args:
        rows: of a replica.
        stages: that they go through.
        asked: how many there are to be at most; None for some for each stage.
    """
    if asked is not None:
        return max(min(asked, rows), 1)
    most = max(min(MICROBATCHES * stages, rows), 1)
    return next((one for one in range(most, most // 2, -1) if rows % one == 0), most)


@dataclass(frozen=True, eq=False)
class Course:
    """What all stages do in a step.

    Attributes:
        turns: in the order in which they begin.
        ticks: of the clock.
        microbatches: into which the rows of a replica are cut.
        tags: a number for each name that is handed over.
        sums: accumulators of microbatches.
        owners: the stages of these, but for those that all stages have.
        why_whole: why there is one microbatch where more were asked for; "" where not.
    """

    turns: list[Turn]
    ticks: int
    microbatches: int
    tags: dict[str, int]
    sums: list[Variable]
    owners: dict[Variable, int]
    why_whole: str = ""


def course_of(
    program: PlacedProgram, owners: Mapping[Variable, int], stages: int, microbatches: int, *, alone: bool
) -> Course:
    """Return what stages do in a step.

    Args:
        program: of a replica.
        owners: the stages of variables that one stage alone has.
        stages: how many there are.
        microbatches: how many there are to be, where the step allows it.
        alone: there is one replica.
    """
    where, why = assigned(program, owners), ""
    if microbatches > 1:
        try:
            halves = in_microbatches(program, where, alone=alone)
        except ConfigError as error:
            microbatches, why = 1, str(error)
        else:
            known = {**owners, **halves.owners}
            each, once = (pieces_of(one, halves.stages, known, stages) for one in (halves.each, halves.once))
            turns = _in_order(each, microbatches, stages)
            ticks = _end(turns)
            turns += [replace(one, tick=one.tick + ticks) for one in _in_order(once, 1, stages)]
            return Course(turns, _end(turns), microbatches, _tags(each, once), list(halves.each.updates), halves.owners)
    pieces = pieces_of(program, where, owners, stages)
    turns = _in_order(pieces, 1, stages)
    return Course(turns, _end(turns), 1, _tags(pieces), [], {}, why)


def _in_order(pieces: Sequence[Piece], microbatches: int, stages: int) -> list[Turn]:
    work = {one: sum(map(flops, one.program.tensors)) for one in pieces}
    unit = max(max(work.values(), default=1) / _LONGEST, 1)
    times = {one: max(round(operations / unit), 1) for one, operations in work.items()}
    return one_forward_one_backward(pieces, microbatches, stages, times)


def _end(turns: Sequence[Turn]) -> int:
    return max((one.tick + _LONGEST for one in turns), default=0)


def _tags(*parts: Sequence[Piece]) -> dict[str, int]:
    names = dict.fromkeys(name for pieces in parts for piece in pieces for name in piece.gives)
    return {name: number for number, name in enumerate(names)}
