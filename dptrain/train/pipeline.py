"""Steps of a pipeline: this rank's stage of the layers, for one microbatch after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, Executable
from dptrain.comm.base import HandOvers
from dptrain.comm.mesh import STAGE, MeshCommunicator
from dptrain.comm.parts import cut
from dptrain.program.course import Course
from dptrain.program.hand_overs import HandOver, Link, links_of
from dptrain.program.memory import nbytes
from dptrain.program.mesh import OWN_PART, PlacedProgram
from dptrain.program.pieces import FIRST, Piece, with_parts
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule import Turn
from dptrain.program.shapes import local
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Below this hand-overs take any tag that tells apart what is given; those above are theirs.
_TAGS = 1 << 14


class PipelineExecutable:
    """A step of one rank of a pipeline, for one number of rows; an `Executable`.

    Args:
        course: what all stages do.
        program: that they execute.
        backend: the device.
        arrays: as `Backend.executable`.
        rows: of the global batch that this rank's replica has.
        first_row: the global number of the first of them.
        comm: the ranks.
        alone: replicas do not meet.
        parts: of variables that one stage has, what this rank has of them.

    Attributes:
        outputs: what the last step made, by name.
        nbytes: the device's memory that prepared pieces take.
    """

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
        own = [one for one in course.turns if one.piece.stage == comm.coordinates[STAGE]]
        self._programs = {
            piece: with_parts(piece.program, parts).for_rows(program.rows) for piece in {one.piece: None for one in own}
        }
        self._turns = own
        self._cuts = cut(0, rows, course.microbatches)
        self._whole, self._first_row = (0, rows), first_row
        self._each = {piece for piece, count in _counted(course.turns).items() if count > 1}
        self._links, self._stage = links_of(course.turns), comm.coordinates[STAGE]
        self._takes: dict[Turn, list[tuple[int, HandOver]]] = {turn: [] for turn in own}
        for link in self._links:
            for item in link.items if link.target == self._stage else []:
                self._takes[item.taker].append((link.source, item))
        most = -(-program.rows // comm.replicas)  # as many on each replica: rings of slots are alike
        self._sizes = [self._bytes(link, most, -(-most // course.microbatches)) for link in self._links]
        self._read = {name for piece in self._programs for name in piece.program.inputs}
        self._on_host, self._on_device = _OnHost(backend), _OnDevice(backend)
        self._prepared: dict[tuple[Piece, int, int], tuple[Executable, dict[str, Buffer]]] = {}
        self._moments = {piece: _reads_first_row(one) for piece, one in self._programs.items()}
        for turn in own:
            self._prepare(turn)
        self.nbytes = self._prepared_bytes()
        self._sources: dict[str, Mapping[str, Array]] = {}
        self.outputs: Mapping[str, Array] = _Results(self._sources)

    def _prepared_bytes(self) -> int:
        return sum(one.nbytes for one, _ in self._prepared.values()) + self._on_device.nbytes

    def _bytes(self, link: Link, rows: int, rows_of_each: int) -> int:
        """Return the bytes of the largest item of a link."""
        return max(
            nbytes(one.giver.piece.program.outputs[one.name], rows_of_each if one.giver.piece in self._each else rows)
            for one in link.items
        )

    def _rows(self, turn: Turn) -> tuple[int, int]:
        """Return from where to where the rows of the replica's batch are that a turn is for."""
        return self._cuts[turn.microbatch] if turn.piece in self._each else self._whole

    def _prepare(self, turn: Turn) -> tuple[Executable, dict[str, Buffer]]:
        start, stop = self._rows(turn)
        first = self._first_row + start if self._moments[turn.piece] else 0
        key = turn.piece, stop - start, first
        if key not in self._prepared:
            program = self._programs[turn.piece]
            own = {
                name: self._backend.empty(local(one.shape, stop - start), one.dtype)
                for name, one in program.inputs.items()
                if name not in self._arrays
            }
            arrays = {name: own[name] if name in own else self._arrays[name] for name in program.inputs}
            place: Any = {"rows": stop - start, "first_row": first, "comm": self._comm}
            self._prepared[key] = self._backend.executable(program, arrays, **place), own
        return self._prepared[key]

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute it as often as there are starts. Collective.

        Args:
            starts: where in the input `program.ROWS` each step's rows begin.
        """
        for start in starts:
            hand_overs = self._backend.hand_overs(self._mesh, self._links, self._sizes, self._course.ticks)
            values = self._on_device if hand_overs.on_device else self._on_host
            held: list[dict[str, Any]] = [{} for _ in self._cuts]
            for turn in self._turns:
                self._execute(turn, start, held, hand_overs, values)
            hand_overs.finish()
        self.nbytes = self._prepared_bytes()

    def _execute(
        self, turn: Turn, start: int, held: list[dict[str, Any]], hand_overs: HandOvers, values: "_Values"
    ) -> None:
        piece, (begin, _), own_held = turn.piece, self._rows(turn), held[turn.microbatch]
        for source, item in self._takes[turn]:
            first, last = self._rows(item.giver)
            like = item.giver.piece.program.outputs[item.name]
            taken = held[item.microbatch][item.name] = values.empty(local(like.shape, last - first), like.dtype)
            hand_overs.take(source, taken, self._tag(item.microbatch, item.name), turn.tick)
        executable, own = self._prepare(turn)
        for name, buffer in own.items():
            if name == FIRST:
                values.tell(buffer, turn.microbatch == 0)
            else:
                values.load(buffer, own_held[name])
        executable.run([start + begin] if ROWS in piece.program.inputs else [0])
        found = values.made(executable)
        for name, stages in piece.gives.items():
            for stage in stages:
                hand_overs.give(stage, found[name], self._tag(turn.microbatch, name))
        for name in found:
            if name in self._read and name not in piece.drops:
                own_held[name] = values.keep(found[name])
        for name in piece.drops:
            if name in own_held:
                values.drop(own_held.pop(name))
        results = [name for name in piece.program.outputs if name in self._results]
        if results:
            self._sources |= dict.fromkeys(results, values.results(executable, found))

    def _tag(self, microbatch: int, name: str) -> int:
        tags = self._course.tags
        return (microbatch * len(tags) + tags[name]) % _TAGS

    def close(self) -> None:
        """Give back what the device's driver holds of the pieces."""
        for one, _ in self._prepared.values():
            one.close()
        self._on_device.clear()


def _counted(turns: Sequence[Turn]) -> dict[Piece, int]:
    found: dict[Piece, int] = {}
    for one in turns:
        found[one.piece] = found.get(one.piece, 0) + 1
    return found


def _reads_first_row(program: Program) -> bool:
    """Whether it depends on the numbers of the rows in the global batch."""
    return any(one.op is not None and (one.op.by_row or one.op is OWN_PART) for one in program.tensors)


class _Values(ABC):
    """Where tensors are that pieces of a stage hand to each other.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return memory for one."""

    @abstractmethod
    def load(self, buffer: Buffer, value: Any) -> None:
        """Let an input of a piece be one."""

    @abstractmethod
    def tell(self, buffer: Buffer, truth: bool) -> None:
        """Let an input of a piece be a truth value."""

    @abstractmethod
    def made(self, executable: Executable) -> Mapping[str, Any]:
        """Return what a piece has just made, contiguous; until it is executed again, for what is not kept."""

    @abstractmethod
    def keep(self, value: Any) -> Any:
        """Return what a piece has just made, for later pieces."""

    @abstractmethod
    def drop(self, value: Any) -> None:
        """Let the memory of one be used for another."""

    @abstractmethod
    def results(self, executable: Executable, found: Mapping[str, Any]) -> Mapping[str, Array]:
        """Return what a piece that is executed once a step has made, on the host; `found` as `made` returned it."""


class _OnHost(_Values):
    """On the host: copied there when they are made, and back where they are read."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def load(self, buffer: Buffer, value: Array) -> None:
        self._backend.write(buffer, value)

    def tell(self, buffer: Buffer, truth: bool) -> None:
        self._backend.write(buffer, np.array(truth))

    def made(self, executable: Executable) -> Mapping[str, Array]:
        return {name: np.asarray(one, order="C") for name, one in executable.outputs.items()}

    def keep(self, value: Array) -> Array:
        return value

    def drop(self, value: Array) -> None:
        """Python does."""

    def results(self, executable: Executable, found: Mapping[str, Array]) -> Mapping[str, Array]:
        return found


class _OnDevice(_Values):
    """On the device, whose host waits for none of them. Memory is used again by what is queued later.

    Attributes:
        nbytes: that it has.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._free: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Buffer]] = {}
        self._truths: dict[bool, Buffer] = {}
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        free = self._free.setdefault((shape, dtype), [])
        if free:
            return free.pop()
        found = self._backend.empty(shape, dtype, "microbatches under way")
        self.nbytes += int(found.nbytes)
        return found

    def clear(self) -> None:
        """Give the memory back."""
        self._free.clear()
        self._truths.clear()
        self.nbytes = 0

    def load(self, buffer: Buffer, value: Buffer) -> None:
        self._backend.copy(buffer, value)

    def tell(self, buffer: Buffer, truth: bool) -> None:
        if truth not in self._truths:
            self._truths[truth] = self._backend.upload(np.array(truth))
        self._backend.copy(buffer, self._truths[truth])

    def made(self, executable: Executable) -> Mapping[str, Buffer]:
        return self._backend.made(executable)

    def keep(self, value: Buffer) -> Buffer:
        found = self.empty(value.shape, value.dtype)
        self._backend.copy(found, value)
        return found

    def drop(self, value: Buffer) -> None:
        self._free[value.shape, value.dtype].append(value)

    def results(self, executable: Executable, found: Mapping[str, Buffer]) -> Mapping[str, Array]:
        return executable.outputs


class _Results(Mapping[str, Array]):
    """What a step has made: who reads one waits for it.

    Args:
        sources: what has each of them, by name.
    """

    def __init__(self, sources: Mapping[str, Mapping[str, Array]]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> Array:
        return self._sources[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
