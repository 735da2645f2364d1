"""Steps of a pipeline: this rank's stage, microbatch by microbatch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, Executable
from dptrain.comm.base import HandOvers
from dptrain.comm.mesh import STAGE, MeshCommunicator
from dptrain.comm.parts import cut
from dptrain.program.codegen.memory import nbytes
from dptrain.program.pipeline.order import Turn
from dptrain.program.pipeline.schedule import Course
from dptrain.program.pipeline.send_recv import HandOver, Link, links_of
from dptrain.program.pipeline.subgraphs import FIRST, Piece, with_parts
from dptrain.program.program import ROWS, Program
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import OWN_PART, PlacedProgram
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Below this hand-overs take any tag that tells apart what is given; those above are theirs.
_TAGS = 1 << 14


class PipelineExecutable:
    """A step of one rank of a pipeline, for one number of rows; an `Executable`."""

    def __init__(
        self,
        course: Course,
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
        self._course, self._backend, self._arrays = course, backend, arrays
        self._comm = None if alone else comm
        self._mesh, self._results = comm, set(program.outputs)
        own_turns = [turn for turn in course.turns if turn.piece.stage == comm.coordinates[STAGE]]
        self._programs = {
            piece: with_parts(piece.program, parts).for_rows(program.rows)
            for piece in {turn.piece: None for turn in own_turns}
        }
        self._turns = own_turns
        self._cuts = cut(0, rows, course.microbatches)
        self._whole, self._first_row = (0, rows), first_row
        self._each = {piece for piece, count in _counted(course.turns).items() if count > 1}
        self._links, self._stage = links_of(course.turns), comm.coordinates[STAGE]
        self._takes: dict[Turn, list[tuple[int, HandOver]]] = {turn: [] for turn in own_turns}
        for link in self._links:
            for item in link.items if link.target == self._stage else []:
                self._takes[item.taker].append((link.source, item))
        most = -(-program.rows // comm.replicas)  # as many on each replica: rings of slots are alike
        self._sizes = [self._bytes(link, most, -(-most // course.microbatches)) for link in self._links]
        self._read = {name for piece in self._programs for name in piece.program.inputs}
        self._on_host, self._on_device = _OnHost(backend), _OnDevice(backend)
        self._prepared: dict[tuple[Piece, int, int], tuple[Executable, dict[str, Buffer]]] = {}
        self._moments = {piece: _reads_first_row(program_) for piece, program_ in self._programs.items()}
        for turn in own_turns:
            self._prepare(turn)
        self.nbytes = self._prepared_bytes()
        self._sources: dict[str, Mapping[str, Array]] = {}
        self.outputs: Mapping[str, Array] = _Results(self._sources)

    def _prepared_bytes(self) -> int:
        return sum(executable.nbytes for executable, _ in self._prepared.values()) + self._on_device.nbytes

    def _bytes(self, link: Link, rows: int, rows_of_each: int) -> int:
        """Return the bytes of the largest item of a link."""
        return max(
            nbytes(
                item.giver.piece.program.outputs[item.name], rows_of_each if item.giver.piece in self._each else rows
            )
            for item in link.items
        )

    def _rows(self, turn: Turn) -> tuple[int, int]:
        """Return first and last row, in the replica's batch, of a turn."""
        return self._cuts[turn.microbatch] if turn.piece in self._each else self._whole

    def _prepare(self, turn: Turn) -> tuple[Executable, dict[str, Buffer]]:
        start, stop = self._rows(turn)
        first = self._first_row + start if self._moments[turn.piece] else 0
        key = turn.piece, stop - start, first
        if key not in self._prepared:
            program = self._programs[turn.piece]
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
            hand_overs = self._backend.hand_overs(self._mesh, self._links, self._sizes, self._course.ticks)
            values = self._on_device if hand_overs.on_device else self._on_host
            values_by_microbatch: list[dict[str, Any]] = [{} for _ in self._cuts]
            for turn in self._turns:
                self._execute(turn, start, values_by_microbatch, hand_overs, values)
            hand_overs.finish()
        self.nbytes = self._prepared_bytes()

    def _execute(
        self,
        turn: Turn,
        start: int,
        values_by_microbatch: list[dict[str, Any]],
        hand_overs: HandOvers,
        values: "_Values",
    ) -> None:
        piece, (begin, _), stored = turn.piece, self._rows(turn), values_by_microbatch[turn.microbatch]
        for source, item in self._takes[turn]:
            first, last = self._rows(item.giver)
            like = item.giver.piece.program.outputs[item.name]
            received = values_by_microbatch[item.microbatch][item.name] = values.empty(
                local(like.shape, last - first), like.dtype
            )
            hand_overs.take(source, received, self._tag(item.microbatch, item.name), turn.tick)
        executable, buffers = self._prepare(turn)
        for name, buffer in buffers.items():
            if name == FIRST:
                values.tell(buffer, turn.microbatch == 0)
            else:
                values.load(buffer, stored[name])
        executable.run([start + begin] if ROWS in piece.program.inputs else [0])
        outputs = values.outputs_of(executable)
        for name, stages in piece.gives.items():
            for stage in stages:
                hand_overs.give(stage, outputs[name], self._tag(turn.microbatch, name))
        for name in outputs:
            if name in self._read and name not in piece.drops:
                stored[name] = values.keep(outputs[name])
        for name in piece.drops:
            if name in stored:
                values.drop(stored.pop(name))
        results = [name for name in piece.program.outputs if name in self._results]
        if results:
            self._sources |= dict.fromkeys(results, values.results(executable, outputs))

    def _tag(self, microbatch: int, name: str) -> int:
        tags = self._course.tags
        return (microbatch * len(tags) + tags[name]) % _TAGS

    def close(self) -> None:
        """Release the prepared pieces."""
        for executable, _ in self._prepared.values():
            executable.close()
        self._on_device.clear()


def _counted(turns: Sequence[Turn]) -> dict[Piece, int]:
    counts: dict[Piece, int] = {}
    for turn in turns:
        counts[turn.piece] = counts.get(turn.piece, 0) + 1
    return counts


def _reads_first_row(program: Program) -> bool:
    """Return whether a program depends on the rows' numbers in the global batch."""
    return any(tensor.op is not None and (tensor.op.by_row or tensor.op is OWN_PART) for tensor in program.tensors)


class _Values(ABC):
    """Storage of the tensors that a stage's pieces pass to each other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate a value."""

    @abstractmethod
    def load(self, buffer: Buffer, value: Any) -> None:
        """Copy a value into an input of a piece."""

    @abstractmethod
    def tell(self, buffer: Buffer, truth: bool) -> None:
        """Write a truth value into an input of a piece."""

    @abstractmethod
    def outputs_of(self, executable: Executable) -> Mapping[str, Any]:
        """Return a piece's contiguous outputs, valid until it runs again unless kept."""

    @abstractmethod
    def keep(self, value: Any) -> Any:
        """Return a value that later pieces can read."""

    @abstractmethod
    def drop(self, value: Any) -> None:
        """Free a value for reuse."""

    @abstractmethod
    def results(self, executable: Executable, outputs: Mapping[str, Any]) -> Mapping[str, Array]:
        """Return results of a piece that runs once a step, on the host."""


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
        """Release the memory."""
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
