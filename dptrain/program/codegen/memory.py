"""Plans memory: new state overwrites old state, and intermediate results share an arena over time.

A backend says which tensors each of its kernels reads and writes (`Access`); the rules are the same for all backends.
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

# Alignment of arrays: a cache line.
ALIGNMENT = 64


def _reads_elsewhere(new: Tensor, old: Tensor) -> bool:
    return False


@dataclass(eq=False)
class Access:
    """Memory that a kernel uses: tensors that it loads and stores, scratch memory included.

    Kernels of later stages, and of its stage all in whose `after` it is, run later. `replaces` says whether a new value
    may overwrite an old one: each element is read before any thread writes it.
    """

    reads: Set[Tensor] = frozenset()
    writes: Collection[Any] = ()
    stage: int = 0
    after: set["Access"] = field(default_factory=set)
    replaces: Callable[[Tensor, Tensor], bool] = _reads_elsewhere

    def waits_for(self, kernel: "Access") -> bool:
        """Whether another kernel must run before this one."""
        visited, stack = set[Access](), [self]
        while stack:
            current = stack.pop()
            if current is kernel:
                return True
            if current not in visited:
                visited.add(current)
                stack += current.after
        return kernel.stage < self.stage


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of intermediate results in an arena of `size` bytes; without sharing they would take `alone` bytes."""

    size: int
    offsets: Mapping[Any, int]
    alone: int


def in_place(updates: Iterable[tuple[Tensor, Tensor]], kernels: Iterable[Access]) -> dict[Tensor, Tensor]:
    """Return the state that each new value overwrites.

    All other readers of the old value must run before the kernel that writes the new one, or be made to by `after`, and
    that kernel must read it element by element, if at all.
    """
    kernels = list(kernels)
    makers = {tensor: kernel for kernel in kernels for tensor in kernel.writes}
    reading: dict[Tensor, list[Access]] = {}
    for kernel in kernels:
        for tensor in kernel.reads:
            reading.setdefault(tensor, []).append(kernel)
    awaited = {earlier for kernel in kernels for earlier in kernel.after}  # most are not
    replaced: dict[Tensor, Tensor] = {}
    for new, old in updates:
        maker = makers.get(new)
        if maker is None or new in replaced or new.dtype != old.dtype:
            continue
        readers = [reader for reader in reading.get(old, []) if reader is not maker]
        is_read_later = any(
            maker.stage < reader.stage or (maker in awaited and reader.waits_for(maker)) for reader in readers
        )
        if is_read_later or (old in maker.reads and not maker.replaces(new, old)):
            continue
        maker.after |= {reader for reader in readers if reader.stage == maker.stage}
        awaited |= maker.after
        replaced[new] = old
    return replaced


def plan(kernels: Sequence[Access], sizes: Mapping[Any, int], alignment: int = ALIGNMENT) -> MemoryPlan:
    """Assign arena offsets to the tensors in `sizes`, given kernels in execution order.

    Each tensor lives from the first kernel that uses it to the last. The largest is placed first, each at the
    lowest offset that is free throughout its life.
    """
    births: dict[Any, int] = {}
    deaths: dict[Any, int] = {}
    for number, kernel in enumerate(kernels):
        for tensor in (*kernel.reads, *kernel.writes):
            if tensor in sizes:
                births.setdefault(tensor, number)
                deaths[tensor] = number
    offsets: dict[Any, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # in order: begin and end in memory, birth and death
    for tensor in sorted(births, key=lambda tensor: (-sizes[tensor], births[tensor])):
        start, length = 0, -(-sizes[tensor] // alignment) * alignment
        for begin, end, born, died in placed:
            if begin >= start + length:
                break
            if born <= deaths[tensor] and births[tensor] <= died and start < end:
                start = end
        offsets[tensor] = start
        insort(placed, (start, start + length, births[tensor], deaths[tensor]))
    alone = in_a_row([sizes[tensor] for tensor in births], alignment)[-1]
    return MemoryPlan(max((end for _, end, _, _ in placed), default=0), offsets, alone)


class Arena:
    """Host memory that programs which run one after the other share for intermediate results.

    Nothing in it outlives a run, so it is as large as the largest program needs; programs for a smaller last batch
    and for validation add none. A run within another, or in another thread, gets other memory.
    """

    # Unused memory to keep besides one piece.
    _KEPT_BYTES = 64 << 20

    def __init__(self) -> None:
        self._size = 0
        self._lock = threading.Lock()
        self._free: list[Array] = []  # the latest used last

    def reserve(self, size: int) -> None:
        """Grow to at least so many bytes; MemoryError if there are not as many."""
        with self._lock:
            if size > self._size:
                self._free = [aligned((size,), np.uint8)]
                self._size = size

    @contextmanager
    def lent(self, size: int, preferred: Array | None = None) -> Iterator[Array]:
        """Lend at least `size` bytes for one run, `preferred` if that is free; MemoryError if there are not as many."""
        self.reserve(size)
        with self._lock:
            number = next(
                (number for number, memory in enumerate(self._free) if memory is preferred), len(self._free) - 1
            )
            memory = self._free.pop(number) if self._free else aligned((self._size,), np.uint8)
        try:
            yield memory
        finally:
            with self._lock:
                if len(memory) == self._size:  # unless more was needed meanwhile
                    self._free.append(memory)
                    if self._size * len(self._free) > self._KEPT_BYTES and len(self._free) > 1:
                        del self._free[0]


def in_a_row(sizes: Iterable[int], alignment: int = 1) -> list[int]:
    """Return the aligned offsets of consecutive blocks, and the end."""
    return list(accumulate((-(-size // alignment) * alignment for size in sizes), initial=0))


def nbytes(tensor: Tensor, rows: int) -> int:
    """Return the bytes of a tensor on a rank with so many rows."""
    return size(local(tensor.shape, rows)) * tensor.dtype.itemsize


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that begins on a cache line: unaligned AVX-512 passes are a tenth slower."""
    kind = np.dtype(dtype)
    length = size(shape) * kind.itemsize
    if length > sys.maxsize - ALIGNMENT:  # NumPy would raise a ValueError
        raise MemoryError(f"unable to allocate {length} bytes for an array with shape {tuple(shape)}")
    memory = np.empty(length + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + length].view(kind).reshape(shape)
