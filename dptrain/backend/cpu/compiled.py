"""Executes programs as compiled code: many steps in one call, without Python in between."""

import ctypes
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, product
from typing import Any

import numpy as np

from dptrain.backend.cpu.codegen import Code, NativeFunction, NeedsPythonError, Part, generate
from dptrain.backend.cpu.compile import convolutions, library, parallel, products
from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.backend.cpu.denormals import flush_to_zero
from dptrain.backend.cpu.interruption import Interruption
from dptrain.backend.cpu.kernel_descriptions import marked
from dptrain.backend.cpu.node_sums import NodeSums, is_native
from dptrain.backend.cpu.parameters import Parameterized
from dptrain.comm.base import Communicator
from dptrain.errors import CompilerError, ConfigError, DataError
from dptrain.program.absent_rows import OUTSIDE, find_absent_row
from dptrain.program.body import with_steps
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.index_expr import Numel
from dptrain.program.codegen.kernels import Call, Fused, Kernel, Loop, LoopMember, ProductKernel, RepeatKernel
from dptrain.program.codegen.memory import (
    ALIGNMENT,
    Access,
    Arena,
    MemoryPlan,
    aligned,
    in_a_row,
    in_place,
    nbytes,
    plan,
)
from dptrain.program.codegen.views import View
from dptrain.program.execute import HostMemory
from dptrain.program.lowering import AttentionLowering, ConvolutionLowering, lowering_of
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.shapes import local, size
from dptrain.program.sharding.mesh import ALL_REDUCE, constant_of
from dptrain.program.sharding.messages import all_reduce, exchange
from dptrain.program.steps import step_of, unrolled, without_ranks
from dptrain.program.structure import draws_bits, of_variables, structure_of, to_be_kept
from dptrain.program.tensor import Array, Tensor
from dptrain.program.turns import MAKING, TURNS
from dptrain.runtime.garbage import uncollected
from dptrain.runtime.python_lock import released
from dptrain.runtime.signals import EndlessStepError, in_step
from dptrain.runtime.types import TYPES

# `dp_Implementation` and `dp_Factor`, by which `Context.functions` is indexed.
IMPLEMENTATIONS = ("product", "channels", "pixels", "winograd")
FACTORS = tuple(name for name, known in TYPES.items() if known.is_factor)

# Structures with cached kernels, code and seeds, the latest last: all runs of a sweep share a few.
KEPT = 32
_LOWERED: OrderedDict[Hashable, tuple[Fused, Code, Sequence[int]]] = OrderedDict()


class Context(ctypes.Structure):
    """`Context` of `kernels/native.h`."""

    _fields_ = (
        ("p", ctypes.c_void_p),
        ("n", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("R", ctypes.c_int64),
        ("F", ctypes.c_int64),
        ("G", ctypes.c_int64),
        ("outside", ctypes.c_void_p),
        ("stopped", ctypes.c_void_p),
        ("asks", ctypes.c_void_p),
        ("asked", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * (len(IMPLEMENTATIONS) * len(FACTORS))),
        ("messages", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("finished", ctypes.c_int64),
        ("marks", ctypes.c_void_p),
        ("marked", ctypes.c_int64),
        ("parameters", ctypes.c_void_p),
    )


class CompiledExecutable:
    """A program for one number of rows; arguments and attributes as for `ReferenceExecutable`.

    Args:
        threads: of this process, for large products and loops.
        arena: of its intermediate results; None for that of `memory`.
        join: fuse loops; without, each op is its own loop, with the same bits.
        clock: measures the kernels.

    Attributes:
        fused: its kernels.
        code: their C++.
        nbytes: bytes needed of the arena, which executables may share.

    Raises:
        ConfigError: an array is missing or has another shape.
        DeviceError: there is no C++ compiler.
    """

    def __init__(
        self,
        program: Program,
        memory: HostMemory,
        arrays: Mapping[str, Array],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
        threads: int = 1,
        arena: Arena | None = None,
        join: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._batch_rows = program.rows
        self._rows, self._first_row = self._batch_rows if rows is None else rows, first_row
        _shared([], program.tensors)  # compiled while this program is fused and compiled
        self._clock, alone = clock, self._comm is None
        self.fused, self.code = (
            lowered(program, alone=alone, join=join) if clock is None else _made(program, alone, join, marks=True)
        )
        self._library, parameters, (parallel, *functions) = self._compiled()
        self.outputs: Mapping[str, Array] = {}
        self.samples: Sequence[int] | Array | None = None
        memory.adopt(program.state)
        # Including itself: it has buffers for one run at a time.
        self._reads, self._writes = program.reads, program.writes | {self}
        self._arrays = {tensor: memory.array(variable) for variable, tensor in self.fused.program.state.items()}
        self._arena = memory.arena if arena is None else arena
        self._place()
        self._pointers = np.zeros(max(len(self.code.roots), 1), np.uint64)
        self._lengths = np.zeros(max(len(self.code.tables), 1), np.int64)
        self._seeds = np.array(self.code.seeds, np.uint64)
        self._outside = np.zeros(1, np.int64)
        rows_of_batch = (self._rows, first_row, self._batch_rows)
        table = (self._pointers.ctypes.data, self._lengths.ctypes.data, self._seeds.ctypes.data)
        self._interruption = Interruption()
        asks = (*self._interruption.addresses, 0)
        called = (max(threads, 1), parallel, tuple(functions))
        self._context = Context(*table, *rows_of_batch, self._outside.ctypes.data, *asks, *called)
        self._parameters = np.array([*parameters, 0], np.uint64)
        self._context.parameters = self._parameters.ctypes.data
        self._is_one_call = all(isinstance(part, NativeFunction) for part in self.code.parts)
        self._sums: list[NodeSums] = []
        self._summed: dict[Tensor, tuple[NodeSums, int]] = {}
        self._has_met = not self.fused.reduced
        self._loops: dict[RepeatKernel, tuple[list[Array], CompiledExecutable]] = {}
        self._marks: Array = np.empty((0, 2), np.int64)
        if clock is not None:
            self._first_mark = clock.measures(marked(self.fused, self.code, self._rows))
        self.bind(arrays)

    def _compiled(self) -> tuple[ctypes.CDLL, Sequence[int], list[int]]:
        """Return the program's library, the parameters that it passes, and the addresses of shared functions."""
        kernels = self.fused.all_kernels
        factors = [kernel.reads[0].root for kernel in kernels if isinstance(kernel, ProductKernel)]
        calls = [kernel.tensor for kernel in kernels if isinstance(kernel, Call)]
        shared = _shared(factors, calls)
        with MAKING:  # else two threads would compile the same text
            compiled = self.code.compiled or Parameterized(self.code.source, self.fused.program)
            try:
                program_library = library(compiled.source)
            except CompilerError:
                if not compiled.is_shared:
                    raise
                compiled.refuse(self.code.source)
                program_library = library(compiled.source)
            self.code.compiled = compiled
        return program_library, compiled.parameters, [0 if address is None else address.result() for address in shared]

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Let inputs read other arrays; ConfigError if one is missing or has another shape."""
        self._order = self._window = np.empty(0, np.int64)
        for name, tensor in self.fused.program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            array, shape = np.asarray(arrays[name], tensor.dtype, order="C"), tuple(local(tensor.shape, self._rows))
            if name == ROWS:
                self._order, self._window = array, np.empty(shape, tensor.dtype)
                self._arrays[tensor] = self._window
            else:
                self.fused.program.check_input(name, array.shape, self._rows)
                self._arrays[tensor] = array
        self._lent: Array | None = None  # memory at the addresses in the code; none yet

    def _connect(self, arena: Array) -> None:
        """Point the code to all memory; `arena` holds all computed values but messages and replaced state."""
        if arena is self._lent:
            return
        self._lent = arena
        for tensor, start in self._offsets.items():
            place = arena[start : start + nbytes(tensor, self._rows)]
            self._arrays[tensor] = place.view(tensor.dtype).reshape(local(tensor.shape, self._rows))
        for number, root in enumerate(self.code.roots):
            if root in self.code.moved:
                continue
            is_order = root is self.fused.program.inputs.get(ROWS) and self._is_one_call
            self._pointers[number] = (self._order if is_order else self._array(root)).ctypes.data
        for number, root in enumerate(self.code.tables):
            is_moved = root in self.code.moved
            self._lengths[number] = local(root.shape, self._rows)[0] if is_moved else len(self._array(root))
        self._steps = [self._step(part) for part in self.code.parts]
        outputs = self.fused.program.outputs
        self._results = {name: self._strided(view, outputs[name]) for name, view in self.fused.outputs.items()}

    @np.errstate(all="ignore")  # infinities and NaNs are results, as on a GPU
    def run(self, starts: Sequence[int] = (0,)) -> None:
        """See `ReferenceExecutable.run`."""
        self._meet()
        turn = TURNS.of(self._reads, self._writes) if self._comm is None else nullcontext()  # ranks run concurrently
        with turn, self._arena.lent(self.nbytes, self._lent) as arena:
            self._connect(arena)
            self._run(starts)

    def _run(self, starts: Sequence[int]) -> None:
        positions = np.ascontiguousarray(starts, np.int64)
        if (
            ROWS in self.fused.program.inputs
            and positions.size
            and (positions.min() < 0 or positions.max() + len(self._window) > len(self._order))
        ):
            raise DataError(
                f"a step begins at row {positions.max()} of {len(self._order)}, and needs {len(self._window)}"
            )
        self._context.finished = 0
        if self._clock is not None:
            marks = len(self.fused.kernels) + len(self.code.parts) + 2
            self._marks = np.empty((max(positions.size, 1) * marks, 2), np.int64)
            self._context.marks, self._context.marked = self._marks.ctypes.data, 0
        try:
            with flush_to_zero():
                self._execute(positions)
                self._interruption.check()
        except EndlessStepError as error:
            error.finished = self._context.finished
            raise
        if self._outside[0]:
            self._outside[0] = 0
            raise self._absent_row(positions) or DataError(OUTSIDE)
        if self._clock is not None:
            self._clock.add(self._marks[: self._context.marked].tolist(), self._first_mark)
        if positions.size:
            self.outputs = {name: view.copy() for name, view in self._results.items()}

    def _execute(self, positions: Array) -> None:
        if self._is_one_call:
            run, steps = self._library.run, ctypes.c_int64(positions.size)
            with released(), in_step():
                run(ctypes.byref(self._context), ctypes.c_void_p(positions.ctypes.data), steps)
            for node_sums in self._sums:
                node_sums.check()
            return
        for number, start in enumerate(positions, 1):
            self._window[...] = self._order[start : start + len(self._window)]
            if self._clock is not None:
                self._mark(-1)
            with in_step():
                for step, mark in zip(self._steps, self._numbers, strict=True):
                    step(number == positions.size)
                    self._interruption.check()
                    if self._clock is not None and mark is not None:
                        self._mark(mark)
            self._library.moves(ctypes.byref(self._context))
            self._context.finished = number

    def _mark(self, kernel: int) -> None:
        """See `dp_mark` of native.h, whose clock is this one."""
        self._marks[self._context.marked] = kernel, time.monotonic_ns()
        self._context.marked += 1

    @cached_property
    def _numbers(self) -> list[int | None]:
        """What is marked behind each part that is executed here; compiled parts mark their kernels."""
        kernels: dict[Any, int] = {kernel: number for number, kernel in enumerate(self.fused.kernels)}
        messages = count(len(kernels))
        return [
            None if isinstance(part, NativeFunction) else next(messages) if isinstance(part, list) else kernels[part]
            for part in self.code.parts
        ]

    def _absent_row(self, positions: Array) -> DataError | None:
        program = self.fused.program
        values = {tensor: self._arrays[tensor] for tensor in (*program.inputs.values(), *program.state.values())}
        for start in positions:
            if ROWS in program.inputs:
                values[program.inputs[ROWS]] = self._order[start : start + len(self._window)]
            error = find_absent_row(program, values, self._rows, self._first_row, self.samples)
            if error is not None:
                return error
        return None

    def _meet(self) -> None:
        """Allocate memory of messages with other ranks. Collective at the first call."""
        if not self._has_met:
            self._lay_out_sums()
            self._has_met = True

    def close(self) -> None:
        """Nothing to release."""

    @property
    def addresses(self) -> list[int]:
        """Addresses of `code.roots`."""
        return [int(pointer) for pointer in self._pointers[: len(self.code.roots)]]

    def _step(self, part: Part) -> Callable[[bool], None]:
        """Return a function that executes a part of a step, given whether the step is the last."""
        if isinstance(part, NativeFunction):
            function, context = getattr(self._library, part.name), ctypes.byref(self._context)
            return lambda last: function(context, int(last))
        if isinstance(part, Call):
            return self._call(part)
        if isinstance(part, RepeatKernel):
            return self._loop(part)
        first, comm = part[0][1], self._comm
        assert comm is not None
        if first in self._summed:
            node_sums, number = self._summed[first]
            return lambda last: node_sums.sum(number)
        if first.op is ALL_REDUCE:
            flat, attributes = self._messages[first], first.attributes
            return lambda last: all_reduce(flat, attributes["over"], comm.along(attributes["mesh"]))
        message = [result for _, result in part]
        summands = [self._array(root).reshape(local(reduced.inputs[0].shape, self._rows)) for root, reduced in part]
        totals = [self._array(reduced) for reduced in message]
        return lambda last: exchange(message, summands, totals, comm)

    def _call(self, call: Call) -> Callable[[bool], None]:
        tensor, op = call.tensor, call.tensor.op
        assert op is not None
        attributes = op.local_attributes(tensor, self._rows, self._first_row)
        inputs = [self._strided(view, source) for view, source in zip(call.reads, tensor.inputs, strict=True)]
        out: Any = self._array(tensor)
        if op.has_values:
            count = len(tensor.node.values)
            out = [self._array(call.values[number]) if number in call.values else None for number in range(count)]
        in_every_step = not self.fused.every_step.isdisjoint(call.tensors)

        def execute(last: bool) -> None:
            if in_every_step or last:
                op.compute(*inputs, **attributes, out=out)

        return execute

    def _loop(self, kernel: RepeatKernel) -> Callable[[bool], None]:
        """Return a loop whose steps are executed one by one, as ranks communicate in them or NumPy computes."""
        if kernel not in self._loops:
            self._loops[kernel] = self._executable_of_step(kernel)
        arrays, step = self._loops[kernel]
        body = kernel.repeat.body
        inputs = [self._strided(view, leaf) for view, leaf in zip(kernel.reads, body.inputs, strict=True)]
        of_leaf = dict(zip(body.placeholders, arrays, strict=True))
        carries = {carry.value: of_leaf[carry.leaf] for carry in kernel.repeat.carries}
        condition = of_leaf[kernel.repeat.condition.leaf]
        values = [(self._array(tensor), carries[number]) for number, tensor in kernel.values.items()]
        in_every_step = not self.fused.every_step.isdisjoint(kernel.tensors)

        def execute(last: bool) -> None:
            if not (in_every_step or last):
                return
            for array, given in zip(arrays, inputs, strict=True):
                np.copyto(array, given)
            while condition:
                step.run()
                for number, carry in carries.items():
                    np.copyto(carry, step.outputs[str(number)])
            for value, carry in values:
                np.copyto(value, carry)

        return execute

    def _executable_of_step(self, kernel: RepeatKernel) -> "tuple[list[Array], CompiledExecutable]":
        program = step_of(kernel.repeat.body, self._batch_rows)
        arrays = {name: aligned(local(leaf.shape, self._rows), leaf.dtype) for name, leaf in program.inputs.items()}
        place: Any = {"rows": self._rows, "first_row": self._first_row, "comm": self._comm}
        executable = CompiledExecutable(program, HostMemory(), arrays, **place, threads=self._context.threads)
        return list(arrays.values()), executable

    def _array(self, root: Tensor) -> Array:
        beneath = self.fused.memory_of(root)
        if beneath not in self._arrays:  # a constant
            self._arrays[beneath] = np.asarray(constant_of(beneath, self._rows, self._batch_rows), order="C")
        array = self._arrays[beneath]
        return array if beneath is root else array.reshape(local(root.shape, self._rows))

    def _strided(self, view: View, tensor: Tensor) -> Array:
        array, shape = self._array(view.root), local(tensor.shape, self._rows)
        if 0 in shape or not array.size:
            return np.empty(shape, array.dtype)
        start = view.start.number(self._rows, self._first_row)
        strides = [self._number(stride) * array.itemsize for stride in view.strides(len(shape))]
        bits = array.reshape(-1)[start:].view(f"u{array.itemsize}")  # NumPy would look float8_e5m2 up by its kind
        return np.lib.stride_tricks.as_strided(bits, shape, strides).view(array.dtype)

    def _number(self, numel: Numel) -> int:
        return numel[0] * int(self._rows ** numel[1])

    # Memory

    def _place(self) -> None:
        """Allocate new values that replace state, and lay out the rest in the arena."""
        replaced, layout = planned(self.fused, self.code, self._rows)
        for tensor, old in replaced.items():
            self._arrays[tensor] = self._arrays[old].reshape(local(tensor.shape, self._rows))
        self._offsets, self.nbytes = layout.offsets, layout.size
        self._arena.reserve(layout.size)

    def _lay_out_sums(self) -> None:
        """Allocate sums over ranks: in shared memory if the ranks have it, else in a buffer."""
        assert self._comm is not None
        self._messages: dict[Tensor, Array] = {}
        all_sums = [part for part in self.code.parts if isinstance(part, list) and part[0][1].op is ALL_REDUCE]
        for axis in dict.fromkeys(message[0][1].attributes["mesh"] for message in all_sums):
            native_sums = [
                message for message in all_sums if message[0][1].attributes["mesh"] == axis and is_native(message[0][1])
            ]
            like = [(self._ends(message)[-1], message[0][0].dtype) for message in native_sums]
            memory = self._comm.along(axis).node_messages(like) if native_sums else None
            if memory is not None:
                node_sums = NodeSums(memory)
                self._sums.append(node_sums)
                self._summed |= {message[0][1]: (node_sums, number) for number, message in enumerate(native_sums)}
        for message in all_sums:
            first, ends = message[0][1], self._ends(message)
            if first in self._summed:
                node_sums, number = self._summed[first]
                summand, total = node_sums.memory(number)
            else:
                summand = total = self._messages[first] = aligned((ends[-1],), first.dtype)
            cut = (np.split(flat, ends[1:-1]) for flat in (summand, total))
            for (part, reduced), *places in zip(message, *cut, strict=True):
                shape = local(part.shape, self._rows)
                self._arrays[part], self._arrays[reduced] = (flat_part.reshape(shape) for flat_part in places)
        if all(isinstance(part, NativeFunction) or self._is_native(part) for part in self.code.parts):
            self._is_one_call = True
            addresses = [
                node_sums.addresses[number]
                for node_sums, number in (self._summed[message[0][1]] for message in all_sums)
            ]
            self._addresses = np.array(addresses, np.uint64)
            self._context.messages, self._context.sum = self._addresses.ctypes.data, self._sums[0].function

    def _is_native(self, part: Part) -> bool:
        """Whether compiled code executes a part of a step."""
        return isinstance(part, list) and part[0][1] in self._summed

    def _ends(self, message: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Return the offsets of a message's tensors, and the end."""
        return in_a_row(size(local(part.shape, self._rows)) for part, _ in message)


def _shared(factors: Iterable[Tensor], tensors: Iterable[Tensor]) -> list[Future[int] | None]:
    """Start compiling what programs share (products, attention, convolutions); return futures in `Context`'s order."""
    needed = {("product", factor.dtype.name) for factor in factors}
    for tensor in tensors:
        lowering = lowering_of(tensor)
        if isinstance(lowering, AttentionLowering):
            needed.add(("product", tensor.dtype.name))
        if isinstance(lowering, ConvolutionLowering):
            needed.add((implementation_of(tensor), tensor.dtype.name))
    return [parallel(), *(_function(*key) if key in needed else None for key in product(IMPLEMENTATIONS, FACTORS))]


def _function(implementation: str, dtype: str) -> Future[int]:
    return products(dtype) if implementation == "product" else convolutions(implementation, dtype)


def lowered(program: Program, *, alone: bool = True, join: bool = True) -> tuple[Fused, Code]:
    """Return a program's kernels and C++, cached for all numbers of rows and for programs of the same structure."""
    key = "cpu", alone, join
    if key not in program.lowered:
        with MAKING, uncollected():
            if key not in program.lowered:
                program.lowered[key] = _of_structure(program, alone, join)
    result: tuple[Fused, Code] = program.lowered[key]
    return result


def _of_structure(program: Program, alone: bool, join: bool) -> tuple[Fused, Code]:
    structure = structure_of(program)
    if structure is None:
        return _made(program, alone, join)
    key = structure.key, alone, join
    cached = _LOWERED.pop(key, None)
    if cached is not None:
        _LOWERED[key] = cached  # now the latest
        fused, code, seeds = cached
        new_seeds = dict(zip(seeds, structure.seeds, strict=True))
        of_state = dict(enumerate(structure.variables))
        return of_variables(fused, of_state), replace(code, seeds=[new_seeds[seed] for seed in code.seeds])
    fused, code = _made(to_be_kept(program), alone, join)
    # A NumPy call draws with the seed that it was fused with.
    by_python = [tensor for part in code.parts if isinstance(part, Call | RepeatKernel) for tensor in part.tensors]
    if not any(map(draws_bits, with_steps(by_python))):
        numbers = {variable: number for number, variable in enumerate(structure.variables)}
        _LOWERED[key] = of_variables(fused, numbers), code, structure.seeds
        if len(_LOWERED) > KEPT:
            _LOWERED.popitem(last=False)
    return fused, code


def _made(program: Program, alone: bool, join: bool, marks: bool = False) -> tuple[Fused, Code]:
    fused = fuse(without_ranks(program) if alone else program, join=join)
    try:
        return fused, generate(fused, marks)
    except NeedsPythonError:
        return _made(unrolled(program), alone, join, marks)


def planned(fused: Fused, code: Code, rows: int) -> tuple[dict[Tensor, Tensor], MemoryPlan]:
    """Return the state that each new value overwrites, and the layout of all other computed tensors.

    An epilogue and its product count as one kernel. Outputs, and new values that are copied over old ones, are read
    last.
    """
    result = code.plans.get(rows)
    if result is None:
        if len(code.plans) >= KEPT:
            code.plans.clear()
        result = code.plans[rows] = _planned(fused, code, rows)
    return result


def _planned(fused: Fused, code: Code, rows: int) -> tuple[dict[Tensor, Tensor], MemoryPlan]:
    kernels: list[Access] = []
    for stage in fused.stages:
        kernels += _accesses(fused, code, stage.kernels, len(kernels))
        for message in stage.messages:
            if message[0][1].op is not ALL_REDUCE:
                reads = {fused.memory_of(part) for part, _ in message}
                kernels.append(Access(reads, [result for _, result in message], len(kernels)))
    results = [*(view.root for view in fused.outputs.values()), *fused.updates.values()]
    kernels.append(Access(set(map(fused.memory_of, results)), stage=len(kernels)))
    reduced = fused.reduced
    pairs = [(fused.memory_of(new), fused.program.state[variable]) for variable, new in fused.updates.items()]
    # A step that may be abandoned changes the state when all has been computed, by `moves`.
    chosen = [] if fused.may_not_end else [(new, old) for new, old in pairs if new not in reduced]
    replaced = in_place(chosen, kernels)
    return replaced, _laid_out(kernels, code, rows, [*reduced, *replaced])


def _accesses(fused: Fused, code: Code, kernels: Sequence[Kernel], first: int) -> list[Access]:
    steps: list[list[Kernel]] = []
    for kernel in kernels:
        steps += [] if kernel in code.epilogues else [[]]
        steps[-1].append(kernel)
    accesses = []
    for number, step in enumerate(steps, first):
        reads = {fused.memory_of(view.root) for kernel in step for view in kernel.reads}
        writes: list[Any] = [tensor for kernel in step for tensor in kernel.tensors if tensor in code.stored]
        writes += [repeat for repeat in step if isinstance(repeat, RepeatKernel) and repeat not in code.parts]
        accesses.append(Access(reads, writes, number, replaces=partial(_replaces, fused, step)))
    return accesses


def _laid_out(kernels: Sequence[Access], code: Code, rows: int, elsewhere: Collection[Tensor]) -> MemoryPlan:
    """Return the layout of what kernels write in an arena, including the steps of loops."""
    lie_elsewhere = {*elsewhere, *code.moved}
    written = [root for kernel in kernels for root in kernel.writes if root not in lie_elsewhere]
    of_steps = {root: _of_steps(root, code, rows) for root in written if isinstance(root, RepeatKernel)}
    sizes = {root: of_steps[root].size if root in of_steps else nbytes(root, rows) for root in written}
    layout = plan(kernels, sizes)
    offsets = {root: start for root, start in layout.offsets.items() if root not in of_steps}
    for repeat, steps in of_steps.items():
        offsets |= {root: layout.offsets[repeat] + start for root, start in steps.offsets.items()}
    return replace(layout, offsets=offsets)


def _of_steps(repeat: RepeatKernel, code: Code, rows: int) -> MemoryPlan:
    """Return the layout of a loop's steps: that of a step, and two buffers for each carry."""
    (stage,) = repeat.step.stages
    kernels = _accesses(repeat.step, code, stage.kernels, 0)
    kernels.append(Access(set(repeat.results), stage=len(kernels)))
    layout = _laid_out(kernels, code, rows, ())
    if repeat in code.apart:  # threads are in different steps: no tensor may lie where another one has been
        sizes = [nbytes(root, rows) for root in layout.offsets]
        starts = in_a_row(sizes, ALIGNMENT)
        layout = MemoryPlan(starts[-1], dict(zip(layout.offsets, starts, strict=False)), starts[-1])
    buffers = [buffer for pair in repeat.buffers for buffer in pair]
    starts = in_a_row([layout.size, *(nbytes(buffer, rows) for buffer in buffers)], ALIGNMENT)
    return MemoryPlan(starts[-1], {**layout.offsets, **dict(zip(buffers, starts[1:], strict=False))}, starts[-1])


def _replaces(fused: Fused, step: Sequence[Kernel], new: Tensor, old: Tensor) -> bool:
    """See `Access.replaces`; holds for a loop with one pass that reads each element where it overwrites it."""
    loop = next(kernel for kernel in step if any(tensor is new for tensor in kernel.tensors))
    writer = loop.member(new) if isinstance(loop, Loop) else None
    if not isinstance(loop, Loop) or writer is None or writer.kind != "map" or not writer.inner:
        return False
    writer_index = writer.view.place
    readers = [reader for kernel in step for reader in (kernel.members if isinstance(kernel, Loop) else [kernel])]
    return not any(loop.passes().values()) and all(
        isinstance(reader, LoopMember)
        and reader in loop.members
        and reader.kind in ("map", "gather")
        and reader.inner
        and view.place == writer_index
        for reader in readers
        for view in reader.reads
        if fused.memory_of(view.root) is old
    )
