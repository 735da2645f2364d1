"""Steps of a pipeline: this rank's stage of the layers, for one microbatch after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, Executable
from dptrain.comm.base import HandOvers
from dptrain.comm.mesh import STAGE, MeshCommunicator
from dptrain.comm.parts import cut
from dptrain.program.course import Course
from dptrain.program.mesh import OWN_PART, PlacedProgram
from dptrain.program.pieces import FIRST, Piece, with_parts
from dptrain.program.program import ROWS, Program
from dptrain.program.schedule import Turn
from dptrain.program.shapes import local
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Below this MPI takes any tag.
_TAGS = 1 << 15


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
        self._pipeline, self._results = comm.along(STAGE), set(program.outputs)
        own = [one for one in course.turns if one.piece.stage == comm.coordinates[STAGE]]
        self._programs = {
            piece: with_parts(piece.program, parts).for_rows(program.rows) for piece in {one.piece: None for one in own}
        }
        self._turns = own
        self._cuts = cut(0, rows, course.microbatches)
        self._whole, self._first_row = (0, rows), first_row
        self._each = {piece for piece, count in _counted(own).items() if count > 1}
        self._prepared: dict[tuple[Piece, int, int], tuple[Executable, dict[str, Buffer]]] = {}
        self._moments = {piece: _reads_first_row(one) for piece, one in self._programs.items()}
        for turn in own:
            self._prepare(turn)
        self.nbytes = sum(one.nbytes for one, _ in self._prepared.values())
        self.outputs: Mapping[str, Array] = {}

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
            hand_overs = self._pipeline.hand_overs(self._course.ticks)
            held: dict[int, dict[str, Array]] = {}
            for turn in self._turns:
                self._execute(turn, start, held.setdefault(turn.microbatch, {}), hand_overs)
            hand_overs.finish()

    def _execute(self, turn: Turn, start: int, held: dict[str, Array], hand_overs: HandOvers) -> None:
        piece, (begin, stop), tags = turn.piece, self._rows(turn), self._course.tags

        def tag(name: str) -> int:
            return (turn.microbatch * len(tags) + tags[name]) % _TAGS

        for name, source in piece.gets.items():
            like = piece.program.inputs[name]
            held[name] = np.empty(local(like.shape, stop - begin), like.dtype)
            hand_overs.take(source, held[name], tag(name), turn.tick)
        executable, own = self._prepare(turn)
        for name, buffer in own.items():
            self._backend.write(buffer, np.array(turn.microbatch == 0) if name == FIRST else held[name])
        executable.run([start + begin] if ROWS in piece.program.inputs else [0])
        found = executable.outputs
        for name, stages in piece.gives.items():
            for stage in stages:
                hand_overs.give(stage, np.ascontiguousarray(found[name]), tag(name))
        held |= found
        for name in piece.drops:
            held.pop(name, None)
        self.outputs = {**self.outputs, **{name: one for name, one in found.items() if name in self._results}}

    def close(self) -> None:
        """Give back what the device's driver holds of the pieces."""
        for one, _ in self._prepared.values():
            one.close()


def _counted(turns: Sequence[Turn]) -> dict[Piece, int]:
    found: dict[Piece, int] = {}
    for one in turns:
        found[one.piece] = found.get(one.piece, 0) + 1
    return found


def _reads_first_row(program: Program) -> bool:
    """Whether it depends on the numbers of the rows in the global batch."""
    return any(one.op is not None and (one.op.by_row or one.op is OWN_PART) for one in program.tensors)
