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


def microbatches_of(rows: int, stages: int, requested: int | None) -> int:
    """Return the number of microbatches, at most as requested; by default some for each stage, equal if possible."""
    if requested is not None:
        return max(min(requested, rows), 1)
    most = max(min(MICROBATCHES * stages, rows), 1)
    return next((count for count in range(most, most // 2, -1) if rows % count == 0), most)


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """Tasks of all stages in a step, in the order in which they begin.

    Attributes:
        ticks: length of the step.
        microbatches: into which the rows of a replica are cut; `why_undivided` says why there is only one, or "".
        tags: a number for each name that is sent.
        accumulators: sums over microbatches.
        owners: the stage of each accumulator that only one stage has.
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
    """Schedule the step of a replica; `owners` are the stages of variables that only one stage has."""
    where, reason = assigned(program, owners), ""
    if microbatches > 1:
        try:
            programs = in_microbatches(program, where, alone=alone)
        except ConfigError as error:
            microbatches, reason = 1, str(error)
        else:
            all_owners = {**owners, **programs.owners}
            per_microbatch, per_step = (
                subgraphs_of(program_part, programs.stages, all_owners, stages)
                for program_part in (programs.per_microbatch, programs.per_step)
            )
            tasks = _in_order(per_microbatch, microbatches, stages)
            ticks = _end(tasks)
            tasks += [replace(task, tick=task.tick + ticks) for task in _in_order(per_step, 1, stages)]
            return PipelineSchedule(
                tasks,
                _end(tasks),
                microbatches,
                _tags(per_microbatch, per_step),
                list(programs.per_microbatch.updates),
                programs.owners,
            )
    subgraphs = subgraphs_of(program, where, owners, stages)
    tasks = _in_order(subgraphs, 1, stages)
    return PipelineSchedule(tasks, _end(tasks), 1, _tags(subgraphs), [], {}, reason)


def _in_order(subgraphs: Sequence[Subgraph], microbatches: int, stages: int) -> list[Task]:
    work = {subgraph: sum(map(flops, subgraph.program.tensors)) for subgraph in subgraphs}
    unit = max(max(work.values(), default=1) / _LONGEST, 1)
    times = {subgraph: max(round(operations / unit), 1) for subgraph, operations in work.items()}
    return one_forward_one_backward(subgraphs, microbatches, stages, times)


def _end(tasks: Sequence[Task]) -> int:
    return max((task.tick + _LONGEST for task in tasks), default=0)


def _tags(*parts: Sequence[Subgraph]) -> dict[str, int]:
    names = dict.fromkeys(name for subgraphs in parts for subgraph in subgraphs for name in subgraph.sends)
    return {name: number for number, name in enumerate(names)}
