"""Where the tensors of a program lie in memory: in one arena, those that are never alive together in the same place."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dptrain.program.lowering import ViewMap, lowering_of
from dptrain.program.mesh import ALL_REDUCE
from dptrain.program.messages import stages
from dptrain.program.program import Program
from dptrain.program.shapes import local, size
from dptrain.program.tensor import Array, Tensor

# A cache line: where arrays begin.
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Plan:
    """The memory of an executable.

    Attributes:
        size: of the arena in bytes.
        offsets: where in it tensors begin, by their `id`; those without a place there share memory with others.
        in_place: the state that a tensor is written over, by the tensor's `id`.
        alone: bytes that the same tensors would take if each had memory of its own.
    """

    size: int
    offsets: Mapping[int, int]
    in_place: Mapping[int, Tensor]
    alone: int


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that begins on a cache line, without which AVX-512 passes are a tenth slower."""
    kind = np.dtype(dtype)
    size = math.prod(map(int, shape)) * kind.itemsize
    if size > sys.maxsize - ALIGNMENT:  # NumPy would call it a ValueError
        raise MemoryError(f"unable to allocate {size} bytes for an array with shape {tuple(shape)}")
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def plan(program: Program, rows: int | None = None) -> Plan:
    """Return where tensors go.

    A tensor is alive from the op that makes it to the last one that reads it or a view of it; what comes out is alive
    to the end. Tensors take, the largest first, the lowest place that is free all their life.

    An update of the state is written over the state itself where nothing reads the old value any more, by an op that
    may (`Op.in_place`) and has the state for an input.

    Args:
        program: as it is executed, see `messages.stages`.
        rows: of a rank; None for all.
    """
    rows = program.rows if rows is None else rows
    order = [one for stage in stages(program) for one in stage.order]
    at = {id(one): number for number, one in enumerate(order)}
    roots = _roots(order)
    last: dict[int, int] = {}
    for one in order:
        for read in one.inputs:
            last[roots[id(read)]] = max(last.get(roots[id(read)], 0), at[id(one)])
    for one in program.results:
        last[roots[id(one)]] = len(order)
    in_place = _in_place(program, at, last)
    wanted = [one for one in order if roots[id(one)] == id(one) and one.op is not None and id(one) not in in_place]
    # A view that NumPy must copy (a reshape across strides) needs a place as well; it is not known here which do.
    wanted += [one for one in order if lowering_of(one) == ViewMap()]
    sizes = {id(one): _bytes(one, rows) for one in wanted}
    offsets, arena = arrange([(sizes[id(one)], at[id(one)], last.get(roots[id(one)], at[id(one)])) for one in wanted])
    places = {id(one): start for one, start in zip(wanted, offsets, strict=True)}
    return Plan(arena, places, in_place, sum(sizes.values()))


def arrange(lives: Sequence[tuple[int, int, int]], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Return where in an arena things begin that need (bytes, from one step, to another with it), and its size.

    The largest first, each takes the lowest place that is free all its life; each begins at a multiple of `alignment`.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin and end in memory, birth and death
    offsets = [0] * len(lives)
    for number in sorted(range(len(lives)), key=lambda n: (-lives[n][0], lives[n][1])):
        size, birth, death = lives[number]
        start, length = 0, -(-size // alignment) * alignment
        for begin, end, born, died in sorted(placed):
            if born <= death and birth <= died and begin < start + length and start < end:
                start = end
        offsets[number] = start
        placed.append((start, start + length, birth, death))
    return offsets, max((end for _, end, _, _ in placed), default=0)


def _bytes(tensor: Tensor, rows: int) -> int:
    return -(-size(local(tensor.shape, rows)) * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _roots(order: list[Tensor]) -> dict[int, int]:
    """Return whose memory each tensor has: its own, or that of what it is a view of."""
    roots: dict[int, int] = {}
    for one in order:
        shares = one.op is not None and (one.op.is_view or one.op is ALL_REDUCE)
        roots[id(one)] = roots[id(one.inputs[0])] if shares else id(one)
    return roots


def _in_place(program: Program, at: Mapping[int, int], last: Mapping[int, int]) -> dict[int, Tensor]:
    """Return the updates that can be written over the state."""
    found: dict[int, Tensor] = {}
    for variable, new in program.updates.items():
        old = program.state[variable]
        reads_it = new.op is not None and new.op.in_place and any(one is old for one in new.inputs)
        alike = new.shape == old.shape and new.dtype == old.dtype
        if reads_it and alike and last[id(old)] == at[id(new)]:
            found[id(new)] = old
    return found
