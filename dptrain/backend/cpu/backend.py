"""The CPU backend: compiled programs if there is a C++ compiler, else NumPy op by op."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Executable, HostArray
from dptrain.backend.cpu.compile import compiler, has_tiles
from dptrain.backend.cpu.compiled import CompiledExecutable, lowered, planned
from dptrain.backend.cpu.denormals import flush_to_zero
from dptrain.backend.cpu.snapshot import HostSnapshot
from dptrain.backend.transfers import Exchange, HostExchange, HostStaging, Staging
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.mixed_precision import DTypePolicy
from dptrain.program import execute
from dptrain.program.codegen.memory import Arena, aligned
from dptrain.program.program import Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.tensor import Variable

Array = npt.NDArray[Any]

# Shared by all models of a process: models that share layers read and write the same arrays.
_MEMORY = execute.HostMemory()


def wants_compiled(choice: bool | Literal["auto"]) -> bool | None:
    """Return whether programs are to be compiled; None for "if possible". "auto" follows DPTRAIN_JIT_COMPILE.

    Raises:
        ConfigError: not a valid choice.
    """
    if choice not in (True, False, "auto"):
        raise ConfigError(f"jit_compile = {choice!r}: expected True, False or 'auto'")
    return bool(choice) if choice != "auto" else {"0": False, "1": True}.get(os.environ.get("DPTRAIN_JIT_COMPILE", ""))


class NumpyExecutable(execute.ReferenceExecutable):
    """NumPy ops in the floating-point environment of a GPU: denormals are zero."""

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """See `execute.ReferenceExecutable`."""
        with flush_to_zero():
            super().run(starts)


class CpuBackend(Backend):
    """The host's memory and processor.

    Args:
        dtype: float32 or float64.
        threads: that this process may use.
        jit_compile: whether programs are compiled; "auto" if there is a C++ compiler.
        policy: the models' dtype policy, for `numerics` and the description; by default that of `dtype`.

    Raises:
        ConfigError: programs must be compiled and there is no compiler.
        DeviceError: the compiler fails.
    """

    def __init__(
        self,
        dtype: npt.DTypeLike = np.float32,
        threads: int = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        policy: str | None = None,
    ) -> None:
        self.name = "cpu"
        self.dtype = np.dtype(dtype)
        self.threads = threads
        must_compile = wants_compiled(jit_compile)
        command = None if must_compile is False else compiler()
        if command is None and must_compile:
            raise ConfigError("jit_compile=True needs a C++ compiler: neither $CXX nor c++, g++ or clang++ on PATH")
        self.compiles = command is not None
        by = f"compiled by {command[1]}" if command is not None else "NumPy"
        by += ": no C++ compiler on PATH" if command is None and must_compile is None else ""
        of_models = DTypePolicy(policy or self.dtype.name)
        in_tiles = self.compiles and of_models.compute_dtype == "bfloat16" and has_tiles()
        tiles = ", products in AMX tiles" if in_tiles else ""
        self.numerics = f"cpu, {self.dtype}, {'compiled' if self.compiles else 'NumPy'}{tiles}"
        self.description = f"CPU, {threads} thread{'s' if threads > 1 else ''}, {of_models.name}, {by}{tiles}"
        self._memory, self._arena = _MEMORY, Arena()

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
        clock: Clock | None = None,
    ) -> Executable:
        place: Any = {"rows": rows, "first_row": first_row, "comm": comm, "clock": clock}
        if self.compiles:
            return CompiledExecutable(program, self._memory, arrays, **place, threads=self.threads, arena=self._arena)
        return NumpyExecutable(program, self._memory, arrays, **place)

    def planned_bytes(self, program: Program, rows: int) -> int:
        if not self.compiles:
            return execute.bytes_of(program, rows)
        return planned(*lowered(program), rows)[1].size

    def launch_waiting(self) -> None:
        pass  # nothing waits

    def part(self, comm: Communicator) -> None:
        pass  # only MPI connects them

    def snapshot(self, variables: Iterable[Variable]) -> HostSnapshot:
        adopted = list(variables)
        self._memory.adopt(adopted)
        return HostSnapshot([self._memory.array(variable) for variable in adopted], self.compiles)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Array:
        return aligned(shape, self.dtype if dtype is None else dtype)

    def upload(self, array: HostArray, name: str = "") -> Array:
        return array

    def download(self, buffer: Array) -> HostArray:
        return buffer.copy()

    def write(self, buffer: Array, array: HostArray) -> None:
        buffer[...] = array

    def copy(self, buffer: Array, source: Array) -> None:
        np.copyto(buffer, source)

    def exchange(self, buffer: Array, *, direct: bool = False) -> Exchange:
        return HostExchange(buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return HostStaging(aligned(shape, dtype))

    def close(self) -> None:
        """Nothing to release."""

    def upload_samples(self, array: HostArray) -> Array:
        return array

    def missing_samples(self, array: HostArray) -> int:
        return array.nbytes

    def room_for_data(self) -> int | None:
        return None
