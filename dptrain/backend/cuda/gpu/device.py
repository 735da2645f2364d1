"""Opens and closes the GPU of this process. The only module that imports PyCUDA."""

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dptrain.backend.cuda.compile import Ahead, Cubin
from dptrain.backend.cuda.gpu.driver import Module, StreamKernel
from dptrain.backend.cuda.gpu.probe import architecture_of, device_uuid
from dptrain.backend.cuda.gpu.selection import masked, visible_device
from dptrain.backend.cuda.graphs import CudaGraph, capture
from dptrain.backend.cuda.packs import Packs
from dptrain.errors import DeviceError
from dptrain.runtime.extras import pip_install

try:
    import pycuda.driver as cuda
except ModuleNotFoundError as error:
    raise DeviceError(f"PyCUDA is not installed: {pip_install('cuda')}, or use --device cpu") from error
except ImportError as error:
    raise DeviceError(
        f"no NVIDIA driver: PyCUDA does not load ({error}); install the driver (nvidia-smi must work), "
        "or use --device cpu"
    ) from error

__all__ = ["Gpu", "cuda", "driver_version", "open_gpu"]


class _Ending:
    """Closes the GPU with its thread: PyCUDA ends the process if a context is current in a thread that ends."""

    def __del__(self) -> None:
        _close_gpu()


@dataclass(eq=False)
class Gpu:
    """The GPU of this process, and what its backends share there.

    Attributes:
        context: the primary context, current in the thread that opened it.
        uuid: "GPU-..." or "MIG-..." as nvidia-smi prints it, or None if the driver does not report it.
        memory: total bytes.
        backends: to close before the GPU.
        samples: shared by backends, by the identity of the host's arrays.
        thread: that opened it, the only one that may use it; `owner` is its identity, 0 when the GPU is closed.
        modules: loaded ones, by their compiled files; `stream_modules` those of kernels for any stream.
        packs: what backends execute together.
        compiling: kernels that are compiled ahead.
        links: connections with other ranks' GPUs, by these ranks.
        captures: a stream is being captured, and nothing may be waited for.
        retired: PyCUDA's records of memory and streams that another thread (a garbage collection as a rule), or this
            one during a capture, has dropped. They are freed with the last reference, which must go in the GPU's
            thread.
    """

    device: Any
    context: Any
    name: str
    uuid: str | None
    memory: int
    capability: tuple[int, int]
    backends: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    samples: "weakref.WeakValueDictionary[tuple[Any, ...], Any]" = field(default_factory=weakref.WeakValueDictionary)
    modules: dict[Path, Any] = field(default_factory=dict)
    stream_modules: dict[Path, Module] = field(default_factory=dict)
    packs: Packs = field(default_factory=Packs)
    compiling: Ahead = field(default_factory=Ahead)
    links: dict[Any, Any] = field(default_factory=dict)
    captures: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)
    owner: int = field(default_factory=threading.get_ident)
    retired: deque[Any] = field(default_factory=deque)

    # Held by the class: at exit the module's names go before the last buffers do.
    _ident = staticmethod(threading.get_ident)

    @property
    def architecture(self) -> str:
        """Target architecture of kernels, such as "sm_80"."""
        return architecture_of(*self.capability)

    def allow_shared(self, function: Any, nbytes: int) -> bool:
        """Let a kernel use so much dynamic shared memory (above 48 KB on request); return whether the GPU has it."""
        static_bytes, limit = function.shared_size_bytes, cuda.device_attribute
        if static_bytes + nbytes <= self.device.get_attribute(limit.MAX_SHARED_MEMORY_PER_BLOCK):
            return True
        if static_bytes + nbytes > self.device.get_attribute(limit.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN):
            return False
        # The maximum so far: a graph may queue earlier launches again.
        most = cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.set_attribute(most, max(nbytes, function.get_attribute(most)))
        return True

    def module(self, cubin: Cubin) -> Any:
        """Return PyCUDA's module of a compiled file, loaded if new; cuda.Error if the driver refuses it."""
        if cubin.path not in self.modules:
            self.modules[cubin.path] = cuda.module_from_buffer(cubin.content)
        return self.modules[cubin.path]

    def stream_kernel(self, cubin: Cubin, name: str, types: Sequence[Any]) -> StreamKernel:
        """Return a kernel of a compiled file for any stream; DeviceError if the driver refuses it."""
        if cubin.path not in self.stream_modules:
            self.stream_modules[cubin.path] = Module(cubin.content)
        return StreamKernel(self.stream_modules[cubin.path], name, types)

    def enter(self) -> None:
        """Free what other threads have dropped; DeviceError if this thread may not use the GPU."""
        if self._ident() != self.owner:
            owner = f"the GPU belongs to thread {self.thread.name!r}, which opened it: use it from there, not from "
            closed = f"the GPU belonged to thread {self.thread.name!r}, and was closed when that thread ended"
            raise DeviceError(f"{owner}{threading.current_thread().name!r}" if self.owner else closed)
        if self.retired and not self.captures:
            with contextlib.suppress(cuda.Error):
                self.context.synchronize()
            while self.retired:
                self.retired.popleft()

    def retire(self, *handles: Any) -> bool:
        """In a thread other than the GPU's, or during a capture, postpone freeing PyCUDA's objects and return True."""
        if self._ident() == self.owner and not self.captures:
            return False
        self.retired.extend(handles)
        return True

    def captured(self, stream: Any, queue: Callable[[], None]) -> CudaGraph:
        """Return a graph of what `queue` queues on a stream, see `graphs.capture`; DeviceError if that fails."""
        self.captures = True
        try:
            with capture(stream) as graph:
                queue()
        finally:
            self.captures = False
        return graph


# The one GPU of this process: opened by the first backend, closed at exit.
_gpu: Gpu | None = None
_thread = threading.local()
# Seconds for an ended thread to close the GPU.
_PATIENCE = 10.0


def open_gpu(number: int, select: str, host: str) -> Gpu:
    """Start the driver and make a GPU's primary context current.

    Args:
        number: index of the GPU among those that CUDA shows this process.
        select: "mask" makes the GPU the only visible one: it sets CUDA_VISIBLE_DEVICES, within a mask that is already
            set, before the driver starts, so that no library of this process touches another GPU. "index" leaves the
            mask alone, which CUDA IPC needs in some MPI libraries.
        host: this node's name, for messages.

    Raises:
        DeviceError: no GPU answers, or another thread has opened it.
    """
    global _gpu
    started = time.monotonic()
    while _gpu is not None and not _gpu.thread.is_alive() and time.monotonic() - started < _PATIENCE:
        time.sleep(0.001)
    if _gpu is None:
        mask, problem = os.environ.get("CUDA_VISIBLE_DEVICES"), masked()
        if select == "mask":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(mask, number)
        try:
            cuda.init()
            # Under a mask one device is visible now, unless the user's own code had started the driver before.
            index = min(number, cuda.Device.count() - 1)
            device = cuda.Device(index)
            context = device.retain_primary_context()
            context.push()
        except cuda.Error as error:
            if mask is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = mask
            raise DeviceError(
                f"host {host}: no usable GPU{problem} ({error}); see nvidia-smi, or use --device cpu"
            ) from error
        _gpu = Gpu(device, context, device.name(), _uuid(index), device.total_memory(), device.compute_capability())
        if _gpu.thread is not threading.main_thread():
            _thread.ending = _Ending()
        atexit.register(_close_gpu)
    _gpu.enter()
    return _gpu


def driver_version() -> tuple[int, int]:
    """Return the latest CUDA version that the driver supports."""
    number = cuda.get_driver_version()
    return number // 1000, number % 1000 // 10


def _uuid(index: int) -> str | None:
    return device_uuid(ctypes.CDLL("libcuda.so.1"), index)


def _close_gpu() -> None:
    """Release everything before the interpreter dismantles PyCUDA, if this is the GPU's thread."""
    global _gpu
    if _gpu is not None and _gpu.owner == threading.get_ident():
        for backend in list(_gpu.backends):
            backend.close()
        while _gpu.links:
            _gpu.links.popitem()[1].close()
        _gpu.modules.clear()
        _gpu.stream_modules.clear()
        _gpu.enter()
        _gpu.owner = 0
        with contextlib.suppress(cuda.Error):
            _gpu.context.pop()
            _gpu.context.detach()
        _gpu = None
