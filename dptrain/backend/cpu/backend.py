"""The CPU: programs run as NumPy calls on prepared views, or compiled where there is a C++ compiler."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Executable, HostArray
from dptrain.backend.transfers import Exchange, HostExchange, HostStaging, Staging
from dptrain.comm.base import Communicator
from dptrain.program import execute
from dptrain.program.program import Program
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Bytes.
CACHE_LINE = 64


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that begins on a cache line, without which AVX-512 passes are a tenth slower."""
    kind = np.dtype(dtype)
    size = math.prod(map(int, shape)) * kind.itemsize
    if size > sys.maxsize - CACHE_LINE:  # NumPy would call it a ValueError
        raise MemoryError(f"unable to allocate {size} bytes for an array with shape {tuple(shape)}")
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(kind).reshape(shape)


class CpuBackend(Backend):
    """The host's memory and processor.

    Args:
        dtype: float32 or float64.
        threads: that this process may use.
    """

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int = 1) -> None:
        self.name = "cpu"
        self.dtype = np.dtype(dtype)
        self.threads = threads
        self.numerics = f"cpu, {self.dtype}"
        self.description = f"CPU, {threads} thread{'s' if threads > 1 else ''}, {self.dtype}"
        self._memory = execute.HostMemory()

    def adopt(self, variables: Iterable[Variable]) -> None:
        self._memory.adopt(variables)

    def release(self, variables: Iterable[Variable]) -> None:
        self._memory.release(variables)

    def executable(
        self,
        program: Program,
        arrays: Mapping[str, Array],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
    ) -> Executable:
        return execute.Executable(program, self._memory, arrays, rows=rows, first_row=first_row, comm=comm)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Array:
        return aligned_empty(shape, self.dtype if dtype is None else dtype)

    def upload(self, array: HostArray, name: str = "") -> Array:
        return array

    def download(self, buffer: Array) -> HostArray:
        return buffer.copy()

    def write(self, buffer: Array, array: HostArray) -> None:
        buffer[...] = array

    def exchange(self, buffer: Array, *, direct: bool = False) -> Exchange:
        return HostExchange(buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return HostStaging(aligned_empty(shape, dtype))

    def close(self) -> None:
        """Nothing is held."""

    def upload_samples(self, array: HostArray) -> Array:
        return array

    def missing_samples(self, array: HostArray) -> int:
        return array.nbytes

    def room_for_data(self) -> int | None:
        return None
