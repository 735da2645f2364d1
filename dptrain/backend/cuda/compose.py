"""Composes a program for a GPU, without needing one: kernels, their order, messages and memory plan."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from dptrain.backend.cuda.attention import attention_precision
from dptrain.backend.cuda.frames.functions import function_of
from dptrain.backend.cuda.generate import (
    GeneratedFunction,
    Kernel,
    Local,
    kernels,
    names_of,
    run_fields,
    source,
    with_steps,
)
from dptrain.backend.cuda.libraries.providers import Problem, Provider, is_product, problem_of, with_providers
from dptrain.backend.cuda.loops import Address, LoopCall
from dptrain.backend.cuda.persistent import RowsWriter, rows_of_block
from dptrain.backend.cuda.policy import POLICY, factors_of
from dptrain.backend.cuda.row_chains import with_row_chains
from dptrain.errors import ConfigError
from dptrain.program.body import body_of, has_body, steps_of
from dptrain.program.body import with_steps as with_tensors_of_steps
from dptrain.program.codegen.memory import Access, MemoryPlan, nbytes, plan
from dptrain.program.gradient import topological
from dptrain.program.operand import OPERATORS
from dptrain.program.passes import with_long_products, with_precision
from dptrain.program.program import Program
from dptrain.program.schedule.fuse import fuse
from dptrain.program.schedule.loops import BUFFERS, repeat_of
from dptrain.program.schedule.nest import Nest
from dptrain.program.schedule.rows import RowLoop
from dptrain.program.schedule.schedule import Schedule
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE
from dptrain.program.steps import (
    step_of,
    with_attention_on_gpu,
    with_branches_selected,
    with_halves_in_loops,
    with_loops_in_memory,
    with_steps_changed,
    without_ranks,
)
from dptrain.program.tensor import Tensor

# From so many elements on an int is too short for indices, which run a little past the end.
_WIDE = 2**30
# Kernels compiled as one text: a text takes about 0.5 s, plus 0.2 to 0.4 s for each kernel.
_TOGETHER = 8
# Alignment of tensors: for the widest loads of kernels, and a cache line.
ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class Message:
    """Collectives sent together, after `after` kernels of a stage: this rank's `parts`, and the `results` it gets."""

    results: list[Tensor]
    parts: list[Tensor]
    after: int

    @property
    def is_sum(self) -> bool:
        """Whether it consists of all-reduces, which have a separate buffer."""
        return self.results[0].op is ALL_REDUCE


class Composition:
    """A program as kernels; `rows`, `first_row` and `alone` as for `Backend.prepare`.

    Args:
        precision: of products; `of_halves`: of those of half-precision factors, see `with_precision`.
        provider: returns who computes a product or a convolution; by default our kernels.

    Attributes:
        program: with distinct, computed results.
        stages: kernels, in order, between two sync points, with the `messages` after each.
        stored: tensors that kernels and messages store.
        targets: the variable of each new value; `in_place` are the updates that overwrite the old one.
        counts_steps: kernels read the number of the step.
        notes_rows: kernels report indices outside a table.
        wide_index: an int is too small to count all elements.
        last_carries: the first carry, and the buffer, that hold a loop's last carry.
        plan: offsets of intermediate results, and of scratch memory by function and argument.

    Raises:
        ConfigError: an op has no kernel.
    """

    def __init__(
        self,
        program: Program,
        rows: int | None = None,
        first_row: int = 0,
        *,
        alone: bool = True,
        precision: str = "float32",
        of_halves: str = "half",
        provider: Provider | None = None,
    ) -> None:
        # Repeats stay: numbers that are equal in one run may differ in another that shares its kernels.
        program = without_ranks(program) if alone else program
        _require_known_lengths(program)
        program = with_halves_in_loops(with_branches_selected(program))
        self.sizes = _local(program, rows, first_row)
        lower = partial(_lowered, precision=precision, of_halves=of_halves, provider=provider, sizes=self.sizes)
        program = self.program = _with_own_results(with_steps_changed(program, lower))
        tensors = list(
            dict.fromkeys(with_tensors_of_steps([*program.inputs.values(), *program.state.values(), *program.tensors]))
        )
        self.wide_index = max((self.sizes.count(tensor.shape) for tensor in tensors), default=0) >= _WIDE
        schedule = fuse(program, POLICY)
        self.stored, self.in_place = schedule.written, schedule.in_place
        self.targets = {schedule.copies.get(tensor, tensor): variable for variable, tensor in program.updates.items()}
        labels = {tensor: name for name, tensor in program.outputs.items()}
        labels |= {tensor: f"new {variable._path}" for variable, tensor in program.updates.items()}
        names = names_of(tensors, labels)
        names |= {part: f"part_of_{names[tensor]}" for tensor, part in schedule.parts.items() if part not in names}
        names |= {copy: f"moved_{names[copied]}" for copied, copy in schedule.copies.items()}
        self._first_carries = set[Tensor]()
        self.last_carries: dict[Tensor, tuple[Tensor, int]] = {}
        functions = self._functions(schedule, names, {}, 0)
        old = {new: program.state[variable] for new, variable in self.targets.items()}
        for function in functions.values():
            for new in [tensor for tensor in function.pointers if tensor in old and old[tensor] in function.pointers]:
                function.overlapping |= {new, old[new]}
        self.counts_steps = any("step" in function.needs for function in functions.values())
        self.stages = _stages(schedule, functions, self.counts_steps)
        self.notes_rows = any("outside" in function.needs for kernel in self._kernels for function in kernel.functions)
        pairs = zip(schedule.messages, self.stages, strict=True)
        self.messages = [_messages(results, schedule.parts, stage) for results, stage in pairs]
        self.plan = self._plan(self.stages, self.messages, self.stored - self._elsewhere)

    def _functions(
        self,
        schedule: Schedule,
        names: dict[Tensor, str],
        addresses: Mapping[Tensor, Address],
        depth: int,
    ) -> dict[Nest, GeneratedFunction]:
        """Return the functions of nests, at a depth of loops."""
        functions = {nest: function_of(nest, self.sizes, names, addresses) for nest in schedule.nests}
        for nest, function in functions.items():
            if nest.frame == "loop":
                self._fill_loop(function, list(nest.members), names, addresses, depth)
        return functions

    def _fill_loop(
        self,
        function: GeneratedFunction,
        values: Sequence[Tensor],
        names: dict[Tensor, str],
        around: Mapping[Tensor, Address],
        depth: int,
    ) -> None:
        """Give a function the steps of a loop whose `values` are read: in its own text, or as launches."""
        call = LoopCall(values[0].node, depth)
        self._first_carries.update(call.first_carries)
        self.last_carries |= call.last_carries(values)
        addresses = call.addresses(values, names, around)
        written = call.repeat.writes(value.index for value in values)
        step = step_of(call.repeat.body, self.program.rows)
        step = replace(step, outputs={name: output for name, output in step.outputs.items() if int(name) in written})
        schedule = fuse(step, POLICY)
        functions = self._functions(schedule, names, addresses, depth + 1)
        row_loop = RowLoop(call.repeat, schedule.nests)
        if depth == 0 and (rows := rows_of_block(row_loop, self.sizes)) is not None:
            self.stored |= RowsWriter(row_loop, rows, self.sizes, names, addresses).fill(function, call)
            return
        (call.kernels,) = _stages(schedule, functions, steps=False)
        call.plan = self._plan([call.kernels], [[]], schedule.written - addresses.keys())
        function.call = call

    def source(self) -> str:
        """Return the C++ of all kernels."""
        return source(self._kernels, self.wide_index)

    def sources(self) -> dict[str, list[Kernel]]:
        """Return all kernels as sources for parallel compilation, split by their number so that machines share them."""
        generated = [kernel for kernel in self._kernels if kernel.threads]
        fields, parts = (
            run_fields(generated),
            (generated[n : n + _TOGETHER] for n in range(0, max(len(generated), 1), _TOGETHER)),
        )
        return {source(part, self.wide_index, fields): part for part in parts}

    @property
    def fields(self) -> list[str]:
        """Names of a `Run`'s fields, in order."""
        return list(run_fields(self._kernels))

    @cached_property
    def late(self) -> set[Message]:
        """Gathers of variables' new values alone, which nothing in the step reads: the next step's ops do."""
        read = {operand for tensor in self.program.tensors for operand in tensor.inputs}
        read |= set(self.program.outputs.values())
        gathers = (message for messages in self.messages for message in messages if message.results[0].op is ALL_GATHER)
        return {
            message
            for message in gathers
            if all(result in self.targets and result not in read for result in message.results)
        }

    @property
    def in_one_launch(self) -> list[int]:
        """Numbers of steps of the loops that are one launch."""
        functions = [function for kernel in self._kernels for function in kernel.functions if function.call is None]
        loops = [function for function in functions if function.nest is not None and function.nest.frame == "loop"]
        return [argument.value for loop in loops for argument in loop.arguments if argument.name == "length"]

    @property
    def _kernels(self) -> list[Kernel]:
        return list(with_steps(kernel for stage in self.stages for kernel in stage))

    @property
    def _elsewhere(self) -> set[Tensor]:
        """Tensors stored outside the arena: results, and operands of all-reduces."""
        sums = (
            result for messages in self.messages for message in messages if message.is_sum for result in message.results
        )
        return {*self.targets, *self.program.outputs.values(), *sums}

    def _plan(
        self, stages: Sequence[Sequence[Kernel]], messages: Sequence[Sequence[Message]], stored: Set[Tensor]
    ) -> MemoryPlan:
        """Plan intermediate results and scratch memory, including those of loops."""
        rows, sizes, accesses = self.sizes.rows, dict[Any, int](), list[Access]()
        for tensor in stored - self.last_carries.keys():
            sizes[tensor] = nbytes(tensor, rows) * (BUFFERS if tensor in self._first_carries else 1)
        for stage, stage_messages in zip(stages, messages, strict=True):
            moved = [
                (message.after, Access(dict.fromkeys(message.parts).keys(), message.results))
                for message in stage_messages
                if not message.is_sum
            ]
            accesses += [access for after, access in moved if after == 0]
            for number, kernel in enumerate(stage, 1):
                tensors = [
                    self.last_carries.get(tensor, (tensor,))[0]
                    for function in kernel.functions
                    for tensor in function.pointers
                ]
                scratch: dict[Any, int] = {
                    (function.name, argument.name): argument.value
                    for function in kernel.functions
                    for argument in function.arguments
                    if argument.is_scratch and argument.value
                }
                if kernel.loop is not None:
                    scratch[kernel.loop] = kernel.loop.plan.size
                used = dict.fromkeys(tensors).keys()  # an ordered set, so that a program always has the same layout
                accesses.append(Access(used, [*used, *scratch]))
                sizes |= scratch
                # From here on it travels on its own streams, beside the stage's other kernels.
                accesses += [access for after, access in moved if after == number]
            accesses += [access for _, access in moved]
        memory_plan = plan(accesses, sizes, ALIGNMENT)
        offsets = dict(memory_plan.offsets)
        for loop in [key for key in offsets if isinstance(key, LoopCall)]:
            start = offsets.pop(loop)
            offsets |= {key: start + within for key, within in loop.plan.offsets.items()}
        return replace(memory_plan, offsets=offsets)


def problems(program: Program, rows: int, *, precision: str, of_halves: str) -> list[Problem]:
    """Return a program's products and convolutions that a library may compute; see `Composition`."""
    program = with_halves_in_loops(with_branches_selected(without_ranks(program)))
    program = with_steps_changed(program, lambda step: with_precision(with_long_products(step), precision, of_halves))
    count = _local(program, rows, 0).count

    def problem(tensor: Tensor) -> Problem:
        (_, transposed_a), (_, transposed_b) = factors_of(tensor)
        return problem_of(tensor, (transposed_a, transposed_b), count)

    return [problem(tensor) for tensor in dict.fromkeys(with_tensors_of_steps(program.tensors)) if is_product(tensor)]


def _require_known_lengths(program: Program) -> None:
    """Refuse loops of unknown length that would communicate, or go on in a branch that is not taken."""
    for tensor in with_tensors_of_steps(program.tensors):
        if not has_body(tensor):
            continue
        for read in topological(body_of(tensor).results):
            if steps_of(tensor) is None and read.op is ALL_REDUCE:
                raise ConfigError(
                    "not supported: a while_loop whose length is not known, in which ranks communicate, on a GPU; pass "
                    "maximum_iterations"
                )
            nested = topological(body_of(read).results) if body_of(tensor).guarded and has_body(read) else ()
            if any(has_body(inner) and steps_of(inner) is None for inner in with_tensors_of_steps(nested)):
                raise ConfigError(
                    "not supported: a while_loop whose length is not known, in a loop in a branch, on a GPU; pass "
                    "maximum_iterations"
                )


def _lowered(program: Program, precision: str, of_halves: str, provider: Provider | None, sizes: Local) -> Program:
    program = with_attention_on_gpu(program, partial(attention_precision, of_halves=of_halves))
    program = with_precision(with_long_products(program), precision, of_halves)
    if provider is not None:
        program = with_providers(program, provider, sizes.count, factors_of)
    return with_loops_in_memory(with_row_chains(program))


def _with_own_results(program: Program) -> Program:
    """Make results distinct and computed; copy sums over ranks and last carries, which are stored elsewhere."""
    used: set[Tensor] = set()

    def own(tensor: Tensor) -> Tensor:
        is_last_carry = has_body(tensor) and repeat_of(tensor).carry_of(tensor.index) is not None
        lies_elsewhere = tensor.op is ALL_REDUCE or is_last_carry
        if tensor.op is not None and not lies_elsewhere and tensor not in used:
            used.add(tensor)
            return tensor
        return Tensor(OPERATORS["identity"], (tensor,), {}, tensor.shape, tensor.dtype)

    updates = {variable: own(tensor) for variable, tensor in program.updates.items()}
    outputs: dict[Tensor, Tensor] = {}
    for tensor in program.outputs.values():
        if tensor not in outputs:
            outputs[tensor] = own(tensor)
    outputs_by_name = {name: outputs[tensor] for name, tensor in program.outputs.items()}
    return replace(program, outputs=outputs_by_name, updates=updates)


def _messages(
    results_of: Sequence[list[Tensor]], parts: Mapping[Tensor, Tensor], stage: Sequence[Kernel]
) -> list[Message]:
    written = {
        result: n for n, kernel in enumerate(stage, 1) for function in kernel.functions for result in function.writes
    }
    parts_of = [[parts[result] for result in results] for results in results_of]
    after = [max(written.get(result, 0) for result in function) for function in parts_of]
    return list(map(Message, results_of, parts_of, after))


def _local(program: Program, rows: int | None, first_row: int) -> Local:
    return Local(program.rows if rows is None else rows, first_row, program.rows)


def _stages(schedule: Schedule, functions: dict[Nest, GeneratedFunction], steps: bool) -> list[list[Kernel]]:
    """Return the kernels of each stage; the last one advances the step."""
    kernels_of = []
    of_stages: list[dict[int, list[GeneratedFunction]]] = [{} for _ in schedule.messages]
    for nest, function in functions.items():
        of_stages[nest.stage].setdefault(nest.level, []).append(function)
    for stage, levels in enumerate(of_stages):
        if steps and stage == len(of_stages) - 1:
            readers = [
                n
                for n, functions_there in levels.items()
                if any("step" in function.needs for function in functions_there)
            ]
            advance = GeneratedFunction(
                "next_step", None, "the number of the step", ["if (threadIdx.x == 0) *step += 1;"]
            )
            advance.needs.add("step")
            levels.setdefault(max(readers, default=0) + 1, []).append(advance)
        kernels_of.append(kernels([levels[n] for n in sorted(levels)]))
    return kernels_of
