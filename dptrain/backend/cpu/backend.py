"""The CPU: programs run as NumPy calls on prepared views, or compiled where there is a C++ compiler."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Executable, HostArray
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.backend.transfers import Exchange, HostExchange, HostStaging, Staging
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError, DeviceError
from dptrain.program import execute
from dptrain.program.memory import aligned
from dptrain.program.program import Program
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]


def compiles(choice: str | bool) -> bool:
    """Return whether programs are compiled; the environment's DPTRAIN_JIT_COMPILE (0 or 1) says what "auto" means.

    Raises:
        ConfigError: it is none of the choices.
        DeviceError: they are to be compiled, and there is no compiler.
    """
    if choice not in (True, False, "auto"):
        raise ConfigError(f"jit_compile = {choice!r}: expected True, False or 'auto'")
    wanted = choice if choice != "auto" else {"0": False, "1": True}.get(os.environ.get("DPTRAIN_JIT_COMPILE", ""))
    if wanted and compiler() is None:
        raise DeviceError("jit_compile: no C++ compiler: neither $CXX nor c++, g++ or clang++ on PATH")
    return compiler() is not None if wanted is None else bool(wanted)


class CpuBackend(Backend):
    """The host's memory and processor.

    Args:
        dtype: float32 or float64.
        threads: that this process may use.
        jit_compile: whether programs are compiled; "auto" where there is a C++ compiler.

    Raises:
        DeviceError: they are to be compiled, and there is no compiler.
    """

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int = 1, jit_compile: str | bool = "auto") -> None:
        self.name = "cpu"
        self.dtype = np.dtype(dtype)
        self.threads = threads
        self._compiles = compiles(jit_compile)
        self.numerics = f"cpu, {self.dtype}{', compiled' if self._compiles else ''}"
        self.description = f"CPU, {threads} thread{'s' if threads > 1 else ''}, {self.dtype}"
        found = compiler()
        if self._compiles and found is not None:
            self.description += f", compiled by {found[1]}"
        else:
            self.description += ", NumPy" + ("" if found is not None else ": no C++ compiler on PATH")
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
        place: dict[str, Any] = {"rows": rows, "first_row": first_row, "comm": comm}
        if self._compiles:
            return CompiledExecutable(program, self._memory, arrays, **place, threads=self.threads)
        return execute.Executable(program, self._memory, arrays, **place)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Array:
        return aligned(shape, self.dtype if dtype is None else dtype)

    def upload(self, array: HostArray, name: str = "") -> Array:
        return array

    def download(self, buffer: Array) -> HostArray:
        return buffer.copy()

    def write(self, buffer: Array, array: HostArray) -> None:
        buffer[...] = array

    def exchange(self, buffer: Array, *, direct: bool = False) -> Exchange:
        return HostExchange(buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return HostStaging(aligned(shape, dtype))

    def close(self) -> None:
        """Nothing is held."""

    def upload_samples(self, array: HostArray) -> Array:
        return array

    def missing_samples(self, array: HostArray) -> int:
        return array.nbytes

    def room_for_data(self) -> int | None:
        return None
