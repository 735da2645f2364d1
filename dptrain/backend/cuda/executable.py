"""A program on a GPU: generated kernels, memory, and the launches of a step.

All that changes from step to step is in device memory: the variables, and the number of the step, which locates its
rows. So a step is a list of launches with constant arguments.

Kernels read a run's addresses from its row of a table, so that several runs can execute together as a pack: one of its
executables, the lead, has a table with a row for each, and launches the kernels for all.
"""

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backend.cuda.compile import compiled_text, kernel_cache
from dptrain.backend.cuda.compose import ALIGNMENT, Message
from dptrain.backend.cuda.custom import HostLaunch, own_launch
from dptrain.backend.cuda.generate import (
    GeneratedFunction,
    Kernel,
    LibraryCall,
    OwnCall,
    arguments_of,
    blocks_of,
    with_steps,
)
from dptrain.backend.cuda.gpu.device import Gpu, cuda
from dptrain.backend.cuda.graphs import steps_in_graph
from dptrain.backend.cuda.loops import HostLoop, LoopCall
from dptrain.backend.cuda.measuring import Measuring
from dptrain.backend.cuda.memory import DeviceArray, DeviceMemory, Pinned
from dptrain.backend.cuda.packs import RunTable, Starts
from dptrain.backend.cuda.tma import MAPS_BYTES, beside_messages, resident_blocks
from dptrain.backend.cuda.transfers.host import PinnedMove
from dptrain.backend.cuda.transfers.links import LateGather, LinkedMessage, LinkedMove, LinkedSum
from dptrain.backend.cuda.transfers.schedule import LinkedSteps, linked_steps
from dptrain.backend.custom import OwnKernel
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DataError, DeviceError
from dptrain.program.absent_rows import find_absent_row
from dptrain.program.codegen.memory import in_a_row, nbytes
from dptrain.program.lowering import HostCall, UserKernel, lowering_of
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.schedule.loops import BUFFERS
from dptrain.program.shapes import local
from dptrain.program.sharding.messages import all_reduce, exchange
from dptrain.program.tensor import Array, Tensor
from dptrain.runtime.types import is_narrow

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

# Steps whose starts are written to the device at a time.
_STEPS = 1024
_FIRST = np.zeros(1, np.int64)
# In place of a stage's number: a step behind another one, and what follows the last.
_FURTHER, _END = -(1 << 20), -(1 << 20) - 1
# Calls of `run` that are searched for the step that read a missing row.
_REMEMBERED = 64

# Queues a kernel for the given number of a table's first runs.
Launch = Callable[[RunTable, int], None]


@dataclass(frozen=True)
class _Launches:
    """Launches, and the numbers of the messages that they complete."""

    launches: list[Launch]
    ready: list[int]


@dataclass(frozen=True)
class _Travel:
    """Begins a message after the launches queued so far, and finishes it before those queued later. Collective."""

    begin: Callable[[], None]
    finish: Callable[[], None]


class CudaExecutable:
    """A program for one number of rows; arguments and attributes as for `Backend.executable` and `Executable`.

    Arrays may be NumPy's, which are copied to the device; reading an output waits for it.

    Attributes:
        source: the generated C++.
        made: the outputs on the device.
        pack_key: equal for executables that differ only in their `Run` and can execute as a pack; None for one that
            cannot: it communicates with other ranks, or calls kernels that are not generated.

    Raises:
        ConfigError: an array is missing or has another shape or type, or an op has no kernel.
        DeviceError: the source does not compile or load.
    """

    def __init__(
        self,
        program: Program,
        backend: "CudaBackend",
        arrays: Mapping[str, Any],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.backend, self._comm = backend, comm
        self._kernel_names: dict[int, str] = {}  # of launches, by identity
        # Starts of the last steps, which may have read rows that a table does not have.
        self._asked: deque[Sequence[int]] = deque(maxlen=_REMEMBERED)
        composition = backend.composed(program, rows, first_row, alone=comm is None or comm.size == 1)
        self._made, self._rows, self._sizes = composition, composition.sizes.rows, composition.sizes
        # Only where there are messages: without any, not all ranks may have come here.
        self._links = backend.links(comm) if comm is not None and comm.size > 1 and any(composition.messages) else None
        self.source = composition.source()
        flat = list(with_steps(kernel for stage in composition.stages for kernel in stage))
        self._functions = [function for kernel in flat for function in kernel.functions]
        self._allocate()
        self._bind_inputs(composition.program, arrays)
        self._write_maps()
        values_by_name = self._of_run()
        self._row = np.array([values_by_name[name] for name in composition.fields], np.uint64)
        self.pack_key = self._load()
        self._table: RunTable | None = backend.run_table(self.pack_key, len(self._row))
        self.made = {name: self._results[tensor] for name, tensor in composition.program.outputs.items()}
        self.samples: Sequence[int] | Array | None = None
        self.outputs: Mapping[str, Array] = DeviceOutputs(self.made, backend.download)
        self._measuring = None if clock is None else Measuring(clock, composition, self._kernel_names)
        backend.executables.add(self)

    # Memory

    def _allocate(self) -> None:
        backend, program = self.backend, self._made.program
        backend.adopt(program.state)
        self._pointers: dict[Tensor, int] = {
            tensor: backend.state.array(variable).pointer for variable, tensor in program.state.items()
        }
        self._pointers |= {
            tensor: backend.state.array(variable).pointer for tensor, variable in self._made.targets.items()
        }
        self._memories: list[DeviceMemory] = []
        self._results = self._placed(list(dict.fromkeys(program.outputs.values())), "outputs")
        constants = [tensor for function in self._functions for tensor in function.pointers if tensor.value is not None]
        constant_buffers = self._placed(list(dict.fromkeys(constants)), "constants")
        for tensor, buffer in constant_buffers.items():
            backend.write(buffer, np.asarray(tensor.value))
        sent_messages = [message for messages in self._made.messages for message in messages]
        sums = self._sums([message for message in sent_messages if message.is_sum])
        kept = [
            (function.name, argument)
            for function in self._functions
            for argument in function.arguments
            if argument.is_kept
        ]
        starts = in_a_row((argument.value for _, argument in kept), ALIGNMENT)
        self._kept = backend.zeros((max(starts[-1], 1),), np.uint8, "counters")
        self._scratch = {
            (function, argument.name): self._kept.pointer + start
            for (function, argument), start in zip(kept, starts, strict=False)
        }
        self._arena = DeviceMemory(backend.heap, self._made.plan.size, "intermediate results")
        self._memories.append(self._arena)
        for key, start in self._made.plan.offsets.items():
            if isinstance(key, Tensor):
                self._pointers[key] = self._arena.pointer + start
            else:
                self._scratch[key] = self._arena.pointer + start
        for value, (first, place) in self._made.last_carries.items():
            self._pointers[value] = self._pointers[first] + place * nbytes(first, self._rows)
        travels = sums | (self._moves() if self._links is None else self._linked_moves())
        self._messages = [travels[message] for message in sent_messages]
        linked: dict[str, list[LinkedMessage]] = {}
        for message in self._messages:
            if isinstance(message, LinkedMessage):
                linked.setdefault(message.axis, []).append(message)
        for messages in linked.values():  # along an axis they leave in turn
            scratch = backend.empty((max(message.scratch_bytes for message in messages),), np.uint8, "messages")
            for message in messages:
                message.scratch = scratch
        self.nbytes = starts[-1] + sum(memory.nbytes for memory in self._memories)
        self._starts = backend.empty((_STEPS,), np.int64, "steps")
        self._number = backend.zeros((1,), np.int64, "steps")

    def _placed(self, tensors: Sequence[Tensor], name: str) -> dict[Tensor, DeviceArray]:
        shapes = [self._shape(tensor) for tensor in tensors]
        starts = in_a_row((nbytes(tensor, self._rows) for tensor in tensors), ALIGNMENT)
        memory = DeviceMemory(self.backend.heap, starts[-1], name)
        self._memories.append(memory)
        buffers = {
            tensor: DeviceArray(memory, memory.pointer + start, shape, tensor.dtype)
            for tensor, start, shape in zip(tensors, starts, shapes, strict=False)
        }
        self._pointers |= {tensor: buffer.pointer for tensor, buffer in buffers.items()}
        return buffers

    def _sums(self, messages: Sequence[Message]) -> dict[Message, "_Travel | LinkedMessage"]:
        """Put the tensors of each all-reduce message into one buffer."""
        starts_of = [in_a_row(self._sizes.count(result.shape) for result in message.results) for message in messages]
        firsts = [message.results[0] for message in messages]
        if self._links is None:
            empty = self.backend.empty
            buffers = [
                empty((starts[-1],), first.dtype, "messages") for starts, first in zip(starts_of, firsts, strict=True)
            ]
        else:
            buckets = [
                (starts[-1], first.dtype, first.attributes["mesh"])
                for starts, first in zip(starts_of, firsts, strict=True)
            ]
            buffers = self._links.buckets(self.backend, buckets)
        for message, starts, buffer in zip(messages, starts_of, buffers, strict=True):
            for result, start in zip(message.results, starts, strict=False):
                self._pointers[result] = buffer.pointer + start * result.dtype.itemsize
        return {message: self._sum(message, buffer) for message, buffer in zip(messages, buffers, strict=True)}

    def _sum(self, message: Message, buffer: DeviceArray) -> "_Travel | LinkedMessage":
        backend, comm, first = self.backend, self._comm, message.results[0]
        assert comm is not None
        over = first.attributes["over"]
        if self._links is not None:
            return LinkedSum(backend, buffer, over, self._links.along(first.attributes["mesh"]))
        direct = backend.transport == "cuda-aware" and over == "sum" and not is_narrow(buffer.dtype)
        exchange_of_buffer = backend.exchange(buffer, direct=direct)
        group = comm.along(first.attributes["mesh"])

        def finish() -> None:
            all_reduce(exchange_of_buffer.values(), over, group)
            exchange_of_buffer.end()

        return _Travel(exchange_of_buffer.begin, finish)

    def _moves(self) -> dict[Message, _Travel]:
        """Prepare messages of gathers and reduce-scatters; the n-th ones of all stages share pinned memory."""
        stages = [[message for message in messages if not message.is_sum] for messages in self._made.messages]
        moves: dict[Message, _Travel] = {}
        for messages in zip_longest(*stages):
            nth_messages = [message for message in messages if message is not None]
            out, back = (
                Pinned(
                    self.backend.heap,
                    (max(sum(nbytes(tensor, self._rows) for tensor in tensors) for tensors in tensor_lists),),
                    np.dtype(np.uint8),
                )
                for tensor_lists in (
                    [message.parts for message in nth_messages],
                    [message.results for message in nth_messages],
                )
            )
            moves |= {message: self._move(message, out, back) for message in nth_messages}
        return moves

    def _move(self, message: Message, out: Pinned, back: Pinned) -> _Travel:
        comm = self._comm
        assert comm is not None
        parts, results = self._buffers(message)
        replaces = any(result in self._made.targets for result in message.results)
        move = PinnedMove(self.backend.heap, (out, back), parts, results, replaces=replaces)

        def finish() -> None:
            exchange(message.results, *move.values(), comm)
            move.end()

        return _Travel(move.begin, finish)

    def _linked_moves(self) -> dict[Message, LinkedMessage]:
        assert self._links is not None
        updates = set(self._made.program.updates.values())
        moves: dict[Message, LinkedMessage] = {}
        for message in (message for messages in self._made.messages for message in messages if not message.is_sum):
            link = self._links.along(message.results[0].attributes["mesh"])
            if message in self._made.late:
                moves[message] = LateGather(self.backend, message.results, *self._buffers(message), link)
                continue
            must_wait = not updates.isdisjoint(message.results)
            moves[message] = LinkedMove(self.backend, message.results, *self._buffers(message), link, waits=must_wait)
        return moves

    def _buffers(self, message: Message) -> tuple[list[DeviceArray], list[DeviceArray]]:
        def buffer(tensor: Tensor, like: Tensor) -> DeviceArray:
            return DeviceArray(self._arena, self._pointers[tensor], self._shape(like), tensor.dtype)

        parts = [buffer(part, result.inputs[0]) for part, result in zip(message.parts, message.results, strict=True)]
        return parts, [buffer(result, result) for result in message.results]

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        return local(tensor.shape, self._rows)

    def _bind_inputs(self, program: Program, arrays: Mapping[str, Any]) -> None:
        self._arrays: list[DeviceArray] = []
        for name, tensor in program.inputs.items():
            if name not in arrays:
                raise ConfigError(f"input {name!r} is missing")
            array = arrays[name]
            if not isinstance(array, DeviceArray):
                array = self.backend.upload(np.asarray(array), f"input {name}")
            if name != ROWS or len(array.shape) != 1:
                program.check_input(name, array.shape, self._rows)
            if array.dtype != tensor.dtype and (array.dtype, tensor.dtype) != (np.dtype(np.uint8), np.dtype(np.bool_)):
                raise ConfigError(f"input {name!r} has dtype {array.dtype} on the device: expected {tensor.dtype}")
            self._arrays.append(array)
            self._pointers[tensor] = array.pointer

    def _write_maps(self) -> None:
        for function in self._functions:
            if function.maps is not None:
                start = self._scratch[function.name, "maps"] - self._kept.pointer
                addresses = [self._pointer(function, factor, {}) for factor in function.maps.factors]
                encoded = function.maps.encoded(addresses)
                self.backend.write(self._kept[start : start + MAPS_BYTES], np.frombuffer(encoded, np.uint8))

    # Launches

    def _load(self) -> Hashable:
        """Compile the kernels and prepare their launches; return the pack key."""
        backend, gpu = self.backend, self.backend.gpu_record
        sources = self._made.sources()
        backend.compile_ahead(list(sources)[1:])
        cubins = {text: compiled_text("program", text, gpu.architecture) for text in sources}
        self._stages: list[list[_Launches]] = []
        self._reads: dict[int, set[Tensor]] = {}  # what a kernel reads, by the id of its first launch
        self._on_host = self._host_loops = 0
        pack_parts: list[Hashable] = [cubin.path for cubin in cubins.values()]
        numbers, index = iter(range(len(self._messages))), "q" if self._made.wide_index else "i"
        try:
            modules = {
                kernel.name: gpu.module(cubins[source]) for source, kernels in sources.items() for kernel in kernels
            }
            self._resident = {
                kernel.name: resident_blocks(cubins[source].content, kernel.name, kernel.schedule)
                for source, kernels in sources.items()
                for kernel in kernels
                if kernel.schedule is not None
            }
            self._prepared = {
                kernel.name: _prepare(gpu, kernel, modules[kernel.name], index)
                for kernels in sources.values()
                for kernel in kernels
            }
            for stage, messages in zip(self._made.stages, self._made.messages, strict=True):
                launches: list[Launch] = []
                counts = [0]  # launches after each number of kernels
                self._beside = self._kernels_beside(stage, messages)
                for kernel in stage:
                    launches += self._launches_of(kernel, {}, pack_parts)
                    if len(launches) > counts[-1]:
                        read = {tensor for function in kernel.functions for tensor in function.reads}
                        self._reads[id(launches[counts[-1]])] = read
                    counts.append(len(launches))
                # numbers, from 1, of the host's launches, which a graph cannot hold
                alone = [number for number, launch in enumerate(launches, 1) if _is_of_host(launch)]
                after = [counts[message.after] for message in messages]
                if self._links is not None:  # a rank without rows launches less, but all send in the same order
                    after = list(accumulate(after, max))
                self._stages.append(_cut(launches, [(next(numbers), count) for count in after], alone))
                self._on_host += len(alone)
        except cuda.Error as error:
            raise DeviceError(
                f"{gpu.name}: compiled kernels cannot be loaded ({error}); remove {kernel_cache()} to compile them "
                "again"
            ) from error
        self._further, self._end = list[Launch](), list[Launch]()
        if self._queues_messages:
            steps = self._linked_steps()
            self._stages = [[_Launches(steps.first, [])]]
            if steps.end:
                self._further, self._end = steps.further, steps.end
        is_generated = all(function.call is None or isinstance(function.call, LoopCall) for function in self._functions)
        return tuple(pack_parts) if is_generated and not self._messages and not self._host_loops else None

    def _linked_steps(self) -> LinkedSteps:
        program, made = self._made.program, self._made
        sent_messages = [message for messages in made.messages for message in messages]
        position = {variable: number for number, variable in enumerate(program.state)}
        written = {
            number: [made.targets[result] for result in message.results]
            for number, message in enumerate(sent_messages)
            if message in made.late
        }
        # The order in which variables are first read: that of the program, as ranks may launch different kernels.
        last = len(position)
        order = sorted(written, key=lambda number: min(position.get(variable, last) for variable in written[number]))
        late = {
            number: [program.state[variable] for variable in written[number] if variable in position]
            for number in order
        }
        parts = [message.parts for message in sent_messages]
        return linked_steps(
            self._stages, self._messages, self._reads, parts, late, lambda call: partial(_call_alone, call)
        )

    def _kernels_beside(self, stage: Sequence[Kernel], messages: Sequence[Message]) -> set[str]:
        """Return the names of a stage's kernels that may run while messages between GPUs travel."""
        if self._links is None:
            return set()
        # Late gathers may travel from a step's begin on.
        first = 0 if self._made.late else min((message.after for message in messages), default=len(stage))
        return {kernel.name for kernel in with_steps(stage[first:])}

    def _launches_of(self, kernel: Kernel, counters: Mapping[str, int], pack_parts: list[Hashable]) -> list[Launch]:
        """Return a kernel's launches at step numbers of loops; `pack_parts` receives parts of the pack key."""
        launches = self._launches_alone(kernel, counters, pack_parts)
        if kernel.loop is None or kernel.loop.repeat.length is None:
            self._kernel_names |= {id(launch): kernel.name for launch in launches}
        return launches

    def _launches_alone(self, kernel: Kernel, counters: Mapping[str, int], pack_parts: list[Hashable]) -> list[Launch]:
        if kernel.loop is not None:
            launches = list[Launch]()
            repeat = kernel.loop.repeat
            pack_parts.append((kernel.name, repeat.length, repeat.reverse))
            if repeat.length is None:
                return [self._host_loop(kernel.loop, counters)]
            for number, step in enumerate(kernel.loop.steps()):
                parts_of_step = pack_parts if number == 0 else []
                launches += [
                    launch
                    for inner in kernel.loop.kernels
                    for launch in self._launches_of(inner, {**counters, **step}, parts_of_step)
                ]
            return launches
        if not kernel.threads:
            return [partial(_call_alone, call) for call in self._calls(kernel, counters)]
        call = self._prepared[kernel.name]
        if call is None:
            return []
        most = self._resident.get(kernel.name)
        if most is not None and kernel.schedule is not None and kernel.name in self._beside:
            most = beside_messages(most, kernel.schedule)
        blocks = _blocks(kernel, most)
        sizes, values_by_name = self._sizes, {**_arguments(kernel), **blocks, **counters}
        values = (
            sizes.rows,
            sizes.first_row,
            sizes.global_rows,
            *(values_by_name[name] for _, name in arguments_of(kernel)),
        )
        count = sum(blocks.values())
        pack_parts.append((kernel.name, count, values))
        return [partial(_launch, call, count, kernel.threads, self.backend.stream, values)]

    def _host_loop(self, loop: LoopCall, counters: Mapping[str, int]) -> HostLoop:
        """Return a loop whose steps are queued one by one, each as a graph if it can be."""
        number, self._host_loops = self._host_loops, self._host_loops + 1
        carries = [
            [
                DeviceArray(
                    self._arena,
                    self._pointers[first] + buffer * nbytes(first, self._rows),
                    self._shape(first),
                    first.dtype,
                )
                for buffer in range(BUFFERS)
            ]
            for first in loop.first_carries
        ]
        steps = [
            [launch for inner in loop.kernels for launch in self._launches_of(inner, {**counters, **step}, [])]
            for step in loop.steps()
        ]
        queues = [partial(self._queue, (-1 - number, buffer, 1, 1), launches) for buffer, launches in enumerate(steps)]
        return HostLoop(self.backend, loop.repeat, carries, queues)

    @property
    def _queues_messages(self) -> bool:
        return bool(self._messages) and self._links is not None

    def _calls(self, kernel: Kernel, counters: Mapping[str, int]) -> list[Callable[[], None]]:
        """Return the calls that replace a generated kernel, at a step of the loops around it."""
        (function,) = kernel.functions
        call = function.call
        if isinstance(call, OwnCall):
            return self._own_call(function, call, counters)
        assert isinstance(call, LibraryCall)
        library, count = self.backend.libraries[call.problem.kind], 1
        if call.problem.kind == "gemm":
            count = call.problem.sizes[2]
        starts = [self._pointer(function, tensor, counters) for tensor in call.tensors]
        return [
            library.prepared(call.problem, *(start + n * step for start, step in zip(starts, call.steps, strict=True)))
            for n in range(count)
        ]

    def _pointer(self, function: GeneratedFunction, tensor: Tensor, counters: Mapping[str, int]) -> int:
        """Return a tensor's address at a step of the loops around a function."""
        at = function.addresses.get(tensor)
        if at is None:
            return self._pointers[tensor]
        elements = sum(counters[counter] * self._sizes.count(shape) for counter, shape in at.terms)
        return self._pointers[at.base] + elements * tensor.dtype.itemsize

    def _own_call(
        self, function: GeneratedFunction, call: OwnCall, counters: Mapping[str, int]
    ) -> list[Callable[[], None]]:
        """Return the launch of a user's kernel, or the call of the host's function; ConfigError or DeviceError."""
        tensor, memory = call.tensor, self._memories[0]
        user = lowering_of(tensor)
        assert tensor.op is not None

        def buffer(tensor_read: Tensor) -> DeviceArray:
            return DeviceArray(
                memory, self._pointer(function, tensor_read, counters), self._shape(tensor_read), tensor_read.dtype
            )

        numbers = tensor.op.local_attributes(tensor, self._rows, self._sizes.first_row)
        if isinstance(user, HostCall):
            compute = partial(tensor.op.compute, **numbers)
            return [HostLaunch(self.backend, compute, [*map(buffer, tensor.inputs)], buffer(tensor))]
        assert isinstance(user, UserKernel)
        kernel: OwnKernel = user.kernel

        if any(tensor.dtype == np.float64 for tensor in (*tensor.inputs, tensor)):
            raise ConfigError(f"op {kernel.name!r}: its kernel computes in float32, not in float64; use --device cpu")
        outputs = {user.output: buffer(tensor)}
        scratch = self._scratch.get((function.name, "others"), 0)
        for number, (shape, start) in call.scratch.items():
            local_shape = local(shape, self._rows)
            outputs[number] = DeviceArray(memory, scratch + start, local_shape, tensor.dtype)
        buffers = [*map(buffer, tensor.inputs), *(outputs[number] for number in sorted(outputs))]
        return [own_launch(self.backend.gpu_record, self.backend.stream, kernel, buffers, numbers)]

    def _of_run(self) -> dict[str, int]:
        values = {"starts": self._starts.pointer, "step": self._number.pointer}
        if self._made.notes_rows:
            values["outside"] = self.backend.outside.pointer
        for function in self._functions:
            values |= {name: self._pointers[tensor] for tensor, name in function.fields.items()}
            values |= {
                name: int.from_bytes(number.tobytes(), sys.byteorder) for name, number in function.numbers.items()
            }
            for argument in function.arguments:
                if "*" in argument.kind:
                    values[f"{argument.name}_{function.name}"] = self._scratch.get((function.name, argument.name), 0)
        return values

    @property
    def launches(self) -> int:
        """Number of launches in a step."""
        return sum(len(part.launches) for stage in self._stages for part in stage)

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Queue a step for each start of its rows in the array `ROWS`. Collective if the program is placed."""
        if self._made.notes_rows:
            self._asked.append(starts)
        for begin in range(0, len(starts), _STEPS):
            chunk = np.asarray(starts[begin : begin + _STEPS], np.int64)
            if self.backend.joins_packs and self.pack_key is not None and self._measuring is None:
                self.backend.gpu_record.packs.add(self, chunk)
            else:
                self.execute([(self, chunk)])

    def absent_row(self) -> DataError | None:
        """Return the error that names an index outside a table, of a step since the last call."""
        program, starts_of_runs = self._made.program, list(self._asked)
        self._asked.clear()
        if not starts_of_runs:
            return None
        values = {
            tensor: self._held(buffer) for tensor, buffer in zip(program.inputs.values(), self._arrays, strict=True)
        }
        values |= {tensor: self._held(self.backend.state.array(variable)) for variable, tensor in program.state.items()}
        order = values.get(program.inputs[ROWS]) if ROWS in program.inputs else None
        for start in (start for starts in starts_of_runs for start in starts):
            if order is not None:
                values[program.inputs[ROWS]] = order[start : start + self._shape(program.inputs[ROWS])[0]]
            error = find_absent_row(program, values, self._rows, self._sizes.first_row, self.samples)
            if error is not None:
                return error
        return None

    def _held(self, buffer: DeviceArray) -> Array:
        return self.backend.fetched(buffer)

    def execute(self, pack: Sequence[tuple["CudaExecutable", Starts]]) -> None:
        """Queue steps of a pack, as its lead: executables with equal keys and their starts, the most steps first."""
        for executable, starts in pack:
            if executable._made.counts_steps:
                executable.backend.send(executable._starts[: len(starts)], starts)
                executable.backend.send(executable._number, _FIRST)
        other_backends = [executable.backend for executable, _ in pack[1:]]
        for backend in other_backends:
            self.backend.wait_for(backend)
        assert self._table is not None, "it is closed"
        self._table.fill([executable._row for executable, _ in pack])
        steps_done = 0
        for runs in range(len(pack), 0, -1):
            steps = len(pack[runs - 1][1])
            self._run_steps(steps - steps_done, runs)
            steps_done = steps
        for backend in other_backends:
            backend.wait_for(self.backend)

    def _run_steps(self, steps: int, runs: int) -> None:
        if self._measuring is not None:
            for number in range(steps):
                with self._queueing():
                    self._measuring.begin(self.backend.stream)
                    self._run_step(runs, number, steps)
                    self._measuring.end()
            return
        together = steps_in_graph(self.launches)
        # Neither other ranks nor the host are needed between the first launch and the last.
        if together > 1 and not self._messages and not self._on_host:
            ((part,),) = self._stages
            for _ in range(steps // together):
                self._queue((0, 0, runs, together), part.launches * together)
            steps %= together
        for number in range(steps):
            with self._queueing():
                self._run_step(runs, number, steps)

    def _queueing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._links is None or not self._queues_messages else self._links.queueing()

    def _run_step(self, runs: int, step: int, steps: int) -> None:
        """Queue a step of so many."""
        if step and self._further:
            self._queue((_FURTHER, 0, runs, 1), self._further)
        else:
            self._run_stages(runs)
        if step == steps - 1 and self._end:
            self._queue((_END, 0, runs, 1), self._end)

    def _run_stages(self, runs: int) -> None:
        for number, stage in enumerate(self._stages):
            for part_number, part_launches in enumerate(stage):
                self._queue((number, part_number, runs, 1), part_launches.launches)
                for message in part_launches.ready:
                    with self._measured_message():
                        self._messages[message].begin()  # sent while later launches compute
            # In the same order on all ranks: one without rows launches less, and would complete them in another.
            for message in sorted(message for part_launches in stage for message in part_launches.ready):
                with self._measured_message():
                    self._messages[message].finish()

    def _measured_message(self) -> AbstractContextManager[None]:
        return nullcontext() if self._measuring is None else self._measuring.message()

    def _queue(self, place: tuple[int, int, int, int], launches: Sequence[Launch]) -> None:
        """Queue launches between two messages as one graph, recorded once for each `place` (stage, part, ...)."""
        stream, table, runs = self.backend.stream, self._table, place[2]
        assert table is not None, "it is closed"

        def queue() -> None:
            for launch in launches:
                launch(table, runs)

        if self._measuring is not None:  # a graph has no events between its kernels
            for launch in launches:
                with self._measuring.launch(launch):
                    launch(table, runs)
            return
        of_host = (self._on_host and self._queues_messages) or any(map(_is_of_host, launches))
        if self.backend.graph and len(launches) > 1 and not of_host:
            if place not in table.graphs:
                table.graphs[place] = self.backend.gpu_record.captured(stream, queue)
            table.graphs[place].launch(stream)
        else:
            queue()

    def close(self) -> None:
        """Queue waiting steps, and free intermediate results and graphs that nobody shares; outputs stay readable."""
        self.backend.launch_waiting()
        self._table = None
        if not self.backend.joins_packs:  # else others' launches may still need them
            self._arena.free()  # now, as holders of the outputs may keep all of this alive


def _prepare(gpu: Gpu, kernel: Kernel, module: Any, index: str) -> Callable[..., None] | None:
    """Return the prepared call of a generated kernel; None if it has no blocks."""
    letters = "P" + index * 3 + "".join("q" if "long long" in kind else "i" for kind, _ in arguments_of(kernel))
    if not any(_blocks(kernel, None).values()):
        return None
    prepared = module.get_function(kernel.name)
    prepared.prepare(letters)
    if not gpu.allow_shared(prepared, kernel.dynamic):
        raise DeviceError(
            f"{gpu.name}: a kernel needs {kernel.dynamic:,} bytes of shared memory per block, more than this GPU has"
        )
    return partial(prepared.prepared_async_call, shared_size=kernel.dynamic)


def _arguments(kernel: Kernel) -> dict[str, int]:
    values: dict[str, int] = {}
    for function in kernel.functions:
        values |= {f"{argument.name}_{function.name}": argument.value for argument in function.arguments}
    return values


def _blocks(kernel: Kernel, most: int | None) -> dict[str, int]:
    """Return the blocks of each function as arguments; `most`: that walk over a function's tiles."""
    blocks = {function.name: blocks_of(function, kernel.threads) for function in kernel.functions}
    return {f"blocks_{name}": count if most is None else min(count, most) for name, count in blocks.items()}


def _launch(
    call: Callable[..., None], blocks: int, threads: int, stream: Any, values: Sequence[int], table: RunTable, runs: int
) -> None:
    call((blocks, runs), (threads, 1, 1), stream, table.rows.pointer, *values)


def _call_alone(call: Callable[[], None], table: RunTable, runs: int) -> None:
    assert runs == 1, "what no generated kernel computes is never part of a pack"
    call()


def _is_of_host(launch: Launch) -> bool:
    """Whether the host computes, which a graph cannot hold."""
    return isinstance(launch, HostLoop) or (isinstance(launch, partial) and isinstance(launch.args[0], HostLaunch))


def _cut(launches: list[Launch], ready: Sequence[tuple[int, int]], alone: Sequence[int]) -> list[_Launches]:
    """Cut launches where messages begin (`ready`, with the launches that complete them), and around the host's."""
    ends = sorted(
        {len(launches), *(count for _, count in ready), *alone, *(number - 1 for number in alone if number > 1)}
    )
    return [
        _Launches(launches[begin:end], [message for message, count in ready if count == end])
        for begin, end in pairwise([0, *ends])
    ]


class DeviceOutputs(Mapping[str, Array]):
    """Outputs of the last step, copied to the host when they are read."""

    def __init__(self, buffers: Mapping[str, DeviceArray], download: Callable[[DeviceArray], Array]) -> None:
        self._buffers, self._download = buffers, download

    def __getitem__(self, name: str) -> Array:
        return self._download(self._buffers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)
