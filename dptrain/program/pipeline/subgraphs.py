"""A program cut into subgraphs, each of which one stage of a pipeline executes on its own.

Between two subgraphs of a stage, other stages compute what the second one waits for. In a forward and a backward pass
every stage but the last has two. A tensor that a later subgraph reads is kept, or sent where that is on another stage.
Views, and whatever follows from data and from variables that a stage has, are recomputed in each subgraph.

Microbatches: sums over rows are partial over the ranks, and in the same way over the microbatches of one rank. So the
program is cut at these sums: what comes before runs for each microbatch and adds to accumulators, the rest runs once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.shapes import size
from dptrain.program.sharding.mesh import ALL_REDUCE, OWN_PART, PlacedProgram
from dptrain.program.tensor import Drawn, Tensor, Variable, placeholder

# The input that says whether a microbatch is the first of a step.
FIRST = "first microbatch"


@dataclass(eq=False)
class Subgraph:
    """The part of a program that a stage executes between two points at which it waits for other stages.

    Attributes:
        phase: how many transfers lie before it; a stage executes its subgraphs in this order.
        program: its inputs are data, received and kept tensors; its outputs are sent, kept or results of the step.
        receives: the stage that sends each received input.
        sends: the stages that each output is sent to.
        frees: kept tensors that no later subgraph of the stage reads.
    """

    stage: int
    phase: int
    program: Program
    receives: dict[str, int] = field(default_factory=dict)
    sends: dict[str, list[int]] = field(default_factory=dict)
    frees: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class MicrobatchPrograms:
    """A step split into a program for each microbatch, which updates accumulators, and one that runs once afterwards.

    `stages` are those of the tensors of both programs, `owners` those of accumulators that only one stage has.
    """

    per_microbatch: Program
    per_step: PlacedProgram
    stages: dict[Tensor, int]
    owners: dict[Variable, int]


def in_microbatches(program: PlacedProgram, stages: Mapping[Tensor, int], *, alone: bool) -> MicrobatchPrograms:
    """Split a step of one replica (`alone`) or several; ConfigError if an op needs all rows of the batch."""
    sums = [tensor for tensor in program.tensors if tensor.op is ALL_REDUCE]
    _refuse_mixing(program, sums)
    first = placeholder((), np.bool_, FIRST)
    state, updates, owners = dict(program.state), dict[Variable, Tensor](), dict[Variable, int]()
    stage_of, new = dict(stages), dict[Tensor, Tensor]()
    for number, tensor in enumerate(sums):
        (summand,) = tensor.inputs
        zeros = partial(np.zeros, shape := tuple(map(int, tensor.shape)), tensor.dtype)
        total = Variable(Drawn(shape, tensor.dtype, zeros), f"sum {number}", trainable=False)
        before = state[total] = placeholder(tensor.shape, tensor.dtype, total._path, total)
        added = OPERATORS["+"](before, summand)
        new_total = updates[total] = OPERATORS["select"](first, summand, added)
        if tensor in stages:
            owners[total] = stages[tensor]
            stage_of |= dict.fromkeys((before, added, new_total), stages[tensor])
        new[tensor] = before if alone else tensor.with_inputs([before])
    rebuilt = _rebuilt(program.results, new)
    stage_of |= {rebuilt[tensor]: stage for tensor, stage in stages.items() if tensor in rebuilt}
    outputs = {name: rebuilt[tensor] for name, tensor in program.outputs.items()}
    per_step = replace(
        program,
        state=state,
        outputs=outputs,
        updates={variable: rebuilt[tensor] for variable, tensor in program.updates.items()},
        placements={
            rebuilt[tensor]: placement for tensor, placement in program.placements.items() if tensor in rebuilt
        },
    )
    per_microbatch = Program({**program.inputs, FIRST: first}, state, {}, updates, rows=program.rows)
    return MicrobatchPrograms(per_microbatch, per_step, stage_of, owners)


def _refuse_mixing(program: PlacedProgram, sums: Sequence[Tensor]) -> None:
    """Refuse a step in which rows, or other sums over rows, depend on a sum over rows."""
    data, chosen = set(program.inputs.values()), set(sums)
    behind: dict[Tensor, Tensor] = {}  # the sum that a tensor depends on
    of_data = set[Tensor]()
    for tensor in program.tensors:
        if tensor in data or not of_data.isdisjoint(tensor.inputs):
            of_data.add(tensor)
        source = next((behind[read] for read in tensor.inputs if read in behind), None)
        if tensor in chosen:
            if source is not None or tensor.attributes["over"] == "max":
                raise _needs_all_rows(source or tensor)
            behind[tensor] = tensor
            of_data.discard(tensor)
        elif source is not None:
            if tensor in of_data:
                raise _needs_all_rows(source)
            behind[tensor] = source


def _needs_all_rows(sum_of_rows: Tensor) -> ConfigError:
    level, name = [sum_of_rows], ""
    while level and not name:
        name = next((tensor.name for tensor in level if tensor.op is not None and tensor.name), "")
        level = [read for tensor in level for read in tensor.inputs][:64]
    culprit = f"layer {name!r}" if name else "a custom loss or step"
    return ConfigError(f"{culprit} needs the whole batch at once, which microbatches split")


def subgraphs_of(
    program: Program, stages: Mapping[Tensor, int], owners: Mapping[Variable, int], count: int
) -> list[Subgraph]:
    """Cut a program, placed for one rank of a pipeline, into subgraphs, in an order in which they can be executed.

    Each stage computes the tensors it needs that `stages` does not assign. Outputs, and new values of variables that
    all stages have, are computed on each stage or sent to each; `owners` are the stages of the other variables.
    """
    return _Partitioner(program, stages, owners, count).subgraphs()


class _Partitioner:
    def __init__(
        self, program: Program, stages: Mapping[Tensor, int], owners: Mapping[Variable, int], count: int
    ) -> None:
        self._program, self._stages, self._owners, self._count = program, stages, owners, count
        self._tensors = program.tensors
        self._names = {tensor: f"tensor {number}" for number, tensor in enumerate(self._tensors)}
        data = set(program.inputs.values())
        # Functions of one stage's variables, or of what all stages have beside data: recomputed wherever they are read.
        self._of_state: dict[Tensor, frozenset[Variable]] = {}
        self._phase: dict[Tensor, int] = {}
        for tensor in self._tensors:
            stage = stages.get(tensor)
            if tensor.op is None:
                if tensor not in data:
                    self._of_state[tensor] = frozenset([tensor.variable] if tensor.variable in program.state else [])  # type: ignore[list-item]
            elif all(read in self._of_state and stages.get(read, stage) == stage for read in tensor.inputs):
                self._of_state[tensor] = frozenset[Variable]().union(*(self._of_state[read] for read in tensor.inputs))
            if stage is not None:
                behind = [self._phase[read] + (stages[read] != stage) for read in tensor.inputs if read in stages]
                self._phase[tensor] = max(behind, default=0)

    def subgraphs(self) -> list[Subgraph]:
        updates, outputs = self._results()
        places = {
            (self._stages[tensor], phase) for tensor, phase in self._phase.items() if tensor not in self._of_state
        }
        places |= set(updates) | set(outputs)
        results_of: dict[tuple[int, int], dict[Tensor, None]] = {}  # for other subgraphs, or later ones of the stage
        operands_of: dict[tuple[int, int], dict[Tensor, None]] = {}
        pending = sorted(places, key=lambda key: (key[1], key[0]))
        order: list[tuple[int, int]] = []
        while pending:
            place = pending.pop()
            order.insert(0, place)
            results = [*results_of.get(place, []), *updates.get(place, {}).values(), *outputs.get(place, {}).values()]
            operands_of[place] = self._given(results, place)
            for tensor in operands_of[place]:
                source = self._stages[tensor], self._phase[tensor]
                results_of.setdefault(source, {})[tensor] = None
                if source not in pending:
                    pending = sorted([*pending, source], key=lambda key: (key[1], key[0]))
        order = [key for key in order if results_of.get(key) or key in updates or key in outputs]
        first: dict[tuple[int, Tensor], tuple[int, int]] = {}
        last: dict[tuple[int, Tensor], tuple[int, int]] = {}
        for place in order:
            for value in (*operands_of[place], *results_of.get(place, [])):
                if value in operands_of[place]:
                    first.setdefault((place[0], value), place)
                last[place[0], value] = place
        subgraphs = []
        for place in order:
            subgraph = self._subgraph(place, list(operands_of[place]), [*results_of.get(place, [])], updates, outputs)
            stage = place[0]
            subgraph.receives = {
                self._names[tensor]: self._stages[tensor]
                for tensor in operands_of[place]
                if self._stages[tensor] != stage and first[stage, tensor] == place
            }
            subgraph.sends = {
                self._names[tensor]: targets
                for tensor in results_of.get(place, [])
                if (targets := [at for at in range(self._count) if at != stage and (at, tensor) in first])
            }
            subgraph.frees = [self._names[tensor] for (at, tensor), end in last.items() if at == stage and end == place]
            subgraphs.append(subgraph)
        return subgraphs

    def _results(
        self,
    ) -> tuple[dict[tuple[int, int], dict[Variable, Tensor]], dict[tuple[int, int], dict[str, Tensor]]]:
        """Return the subgraphs, by stage and phase, that store new values of variables and outputs."""
        program, everywhere = self._program, range(self._count)
        last = [0] * self._count
        reads: dict[tuple[int, Variable], int] = {}  # the last phase in which a stage reads a variable
        for tensor, phase in self._phase.items():
            if tensor not in self._of_state:
                at = self._stages[tensor]
                last[at] = max(last[at], phase)
                for read in tensor.inputs:
                    for variable in self._of_state.get(read, ()):
                        reads[at, variable] = max(reads.get((at, variable), 0), phase)

        def begins(tensor: Tensor, at: int) -> int | None:
            if tensor not in self._stages or (tensor in self._of_state and self._stages[tensor] == at):
                return None
            return self._phase[tensor] + (self._stages[tensor] != at)

        kept_updates = [
            (at, variable, tensor)
            for variable, tensor in program.updates.items()
            for at in ([self._owners[variable]] if variable in self._owners else everywhere)
        ]
        kept_outputs = [(at, name, tensor) for name, tensor in program.outputs.items() for at in everywhere]
        for at, _, tensor in (*kept_updates, *kept_outputs):
            last[at] = max(last[at], begins(tensor, at) or 0)
        for at, _, tensor in (*kept_updates, *kept_outputs):
            if begins(tensor, at) is None:
                for variable in self._of_state.get(tensor, ()):
                    reads[at, variable] = last[at]
        updates: dict[tuple[int, int], dict[Variable, Tensor]] = {}
        outputs: dict[tuple[int, int], dict[str, Tensor]] = {}
        for at, variable, tensor in kept_updates:
            begin = begins(tensor, at)
            end = last[at] if begin is None else max(begin, reads.get((at, variable), 0))
            updates.setdefault((at, end), {})[variable] = tensor
        for at, name, tensor in kept_outputs:
            begin = begins(tensor, at)
            outputs.setdefault((at, last[at] if begin is None else begin), {})[name] = tensor
        return updates, outputs

    def _is_made_in(self, tensor: Tensor, place: tuple[int, int]) -> bool:
        stage = self._stages.get(tensor)
        if stage is None or (tensor in self._of_state and stage == place[0]):
            return True
        return tensor not in self._of_state and (stage, self._phase[tensor]) == place

    def _given(self, results: Sequence[Tensor], place: tuple[int, int]) -> dict[Tensor, None]:
        """Return the tensors that a subgraph reads and does not compute."""
        operands, visited, stack = dict[Tensor, None](), set[Tensor](), list(reversed(results))
        while stack:
            tensor = stack.pop()
            if tensor in visited:
                continue
            visited.add(tensor)
            if self._is_made_in(tensor, place) or _is_small_view(tensor):
                stack += reversed(tensor.inputs)
            else:
                operands[tensor] = None
        return operands

    def _subgraph(
        self,
        place: tuple[int, int],
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        updates: Mapping[tuple[int, int], Mapping[Variable, Tensor]],
        outputs: Mapping[tuple[int, int], Mapping[str, Tensor]],
    ) -> Subgraph:
        program = self._program
        placeholders = {tensor: placeholder(tensor.shape, tensor.dtype, self._names[tensor]) for tensor in operands}
        own_updates, own_outputs = updates.get(place, {}), outputs.get(place, {})
        roots = [*results, *own_updates.values(), *own_outputs.values()]
        rebuilt = _rebuilt(roots, placeholders)
        named_outputs = {self._names[tensor]: rebuilt[tensor] for tensor in results} | {
            name: rebuilt[tensor] for name, tensor in own_outputs.items()
        }
        rebuilt_tensors = set(rebuilt.values())
        changes: dict[str, object] = {
            "inputs": {name: tensor for name, tensor in program.inputs.items() if tensor in rebuilt_tensors}
            | {tensor.name: tensor for tensor in placeholders.values()},
            "state": {
                variable: tensor
                for variable, tensor in program.state.items()
                if tensor in rebuilt_tensors or variable in own_updates
            },
            "outputs": named_outputs,
            "updates": {variable: rebuilt[tensor] for variable, tensor in own_updates.items()},
            "derived": None,
            "weight_gradients": {},
        }
        if isinstance(program, PlacedProgram):
            changes["placements"] = {
                rebuilt[tensor]: where for tensor, where in program.placements.items() if tensor in rebuilt
            }
        return Subgraph(*place, replace(program, **changes))  # type: ignore[arg-type]


def with_parts(program: Program, parts: Mapping[Variable, Variable]) -> Program:
    """Replace variables of a program."""
    leaves = {
        tensor: placeholder(part.shape, part.dtype, part._path, part)
        for v, part in parts.items()
        if (tensor := program.state.get(v)) is not None
    }
    rebuilt = _rebuilt(program.results, leaves)
    changes: dict[str, object] = {
        "inputs": {name: rebuilt.get(tensor, tensor) for name, tensor in program.inputs.items()},
        "state": {
            parts.get(variable, variable): rebuilt.get(tensor, leaves.get(tensor, tensor))
            for variable, tensor in program.state.items()
        },
        "outputs": {name: rebuilt[tensor] for name, tensor in program.outputs.items()},
        "updates": {parts.get(variable, variable): rebuilt[tensor] for variable, tensor in program.updates.items()},
    }
    if isinstance(program, PlacedProgram):
        changes["placements"] = {
            rebuilt[tensor]: where for tensor, where in program.placements.items() if tensor in rebuilt
        }
    return replace(program, **changes)  # type: ignore[arg-type]


def _rebuilt(roots: Sequence[Tensor], substitutes: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    rebuilt: dict[Tensor, Tensor] = dict(substitutes)
    stack = [(tensor, False) for tensor in reversed(roots)]
    while stack:
        tensor, inputs_done = stack.pop()
        if tensor in rebuilt:
            continue
        if inputs_done:
            rebuilt[tensor] = tensor.with_inputs([rebuilt[read] for read in tensor.inputs])
        else:
            stack.append((tensor, True))
            stack += [(read, False) for read in reversed(tensor.inputs)]
    return rebuilt


def _is_small_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one that is not larger, which is sent in its place."""
    if tensor.op is None or not tensor.op.is_view or tensor.op is OWN_PART:
        return False
    return size(tensor.inputs[0].shape) <= size(tensor.shape)
