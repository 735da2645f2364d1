"""Executing a program by compiled code: many steps in one call, without Python in between."""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dptrain.backend.cpu.codegen import Code, NativeFunction, NeedsPythonError, generate
from dptrain.backend.cpu.compile import convolutions, library, parallel, products
from dptrain.backend.cpu.denormals import flush_to_zero
from dptrain.backend.cpu.node_sums import NodeSums, is_native
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DataError
from dptrain.program.absent_rows import OUTSIDE, find_absent_row
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
from dptrain.program.passes import without_ranks
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local, size
from dptrain.program.sharding.mesh import ALL_REDUCE, constant_of
from dptrain.program.sharding.messages import all_reduce, exchange
from dptrain.program.steps import unrolled
from dptrain.program.structure import draws_bits, of_variables, structure_of, to_be_kept
from dptrain.program.tensor import Array, Tensor
from dptrain.program.turns import MAKING, TURNS
from dptrain.runtime.python_lock import released

# Types of factors, in the order of the products and of the convolutions in `Context`.
_PRODUCTS = ("float32", "float64", "bfloat16", "float16")
_CONVOLUTIONS = [(by, name) for by in ("channels", "pixels", "winograd") for name in _PRODUCTS[:2]]

# Structures whose kernels and code are kept, with seeds, those used last at the end: all runs of a sweep have a few.
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
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("multiply_float", ctypes.c_void_p),
        ("multiply_double", ctypes.c_void_p),
        ("multiply_bfloat16", ctypes.c_void_p),
        ("multiply_float16", ctypes.c_void_p),
        ("channels_float", ctypes.c_void_p),
        ("channels_double", ctypes.c_void_p),
        ("pixels_float", ctypes.c_void_p),
        ("pixels_double", ctypes.c_void_p),
        ("winograd_float", ctypes.c_void_p),
        ("winograd_double", ctypes.c_void_p),
        ("messages", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class CompiledExecutable:
    """A program for one number of rows; as `program.execute.ReferenceExecutable`.

    Args:
        program: what is executed.
        memory: where its state lives, and goes on to live.
        arrays: what its inputs read at every step, by name; of the input `ROWS`, the numbers of stored rows, those of
            many steps.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.
        threads: of this process, for large products and loops.
        arena: of its intermediate results; None for that of `memory`.
        join: whether loops are fused; without, each op is a loop of its own, with the same bits.

    Attributes:
        fused: its kernels.
        code: their C++.
        outputs: what the last step made, by name.
        nbytes: of the arena that it needs, which those that share it have together.

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
    ) -> None:
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._batch_rows = program.rows
        self._rows, self._first_row = self._batch_rows if rows is None else rows, first_row
        _shared([], program.tensors)  # compiled while this program is fused, and then itself compiled
        self.fused, self.code = lowered(program, alone=self._comm is None, join=join)
        self._library, addresses = self._compiled()
        self.outputs: Mapping[str, Array] = {}
        memory.adopt(program.state)
        # Itself among it: it has buffers for one run at a time.
        self._reads, self._writes = program.reads, program.writes | {self}
        self._arrays = {one: memory.array(variable) for variable, one in self.fused.program.state.items()}
        self._arena = memory.arena if arena is None else arena
        self._place()
        self._pointers = np.zeros(max(len(self.code.roots), 1), np.uint64)
        self._lengths = np.zeros(max(len(self.code.tables), 1), np.int64)
        self._seeds = np.array(self.code.seeds, np.uint64)
        self._outside = np.zeros(1, np.int64)
        own = (self._rows, first_row, self._batch_rows)
        table = (self._pointers.ctypes.data, self._lengths.ctypes.data, self._seeds.ctypes.data)
        self._context = Context(*table, *own, self._outside.ctypes.data, max(threads, 1), *addresses)
        self._is_one_call = all(isinstance(one, NativeFunction) for one in self.code.parts)
        self._sums: list[NodeSums] = []
        self._summed: dict[Tensor, tuple[NodeSums, int]] = {}
        self._has_met = not self.fused.reduced
        self.bind(arrays)

    def _compiled(self) -> tuple[ctypes.CDLL, list[int]]:
        """Return the program's library, and the addresses of threads and products in those that all programs share."""
        kernels = self.fused.all_kernels
        factors = [one.reads[0].root for one in kernels if isinstance(one, ProductKernel)]
        calls = [one.tensor for one in kernels if isinstance(one, Call)]
        shared = _shared(factors, calls)
        with MAKING:  # two threads would compile a text twice
            own = library(self.code.source)
        return own, [0 if one is None else one.result() for one in shared]

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Let inputs read other arrays from now on.

        Raises:
            ConfigError: one is missing or has another shape.
        """
        self._order = self._window = np.empty(0, np.int64)
        for name, one in self.fused.program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            given, shape = np.asarray(arrays[name], one.dtype, order="C"), tuple(local(one.shape, self._rows))
            if name == ROWS:
                self._order, self._window = given, np.empty(shape, one.dtype)
                self._arrays[one] = self._window
            elif given.shape != shape:
                raise ConfigError(f"input {name!r} has shape {given.shape}: expected {shape}")
            else:
                self._arrays[one] = given
        self._lent: Array | None = None  # the memory that the code knows; none

    def _connect(self, arena: Array) -> None:
        """Let the code know where all memory is.

        Args:
            arena: bytes, in which all that is computed lies, but for messages and what replaces state.
        """
        if arena is self._lent:
            return
        self._lent = arena
        for one, start in self._offsets.items():
            place = arena[start : start + nbytes(one, self._rows)]
            self._arrays[one] = place.view(one.dtype).reshape(local(one.shape, self._rows))
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
        """Execute it as often as there are starts. Collective where the program is a placed one.

        Args:
            starts: where in the array `ROWS` each step's rows begin.

        Raises:
            DataError: a step asks for rows that a table does not have.
        """
        self._meet()
        turn = TURNS.of(self._reads, self._writes) if self._comm is None else nullcontext()  # ranks run side by side
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
        with flush_to_zero():
            if self._is_one_call:
                run, steps = self._library.run, ctypes.c_int64(positions.size)
                with released():
                    run(ctypes.byref(self._context), ctypes.c_void_p(positions.ctypes.data), steps)
                for one in self._sums:
                    one.check()
            else:
                for number, start in enumerate(positions, 1):
                    self._window[...] = self._order[start : start + len(self._window)]
                    for step in self._steps:
                        step(number == positions.size)
                    self._library.moves(ctypes.byref(self._context))
        if self._outside[0]:
            self._outside[0] = 0
            raise self._absent_row(positions) or DataError(OUTSIDE)
        if positions.size:
            self.outputs = {name: view.copy() for name, view in self._results.items()}

    def _absent_row(self, positions: Array) -> DataError | None:
        """Return the error that names a row that a table does not have, of one of the steps."""
        program = self.fused.program
        given = {one: self._arrays[one] for one in (*program.inputs.values(), *program.state.values())}
        for start in positions:
            if ROWS in program.inputs:
                given[program.inputs[ROWS]] = self._order[start : start + len(self._window)]
            if (error := find_absent_row(program, given, self._rows, self._first_row)) is not None:
                return error
        return None

    def _meet(self) -> None:
        """Find memory for messages together with the other ranks. Collective at the first call."""
        if not self._has_met:
            self._lay_out_sums()
            self._has_met = True

    def close(self) -> None:
        """Nothing is held."""

    @property
    def addresses(self) -> list[int]:
        """Where `code.roots` lie."""
        return [int(one) for one in self._pointers[: len(self.code.roots)]]

    def _step(self, part: NativeFunction | Call | list[tuple[Tensor, Tensor]]) -> Callable[[bool], None]:
        """Return what executes a part of a step, told whether it is that of the last step."""
        if isinstance(part, NativeFunction):
            function, context = getattr(self._library, part.name), ctypes.byref(self._context)
            return lambda last: function(context, int(last))
        if isinstance(part, Call):
            return self._call(part)
        first, comm = part[0][1], self._comm
        assert comm is not None
        if first in self._summed:
            made, number = self._summed[first]
            return lambda last: made.sum(number)
        if first.op is ALL_REDUCE:
            flat, about = self._messages[first], first.attributes
            return lambda last: all_reduce(flat, about["over"], comm.along(about["mesh"]))
        message = [result for _, result in part]
        given = [self._array(root).reshape(local(one.inputs[0].shape, self._rows)) for root, one in part]
        found = [self._array(one) for one in message]
        return lambda last: exchange(message, given, found, comm)

    def _call(self, call: Call) -> Callable[[bool], None]:
        tensor, op = call.tensor, call.tensor.op
        assert op is not None
        attributes = op.local_attributes(tensor, self._rows, self._first_row)
        inputs = [self._strided(view, one) for view, one in zip(call.reads, tensor.inputs, strict=True)]
        out: Any = self._array(tensor)
        if op.has_values:
            count = len(tensor.node.values)
            out = [self._array(call.values[number]) if number in call.values else None for number in range(count)]
        every = not self.fused.every_step.isdisjoint(call.tensors)

        def execute(last: bool) -> None:
            if every or last:
                op.compute(*inputs, **attributes, out=out)

        return execute

    def _array(self, root: Tensor) -> Array:
        """Return a root's memory."""
        beneath = self.fused.memory_of(root)
        if beneath not in self._arrays:  # of a constant
            self._arrays[beneath] = np.asarray(constant_of(beneath, self._rows, self._batch_rows), order="C")
        return self._arrays[beneath].reshape(local(root.shape, self._rows))

    def _strided(self, view: View, tensor: Tensor) -> Array:
        """Return the elements of a tensor."""
        array, shape = self._array(view.root), local(tensor.shape, self._rows)
        if 0 in shape or not array.size:
            return np.empty(shape, array.dtype)
        start = view.start.number(self._rows, self._first_row)
        strides = [self._number(one) * array.itemsize for one in view.strides(len(shape))]
        flat = array.reshape(-1)[start:]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def _number(self, one: Numel) -> int:
        return one[0] * int(self._rows ** one[1])

    # Memory

    def _place(self) -> None:
        """Give roots that replace state their memory, and those that are neither state nor messages their place."""
        replaced, found = planned(self.fused, self.code, self._rows)
        for one, old in replaced.items():
            self._arrays[one] = self._arrays[old].reshape(local(one.shape, self._rows))
        self._offsets, self.nbytes = found.offsets, found.size
        self._arena.reserve(found.size)

    def _lay_out_sums(self) -> None:
        """Give what ranks sum its memory: that which they share where they do, else as much for part and sum."""
        assert self._comm is not None
        self._messages: dict[Tensor, Array] = {}
        all_sums = [one for one in self.code.parts if isinstance(one, list) and one[0][1].op is ALL_REDUCE]
        for axis in dict.fromkeys(one[0][1].attributes["mesh"] for one in all_sums):
            here = [one for one in all_sums if one[0][1].attributes["mesh"] == axis and is_native(one[0][1])]
            like = [(self._ends(one)[-1], one[0][0].dtype) for one in here]
            memory = self._comm.along(axis).node_messages(like) if here else None
            if memory is not None:
                made = NodeSums(memory)
                self._sums.append(made)
                self._summed |= {message[0][1]: (made, number) for number, message in enumerate(here)}
        for message in all_sums:
            first, ends = message[0][1], self._ends(message)
            if first in self._summed:
                made, number = self._summed[first]
                given, found = made.memory(number)
            else:
                given = found = self._messages[first] = aligned((ends[-1],), first.dtype)
            cut = (np.split(flat, ends[1:-1]) for flat in (given, found))
            for (part, reduced), *places in zip(message, *cut, strict=True):
                shape = local(part.shape, self._rows)
                self._arrays[part], self._arrays[reduced] = (one.reshape(shape) for one in places)
        if all(isinstance(one, NativeFunction) or self._is_native(one) for one in self.code.parts):
            self._is_one_call = True
            addresses = [made.addresses[number] for made, number in (self._summed[one[0][1]] for one in all_sums)]
            self._addresses = np.array(addresses, np.uint64)
            self._context.messages, self._context.sum = self._addresses.ctypes.data, self._sums[0].function

    def _is_native(self, part: Call | list[tuple[Tensor, Tensor]]) -> bool:
        """Whether compiled code makes a part of a step by itself."""
        return isinstance(part, list) and part[0][1] in self._summed

    def _ends(self, message: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Return where the tensors of a message begin, and the end."""
        return in_a_row(size(local(part.shape, self._rows)) for part, _ in message)


def _shared(factors: Iterable[Tensor], made: Iterable[Tensor]) -> list[Future[int] | None]:
    """Begin to compile what all programs share; return what will be the addresses, in the order of the `Context`.

    Args:
        factors: of products.
        made: tensors, among them those that convolutions make.
    """
    multiplied = {one.dtype.name for one in factors}
    convolved = set[tuple[str, str]]()
    for one in made:
        convolution = lowering_of(one)
        if isinstance(convolution, AttentionLowering):
            multiplied.add(one.dtype.name)
        if isinstance(convolution, ConvolutionLowering):
            by = convolution.implementation(one)
            convolved.add((by, one.dtype.name))
            multiplied |= {one.dtype.name} if by == "product" else set()
    found = [products(name) if name in multiplied else None for name in _PRODUCTS]
    return [parallel(), *found, *(convolutions(*one) if one in convolved else None for one in _CONVOLUTIONS)]


def lowered(program: Program, *, alone: bool = True, join: bool = True) -> tuple[Fused, Code]:
    """Return a program's kernels and their C++, made once for all numbers of rows, and for programs of one structure.

    Args:
        program: any.
        alone: there are no other ranks.
        join: as in `CompiledExecutable`.
    """
    key = "cpu", alone, join
    if key not in program.lowered:
        with MAKING:
            if key not in program.lowered:
                program.lowered[key] = _of_structure(program, alone, join)
    found: tuple[Fused, Code] = program.lowered[key]
    return found


def _of_structure(program: Program, alone: bool, join: bool) -> tuple[Fused, Code]:
    """See `lowered`."""
    structure = structure_of(program)
    if structure is None:
        return _made(program, alone, join)
    key = structure.key, alone, join
    known = _LOWERED.pop(key, None)
    if known is not None:
        _LOWERED[key] = known  # the last one now
        fused, code, seeds = known
        own = dict(zip(seeds, structure.seeds, strict=True))
        of_state = dict(enumerate(structure.variables))
        return of_variables(fused, of_state), replace(code, seeds=[own[one] for one in code.seeds])
    fused, code = _made(to_be_kept(program), alone, join)
    # A call by NumPy draws by the seed that it was fused with.
    if not any(isinstance(one, Call) and draws_bits(one.tensor) for one in code.parts):
        numbers = {variable: number for number, variable in enumerate(structure.variables)}
        _LOWERED[key] = of_variables(fused, numbers), code, structure.seeds
        if len(_LOWERED) > KEPT:
            _LOWERED.popitem(last=False)
    return fused, code


def _made(program: Program, alone: bool, join: bool) -> tuple[Fused, Code]:
    """See `lowered`; made anew."""
    fused = fuse(without_ranks(program) if alone else program, join=join)
    try:
        return fused, generate(fused)
    except NeedsPythonError:
        return _made(unrolled(program), alone, join)


def planned(fused: Fused, code: Code, rows: int) -> tuple[dict[Tensor, Tensor], MemoryPlan]:
    """Return the state that new values are written over, by the new value, and where all else that is computed lies.

    An epilogue and its product are one kernel. What is read after all of them is what comes out, and new values that
    are copied over the old ones.
    """
    kernels: list[Access] = []
    for stage in fused.stages:
        kernels += _accesses(fused, code, stage.kernels, len(kernels))
        for message in stage.messages:
            if message[0][1].op is not ALL_REDUCE:
                reads = {fused.memory_of(part) for part, _ in message}
                kernels.append(Access(reads, [result for _, result in message], len(kernels)))
    results = [*(one.root for one in fused.outputs.values()), *fused.updates.values()]
    kernels.append(Access(set(map(fused.memory_of, results)), stage=len(kernels)))
    sent = fused.reduced
    pairs = [(fused.memory_of(new), fused.program.state[variable]) for variable, new in fused.updates.items()]
    replaced = in_place([(new, old) for new, old in pairs if new not in sent], kernels)
    return replaced, _laid_out(kernels, code, rows, [*sent, *replaced])


def _accesses(fused: Fused, code: Code, kernels: Sequence[Kernel], first: int) -> list[Access]:
    """Return what the kernels of a stage do with memory. A loop needs some for its steps."""
    steps: list[list[Kernel]] = []
    for kernel in kernels:
        steps += [] if kernel in code.epilogues else [[]]
        steps[-1].append(kernel)
    found = []
    for number, step in enumerate(steps, first):
        reads = {fused.memory_of(view.root) for kernel in step for view in kernel.reads}
        writes: list[Any] = [one for kernel in step for one in kernel.tensors if one in code.stored]
        writes += [one for one in step if isinstance(one, RepeatKernel)]
        found.append(Access(reads, writes, number, replaces=partial(_replaces, fused, step)))
    return found


def _laid_out(kernels: Sequence[Access], code: Code, rows: int, elsewhere: Collection[Tensor]) -> MemoryPlan:
    """Return where lies what kernels write, in an arena, and within that of their loops the memory of the steps."""
    lie_elsewhere = {*elsewhere, *code.moved}
    made = [one for kernel in kernels for one in kernel.writes if one not in lie_elsewhere]
    of_steps = {one: _of_steps(one, code, rows) for one in made if isinstance(one, RepeatKernel)}
    sizes = {one: of_steps[one].size if one in of_steps else nbytes(one, rows) for one in made}
    found = plan(kernels, sizes)
    offsets = {one: start for one, start in found.offsets.items() if one not in of_steps}
    for one, steps in of_steps.items():
        offsets |= {root: found.offsets[one] + start for root, start in steps.offsets.items()}
    return replace(found, offsets=offsets)


def _of_steps(repeat: RepeatKernel, code: Code, rows: int) -> MemoryPlan:
    """Return the memory of a loop's steps: what one needs, and two places for each carry."""
    (stage,) = repeat.step.stages
    kernels = _accesses(repeat.step, code, stage.kernels, 0)
    kernels.append(Access(set(repeat.results), stage=len(kernels)))
    found = _laid_out(kernels, code, rows, ())
    buffers = [one for pair in repeat.buffers for one in pair]
    starts = in_a_row([found.size, *(nbytes(one, rows) for one in buffers)], ALIGNMENT)
    return MemoryPlan(starts[-1], {**found.offsets, **dict(zip(buffers, starts[1:], strict=False))}, starts[-1])


def _replaces(fused: Fused, step: Sequence[Kernel], new: Tensor, old: Tensor) -> bool:
    """See `Access.replaces`: a loop does that goes along its rows once and reads each element where it replaces it."""
    loop = next(one for one in step if any(made is new for made in one.tensors))
    writer = loop.member(new) if isinstance(loop, Loop) else None
    if not isinstance(loop, Loop) or writer is None or writer.kind != "map" or not writer.inner:
        return False
    own = writer.view.place
    readers = [one for kernel in step for one in (kernel.members if isinstance(kernel, Loop) else [kernel])]
    return not any(loop.passes().values()) and all(
        isinstance(one, LoopMember)
        and one in loop.members
        and one.kind in ("map", "gather")
        and one.inner
        and view.place == own
        for one in readers
        for view in one.reads
        if fused.memory_of(view.root) is old
    )
