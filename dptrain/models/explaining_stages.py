"""Text about the stages of a pipeline: what each holds and sends, without ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dptrain.backend.cpu.compiled import lowered, planned
from dptrain.comm.parts import cut
from dptrain.program.explain import wrapped
from dptrain.program.pipeline.schedule import Course, course_of, microbatches_of
from dptrain.program.pipeline.stage_assignment import cut_into_stages, layers_of, with_slots
from dptrain.program.pipeline.subgraphs import Piece
from dptrain.program.shapes import local, size
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Tensor, Variable
from dptrain.train.sharding import slots_of

if TYPE_CHECKING:
    from dptrain.models.model import Model

_HEADS = ("stage", "weights", "gradients", "slots", "kept", "results", "memory", "layers")


def explain_stages(model: "Model", program: PlacedProgram, stages: int, microbatches: int | None) -> list[str]:
    """Return a table of what each stage holds, in bytes, and of its messages."""
    slots = slots_of(model)
    count = microbatches_of(program.rows, stages, microbatches)
    weights = cut_into_stages(program, model.weights, slots, stages, program.rows, count)
    owners = with_slots(weights, slots)
    course = course_of(program, owners, stages, count, alone=True)
    names: list[dict[str, None]] = [{} for _ in range(stages)]
    for layer in layers_of(program, model.weights):
        names[weights[layer[0]]][layer[0]._path.rpartition("/")[0] or layer[0]._path] = None
    rows = -(-program.rows // course.microbatches)
    of_rows = f" of {rows} rows" if program.rows % rows == 0 else f" of up to {rows} rows"
    whole = f": {course.why_whole}" if course.why_whole else ""
    several = f"{course.microbatches} microbatch{'es' * (course.microbatches > 1)}{of_rows}"
    lines = ["", *wrapped(f"{stages} stages of a pipeline, {several}, 1F1B{whole}", 100), ""]
    table: list[tuple[str, ...]] = [_HEADS]
    for stage in range(stages):
        variables = [variable for variable, at in owners.items() if at == stage and variable in program.state]
        of_weights, of_slots = (
            _bytes(variable for variable in variables if (variable in weights) == chosen) for chosen in (True, False)
        )
        sums = _bytes(variable for variable in course.sums if course.owners.get(variable) == stage)
        stored, results = _peak_bytes(course, stage, rows), _results(course, stage, program.rows)
        amounts = (of_weights, sums, of_slots, stored, results, of_weights + sums + of_slots + stored + results)
        table.append((str(stage), *(f"{amount:,}" for amount in amounts), ", ".join(names[stage])))
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADS))]
    for row in table:
        *numbers, layers = row
        lines.append("  ".join([*(cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)), layers]))
    lines += [
        "bytes; kept: of all microbatches that are under way, handed over or for the backward pass; results:",
        "intermediate ones of a microbatch and of the update, each piece of a step in memory of its own",
        "",
    ]
    return [*lines, *_messages(course, program.rows), *_between_replicas(course)]


def _bytes(tensors: Iterable[Variable | Tensor]) -> int:
    return sum(size(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def _peak_bytes(course: Course, stage: int, rows: int) -> int:
    """Return the most bytes that a stage holds between its subgraphs."""
    stored: dict[tuple[int, str], int] = {}
    most = 0
    for turn in course.turns:
        if turn.piece.stage == stage:
            program = turn.piece.program
            for name in turn.piece.gets:
                stored[turn.microbatch, name] = _local_bytes(program.inputs[name], rows)
            for name, tensor in program.outputs.items():
                stored[turn.microbatch, name] = _local_bytes(tensor, rows)
            most = max(most, sum(stored.values()))
            for name in turn.piece.drops:
                stored.pop((turn.microbatch, name), None)
    return most


def _local_bytes(tensor: Tensor, rows: int) -> int:
    return size(local(tensor.shape, rows)) * tensor.dtype.itemsize


def _results(course: Course, stage: int, rows: int) -> int:
    """Return the bytes of intermediate results of a stage's subgraphs."""
    rows = -(-rows // course.microbatches)
    return sum(planned(*lowered(piece.program), rows)[1].size for piece in _pieces(course) if piece.stage == stage)


def _pieces(course: Course) -> dict[Piece, int]:
    """Return the subgraphs, and how often each runs in a step."""
    executions: dict[Piece, int] = {}
    for turn in course.turns:
        executions[turn.piece] = executions.get(turn.piece, 0) + 1
    return executions


def _messages(course: Course, rows: int) -> Iterator[str]:
    """Yield what each stage sends to each other one in a step."""
    counted: dict[tuple[int, int, bool], list[int]] = {}
    for piece, times in _pieces(course).items():
        own_rows = [stop - start for start, stop in cut(0, rows, course.microbatches)] if times > 1 else [rows]
        for name, others in piece.gives.items():
            for other in others:
                totals = counted.setdefault((piece.stage, other, times > 1), [0, 0])
                totals[0] += times
                totals[1] += sum(_local_bytes(piece.program.outputs[name], length) for length in own_rows)
    yield "messages of a step between the stages of one pipeline:"
    for (stage, other, again), (count, nbytes) in sorted(
        counted.items(), key=lambda entry: (not entry[0][2], entry[0])
    ):
        what = "of microbatches" if again else "of the batch" if course.microbatches == 1 else "of the update"
        yield f"{stage} to {other}: {count} {what}, {nbytes:,} bytes"


def _between_replicas(course: Course) -> Iterator[str]:
    """Yield what the replicas of each stage sum, where there are several."""
    stages: Mapping[Variable, int] = course.owners
    if not course.sums:
        return
    nbytes: Sequence[int] = [
        _bytes(variable for variable in course.sums if stages.get(variable, at) == at)
        for at in range(1 + max(stages.values()))
    ]
    yield (
        "each stage and its replicas, if there are any, sum " + ", ".join(f"{amount:,}" for amount in nbytes) + " bytes"
    )
