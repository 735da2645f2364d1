"""The schedule of a pipeline: which stage executes which subgraph for which microbatch, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dptrain.errors import ConfigError
from dptrain.program.explain import flops
from dptrain.program.pipeline.order import Task, one_forward_one_backward
from dptrain.program.pipeline.stage_assignment import assigned
from dptrain.program.pipeline.stages import MICROBATCHES
from dptrain.program.pipeline.subgraphs import Subgraph, in_microbatches, subgraphs_of
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Variable

# The most ticks that a subgraph takes.
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
class PipelineSchedule:
    """What all stages do in a step.

    Attributes:
        tasks: in the order in which they begin.
        ticks: of the clock.
        microbatches: into which the rows of a replica are cut.
        tags: a number for each name that is handed over.
        accumulators: accumulators of microbatches.
        owners: the stages of these, but for those that all stages have.
        why_undivided: why there is one microbatch where more were asked for; "" where not.
    """

    tasks: list[Task]
    ticks: int
    microbatches: int
    tags: dict[str, int]
    accumulators: list[Variable]
    owners: dict[Variable, int]
    why_undivided: str = ""


def schedule_of(
    program: PlacedProgram, owners: Mapping[Variable, int], stages: int, microbatches: int, *, alone: bool
) -> PipelineSchedule:
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
            each, once = (subgraphs_of(one, halves.stages, known, stages) for one in (halves.each, halves.once))
            tasks = _in_order(each, microbatches, stages)
            ticks = _end(tasks)
            tasks += [replace(one, tick=one.tick + ticks) for one in _in_order(once, 1, stages)]
            return PipelineSchedule(
                tasks, _end(tasks), microbatches, _tags(each, once), list(halves.each.updates), halves.owners
            )
    subgraphs = subgraphs_of(program, where, owners, stages)
    tasks = _in_order(subgraphs, 1, stages)
    return PipelineSchedule(tasks, _end(tasks), 1, _tags(subgraphs), [], {}, why)


def _in_order(subgraphs: Sequence[Subgraph], microbatches: int, stages: int) -> list[Task]:
    work = {one: sum(map(flops, one.program.tensors)) for one in subgraphs}
    unit = max(max(work.values(), default=1) / _LONGEST, 1)
    times = {one: max(round(operations / unit), 1) for one, operations in work.items()}
    return one_forward_one_backward(subgraphs, microbatches, stages, times)


def _end(tasks: Sequence[Task]) -> int:
    return max((one.tick + _LONGEST for one in tasks), default=0)


def _tags(*parts: Sequence[Subgraph]) -> dict[str, int]:
    names = dict.fromkeys(name for subgraphs in parts for subgraph in subgraphs for name in subgraph.sends)
    return {name: number for number, name in enumerate(names)}
