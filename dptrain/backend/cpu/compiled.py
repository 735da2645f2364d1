"""Executing a program by compiled code: many steps in one call, without Python in between."""

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from dptrain.backend.cpu.codegen import Code, NativeFunction, generate
from dptrain.backend.cpu.compile import dp_parallel, library, products
from dptrain.backend.cpu.denormals import flush_to_zero
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DataError
from dptrain.program.execute import HostMemory
from dptrain.program.fuse import fuse
from dptrain.program.kernels import Call, Fused, Kernel, Loop, Member
from dptrain.program.lowering import Product, Windows, lowering_of
from dptrain.program.memory import aligned, arrange
from dptrain.program.mesh import constant_of
from dptrain.program.messages import all_reduce
from dptrain.program.passes import without_ranks
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local
from dptrain.program.tensor import Array, Tensor
from dptrain.program.views import Extent, View, whole
from dptrain.runtime.python_lock import released

# C++ types of products, by what NumPy calls them.
_PRODUCTS = {"float32": "float", "float64": "double"}


class Context(ctypes.Structure):
    """`Context` of `kernels/native.h`."""

    _fields_ = (
        ("p", ctypes.c_void_p),
        ("n", ctypes.c_void_p),
        ("R", ctypes.c_int64),
        ("F", ctypes.c_int64),
        ("G", ctypes.c_int64),
        ("outside", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("multiply_float", ctypes.c_void_p),
        ("multiply_double", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class CompiledExecutable:
    """A program for one number of rows; as `program.execute.Executable`.

    Args:
        program: what is executed.
        memory: where its state lives, and goes on to live.
        arrays: what its inputs read at every step, by name; of the input `ROWS`, the numbers of stored rows, those of
            many steps.
        rows: of the global batch that this rank has; None for all.
        first_row: the global number of the first of them.
        comm: the ranks; None for one.
        threads: of this process, for large products and loops.
        join: whether loops are fused; without, each op is a loop of its own, with the same bits.

    Attributes:
        fused: its kernels.
        code: their C++.
        outputs: what the last step made, by name.
        nbytes: of its memory, state and inputs aside.

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
        join: bool = True,
    ) -> None:
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._batch_rows = program.rows
        self._rows, self._first_row = self._batch_rows if rows is None else rows, first_row
        self.fused: Fused = fuse(program if self._comm else without_ranks(program), join=join)
        self.code: Code = generate(self.fused)
        self._library, shared = self._compiled()
        self.outputs: Mapping[str, Array] = {}
        memory.adopt(program.state)
        self._arrays = {id(one): memory.array(variable) for variable, one in program.state.items()}
        self._place()
        self._pointers = np.zeros(max(len(self.code.roots), 1), np.uint64)
        self._lengths = np.zeros(max(len(self.code.tables), 1), np.int64)
        self._outside = np.zeros(1, np.int64)
        own = (self._rows, first_row, self._batch_rows)
        table = (self._pointers.ctypes.data, self._lengths.ctypes.data)
        self._context = Context(*table, *own, self._outside.ctypes.data, max(threads, 1), *shared)
        self._is_one_call = all(isinstance(one, NativeFunction) for one in self.code.parts)
        self.bind(arrays)

    def _compiled(self) -> tuple[ctypes.CDLL, list[int]]:
        """Return the program's library, and the addresses of threads and products in those that all programs share."""
        lowerings = ((lowering_of(one), one.dtype.name) for one in self.fused.program.tensors)
        types = {dtype for lowering, dtype in lowerings if isinstance(lowering, Product | Windows)}
        made = [products(scalar) if name in types else None for name, scalar in _PRODUCTS.items()]
        own, parallel = library(self.code.source), dp_parallel()
        return own, [parallel, *(0 if one is None else one.result() for one in made)]

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
                self._arrays[id(one)] = self._window
            elif given.shape != shape:
                raise ConfigError(f"input {name!r} has shape {given.shape}: expected {shape}")
            else:
                self._arrays[id(one)] = given
        for number, root in enumerate(self.code.roots):
            is_order = root is self.fused.program.inputs.get(ROWS) and self._is_one_call
            self._pointers[number] = (self._order if is_order else self._array(root)).ctypes.data
        for number, root in enumerate(self.code.tables):
            self._lengths[number] = len(self._array(root))
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
            else:
                for number, start in enumerate(positions, 1):
                    self._window[...] = self._order[start : start + len(self._window)]
                    for step in self._steps:
                        step(number == positions.size)
                    self._library.moves(ctypes.byref(self._context))
        if self._outside[0]:
            self._outside[0] = 0
            raise DataError("a row is asked for that is not there: a number outside the table")
        if positions.size:
            self.outputs = {name: view.copy() for name, view in self._results.items()}

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
        reduced, comm = part[0][1], self._comm
        flat = self._messages[id(reduced)]
        assert comm is not None
        return lambda last: all_reduce(flat, reduced.attributes["over"], comm)

    def _call(self, call: Call) -> Callable[[bool], None]:
        tensor, op = call.tensor, call.tensor.op
        assert op is not None
        attributes = op.local_attributes(tensor, self._rows, self._first_row)
        inputs = [self._strided(view, one) for view, one in zip(call.reads, tensor.inputs, strict=True)]
        out, every = self._array(tensor), id(tensor) in self.fused.every_step

        def execute(last: bool) -> None:
            if every or last:
                op.compute(*inputs, **attributes, out=out)

        return execute

    def _array(self, root: Tensor) -> Array:
        """Return a root's memory."""
        beneath = self.fused.memory_of(root)
        if id(beneath) not in self._arrays:  # of a constant
            self._arrays[id(beneath)] = np.asarray(constant_of(beneath, self._rows, self._batch_rows), order="C")
        return self._arrays[id(beneath)].reshape(local(root.shape, self._rows))

    def _strided(self, view: View, tensor: Tensor) -> Array:
        """Return the elements of a tensor."""
        array, shape = self._array(view.root), local(tensor.shape, self._rows)
        if 0 in shape or not array.size:
            return np.empty(shape, array.dtype)
        start = sum(
            (first.plain + first.rows * self._rows + first.first * self._first_row) * self._number(step)
            for first, step in view.start()
        )
        strides = [self._number(one) * array.itemsize for one in view.strides(len(shape))]
        flat = array.reshape(-1)[start:]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def _number(self, one: Extent) -> int:
        return one[0] * int(self._rows ** one[1])

    # Memory

    def _place(self) -> None:
        """Give every root that is computed its memory: in a message, in the state it replaces, or in the arena."""
        self._messages: dict[int, Array] = {}
        for stage in self.fused.stages:
            for message in stage.messages:
                sizes = [int(np.prod(local(part.shape, self._rows))) for part, _ in message]
                flat = aligned((sum(sizes),), message[0][0].dtype)
                for (part, reduced), place in zip(message, np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
                    self._messages[id(reduced)] = flat
                    self._arrays[id(part)] = self._arrays[id(reduced)] = place.reshape(local(part.shape, self._rows))
        kernels = numbered(self.fused, self.code.epilogues)
        replaced = in_place(self.fused, kernels)
        made = [(number, one) for number, kernel in kernels for one in kernel.tensors]
        wanted = [(number, one) for number, one in made if id(one) in self.code.stored]
        wanted = [(number, one) for number, one in wanted if id(one) not in self._arrays]
        for _, one in wanted:
            if id(one) in replaced:
                self._arrays[id(one)] = self._arrays[id(replaced[id(one)])].reshape(local(one.shape, self._rows))
        wanted = [(number, one) for number, one in wanted if id(one) not in replaced]
        last = last_reads(self.fused, kernels)
        shapes = [local(one.shape, self._rows) for _, one in wanted]
        sizes = [int(np.prod(shape)) * one.dtype.itemsize for shape, (_, one) in zip(shapes, wanted, strict=True)]
        lives = [(size, number, last.get(id(one), number)) for size, (number, one) in zip(sizes, wanted, strict=True)]
        offsets, size = arrange(lives)
        arena = aligned((size,), np.uint8)
        for (_, one), start, length, shape in zip(wanted, offsets, sizes, shapes, strict=True):
            self._arrays[id(one)] = arena[start : start + length].view(one.dtype).reshape(shape)
        self.nbytes = size


def numbered(fused: Fused, epilogues: Set[int]) -> list[tuple[int, Kernel]]:
    """Return the kernels with the numbers of their steps: an epilogue's is that of the product it is executed with."""
    numbers = itertools.accumulate(int(id(kernel) not in epilogues) for kernel in fused.kernels)
    return list(zip(numbers, fused.kernels, strict=True))


def last_reads(fused: Fused, kernels: Sequence[tuple[int, Kernel]]) -> dict[int, int]:
    """Return the last step that reads each root's memory; what is handed out is read after all of them."""
    found: dict[int, int] = {}
    for number, kernel in kernels:
        for view in kernel.reads:
            found[id(fused.memory_of(view.root))] = number
    for root in itertools.chain((one.root for one in fused.outputs.values()), fused.updates.values()):
        found[id(fused.memory_of(root))] = len(kernels) + 1
    return found


def in_place(fused: Fused, kernels: Sequence[tuple[int, Kernel]]) -> dict[int, Tensor]:
    """Return the state that new values can be written over, by the `id` of what computes them.

    It can where nothing reads the old value any more, but a loop that reads each element before it writes it.
    """
    readers: dict[int, list[tuple[int, Any]]] = {}
    for number, kernel in kernels:
        for one in kernel.members if isinstance(kernel, Loop) else [kernel]:
            for view in one.reads:
                readers.setdefault(id(fused.memory_of(view.root)), []).append((number, (one, view)))
    handed_out = {id(fused.memory_of(one.root)) for one in fused.outputs.values()}
    found: dict[int, Tensor] = {}
    taken = {id(part) for stage in fused.stages for message in stage.messages for part, _ in message}
    for variable, update in fused.updates.items():
        old, new = fused.program.state[variable], fused.memory_of(update)
        maker = next(((n, k) for n, k in kernels if any(one is new for one in k.tensors)), (-1, None))
        number, loop = maker
        if not isinstance(loop, Loop) or id(new) in taken or id(new) in found or id(old) in handed_out:
            continue
        member = loop.member(new)
        assert member is not None
        if new.dtype == old.dtype and all(
            at < number or (at == number and _reads_itself(loop, member, *reader))
            for at, reader in readers.get(id(old), [])
        ):
            found[id(new)] = old
    return found


def _reads_itself(loop: Loop, writer: Member, reader: Member | Kernel, view: View) -> bool:
    """Whether a loop that writes a member over what a view reads has read each element before."""
    if not isinstance(reader, Member) or writer.kind != "map" or reader.kind not in ("map", "gather"):
        return False
    if any(loop.passes().values()):
        return False
    rank = len(loop.space)
    same = view.strides(rank) == whole(writer.tensor).along(writer.axes).strides(rank) and not view.start()
    return same and reader.inner and writer.inner
