"""Where tensors lie in memory: over the state that they replace, or in an arena, where they share places over time.

What is planned are the kernels of a device. Its backend says what each of them reads and writes (`Access`); the rules
are the same for all backends.
"""

import sys
import threading
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.program.shapes import local, size
from dptrain.program.tensor import Array, Tensor

# A cache line: where arrays begin.
ALIGNMENT = 64


def _reads_elsewhere(new: Tensor, old: Tensor) -> bool:
    return False


@dataclass(eq=False)
class Access:
    """What a kernel does with memory.

    Attributes:
        reads: tensors that it reads in memory.
        writes: tensors that it leaves there; also what it needs for itself.
        stage: kernels of later stages run later.
        after: those of its stage that run before it.
        replaces: whether a new value that it writes may lie over an old one that it reads: whether each element is read
            before any thread writes there.
    """

    reads: Set[Tensor] = frozenset()
    writes: Collection[Any] = ()
    stage: int = 0
    after: set["Access"] = field(default_factory=set)
    replaces: Callable[[Tensor, Tensor], bool] = _reads_elsewhere

    def waits_for(self, other: "Access") -> bool:
        """Whether another kernel has to run before it."""
        seen, rest = set[Access](), [self]
        while rest:
            one = rest.pop()
            if one is other:
                return True
            if one not in seen:
                seen.add(one)
                rest += one.after
        return other.stage < self.stage


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of intermediate results.

    Attributes:
        size: of the arena in bytes.
        offsets: where in it things begin.
        alone: bytes that they would take if each had memory of its own.
    """

    size: int
    offsets: Mapping[Any, int]
    alone: int


def in_place(updates: Iterable[tuple[Tensor, Tensor]], kernels: Iterable[Access]) -> dict[Tensor, Tensor]:
    """Return the state that new values are written over, by the new value.

    A new value can be written over the old one if nothing reads that later: all other kernels that read it run before
    the one that makes the new value, or can be made to; and that one, if it reads it too, does so element by element.

    Args:
        updates: pairs of a variable's new value and its old one.
        kernels: of the program; one that writes over a value now runs `after` those that read it.
    """
    kernels = list(kernels)
    makers = {one: kernel for kernel in kernels for one in kernel.writes}
    reading: dict[Tensor, list[Access]] = {}
    for kernel in kernels:
        for one in kernel.reads:
            reading.setdefault(one, []).append(kernel)
    awaited = {one for kernel in kernels for one in kernel.after}  # most makers of new values are not
    found: dict[Tensor, Tensor] = {}
    for new, old in updates:
        maker = makers.get(new)
        if maker is None or new in found or new.dtype != old.dtype:
            continue
        readers = [one for one in reading.get(old, []) if one is not maker]
        waits = any(maker.stage < one.stage or (maker in awaited and one.waits_for(maker)) for one in readers)
        if waits or (old in maker.reads and not maker.replaces(new, old)):
            continue
        maker.after |= {one for one in readers if one.stage == maker.stage}
        awaited |= maker.after
        found[new] = old
    return found


def plan(kernels: Sequence[Access], sizes: Mapping[Any, int], alignment: int = ALIGNMENT) -> MemoryPlan:
    """Return where things lie in an arena.

    Each is alive from the first kernel that names it to the last one. The largest first, each takes the lowest place
    that is free all its life.

    Args:
        kernels: in the order in which they are executed.
        sizes: bytes of what is to lie there; all else that kernels name lies elsewhere.
        alignment: of which each place is a multiple.
    """
    births: dict[Any, int] = {}
    deaths: dict[Any, int] = {}
    for number, kernel in enumerate(kernels):
        for one in (*kernel.reads, *kernel.writes):
            if one in sizes:
                births.setdefault(one, number)
                deaths[one] = number
    offsets: dict[Any, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # in order: begin and end in memory, birth and death
    for one in sorted(births, key=lambda one: (-sizes[one], births[one])):
        start, length = 0, -(-sizes[one] // alignment) * alignment
        for begin, end, born, died in placed:
            if begin >= start + length:
                break
            if born <= deaths[one] and births[one] <= died and start < end:
                start = end
        offsets[one] = start
        insort(placed, (start, start + length, births[one], deaths[one]))
    alone = in_a_row([sizes[one] for one in births], alignment)[-1]
    return MemoryPlan(max((end for _, end, _, _ in placed), default=0), offsets, alone)


class Arena:
    """Memory on the host in which programs that run one after the other keep their intermediate results.

    Nothing in it outlives a run, so it is as large as the largest of them needs: those for a smaller last batch and for
    validation take none of their own. What runs within another's run, or beside it in another thread, has other memory.
    """

    # Of memory that nobody uses, what is kept besides one piece.
    _KEPT_BYTES = 64 << 20

    def __init__(self) -> None:
        self._size = 0
        self._lock = threading.Lock()
        self._free: list[Array] = []  # the one that was used last at the end

    def reserve(self, size: int) -> None:
        """Have so many bytes, for programs to come.

        Raises:
            MemoryError: there are not as many.
        """
        with self._lock:
            if size > self._size:
                self._free = [aligned((size,), np.uint8)]
                self._size = size

    @contextmanager
    def lent(self, size: int, wanted: Array | None = None) -> Iterator[Array]:
        """Lend at least `size` bytes for one run.

        Args:
            size: as above.
            wanted: what the program knows already, where that is free.

        Raises:
            MemoryError: there are not as many.
        """
        self.reserve(size)
        with self._lock:
            number = next((number for number, one in enumerate(self._free) if one is wanted), len(self._free) - 1)
            memory = self._free.pop(number) if self._free else aligned((self._size,), np.uint8)
        try:
            yield memory
        finally:
            with self._lock:
                if len(memory) == self._size:  # nobody has needed more meanwhile
                    self._free.append(memory)
                    if self._size * len(self._free) > self._KEPT_BYTES and len(self._free) > 1:
                        del self._free[0]


def in_a_row(sizes: Iterable[int], alignment: int = 1) -> list[int]:
    """Return where things of these sizes begin, one behind the other at multiples of `alignment`, and the end."""
    return list(accumulate((-(-one // alignment) * alignment for one in sizes), initial=0))


def nbytes(tensor: Tensor, rows: int) -> int:
    """Return the bytes of a tensor on a rank with so many rows."""
    return size(local(tensor.shape, rows)) * tensor.dtype.itemsize


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that begins on a cache line, without which AVX-512 passes are a tenth slower."""
    kind = np.dtype(dtype)
    length = size(shape) * kind.itemsize
    if length > sys.maxsize - ALIGNMENT:  # NumPy would call it a ValueError
        raise MemoryError(f"unable to allocate {length} bytes for an array with shape {tuple(shape)}")
    memory = np.empty(length + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + length].view(kind).reshape(shape)
