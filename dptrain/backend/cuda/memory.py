"""Memory of a GPU and pinned memory of the host, with the streams that use them."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import amount
from dptrain.backend.cuda.gpu.device import Gpu, cuda
from dptrain.backend.cuda.gpu.driver import UrgentStream
from dptrain.backend.transfers import HostArray
from dptrain.errors import DeviceError, DeviceMemoryError

# Bytes of a block of the ring for small arrays, and the number of blocks.
_RING_BLOCK, _RING_BLOCKS = 2**16, 4
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Streams:
    """The streams of one backend, none of which waits for the default stream.

    `before_ops` queues what has been postponed; the host waits for a stream within the context `waiting`. DeviceError
    if the GPU creates none, or a stream is used in a thread other than the GPU's.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._streams: list[Any] = []
        self._linked: dict[str, UrgentStream] = {}
        self.before_ops: Callable[[], None] | None = None
        self.waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        try:
            self._streams += [cuda.Stream(_NON_BLOCKING) for _ in range(3)]
            self._queued = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        except cuda.Error as error:
            raise DeviceError(f"{gpu.name} cannot create streams ({error}); see nvidia-smi") from error

    @property
    def ops(self) -> Any:
        """The stream of ops."""
        self._gpu.enter()
        self.launch_waiting()
        return self._streams[0]

    def launch_waiting(self) -> None:
        """Queue what has been postponed."""
        queue, self.before_ops = self.before_ops, None
        if queue is not None:
            queue()

    @property
    def inward(self) -> Any:
        """The stream of samples and sums to the device, beside the ops."""
        self._gpu.enter()
        return self._streams[1]

    @property
    def outward(self) -> Any:
        """The stream of gradients to the host."""
        self._gpu.enter()
        return self._streams[2]

    def linked(self, axis: str) -> UrgentStream:
        """Return the stream of messages between GPUs along an axis of the mesh, which no other axis delays."""
        self._gpu.enter()
        if axis not in self._linked:
            self._linked[axis] = UrgentStream()
        return self._linked[axis]

    def synchronize(self, queued: Any) -> None:
        """Let the host wait for a stream, or for an event recorded on a stream."""
        with self.waiting():
            queued.synchronize()

    def retire(self, *handles: Any) -> bool:
        """See `Gpu.retire`."""
        return self._gpu.retire(*handles)

    def wait_for(self, streams: "Streams") -> None:
        """Let ops queued from now on wait for those that another backend has queued."""
        streams._queued.record(streams.ops)
        self.ops.wait_for_event(streams._queued)

    def finish(self) -> None:
        """Wait for all streams."""
        for stream in (*self._streams, *self._linked.values()):
            self.synchronize(stream)

    def close(self) -> None:
        """Destroy the streams."""
        self._streams.clear()
        self._linked.clear()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # if the constructor failed
            self._gpu.retire(*self._streams, *self._linked.values(), self._queued)


class DeviceMemory:
    """An allocation on the device, freed with its last buffer; `name` says in messages what it holds.

    `allocate` returns other memory than PyCUDA's: with `int` its address, and with `free`; MemoryError if short.
    """

    __slots__ = ("__weakref__", "_allocation", "_heap", "name", "nbytes", "pointer")

    def __init__(self, heap: "Heap", nbytes: int, name: str, allocate: Callable[[int], Any] | None = None) -> None:
        self._heap = heap
        self.name = name
        self.nbytes = nbytes
        self._allocation: Any = heap.allocate(max(nbytes, 1), name, allocate)
        self.pointer = int(self._allocation)
        heap.memories.add(self)

    @property
    def is_freed(self) -> bool:
        """Whether its backends have closed: whoever still holds it must not use it."""
        return self._allocation is None

    def free(self) -> None:
        """Free it, after all work queued before."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self._heap.release(allocation)

    def leave(self, heap: "Heap") -> None:
        """Free it with its backend."""
        self.free()

    def __del__(self) -> None:
        # Memory of a failed context cannot be freed, and an exception here would reach nobody.
        with contextlib.suppress(cuda.Error, DeviceError, AttributeError):
            self.free()


class SharedSamples(DeviceMemory):
    """Memory that kernels of several backends read; keeps the host's array so that its address stays unique."""

    __slots__ = ("_users", "source")

    def __init__(self, heap: "Heap", nbytes: int, name: str, source: HostArray) -> None:
        super().__init__(heap, nbytes, name)
        self._users: weakref.WeakSet[Heap] = weakref.WeakSet()
        self.source = source

    def join(self, heap: "Heap") -> None:
        """Let a backend's kernels read it."""
        self._users.add(heap)
        heap.memories.add(self)

    def leave(self, heap: "Heap") -> None:
        """Free it with the last backend whose kernels read it."""
        self._users.discard(heap)
        if not self._users:
            self.free()

    def free(self) -> None:
        """Free it, after all work queued before on any stream."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self._heap.release(allocation, every_stream=True)


class DeviceArray:
    """A dense array on the device, or a part that shares its memory; PyCUDA's GPUArray is slow to slice."""

    __slots__ = ("_memory", "dtype", "pointer", "shape", "size")

    def __init__(self, memory: DeviceMemory, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._memory = memory
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.size = count(shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceArray":
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"a slice of a device buffer must have step 1, not {step}")
        length = self.shape[1:]
        pointer = self.pointer + start * count(length) * self.dtype.itemsize
        return DeviceArray(self._memory, pointer, (max(stop - start, 0), *length), self.dtype)

    def view(self, dtype: npt.DTypeLike) -> "DeviceArray":
        """Return the same bytes as a flat array of another type."""
        kind = np.dtype(dtype)
        return DeviceArray(self._memory, self.pointer, (self.nbytes // kind.itemsize,), kind)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How other libraries (mpi4py among them) find the memory: version 3 of Numba's CUDA Array Interface."""
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3}

    def reshape(self, *shape: Any) -> "DeviceArray":
        """Return the same elements in another shape; a dimension may be -1."""
        new_shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if -1 in new_shape:
            known_size = count(tuple(n for n in new_shape if n != -1))
            new_shape = tuple((self.size // known_size if known_size else 0) if n == -1 else n for n in new_shape)
        if count(new_shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} into {new_shape}")
        return DeviceArray(self._memory, self.pointer, new_shape, self.dtype)


class Pinned:
    """Host memory that copies reach directly, with events before (`queued`) and after (`copied`) a copy."""

    def __init__(self, heap: "Heap", shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._heap = heap
        heap.enter()
        try:
            self._memory: Any = cuda.pagelocked_empty(max(count(shape), 1), dtype)
            self.queued, self.copied = (cuda.Event(cuda.event_flags.DISABLE_TIMING) for _ in range(2))
        except cuda.Error as error:
            raise DeviceError(
                f"cannot pin {amount(count(shape) * dtype.itemsize)} of host memory ({error}): "
                "see ulimit -l and free memory"
            ) from error
        self.host: HostArray = self._memory[: count(shape)].reshape(shape)
        heap.pinned.add(self)

    def free(self) -> None:
        """Free it, after all copies queued before."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._heap.release(memory.base)

    def __del__(self) -> None:
        with contextlib.suppress(cuda.Error, DeviceError, AttributeError):  # as for device memory
            self.free()
            self._heap.retire(self.queued, self.copied)


class PinnedRing:
    """Pinned blocks, filled in turn, from which small arrays are copied without making their owners wait."""

    def __init__(self, heap: "Heap") -> None:
        self._streams = heap.streams
        self._blocks = [Pinned(heap, (_RING_BLOCK,), np.dtype(np.uint8)) for _ in range(_RING_BLOCKS)]
        self._number = self._filled = 0

    def send(self, buffer: DeviceArray, array: HostArray, stream: Any) -> bool:
        """Queue a copy of an array, which may change at once; return False if it is too large."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.nbytes > _RING_BLOCK:
            return False
        if self._filled + data.nbytes > _RING_BLOCK:
            self._blocks[self._number].copied.record(stream)
            self._number, self._filled = (self._number + 1) % _RING_BLOCKS, 0
            self._streams.synchronize(self._blocks[self._number].copied)
        place = self._blocks[self._number].host[self._filled : self._filled + data.nbytes]
        place[:] = data
        cuda.memcpy_htod_async(buffer.pointer, place, stream)
        self._filled += data.nbytes
        return True


class Heap:
    """The memory of one backend: `memories`, its live allocations on the device, and `pinned` ones on the host."""

    def __init__(self, gpu: Gpu, streams: Streams) -> None:
        self._gpu = gpu
        self.streams = streams
        self.memories: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
        self.pinned: weakref.WeakSet[Pinned] = weakref.WeakSet()

    def allocate(self, nbytes: int, name: str, allocate: Callable[[int], Any] | None = None) -> Any:
        """Return new memory, see `DeviceMemory`; DeviceMemoryError if short, DeviceError in the wrong thread."""
        self._gpu.enter()
        try:
            # PyCUDA collects garbage, such as a model that was dropped, and tries again before it gives up.
            return cuda.mem_alloc(nbytes) if allocate is None else _allocated(nbytes, allocate)
        except (cuda.MemoryError, MemoryError):
            free, total = cuda.mem_get_info()
            held_bytes: dict[str, int] = {}
            for memory in self.memories:
                held_bytes[memory.name] = held_bytes.get(memory.name, 0) + memory.nbytes
            largest = sorted(held_bytes.items(), key=lambda name: (-name[1], name[0]))[:4]
            listed = ", ".join(f"{name} {amount(size)}" for name, size in largest) or "none"
            raise DeviceMemoryError(
                f"CUDA out of memory on {self._gpu.name}: tried to allocate {amount(nbytes)} ({name}), "
                f"{amount(free)} of {amount(total)} are free; largest buffers: {listed}",
                name,
                nbytes,
                free,
                held_bytes,
            ) from None

    def enter(self) -> None:
        """See `Gpu.enter`."""
        self._gpu.enter()

    def retire(self, *handles: Any) -> bool:
        """See `Gpu.retire`."""
        return self._gpu.retire(*handles)

    def release(self, allocation: Any, *, every_stream: bool = False) -> None:
        """Free memory after all work queued before (`every_stream`: also of other backends), in the GPU's thread."""
        if self._gpu.retire(allocation):
            return
        if every_stream:
            self._gpu.context.synchronize()
        else:
            self.streams.finish()
        allocation.free()

    def close(self) -> None:
        """Free everything that no other backend uses."""
        for memory in list(self.memories):
            with contextlib.suppress(cuda.Error, DeviceError):
                memory.leave(self)
        for pinned in list(self.pinned):
            with contextlib.suppress(cuda.Error, DeviceError):
                pinned.free()


def count(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    size = 1
    for n in shape:
        size *= n
    return size


def _allocated(nbytes: int, allocate: Callable[[int], Any]) -> Any:
    try:
        return allocate(nbytes)
    except MemoryError:
        gc.collect()
        return allocate(nbytes)
