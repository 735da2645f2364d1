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
    """What a stage computes between two times at which it waits for others.

    Attributes:
        stage: that executes it.
        phase: how often something has been handed over before; a stage executes its subgraphs in this order.
        program: inputs are data, what was handed over and what was kept; outputs likewise, and what the step returns.
        receives: where inputs come from that are handed over: names, each with the stage.
        sends: to which stages outputs are handed.
        frees: what no later subgraph of the stage needs.
    """

    stage: int
    phase: int
    program: Program
    receives: dict[str, int] = field(default_factory=dict)
    sends: dict[str, list[int]] = field(default_factory=dict)
    frees: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class MicrobatchPrograms:
    """A step of microbatches.

    Attributes:
        each: what is executed for each microbatch; its updates are of accumulators.
        once: what follows from these.
        stages: that compute tensors of both.
        owners: the stages of accumulators, but for those that all stages have.
    """

    each: Program
    once: PlacedProgram
    stages: dict[Tensor, int]
    owners: dict[Variable, int]


def in_microbatches(program: PlacedProgram, stages: Mapping[Tensor, int], *, alone: bool) -> MicrobatchPrograms:
    """Return what a step does for each microbatch and what it does once.

    Args:
        program: of a step.
        stages: that compute its tensors.
        alone: there is one replica, which has nothing to sum with others.

    Raises:
        ConfigError: something needs all rows of the batch within the step.
    """
    sums = [one for one in program.tensors if one.op is ALL_REDUCE]
    _refuse_mixing(program, sums)
    first = placeholder((), np.bool_, FIRST)
    state, updates, owners = dict(program.state), dict[Variable, Tensor](), dict[Variable, int]()
    found, new = dict(stages), dict[Tensor, Tensor]()
    for number, one in enumerate(sums):
        (summand,) = one.inputs
        zeros = partial(np.zeros, shape := tuple(map(int, one.shape)), one.dtype)
        total = Variable(Drawn(shape, one.dtype, zeros), f"sum {number}", trainable=False)
        before = state[total] = placeholder(one.shape, one.dtype, total._path, total)
        added = OPERATORS["+"](before, summand)
        made = updates[total] = OPERATORS["select"](first, summand, added)
        if one in stages:
            owners[total] = stages[one]
            found |= dict.fromkeys((before, added, made), stages[one])
        new[one] = before if alone else one.with_inputs([before])
    known = _rebuilt(program.results, new)
    found |= {known[one]: stage for one, stage in stages.items() if one in known}
    outputs = {name: known[one] for name, one in program.outputs.items()}
    once = replace(
        program,
        state=state,
        outputs=outputs,
        updates={variable: known[one] for variable, one in program.updates.items()},
        placements={known[one]: placement for one, placement in program.placements.items() if one in known},
    )
    each = Program({**program.inputs, FIRST: first}, state, {}, updates, rows=program.rows)
    return MicrobatchPrograms(each, once, found, owners)


def _refuse_mixing(program: PlacedProgram, sums: Sequence[Tensor]) -> None:
    """Refuse a step in which rows, or other sums over rows, follow from a sum over rows."""
    data, chosen = set(program.inputs.values()), set(sums)
    behind: dict[Tensor, Tensor] = {}  # the sum that a tensor follows from
    of_data = set[Tensor]()
    for one in program.tensors:
        if one in data or not of_data.isdisjoint(one.inputs):
            of_data.add(one)
        source = next((behind[read] for read in one.inputs if read in behind), None)
        if one in chosen:
            if source is not None or one.attributes["over"] == "max":
                raise _needs_all_rows(source or one)
            behind[one] = one
            of_data.discard(one)
        elif source is not None:
            if one in of_data:
                raise _needs_all_rows(source)
            behind[one] = source


def _needs_all_rows(sum_of_rows: Tensor) -> ConfigError:
    level, name = [sum_of_rows], ""
    while level and not name:
        name = next((one.name for one in level if one.op is not None and one.name), "")
        level = [read for one in level for read in one.inputs][:64]
    who = f"layer {name!r}" if name else "a loss or a step of one's own"
    return ConfigError(f"{who} needs all samples of a batch at once, which microbatches are parts of")


def subgraphs_of(
    program: Program, stages: Mapping[Tensor, int], owners: Mapping[Variable, int], count: int
) -> list[Subgraph]:
    """Return the subgraphs of a program, in an order in which they can be executed.

    Results that are not of one stage alone, outputs and variables that all stages have, are made or handed to each.

    Args:
        program: placed for one rank of a pipeline.
        stages: that compute its tensors; every stage computes the others that it needs.
        owners: stages of variables that one stage alone has.
        count: of stages.
    """
    return _Partitioner(program, stages, owners, count).subgraphs()


class _Partitioner:
    """The work of `subgraphs_of`."""

    def __init__(
        self, program: Program, stages: Mapping[Tensor, int], owners: Mapping[Variable, int], count: int
    ) -> None:
        self._program, self._stages, self._owners, self._count = program, stages, owners, count
        self._tensors = program.tensors
        self._names = {one: f"tensor {number}" for number, one in enumerate(self._tensors)}
        data = set(program.inputs.values())
        # Of variables of one stage alone, and what all stages have beside data: made anew wherever it is read.
        self._of_state: dict[Tensor, frozenset[Variable]] = {}
        self._phase: dict[Tensor, int] = {}
        for one in self._tensors:
            own = stages.get(one)
            if one.op is None:
                if one not in data:
                    self._of_state[one] = frozenset([one.variable] if one.variable in program.state else [])  # type: ignore[list-item]
            elif all(read in self._of_state and stages.get(read, own) == own for read in one.inputs):
                self._of_state[one] = frozenset[Variable]().union(*(self._of_state[read] for read in one.inputs))
            if own is not None:
                behind = [self._phase[read] + (stages[read] != own) for read in one.inputs if read in stages]
                self._phase[one] = max(behind, default=0)

    def subgraphs(self) -> list[Subgraph]:
        """See `subgraphs_of`."""
        updates, outputs = self._results()
        places = {(self._stages[one], phase) for one, phase in self._phase.items() if one not in self._of_state}
        places |= set(updates) | set(outputs)
        wanted: dict[tuple[int, int], dict[Tensor, None]] = {}  # of other subgraphs, or later ones of the stage
        needed: dict[tuple[int, int], dict[Tensor, None]] = {}
        rest = sorted(places, key=lambda one: (one[1], one[0]))
        order: list[tuple[int, int]] = []
        while rest:
            place = rest.pop()
            order.insert(0, place)
            results = [*wanted.get(place, []), *updates.get(place, {}).values(), *outputs.get(place, {}).values()]
            needed[place] = self._given(results, place)
            for one in needed[place]:
                source = self._stages[one], self._phase[one]
                wanted.setdefault(source, {})[one] = None
                if source not in rest:
                    rest = sorted([*rest, source], key=lambda one: (one[1], one[0]))
        order = [one for one in order if wanted.get(one) or one in updates or one in outputs]
        first: dict[tuple[int, Tensor], tuple[int, int]] = {}
        last: dict[tuple[int, Tensor], tuple[int, int]] = {}
        for place in order:
            for one in (*needed[place], *wanted.get(place, [])):
                if one in needed[place]:
                    first.setdefault((place[0], one), place)
                last[place[0], one] = place
        found = []
        for place in order:
            subgraph = self._subgraph(place, list(needed[place]), [*wanted.get(place, [])], updates, outputs)
            own = place[0]
            subgraph.receives = {
                self._names[one]: self._stages[one]
                for one in needed[place]
                if self._stages[one] != own and first[own, one] == place
            }
            subgraph.sends = {
                self._names[one]: others
                for one in wanted.get(place, [])
                if (others := [at for at in range(self._count) if at != own and (at, one) in first])
            }
            subgraph.frees = [self._names[one] for (at, one), end in last.items() if at == own and end == place]
            found.append(subgraph)
        return found

    def _results(
        self,
    ) -> tuple[dict[tuple[int, int], dict[Variable, Tensor]], dict[tuple[int, int], dict[str, Tensor]]]:
        """Return in which subgraphs new values of variables are kept, and outputs made."""
        program, everywhere = self._program, range(self._count)
        last = [0] * self._count
        reads: dict[tuple[int, Variable], int] = {}  # the last phase in which a stage reads a variable
        for one, phase in self._phase.items():
            if one not in self._of_state:
                at = self._stages[one]
                last[at] = max(last[at], phase)
                for read in one.inputs:
                    for variable in self._of_state.get(read, ()):
                        reads[at, variable] = max(reads.get((at, variable), 0), phase)

        def begins(made: Tensor, at: int) -> int | None:
            """Return the phase in which a stage can have a tensor; None for any."""
            if made not in self._stages or (made in self._of_state and self._stages[made] == at):
                return None
            return self._phase[made] + (self._stages[made] != at)

        kept = [
            (at, variable, one)
            for variable, one in program.updates.items()
            for at in ([self._owners[variable]] if variable in self._owners else everywhere)
        ]
        told = [(at, name, one) for name, one in program.outputs.items() for at in everywhere]
        for at, _, one in (*kept, *told):
            last[at] = max(last[at], begins(one, at) or 0)
        for at, _, one in (*kept, *told):
            if begins(one, at) is None:
                for variable in self._of_state.get(one, ()):
                    reads[at, variable] = last[at]
        updates: dict[tuple[int, int], dict[Variable, Tensor]] = {}
        outputs: dict[tuple[int, int], dict[str, Tensor]] = {}
        for at, variable, one in kept:
            begin = begins(one, at)
            end = last[at] if begin is None else max(begin, reads.get((at, variable), 0))
            updates.setdefault((at, end), {})[variable] = one
        for at, name, one in told:
            begin = begins(one, at)
            outputs.setdefault((at, last[at] if begin is None else begin), {})[name] = one
        return updates, outputs

    def _is_made_in(self, one: Tensor, place: tuple[int, int]) -> bool:
        """Whether a subgraph makes a tensor itself, where it needs it."""
        own = self._stages.get(one)
        if own is None or (one in self._of_state and own == place[0]):
            return True
        return one not in self._of_state and (own, self._phase[one]) == place

    def _given(self, results: Sequence[Tensor], place: tuple[int, int]) -> dict[Tensor, None]:
        """Return what a subgraph needs that it does not make itself."""
        found, seen, stack = dict[Tensor, None](), set[Tensor](), list(reversed(results))
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if self._is_made_in(one, place) or _is_small_view(one):
                stack += reversed(one.inputs)
            else:
                found[one] = None
        return found

    def _subgraph(
        self,
        place: tuple[int, int],
        needed: Sequence[Tensor],
        wanted: Sequence[Tensor],
        updates: Mapping[tuple[int, int], Mapping[Variable, Tensor]],
        outputs: Mapping[tuple[int, int], Mapping[str, Tensor]],
    ) -> Subgraph:
        program = self._program
        given = {one: placeholder(one.shape, one.dtype, self._names[one]) for one in needed}
        own_updates, own_outputs = updates.get(place, {}), outputs.get(place, {})
        roots = [*wanted, *own_updates.values(), *own_outputs.values()]
        known = _rebuilt(roots, given)
        made = {self._names[one]: known[one] for one in wanted} | {
            name: known[one] for name, one in own_outputs.items()
        }
        there = set(known.values())
        changes: dict[str, object] = {
            "inputs": {name: one for name, one in program.inputs.items() if one in there}
            | {one.name: one for one in given.values()},
            "state": {
                variable: one for variable, one in program.state.items() if one in there or variable in own_updates
            },
            "outputs": made,
            "updates": {variable: known[one] for variable, one in own_updates.items()},
            "derived": None,
            "weight_gradients": {},
        }
        if isinstance(program, PlacedProgram):
            changes["placements"] = {known[one]: where for one, where in program.placements.items() if one in known}
        return Subgraph(*place, replace(program, **changes))  # type: ignore[arg-type]


def with_parts(program: Program, parts: Mapping[Variable, Variable]) -> Program:
    """Return a program that reads and writes other variables in place of some."""
    leaves = {
        one: placeholder(own.shape, own.dtype, own._path, own)
        for v, own in parts.items()
        if (one := program.state.get(v)) is not None
    }
    known = _rebuilt(program.results, leaves)
    changes: dict[str, object] = {
        "inputs": {name: known.get(one, one) for name, one in program.inputs.items()},
        "state": {
            parts.get(variable, variable): known.get(one, leaves.get(one, one))
            for variable, one in program.state.items()
        },
        "outputs": {name: known[one] for name, one in program.outputs.items()},
        "updates": {parts.get(variable, variable): known[one] for variable, one in program.updates.items()},
    }
    if isinstance(program, PlacedProgram):
        changes["placements"] = {known[one]: where for one, where in program.placements.items() if one in known}
    return replace(program, **changes)  # type: ignore[arg-type]


def _rebuilt(roots: Sequence[Tensor], given: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return what stands for tensors that results are made of, where others stand for some."""
    found: dict[Tensor, Tensor] = dict(given)
    stack = [(one, False) for one in reversed(roots)]
    while stack:
        one, inputs_done = stack.pop()
        if one in found:
            continue
        if inputs_done:
            found[one] = one.with_inputs([found[read] for read in one.inputs])
        else:
            stack.append((one, True))
            stack += [(read, False) for read in reversed(one.inputs)]
    return found


def _is_small_view(tensor: Tensor) -> bool:
    """Whether a tensor shows another one that is not larger: who reads it is handed that."""
    if tensor.op is None or not tensor.op.is_view or tensor.op is OWN_PART:
        return False
    return size(tensor.inputs[0].shape) <= size(tensor.shape)
