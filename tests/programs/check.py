"""Executing a case by each means that there is: what is wrong with it, in a line."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu import separate_rows
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.ops import loops
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable, evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import ROWS, Program
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.sharding.placement import place
from dptrain.program.steps import without_ranks
from dptrain.program.tensor import Array, Tensor, Variable, differentiable
from tests.programs.case import Case
from tests.programs.exact import Expected, exactly
from tests.unit.program.virtual_ranks import VirtualComm, on_ranks

T = TypeVar("T")
# What an executable is made by: of a program, of what its inputs hold, and of rows, first row and communicator.
Make = Callable[..., Any]


def expected(case: Case, run: int = 0) -> Expected:
    """Return what a case computes."""
    return Expected(case.trace(run), case.values(run), case.starts(), ROWS, case.seed, bool(case.shards))


def results(case: Case, program: Program, executable: Any) -> dict[str, Array]:
    """Return what came out, and the state; after no steps the state alone."""
    outputs = {name: np.array(executable.outputs[name]) for name in program.outputs if case.steps}
    return outputs | {f"state {variable.name}": variable.numpy() for variable in program.state}


def run_alone(case: Case, make: Make, run: int = 0, traced_for: int | None = None) -> dict[str, Array]:
    """Return what an executable computes of a case, in one call; of a program traced for another number of rows."""
    program, rows = case.trace(run), {}
    if traced_for is not None:
        other = dataclasses.replace(case, lengths={**case.lengths, "n": traced_for})
        program, rows = without_ranks(place(other.trace(run)).for_rows(case.rows)), {"rows": case.rows}
    executable = make(program, case.in_memory(case.values(run)), **rows)
    executable.run(case.starts())
    return results(case, program, executable)


def run_evaluated(case: Case) -> dict[str, Array]:
    """Return what `evaluate` computes, anew at each step."""
    program, values = case.trace(), case.in_memory(case.values())
    state = {variable: variable.numpy() for variable in program.state}
    outputs: dict[str, Array] = {}
    for start in case.starts():
        inputs = {name: value[start : start + case.rows] if name == ROWS else value for name, value in values.items()}
        with np.errstate(all="ignore"):
            outputs, updates = evaluate(program, inputs, state)
        state |= updates
    return {name: outputs[name] for name in program.outputs if case.steps} | {
        f"state {variable.name}": value for variable, value in state.items()
    }


def run_eagerly(case: Case) -> dict[str, Array]:
    """Return what the ops of a case compute one by one, each when it is called."""
    values, variables, seeds = case.values(), case.variables(), case.seeds()
    outputs: dict[str, Any] = {}
    for start in case.starts():
        inputs = {
            name: differentiable(value[start : start + case.rows] if name == ROWS else value)
            for name, value in values.items()
        }
        outputs = case.computed(inputs, variables, seeds)
    named = {f"state {name}": variable.numpy() for name, variable in (variables | {"seeds": seeds.count}).items()}
    return {name: np.asarray(value) for name, value in outputs.items()} | named


def run_on_ranks(case: Case, make: Make) -> dict[str, Array]:
    """Return what ranks compute together: rows joined, the rest of rank 0, which must have what the others have.

    Raises:
        AssertionError: it has not.
    """
    values = case.values()

    def work(comm: VirtualComm) -> dict[str, Array]:
        program = place(case.trace())
        rows, first = case.shards[comm.rank], sum(case.shards[: comm.rank])
        local_values = case.in_memory(case.of_rank(values, comm.rank))
        executable = make(program, local_values, rows=rows, first_row=first, comm=comm)
        executable.run(case.starts(rows))
        return results(case, program, executable)

    rank_results = on_ranks(len(case.shards), work)
    ends = [joined(case, rank_results, rank) for rank in range(len(rank_results))]
    for rank, end in enumerate(ends):
        for name, value in end.items():
            assert np.array_equal(value, ends[0][name], equal_nan=value.dtype.kind in "fV"), (
                f"rank {rank} has another {name}"
            )
    return ends[0]


def joined(case: Case, rank_results: Sequence[Mapping[str, Array]], rank: int) -> dict[str, Array]:
    """Return what ranks have as one has it; of what all of them have, that of one rank."""
    outputs, joined_values = case.trace().outputs, dict(rank_results[rank])
    for name in joined_values:
        parts = [values[name] for values in rank_results]
        shape = outputs[name].shape if name in outputs else ()
        axis = next((n for n, length in enumerate(shape) if isinstance(length, Dim)), None)
        if axis is None:
            continue
        blocks = []
        for number, scale in enumerate(shape[axis].blocks):  # type: ignore[attr-defined]
            before = sum(shape[axis].blocks[:number])  # type: ignore[attr-defined]
            for rows, part in zip(case.shards, parts, strict=True):
                blocks.append(np.take(part, range(before * rows, (before + scale) * rows), axis))
        joined_values[name] = np.concatenate(blocks, axis)
    return joined_values


def by_numpy(program: Program, values: Mapping[str, Array], **place: Any) -> ReferenceExecutable:
    """Return a program prepared for NumPy."""
    return ReferenceExecutable(program, HostMemory(), values, **place)


def compiled(threads: int = 1, join: bool = True) -> Make:
    """Return what makes compiled executables, whose threads share the rows of loops even where these are few."""

    def make(program: Program, values: Mapping[str, Array], **place: Any) -> CompiledExecutable:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(separate_rows, "LEAST_ROWS", 2)
            patch.setattr(separate_rows, "LEAST_OPERATIONS", 0)
            return CompiledExecutable(program, HostMemory(), values, threads=threads, join=join, **place)

    return make


def not_optimized(execute: Callable[[], T]) -> T:
    """Return what `execute` does, compiled in a fifth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "OPTIONS", ("-O0", *compiling.OPTIONS[1:]))
        return execute()


def unlike(arrays: Mapping[str, Array], others: Mapping[str, Array], judged: Expected) -> str:
    """Return which results have not the same bits, or an empty string."""
    for name in judged.values:
        if not np.array_equal(arrays[name], others[name], equal_nan=arrays[name].dtype.kind in "fV"):
            return f"{name} has other bits"
    return ""


# Ways of which the second has the bits of the first, whatever memory it uses again and whatever it joins.
_WITH_BITS_OF = {
    "NumPy": "NumPy anew at each step",
    "C++ by three threads": "C++",
    "C++ without fusion": "C++",
}


def wrong_on_cpu(case: Case, thorough: bool = True, traced_for: int | None = None, eager: bool = False) -> str:
    """Return what is wrong with a case by NumPy or by C++, alone or on ranks; an empty string if nothing is.

    Args:
        case: what is executed.
        thorough: compile it with all optimizations, and without fusion as well, which must have the same bits.
        traced_for: another number of rows, for which the program that C++ executes is traced as well, if it may be.
        eager: call its ops one by one as well.
    """
    try:
        right = expected(case)
    except Exception as error:
        return f"trace: {type(error).__name__}: {error}"
    ways: dict[str, Callable[[], Mapping[str, Array]]] = {
        "NumPy anew at each step": lambda: run_evaluated(case),
        "NumPy": lambda: run_alone(case, by_numpy),
        "C++": lambda: run_alone(case, compiled()),
        "C++ by three threads": lambda: run_alone(case, compiled(threads=3)),
        "C++ without fusion": lambda: run_alone(case, compiled(join=False)),
        "NumPy on ranks": lambda: run_on_ranks(case, by_numpy),
        "C++ on ranks": lambda: run_on_ranks(case, compiled()),
    }
    if eager:
        ways["eagerly"] = lambda: run_eagerly(case)
    if traced_for is not None and not case.trace().shape_specialised:
        ways["C++ for other rows"] = lambda: run_alone(case, compiled(), traced_for=traced_for)
    if not thorough:
        del ways["C++ without fusion"]
    if not case.shards:
        del ways["NumPy on ranks"], ways["C++ on ranks"]
    outputs: dict[str, Mapping[str, Array]] = {}
    for way, execute in ways.items():
        try:
            optimized = thorough and way in ("C++", "C++ by three threads", "C++ for other rows")
            outputs[way] = execute() if optimized else not_optimized(execute)
            problem = right.wrong(outputs[way])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem and way in _WITH_BITS_OF:
            problem = unlike(outputs[_WITH_BITS_OF[way]], outputs[way], right)
        if problem:
            return f"{way}: {problem}"
    return ""


def wrong_beside_unrolled(case: Case) -> str:
    """Return which result of loops and of their gradients in float64 is not that of steps that are written down."""
    leaves = {name: text.replace("float32", "float64") for name, text in case.leaves.items()}
    try:
        right = expected(wide := dataclasses.replace(case, leaves=leaves))
    except ConfigError:  # it says float32 itself
        right = expected(wide := case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "is_tracing", lambda: False)
        patch.setattr("tests.programs.case.gradients", _gradients_or_zeros)
        try:
            values = exactly(wide.trace(), wide.values(), wide.starts(), ROWS)
        except ConfigError:  # of no steps nothing can be stacked
            return ""
    values = right.values | values  # but numbers that no tensor is read for, which then are no results
    problem = right.wrong({name: value.astype(right.dtypes[name]) for name, value in values.items()})
    return f"unrolled: {problem}" if problem else ""


def _gradients_or_zeros(result: Tensor, tensors: Sequence[Tensor | Variable]) -> list[Any]:
    """Return zeros for what a loop's carries could have depended on, and its steps do not."""
    pairs = zip(gradients(result, tensors), tensors, strict=True)
    return [np.zeros(tensor.shape, tensor.dtype) if gradient is None else gradient for gradient, tensor in pairs]


class Replayed:
    """The communicator of a rank whose others have been executed before, by `evaluate`: sums are of their parts.

    Args:
        case: of which step of which rank.
        rank: this one's number.
        sums: for each message of all steps, what the other ranks have added.
    """

    def __init__(self, case: Case, rank: int, sums: Sequence[Array]) -> None:
        self.rank, self.size = rank, len(case.shards)
        self._sums, self._next = sums, 0

    def along(self, axis: str) -> "Replayed":
        """All ranks differ along the one axis that there is."""
        return self

    def allreduce_sum(self, buffer: Array) -> None:
        """Add what the others have."""
        others = self._sums[self._next]
        assert (others.shape, others.dtype) == (buffer.shape, buffer.dtype), "another message than `evaluate` sends"
        self._next += 1
        with np.errstate(all="ignore"):
            buffer += others

    def node_messages(self, like: object) -> None:
        """Messages are buffers of its own."""

    def sums_in_a_tree(self, nbytes: int) -> bool:
        """Whether sums are in an order of their own."""
        return False


class _Recording(VirtualComm):
    """A communicator that notes what the other ranks add to each message."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm._ranks, comm.rank)
        self.sums: list[Array] = []

    def allreduce_sum(self, buffer: Array) -> None:
        summand = buffer.copy()
        super().allreduce_sum(buffer)
        others = [part for rank, part in enumerate(self._last) if rank != self.rank]
        self.sums.append(functools.reduce(np.add, others).astype(summand.dtype).reshape(summand.shape))  # -0 stays -0
        self._ranks.barrier.wait()

    @property
    def _last(self) -> list[Array]:
        return self._ranks.parts


def messages_of_others(case: Case) -> list[list[Array]]:
    """Return for each rank what the others add to its messages, in all steps."""
    values = case.values()

    def work(comm: Any) -> list[Array]:
        program: PlacedProgram = place(case.trace())
        rows, first = case.shards[comm.rank], sum(case.shards[: comm.rank])
        local_values, recording = case.of_rank(values, comm.rank), _Recording(comm)
        state = {variable: variable.numpy() for variable in program.state}
        for start in case.starts(rows):
            inputs = {
                name: value[start : start + rows] if name == ROWS else value for name, value in local_values.items()
            }
            with np.errstate(all="ignore"):
                state |= evaluate(program, inputs, state, rows=rows, first_row=first, comm=recording)[1]  # type: ignore[arg-type]
        return recording.sums

    return on_ranks(len(case.shards), work)


def wrong_on_cuda(case: Case, backend: Any, another: Callable[[], Any] | None = None) -> str:
    """Return what is wrong with a case on a GPU; an empty string if nothing is.

    Args:
        case: what is executed.
        backend: the device.
        another: opens a further backend that joins packs; packs are left out without.
    """
    try:
        right = expected(case)
    except Exception as error:
        return f"trace: {type(error).__name__}: {error}"

    def make(program: Program, values: Mapping[str, Array], **place: Any) -> Any:
        return backend.executable(program, dict(values), **place)

    try:
        if problem := right.wrong(run_alone(case, make)):
            return f"CUDA: {problem}"
        if case.shards:
            others, values, rank_results = messages_of_others(case), case.values(), []
            for rank, rows in enumerate(case.shards):
                program = place(case.trace())
                comm = Replayed(case, rank, others[rank])
                first = sum(case.shards[:rank])
                local_values = case.in_memory(case.of_rank(values, rank))
                executable = make(program, local_values, rows=rows, first_row=first, comm=comm)
                executable.run(case.starts(rows))
                rank_results.append(results(case, program, executable))
            # Each rank has sums of its own parts by CUDA, and the others' by NumPy.
            for rank in range(len(rank_results)):
                if problem := right.wrong(joined(case, rank_results, rank)):
                    return f"CUDA on rank {rank}: {problem}"
        if case.pack and another is not None and (problem := _wrong_in_pack(case, make, another)):
            return f"CUDA in a pack: {problem}"
    except Exception as error:
        return f"CUDA: {type(error).__name__}: {error}"
    return ""


def _wrong_in_pack(case: Case, make: Make, another: Callable[[], Any]) -> str:
    """Return which of two runs has other bits on devices that are alone, in a pack, and alone again, than alone."""
    starts = case.starts()
    runs = []
    for run in range(2):
        program, reference = case.trace(run), case.trace(run)
        packed, alone = another().executable(program, case.values(run)), make(reference, case.values(run))
        runs.append((program, packed, reference, alone))
    for turn in ("alone", "in a pack", "alone again"):
        for program, packed, _, alone in runs:
            packed.run(starts)
            alone.run(starts)
            if turn != "in a pack":
                results(case, program, packed)  # which does not wait for the other
        for number, (program, packed, reference, alone) in enumerate(runs):
            packed_results, others = results(case, program, packed), results(case, reference, alone)
            for name, array in packed_results.items():
                if array.tobytes() != others[name].tobytes():
                    return f"{name} of run {number} has other bits {turn}"
    return ""
