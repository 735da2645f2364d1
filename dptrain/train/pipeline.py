"""Steps of a pipeline: this rank's stage, microbatch by microbatch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, Executable
from dptrain.comm.base import PointToPoint
from dptrain.comm.mesh import STAGE, MeshCommunicator
from dptrain.comm.parts import cut
from dptrain.program.codegen.memory import nbytes
from dptrain.program.pipeline.order import Task
from dptrain.program.pipeline.schedule import PipelineSchedule
from dptrain.program.pipeline.send_recv import Channel, SendRecv, channels_of
from dptrain.program.pipeline.subgraphs import FIRST, Subgraph, with_parts
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import OWN_PART, PlacedProgram
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Tags below this are free for transfers; those above belong to point-to-point itself.
_TAGS = 1 << 14


class PipelineExecutable:
    """A step of one rank of a pipeline, for one number of rows; an `Executable`."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        program: PlacedProgram,
        backend: Backend,
        arrays: Mapping[str, Buffer],
        *,
        rows: int,
        first_row: int,
        comm: MeshCommunicator,
        alone: bool,
        parts: Mapping[Variable, Variable],
    ) -> None:
        self._schedule, self._backend, self._arrays = schedule, backend, arrays
        self._comm = None if alone else comm
        self._mesh, self._results = comm, set(program.outputs)
        own_tasks = [task for task in schedule.tasks if task.subgraph.stage == comm.coordinates[STAGE]]
        self._programs = {
            subgraph: with_parts(subgraph.program, parts).for_rows(program.rows)
            for subgraph in {task.subgraph: None for task in own_tasks}
        }
        self._tasks = own_tasks
        self._cuts = cut(0, rows, schedule.microbatches)
        self._whole, self._first_row = (0, rows), first_row
        self._each = {subgraph for subgraph, count in _counted(schedule.tasks).items() if count > 1}
        self._channels, self._stage = channels_of(schedule.tasks), comm.coordinates[STAGE]
        self._receives: dict[Task, list[tuple[int, SendRecv]]] = {task: [] for task in own_tasks}
        for channel in self._channels:
            for item in channel.items if channel.target == self._stage else []:
                self._receives[item.receiver].append((channel.source, item))
        most = -(-program.rows // comm.replicas)  # as many on each replica: rings of slots are alike
        self._sizes = [self._bytes(channel, most, -(-most // schedule.microbatches)) for channel in self._channels]
        self._read = {name for subgraph in self._programs for name in subgraph.program.inputs}
        self._on_host, self._on_device = _OnHost(backend), _OnDevice(backend)
        self._prepared: dict[tuple[Subgraph, int, int], tuple[Executable, dict[str, Buffer]]] = {}
        self._moments = {subgraph: _reads_first_row(program_) for subgraph, program_ in self._programs.items()}
        for task in own_tasks:
            self._prepare(task)
        self.nbytes = self._prepared_bytes()
        self.samples: Sequence[int] | Array | None = None
        self._sources: dict[str, Mapping[str, Array]] = {}
        self.outputs: Mapping[str, Array] = _Results(self._sources)

    def _prepared_bytes(self) -> int:
        return sum(executable.nbytes for executable, _ in self._prepared.values()) + self._on_device.nbytes

    def _bytes(self, channel: Channel, rows: int, rows_of_each: int) -> int:
        """Return the bytes of the largest item of a channel."""
        return max(
            nbytes(
                item.sender.subgraph.program.outputs[item.name],
                rows_of_each if item.sender.subgraph in self._each else rows,
            )
            for item in channel.items
        )

    def _rows(self, task: Task) -> tuple[int, int]:
        return self._cuts[task.microbatch] if task.subgraph in self._each else self._whole

    def _prepare(self, task: Task) -> tuple[Executable, dict[str, Buffer]]:
        start, stop = self._rows(task)
        first = self._first_row + start if self._moments[task.subgraph] else 0
        key = task.subgraph, stop - start, first
        if key not in self._prepared:
            program = self._programs[task.subgraph]
            buffers = {
                name: self._backend.empty(local(tensor.shape, stop - start), tensor.dtype)
                for name, tensor in program.inputs.items()
                if name not in self._arrays
            }
            arrays = {name: buffers[name] if name in buffers else self._arrays[name] for name in program.inputs}
            place: Any = {"rows": stop - start, "first_row": first, "comm": self._comm}
            self._prepared[key] = self._backend.executable(program, arrays, **place), buffers
        return self._prepared[key]

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute the step once for each start row in the input `program.ROWS`. Collective."""
        for start in starts:
            p2p = self._backend.point_to_point(self._mesh, self._channels, self._sizes, self._schedule.ticks)
            values = self._on_device if p2p.on_device else self._on_host
            values_by_microbatch: list[dict[str, Any]] = [{} for _ in self._cuts]
            for task in self._tasks:
                self._execute(task, start, values_by_microbatch, p2p, values)
            p2p.finish()
        self.nbytes = self._prepared_bytes()

    def _execute(
        self,
        task: Task,
        start: int,
        values_by_microbatch: list[dict[str, Any]],
        p2p: PointToPoint,
        values: "_Values",
    ) -> None:
        subgraph, (begin, _), stored = task.subgraph, self._rows(task), values_by_microbatch[task.microbatch]
        for source, item in self._receives[task]:
            first, last = self._rows(item.sender)
            like = item.sender.subgraph.program.outputs[item.name]
            received = values_by_microbatch[item.microbatch][item.name] = values.empty(
                local(like.shape, last - first), like.dtype
            )
            p2p.receive(source, received, self._tag(item.microbatch, item.name), task.tick)
        executable, buffers = self._prepare(task)
        for name, buffer in buffers.items():
            if name == FIRST:
                values.tell(buffer, task.microbatch == 0)
            else:
                values.load(buffer, stored[name])
        executable.run([start + begin] if ROWS in subgraph.program.inputs else [0])
        outputs = values.outputs_of(executable)
        for name, stages in subgraph.sends.items():
            for stage in stages:
                p2p.send(stage, outputs[name], self._tag(task.microbatch, name))
        for name in outputs:
            if name in self._read and name not in subgraph.frees:
                stored[name] = values.keep(outputs[name])
        for name in subgraph.frees:
            if name in stored:
                values.drop(stored.pop(name))
        results = [name for name in subgraph.program.outputs if name in self._results]
        if results:
            self._sources |= dict.fromkeys(results, values.results(executable, outputs))

    def _tag(self, microbatch: int, name: str) -> int:
        tags = self._schedule.tags
        return (microbatch * len(tags) + tags[name]) % _TAGS

    def close(self) -> None:
        """Release the prepared subgraphs."""
        for executable, _ in self._prepared.values():
            executable.close()
        self._on_device.clear()


def _counted(tasks: Sequence[Task]) -> dict[Subgraph, int]:
    counts: dict[Subgraph, int] = {}
    for task in tasks:
        counts[task.subgraph] = counts.get(task.subgraph, 0) + 1
    return counts


def _reads_first_row(program: Program) -> bool:
    return any(tensor.op is not None and (tensor.op.by_row or tensor.op is OWN_PART) for tensor in program.tensors)


class _Values(ABC):
    """Storage of the tensors that a stage's subgraphs pass to each other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate a value."""

    @abstractmethod
    def load(self, buffer: Buffer, value: Any) -> None:
        """Copy a value into an input of a subgraph."""

    @abstractmethod
    def tell(self, buffer: Buffer, truth: bool) -> None:
        """Write a truth value into an input of a subgraph."""

    @abstractmethod
    def outputs_of(self, executable: Executable) -> Mapping[str, Any]:
        """Return a subgraph's contiguous outputs, valid until it runs again unless kept."""

    @abstractmethod
    def keep(self, value: Any) -> Any:
        """Return a value that later subgraphs can read."""

    @abstractmethod
    def drop(self, value: Any) -> None:
        """Free a value for reuse."""

    @abstractmethod
    def results(self, executable: Executable, outputs: Mapping[str, Any]) -> Mapping[str, Array]:
        """Return results of a subgraph that runs once a step, on the host."""


class _OnHost(_Values):
    """On the host: copied there when made, and back when read."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def load(self, buffer: Buffer, value: Array) -> None:
        self._backend.write(buffer, value)

    def tell(self, buffer: Buffer, truth: bool) -> None:
        self._backend.write(buffer, np.array(truth))

    def outputs_of(self, executable: Executable) -> Mapping[str, Array]:
        return {name: np.asarray(output, order="C") for name, output in executable.outputs.items()}

    def keep(self, value: Array) -> Array:
        return value

    def drop(self, value: Array) -> None:
        """Left to Python."""

    def results(self, executable: Executable, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return outputs


class _OnDevice(_Values):
    """On the device, without waiting for it; later work in the queue reuses the memory."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._free: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Buffer]] = {}
        self._truths: dict[bool, Buffer] = {}
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        free = self._free.setdefault((shape, dtype), [])
        if free:
            return free.pop()
        buffer = self._backend.empty(shape, dtype, "microbatches under way")
        self.nbytes += int(buffer.nbytes)
        return buffer

    def clear(self) -> None:
        self._free.clear()
        self._truths.clear()
        self.nbytes = 0

    def load(self, buffer: Buffer, value: Buffer) -> None:
        self._backend.copy(buffer, value)

    def tell(self, buffer: Buffer, truth: bool) -> None:
        if truth not in self._truths:
            self._truths[truth] = self._backend.upload(np.array(truth))
        self._backend.copy(buffer, self._truths[truth])

    def outputs_of(self, executable: Executable) -> Mapping[str, Buffer]:
        return self._backend.made(executable)

    def keep(self, value: Buffer) -> Buffer:
        copy = self.empty(value.shape, value.dtype)
        self._backend.copy(copy, value)
        return copy

    def drop(self, value: Buffer) -> None:
        self._free[value.shape, value.dtype].append(value)

    def results(self, executable: Executable, outputs: Mapping[str, Buffer]) -> Mapping[str, Array]:
        return executable.outputs


class _Results(Mapping[str, Array]):
    """Outputs of a step by name; reading one waits for it."""

    def __init__(self, sources: Mapping[str, Mapping[str, Array]]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> Array:
        return self._sources[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
