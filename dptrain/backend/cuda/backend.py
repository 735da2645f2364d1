"""The CUDA backend: executes programs on one NVIDIA GPU with kernels of our own, through PyCUDA.

All work of a backend is queued in order on one non-blocking stream; the host waits only to read.
"""
# ruff: noqa: D102 - each method is documented once, in backend/base.py

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Executable, amount
from dptrain.backend.cuda.compile import compiled_text, find_nvcc, release, too_new
from dptrain.backend.cuda.compose import Composition, problems
from dptrain.backend.cuda.custom import own_launch
from dptrain.backend.cuda.executable import CudaExecutable
from dptrain.backend.cuda.gpu.device import cuda, driver_version, open_gpu
from dptrain.backend.cuda.libraries.choices import OURS, Choices, Library
from dptrain.backend.cuda.libraries.providers import Kind
from dptrain.backend.cuda.memory import DeviceArray, DeviceMemory, Heap, PinnedRing, SharedSamples, Streams, count
from dptrain.backend.cuda.packs import RunTable
from dptrain.backend.cuda.snapshot import DeviceSnapshot
from dptrain.backend.cuda.state import DeviceState
from dptrain.backend.cuda.transfers.host import DirectExchange, PinnedExchange, PinnedStaging
from dptrain.backend.cuda.transfers.links import Links
from dptrain.backend.custom import OwnKernel
from dptrain.backend.transfers import SAMPLES, Exchange, HostArray, Staging
from dptrain.comm.base import Communicator, PointToPoint
from dptrain.errors import ConfigError, DataError, DeviceError
from dptrain.program.absent_rows import OUTSIDE
from dptrain.program.pipeline.send_recv import Channel
from dptrain.program.program import Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.tensor import Variable
from dptrain.runtime.garbage import uncollected
from dptrain.runtime.types import type_of

# The part of a GPU's memory that samples leave free, for intermediate results and other processes.
_RESERVE = 0.05
# Shared samples that a backend keeps when nobody reads them: features, targets, weights, and those for validation.
_KEPT_SAMPLES = 6
# Caches of a program: what is prepared, and its planned memory.
_KEPT_COMPOSITIONS = 2
# Compute capability from which tensor cores have TF32 and bfloat16, and that with warpgroup products.
_TF32_FROM, _WGMMA = (8, 0), (9, 0)


class CudaBackend(Backend):
    """One NVIDIA GPU; arguments as for `backend.create`, with `number` and `select` as for `open_gpu`.

    Attributes beyond those of `Backend`: `of_halves`, the precision of products of half-precision factors ("half" or
    "wgmma" on tensor cores); `heap`, its memory; `state`, the memory of variables; `libraries` that replace our
    kernels, by kind, and `choices` between them; `executables` to close before the device; `graph`: a step is one CUDA
    graph.

    Raises:
        ConfigError: another dtype than float32, a GPU without the precision, or a provider that is not installed.
        DeviceError: no driver, no GPU, no nvcc, or too little memory.
    """

    def __init__(
        self,
        dtype: npt.DTypeLike = np.float32,
        number: int = 0,
        select: str = "mask",
        host: str = "localhost",
        precision: str = "float32",
        gemm: str = "dptrain",
        sharers: int = 1,
        policy: str = "float32",
        conv: str = "dptrain",
    ) -> None:
        self.name, self.precision, self.graph = "cuda", precision, True
        self.dtype = np.dtype(dtype)
        if self.dtype != np.float32:
            raise ConfigError(f"dtype = {self.dtype.name!r}: the CUDA kernels compute in float32; use --device cpu")
        self.gpu_record = gpu = open_gpu(number, select, host)
        has_tf32 = gpu.capability >= _TF32_FROM
        self.of_halves = "wgmma" if gpu.capability == _WGMMA else "half" if has_tf32 else "float32"
        if precision == "tf32" and not has_tf32:
            # Not a DeviceError, after which `--device auto` would take the CPU.
            raise ConfigError(
                f"precision = 'tf32': {gpu.name} ({gpu.architecture}) has no TF32, which needs compute capability 8.0; "
                "use --precision float32"
            )
        if trouble := too_new(release(find_nvcc()), driver_version()):
            raise DeviceError("; ".join(trouble))
        self.gpu = gpu.uuid
        # Ranks that may put samples on the same GPU.
        self._sharers = sharers
        self._last_samples: deque[SharedSamples] = deque(maxlen=_KEPT_SAMPLES)
        self.streams = Streams(gpu)
        self.heap = Heap(gpu, self.streams)
        self.state = DeviceState(self.heap, self.download, self.write)
        self.executables: weakref.WeakSet[CudaExecutable] = weakref.WeakSet()
        self._compositions: weakref.WeakKeyDictionary[Program, dict[Any, Composition]] = weakref.WeakKeyDictionary()
        self._tables: weakref.WeakValueDictionary[Hashable, RunTable] = weakref.WeakValueDictionary()
        self.libraries: dict[Kind, Library] = {}
        self._workspaces: list[DeviceMemory] = []
        gpu.backends.add(self)
        requested: dict[Kind, str] = {"gemm": gemm, "conv": conv}
        without = self._open_libraries(requested)
        self.choices, self.measures = Choices(self, requested, self.libraries), bool(self.libraries)
        words: dict[Kind, str] = {"gemm": "products", "conv": "convolutions"}
        by = {
            kind: f"{words[kind]} by {'auto: dptrain or ' if requested[kind] == 'auto' else ''}{library.numerics}"
            for kind, library in self.libraries.items()
        }
        products = f"{by.get('gemm', 'products by dptrain')} in {precision}"
        convolutions_text = [by["conv"]] if "conv" in by else []
        self._numerics = ", ".join(["cuda", str(self.dtype), gpu.architecture, products, *convolutions_text])
        policy_text = policy if precision == "float32" else f"{policy} with products in {precision}"
        description_parts = [
            gpu.name,
            gpu.uuid or "UUID unknown",
            amount(gpu.memory),
            policy_text,
            *by.values(),
            *without,
        ]
        self.description = ", ".join(description_parts)

    def _open_libraries(self, requested: Mapping[Kind, str]) -> list[str]:
        """Open the requested libraries (or ConfigError, DeviceError); return why "auto" does without some."""
        without = []
        for kind, name in requested.items():
            if name == OURS:
                continue
            try:
                self.libraries[kind] = self._library(kind)
            except (ConfigError, DeviceError) as error:
                if name != "auto":
                    raise
                without.append(f"--{kind} auto: no library is available ({error})")
        return without

    def _library(self, kind: Kind) -> Library:
        if kind == "gemm":
            from dptrain.backend.cuda.libraries.cublaslt import CublasLt

            return CublasLt(self.precision, self.stream.handle, self.workspace)
        from dptrain.backend.cuda.libraries.cudnn import Cudnn

        return Cudnn(self.stream.handle, self.workspace)

    @property
    def numerics(self) -> str:  # type: ignore[override]
        return ", ".join([self._numerics, *([self.choices.digest] if self.choices.digest else [])])

    def workspace(self, nbytes: int) -> int:
        """Return the lasting address, recorded in graphs, of scratch memory that libraries' calls use in turn."""
        if not self._workspaces or self._workspaces[-1].nbytes < nbytes:
            self._workspaces.append(DeviceMemory(self.heap, nbytes, "workspace of libraries"))
        return self._workspaces[-1].pointer

    def close(self) -> None:
        if self.libraries:
            with contextlib.suppress(cuda.Error):
                self.wait()
            while self.libraries:
                self.libraries.popitem()[1].close()
        for executable in list(self.executables):
            executable.close()
        self._last_samples.clear()
        self.heap.close()
        self.streams.close()

    # Programs

    def executable(
        self,
        program: Program,
        arrays: Mapping[str, Any],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
        clock: Clock | None = None,
    ) -> CudaExecutable:
        return CudaExecutable(program, self, arrays, rows=rows, first_row=first_row, comm=comm, clock=clock)

    def run_table(self, pack_key: Hashable, fields: int) -> RunTable:
        """Return the table shared by executables of this key, or a new one if there is none, or no key."""
        table = self._tables.get(pack_key) if pack_key is not None else None
        if table is None:
            table = RunTable(self, fields)
            if pack_key is not None:
                self._tables[pack_key] = table
        return table

    def planned_bytes(self, program: Program, rows: int) -> int:
        return self.composed(program, rows).plan.size

    def composed(
        self, program: Program, rows: int | None = None, first_row: int = 0, *, alone: bool = True
    ) -> Composition:
        """Return a program as kernels of this device; arguments as for `Composition`."""
        key = rows, first_row, alone, self.choices.state
        compositions = self._compositions.setdefault(program, {})
        if key not in compositions:
            products = {"precision": self.precision, "of_halves": self.of_halves}
            provider = self.choices.provider if self.libraries else None
            while len(compositions) >= _KEPT_COMPOSITIONS:
                compositions.pop(next(iter(compositions)))
            with uncollected():
                compositions[key] = Composition(program, rows, first_row, alone=alone, provider=provider, **products)
        return compositions[key]

    def prepare(self, program: Program, rows: int, first_row: int = 0, *, alone: bool = True) -> None:
        """Start nvcc: kernels of a training and of its validation are compiled in parallel."""
        self.compile_ahead(self.composed(program, rows, first_row, alone=alone).sources())

    def compile_ahead(self, sources: Iterable[str]) -> None:
        """Start nvcc on texts, in other threads."""
        for source in sources:
            architecture = self.gpu_record.architecture
            self.gpu_record.compiling.begin(source, partial(compiled_text, "program", source, architecture))

    def settle(self, programs: Iterable[tuple[Program, int]], comm: Communicator) -> None:
        products = {"precision": self.precision, "of_halves": self.of_halves}
        problems_of_programs = [
            problem for program, rows in programs for problem in problems(program, rows, **products)
        ]
        self.choices.settle(dict.fromkeys(problems_of_programs), comm)

    @property
    def chosen(self) -> Mapping[str, Any]:
        return self.choices.as_json()

    def choose(self, chosen: Mapping[str, Any]) -> None:
        self.choices.restore(chosen)

    def launch(self, kernel: OwnKernel, buffers: Sequence[DeviceArray], numbers: Mapping[str, Any]) -> None:
        """Queue a user's kernel; see `own_launch`."""
        own_launch(self.gpu_record, self.stream, kernel, buffers, numbers)()

    def adopt(self, variables: Iterable[Variable]) -> None:
        self.state.adopt(variables)

    def release(self, variables: Iterable[Variable]) -> None:
        self.state.release(variables)

    def snapshot(self, variables: Iterable[Variable]) -> DeviceSnapshot:
        variable_list = list(variables)
        self.state.adopt(variable_list)
        return DeviceSnapshot(self, [self.state.array(variable) for variable in variable_list])

    @property
    def stream(self) -> Any:
        """The stream on which all work is queued in order."""
        return self.streams.ops

    def wait(self) -> None:
        """Wait for all queued work."""
        self.streams.synchronize(self.stream)

    def links(self, comm: Communicator) -> Links | None:
        """Return the connections of the ranks' GPUs; None if messages use the host. Collective at the first call."""
        if self.transport != "nccl":
            return None
        if comm not in self.gpu_record.links:
            self.gpu_record.links[comm] = Links(comm)
        links: Links = self.gpu_record.links[comm]
        self.streams.waiting = links.waiting
        return links

    def point_to_point(
        self, comm: Communicator, channels: Sequence[Channel], sizes: Sequence[int], ticks: int
    ) -> PointToPoint:
        joined = self.links(comm)
        if joined is None:
            return super().point_to_point(comm, channels, sizes, ticks)
        return joined.point_to_point(channels, sizes, ticks, self.streams)

    def made(self, executable: Executable) -> Mapping[str, DeviceArray]:
        assert isinstance(executable, CudaExecutable)
        self.launch_waiting()
        return executable.made

    def part(self, comm: Communicator) -> None:
        self.wait()
        self.streams.waiting = contextlib.nullcontext
        links = self.gpu_record.links.pop(comm, None)
        if links is not None:
            links.close()

    def wait_for(self, backend: "CudaBackend") -> None:
        """Let work queued from now on wait for what another backend has queued."""
        self.streams.wait_for(backend.streams)

    def postpone(self, queue: Callable[[], None]) -> None:
        """Call `queue` at the latest when the stream is next used."""
        self.streams.before_ops = queue

    def launch_waiting(self) -> None:
        self.streams.launch_waiting()

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> DeviceArray:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        shape = tuple(int(n) for n in shape)
        memory = DeviceMemory(self.heap, count(shape) * kind.itemsize, name or "other buffers")
        return DeviceArray(memory, memory.pointer, shape, kind)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> DeviceArray:
        """Return zeros; see `empty`."""
        buffer = self.empty(shape, dtype, name)
        self.fill_with_zeros(buffer)
        return buffer

    def fill_with_zeros(self, buffer: DeviceArray) -> None:
        """Queue the fill of a buffer with zeros."""
        if buffer.nbytes:
            cuda.memset_d8_async(buffer.pointer, 0, buffer.nbytes, self.streams.ops)

    def upload(self, array: HostArray, name: str = "") -> DeviceArray:
        buffer = self.empty(array.shape, _stored(array.dtype), name)
        self.write(buffer, array)
        return buffer

    @functools.cached_property
    def outside(self) -> DeviceArray:
        """Flag that kernels set to 1 for an index outside a table; read with every result."""
        return self.zeros((1,), np.int32, "a note")

    def download(self, buffer: DeviceArray) -> HostArray:
        """See `Backend`; DataError if an earlier step read a row that its table does not have."""
        host = self.fetched(buffer)
        if "outside" in vars(self) and self.fetched(self.outside)[0]:
            self.write(self.outside, np.zeros(1, np.int32))
            errors = (executable.absent_row() for executable in list(self.executables))
            raise next((error for error in errors if error is not None), None) or DataError(OUTSIDE)
        return host

    def fetched(self, buffer: DeviceArray) -> HostArray:
        """Return a copy of a buffer, after all queued work."""
        host = np.empty(buffer.shape, buffer.dtype)
        if buffer.size:
            cuda.memcpy_dtoh_async(host, buffer.pointer, self.streams.ops)
            self.wait()
        return host

    def write(self, buffer: DeviceArray, array: HostArray) -> None:
        host = np.asarray(array, buffer.dtype, order="C")
        if host.shape != buffer.shape:
            raise ValueError(f"cannot write an array of shape {host.shape} to a buffer of shape {buffer.shape}")
        if buffer.size:
            cuda.memcpy_htod_async(buffer.pointer, host, self.streams.ops)
            self.wait()  # the caller may change the array again

    def copy(self, buffer: DeviceArray, source: DeviceArray) -> None:
        if (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            raise ValueError(f"cannot copy {source.dtype} {source.shape} to {buffer.dtype} {buffer.shape}")
        if buffer.size:
            cuda.memcpy_dtod_async(buffer.pointer, source.pointer, buffer.nbytes, self.streams.ops)

    def send(self, buffer: DeviceArray, array: HostArray) -> None:
        """Overwrite a buffer with an array of its type; does not wait for small arrays (some kilobytes)."""
        if buffer.size and not self._ring.send(buffer, array, self.stream):
            self.write(buffer, array)

    @functools.cached_property
    def _ring(self) -> PinnedRing:
        return PinnedRing(self.heap)

    def upload_samples(self, array: HostArray) -> DeviceArray:
        if not self.shares_samples:
            return self.upload(array, SAMPLES)
        memory, is_new = self._shared(array), False
        if memory is None:
            memory = SharedSamples(self.heap, _stored_bytes(array), SAMPLES, array)
            self.gpu_record.samples[_identity(array)] = memory
            is_new = True
        memory.join(self.heap)
        self._last_samples.append(memory)
        buffer = DeviceArray(memory, memory.pointer, array.shape, _stored(array.dtype))
        if is_new:
            self.write(buffer, array)
        return buffer

    def missing_samples(self, array: HostArray) -> int:
        return 0 if self.shares_samples and self._shared(array) is not None else _stored_bytes(array)

    def _shared(self, array: HostArray) -> SharedSamples | None:
        samples: SharedSamples | None = self.gpu_record.samples.get(_identity(array))
        return None if samples is None or samples.is_freed else samples

    def exchange(self, buffer: DeviceArray, *, direct: bool = False) -> Exchange:
        return (DirectExchange if direct else PinnedExchange)(self.heap, buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return PinnedStaging(self.heap, self.empty(shape, _stored(np.dtype(dtype)), SAMPLES))

    def room_for_data(self) -> int:
        self.heap.enter()
        free, total = cuda.mem_get_info()
        return max(0, int(free - total * _RESERVE) // self._sharers)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of samples on the device: that in which kernels compute them, float64 if they do not know the type."""
    known = type_of(dtype)
    return np.dtype(np.float64) if known.c is None else known.compute


def _stored_bytes(array: HostArray) -> int:
    return int(array.size * _stored(array.dtype).itemsize)


def _identity(array: HostArray) -> tuple[Any, ...]:
    """Return a key that distinguishes an array from all others alive."""
    return array.ctypes.data, array.shape, array.strides, array.dtype.str
