"""Transfers between a GPU and the host beside the ops: through pinned memory, or by CUDA-aware MPI."""
# ruff: noqa: D102 - each method is documented once, in backend/transfers.py

import contextlib
from collections.abc import Sequence

from dptrain.backend.cuda.gpu.device import cuda
from dptrain.backend.cuda.memory import DeviceArray, Heap, Pinned
from dptrain.backend.transfers import Exchange, HostArray, Staging
from dptrain.program.codegen.memory import in_a_row


class PinnedExchange(Exchange):
    """Through pinned memory, for an MPI that cannot read device memory."""

    def __init__(self, heap: Heap, buffer: DeviceArray) -> None:
        self._heap, self._streams, self._buffer = heap, heap.streams, buffer
        self._out = Pinned(heap, buffer.shape, buffer.dtype)
        self._back = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # if the constructor failed
            self._heap.retire(self._back)

    def begin(self) -> None:
        # This also waits for the last `end`, for which the ops' stream has waited: the pinned memory is free again.
        self._out.queued.record(self._streams.ops)
        self._streams.outward.wait_for_event(self._out.queued)
        if self._buffer.size:
            cuda.memcpy_dtoh_async(self._out.host, self._buffer.pointer, self._streams.outward)
        self._out.copied.record(self._streams.outward)

    def values(self) -> HostArray:
        self._streams.synchronize(self._out.copied)  # MPI ignores streams
        return self._out.host

    def end(self) -> None:
        if self._buffer.size:
            cuda.memcpy_htod_async(self._buffer.pointer, self._out.host, self._streams.inward)
        self._back.record(self._streams.inward)
        self._streams.ops.wait_for_event(self._back)


class PinnedMove:
    """Copies parts to the host and results back; `replaces`: ops between `begin` and `end` may read the results."""

    def __init__(
        self,
        heap: Heap,
        memory: tuple[Pinned, Pinned],
        parts: Sequence[DeviceArray],
        results: Sequence[DeviceArray],
        *,
        replaces: bool,
    ) -> None:
        self._streams, self._replaces = heap.streams, replaces
        self._out, self._back = memory
        self._parts, self._results = _beside(self._out, parts), _beside(self._back, results)

    def begin(self) -> None:
        """Start to copy the parts out as ops queued so far leave them; later ops run meanwhile."""
        # This waits for what came before, as the ops' stream has: the pinned memory of both ways is free again.
        outward = self._streams.outward
        self._out.queued.record(self._streams.ops)
        outward.wait_for_event(self._out.queued)
        for part, host in self._parts:
            if part.size:
                cuda.memcpy_dtoh_async(host, part.pointer, outward)
        self._out.copied.record(outward)

    def values(self) -> tuple[list[HostArray], list[HostArray]]:
        """Wait until the parts are out; return them, and host arrays to write the results to."""
        self._streams.synchronize(self._out.copied)
        return [_typed(*pair) for pair in self._parts], [_typed(*pair) for pair in self._results]

    def end(self) -> None:
        """Copy in the results, for ops queued from now on."""
        inward = self._streams.inward
        if self._replaces:
            self._back.queued.record(self._streams.ops)
            inward.wait_for_event(self._back.queued)
        for result, host in self._results:
            if result.size:
                cuda.memcpy_htod_async(result.pointer, host, inward)
        self._back.copied.record(inward)
        self._streams.ops.wait_for_event(self._back.copied)


def _beside(memory: Pinned, buffers: Sequence[DeviceArray]) -> list[tuple[DeviceArray, HostArray]]:
    """Return buffers with consecutive slices of pinned memory."""
    starts = in_a_row(buffer.nbytes for buffer in buffers)
    return [
        (buffer, memory.host[start : start + buffer.nbytes]) for buffer, start in zip(buffers, starts, strict=False)
    ]


def _typed(buffer: DeviceArray, host: HostArray) -> HostArray:
    return host.view(buffer.dtype).reshape(buffer.shape)


class DirectExchange(Exchange):
    """For an MPI that reads and writes device memory."""

    def __init__(self, heap: Heap, buffer: DeviceArray) -> None:
        self._heap, self._streams, self._buffer = heap, heap.streams, buffer
        self._complete = cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # if the constructor failed
            self._heap.retire(self._complete)

    def begin(self) -> None:
        self._complete.record(self._streams.ops)

    def values(self) -> DeviceArray:
        self._streams.synchronize(self._complete)  # MPI ignores streams
        return self._buffer

    def end(self) -> None:
        pass  # MPI has finished when it returns


class PinnedStaging(Staging):
    """Through pinned memory, on the inward stream."""

    def __init__(self, heap: Heap, device: DeviceArray) -> None:
        self._streams = heap.streams
        self.device = device
        self._in = Pinned(heap, device.shape, device.dtype)
        self.host = self._in.host

    def reuse(self) -> None:
        self._streams.synchronize(self._in.copied)

    def release(self) -> None:
        self._in.queued.record(self._streams.ops)

    def send(self, rows: int) -> None:
        self._streams.inward.wait_for_event(self._in.queued)
        if self.host[:rows].size:
            cuda.memcpy_htod_async(self.device.pointer, self.host[:rows], self._streams.inward)
        self._in.copied.record(self._streams.inward)

    def arrive(self) -> None:
        self._streams.ops.wait_for_event(self._in.copied)
