"""The driver's calls that PyCUDA lacks, through ctypes: graphs, priorities, kernels on streams with these."""

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from dptrain.errors import DeviceError

# CU_STREAM_NON_BLOCKING and CU_EVENT_DISABLE_TIMING.
_NON_BLOCKING, _DISABLE_TIMING = 1, 2
# CU_MEMORYTYPE_DEVICE.
_DEVICE = 2


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, loaded at the first call; DeviceError without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver: its library does not load ({error})") from error


def call(name: str, *arguments: Any) -> None:
    """Call the driver; DeviceError if the call fails, or the driver is too old to have it."""
    library = driver()
    try:
        code = getattr(library, name)(*arguments)
    except AttributeError:
        raise DeviceError(f"the NVIDIA driver has no {name}: dptrain needs a driver for CUDA 11.4 or later") from None
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"{name}: {text.value.decode() if text.value else 'unknown error'} (CUDA error {code})")


def handle_of(stream: Any) -> ctypes.c_void_p:
    """Return the handle of a stream, PyCUDA's or a `UrgentStream`."""
    return ctypes.c_void_p(stream.handle)


class Event:
    """A point in a stream of either kind, without a time."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._event), _DISABLE_TIMING)

    def record(self, stream: Any) -> None:
        """Move the point behind the work queued so far on a stream."""
        call("cuEventRecord", self._event, handle_of(stream))

    def delay(self, stream: Any) -> None:
        """Let work queued from now on wait for the point."""
        call("cuStreamWaitEvent", handle_of(stream), self._event, 0)

    def synchronize(self) -> None:
        """Wait for the point."""
        call("cuEventSynchronize", self._event)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError, AttributeError, TypeError):
            if self._event:
                call("cuEventDestroy_v2", self._event)


class UrgentStream:
    """A stream of the highest priority, which does not wait for the default stream: its blocks start before others.

    A kernel that waits for other GPUs would otherwise start only after the last wave of a product that is queued
    already. Graphs that record it keep the priority (CUDA 11.7 or later).
    """

    def __init__(self) -> None:
        self._stream = ctypes.c_void_p()
        least, greatest = ctypes.c_int(), ctypes.c_int()
        call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        call("cuStreamCreateWithPriority", ctypes.byref(self._stream), _NON_BLOCKING, greatest)

    @property
    def handle(self) -> int:
        """The driver's."""
        return self._stream.value or 0

    @property
    def priority(self) -> int:
        """Below 0; the lower, the more urgent."""
        value = ctypes.c_int()
        call("cuStreamGetPriority", self._stream, ctypes.byref(value))
        return value.value

    def synchronize(self) -> None:
        """Wait for all queued work."""
        call("cuStreamSynchronize", self._stream)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError, AttributeError, TypeError):
            if self._stream:
                call("cuStreamDestroy_v2", self._stream)


class Module:
    """A loaded cubin; unloaded with its last reference, which must go in the GPU's thread."""

    def __init__(self, image: bytes) -> None:
        self.handle = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self.handle), image)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError, AttributeError, TypeError):
            if self.handle:
                call("cuModuleUnload", self.handle)


class StreamKernel:
    """A kernel of a module for streams of either kind; `types` are those of its arguments."""

    def __init__(self, module: Module, name: str, types: Sequence[Any]) -> None:
        self._module, self._types, self._function = module, types, ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self._function), module.handle, name.encode())

    def __call__(self, stream: Any, blocks: int, threads: int, *arguments: int) -> None:
        """Queue it."""
        values = [kind(argument) for kind, argument in zip(self._types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        call("cuLaunchKernel", self._function, blocks, 1, 1, threads, 1, 1, 0, handle_of(stream), pointers, None)


_ENDS = (
    ("XInBytes", ctypes.c_size_t),
    ("Y", ctypes.c_size_t),
    ("MemoryType", ctypes.c_uint),
    ("Host", ctypes.c_void_p),
    ("Device", ctypes.c_uint64),
    ("Array", ctypes.c_void_p),
    ("Pitch", ctypes.c_size_t),
)


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"{end}{name}", kind) for end in ("src", "dst") for name, kind in _ENDS),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def copy(stream: Any, target: int, source: int, nbytes: int) -> None:
    """Queue a copy on the device."""
    addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
    call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(nbytes), handle_of(stream))


def copy_rows(stream: Any, target: tuple[int, int], source: tuple[int, int], width: int, height: int) -> None:
    """Queue a copy of rows of `width` bytes; `target` and `source` are addresses, and bytes from row to row."""
    rows = _Copy(
        srcMemoryType=_DEVICE,
        srcDevice=source[0],
        srcPitch=source[1],
        dstMemoryType=_DEVICE,
        dstDevice=target[0],
        dstPitch=target[1],
        WidthInBytes=width,
        Height=height,
    )
    call("cuMemcpy2DAsync_v2", ctypes.byref(rows), handle_of(stream))
