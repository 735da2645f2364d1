"""Describes a pipeline's stages, what each holds and sends, without ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dptrain.backend.cpu.compiled import lowered, planned
from dptrain.comm.parts import cut
from dptrain.program.explain import wrapped
from dptrain.program.pipeline.schedule import PipelineSchedule, microbatches_of, schedule_of
from dptrain.program.pipeline.stage_assignment import cut_into_stages, layers_of, with_slots
from dptrain.program.pipeline.subgraphs import Subgraph
from dptrain.program.shapes import local, size
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Tensor, Variable
from dptrain.train.sharding import slots_of

if TYPE_CHECKING:
    from dptrain.models.model import Model

_HEADS = ("stage", "weights", "gradients", "slots", "kept", "results", "memory", "layers")


def explain_stages(model: "Model", program: PlacedProgram, stages: int, microbatches: int | None) -> list[str]:
    """Return a table of the bytes that each stage holds, and of its messages."""
    slots = slots_of(model)
    count = microbatches_of(program.rows, stages, microbatches)
    weights = cut_into_stages(program, model.weights, slots, stages, program.rows, count)
    owners = with_slots(weights, slots)
    schedule = schedule_of(program, owners, stages, count, alone=True)
    names: list[dict[str, None]] = [{} for _ in range(stages)]
    for layer in layers_of(program, model.weights):
        names[weights[layer[0]]][layer[0]._path.rpartition("/")[0] or layer[0]._path] = None
    rows = -(-program.rows // schedule.microbatches)
    of_rows = f" of {rows} rows" if program.rows % rows == 0 else f" of up to {rows} rows"
    whole = f": {schedule.why_undivided}" if schedule.why_undivided else ""
    several = f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}{of_rows}"
    lines = ["", *wrapped(f"{stages} stages of a pipeline, {several}, 1F1B{whole}", 100), ""]
    table: list[tuple[str, ...]] = [_HEADS]
    for stage in range(stages):
        variables = [variable for variable, at in owners.items() if at == stage and variable in program.state]
        of_weights, of_slots = (
            _bytes(variable for variable in variables if (variable in weights) == chosen) for chosen in (True, False)
        )
        sums = _bytes(variable for variable in schedule.accumulators if schedule.owners.get(variable) == stage)
        stored, results = _peak_bytes(schedule, stage, rows), _results(schedule, stage, program.rows)
        amounts = (of_weights, sums, of_slots, stored, results, of_weights + sums + of_slots + stored + results)
        table.append((str(stage), *(f"{amount:,}" for amount in amounts), ", ".join(names[stage])))
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADS))]
    for row in table:
        *numbers, layers = row
        lines.append("  ".join([*(cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)), layers]))
    lines += [
        "bytes; kept: of all microbatches that are under way, handed over or for the backward pass; results:",
        "intermediate ones of a microbatch and of the update, each subgraph of a step in memory of its own",
        "",
    ]
    return [*lines, *_messages(schedule, program.rows), *_between_replicas(schedule)]


def _bytes(tensors: Iterable[Variable | Tensor]) -> int:
    return sum(size(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def _peak_bytes(schedule: PipelineSchedule, stage: int, rows: int) -> int:
    """Return the most bytes that a stage holds between its subgraphs."""
    stored: dict[tuple[int, str], int] = {}
    most = 0
    for task in schedule.tasks:
        if task.subgraph.stage == stage:
            program = task.subgraph.program
            for name in task.subgraph.receives:
                stored[task.microbatch, name] = _local_bytes(program.inputs[name], rows)
            for name, tensor in program.outputs.items():
                stored[task.microbatch, name] = _local_bytes(tensor, rows)
            most = max(most, sum(stored.values()))
            for name in task.subgraph.frees:
                stored.pop((task.microbatch, name), None)
    return most


def _local_bytes(tensor: Tensor, rows: int) -> int:
    return size(local(tensor.shape, rows)) * tensor.dtype.itemsize


def _results(schedule: PipelineSchedule, stage: int, rows: int) -> int:
    """Return the bytes of intermediate results of a stage's subgraphs."""
    rows = -(-rows // schedule.microbatches)
    return sum(
        planned(*lowered(subgraph.program), rows)[1].size
        for subgraph in _subgraphs(schedule)
        if subgraph.stage == stage
    )


def _subgraphs(schedule: PipelineSchedule) -> dict[Subgraph, int]:
    """Return the subgraphs, and how often each runs in a step."""
    executions: dict[Subgraph, int] = {}
    for task in schedule.tasks:
        executions[task.subgraph] = executions.get(task.subgraph, 0) + 1
    return executions


def _messages(schedule: PipelineSchedule, rows: int) -> Iterator[str]:
    """Describe what each stage sends to every other in a step."""
    counted: dict[tuple[int, int, bool], list[int]] = {}
    for subgraph, times in _subgraphs(schedule).items():
        own_rows = [stop - start for start, stop in cut(0, rows, schedule.microbatches)] if times > 1 else [rows]
        for name, others in subgraph.sends.items():
            for other in others:
                totals = counted.setdefault((subgraph.stage, other, times > 1), [0, 0])
                totals[0] += times
                totals[1] += sum(_local_bytes(subgraph.program.outputs[name], length) for length in own_rows)
    yield "messages of a step between the stages of one pipeline:"
    for (stage, other, again), (count, nbytes) in sorted(
        counted.items(), key=lambda entry: (not entry[0][2], entry[0])
    ):
        what = "of microbatches" if again else "of the batch" if schedule.microbatches == 1 else "of the update"
        yield f"{stage} to {other}: {count} {what}, {nbytes:,} bytes"


def _between_replicas(schedule: PipelineSchedule) -> Iterator[str]:
    """Describe what the replicas of each stage sum, if there are several."""
    stages: Mapping[Variable, int] = schedule.owners
    if not schedule.accumulators:
        return
    nbytes: Sequence[int] = [
        _bytes(variable for variable in schedule.accumulators if stages.get(variable, at) == at)
        for at in range(1 + max(stages.values()))
    ]
    yield (
        "each stage and its replicas, if there are any, sum " + ", ".join(f"{amount:,}" for amount in nbytes) + " bytes"
    )
