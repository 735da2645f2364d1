"""The ways between a GPU and the host that run beside the ops: through pinned memory, or by an MPI that knows GPUs."""
# ruff: noqa: D102 - each method is documented once, in backend/transfers.py

import contextlib

from dptrain.backend.cuda.device import cuda
from dptrain.backend.cuda.memory import DeviceArray, Heap, Pinned
from dptrain.backend.transfers import Exchange, HostArray, Staging


class PinnedExchange(Exchange):
    """Through pinned memory, which is where an MPI that knows nothing of GPUs can work."""

    def __init__(self, heap: Heap, buffer: DeviceArray) -> None:
        self._heap, self._streams, self._buffer = heap, heap.streams, buffer
        self._out = Pinned(heap, buffer.shape, buffer.dtype)
        self._back = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # where the constructor failed
            self._heap.retire(self._back)

    def begin(self) -> None:
        # This waits for the last `end` too, which the ops' stream has waited for: the pinned memory is free again.
        self._out.queued.record(self._streams.ops)
        self._streams.outward.wait_for_event(self._out.queued)
        if self._buffer.size:
            cuda.memcpy_dtoh_async(self._out.host, self._buffer.pointer, self._streams.outward)
        self._out.copied.record(self._streams.outward)

    def values(self) -> HostArray:
        self._out.copied.synchronize()  # MPI knows nothing of streams
        return self._out.host

    def end(self) -> None:
        if self._buffer.size:
            cuda.memcpy_htod_async(self._buffer.pointer, self._out.host, self._streams.inward)
        self._back.record(self._streams.inward)
        self._streams.ops.wait_for_event(self._back)


class DirectExchange(Exchange):
    """For an MPI that reads and writes the device's memory itself."""

    def __init__(self, heap: Heap, buffer: DeviceArray) -> None:
        self._heap, self._streams, self._buffer = heap, heap.streams, buffer
        self._complete = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # where the constructor failed
            self._heap.retire(self._complete)

    def begin(self) -> None:
        self._complete.record(self._streams.ops)

    def values(self) -> DeviceArray:
        self._complete.synchronize()  # MPI knows nothing of streams
        return self._buffer

    def end(self) -> None:
        pass  # MPI has finished when it returns


class PinnedStaging(Staging):
    """Through pinned memory, on the stream of what comes in."""

    def __init__(self, heap: Heap, device: DeviceArray) -> None:
        self._streams = heap.streams
        self.device = device
        self._in = Pinned(heap, device.shape, device.dtype)
        self.host = self._in.host

    def reuse(self) -> None:
        self._in.copied.synchronize()

    def release(self) -> None:
        self._in.queued.record(self._streams.ops)

    def send(self, rows: int) -> None:
        self._streams.inward.wait_for_event(self._in.queued)
        if self.host[:rows].size:
            cuda.memcpy_htod_async(self.device.pointer, self.host[:rows], self._streams.inward)
        self._in.copied.record(self._streams.inward)

    def arrive(self) -> None:
        self._streams.ops.wait_for_event(self._in.copied)
