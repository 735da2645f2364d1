"""CUDA graphs: the work of a step on a stream, recorded once and launched again in one call.

PyCUDA has streams but no graphs, so the few missing calls go to the driver through ctypes. NVIDIA's cuda-bindings would
be a dependency for these alone.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from dptrain.backend.cuda.gpu.driver import call, handle_of
from dptrain.errors import DeviceError

__all__ = ["CudaGraph", "capture", "steps_in_graph"]

# The most steps and launches of one graph, and the steps from which several in one pay off.
_STEPS, _LAUNCHES, _WORTH = 16, 128, 8

# CU_STREAM_CAPTURE_MODE_RELAXED: other threads may copy and wait meanwhile, and this one may allocate and free memory.
# Conflicts with the capture itself are refused in every mode, such as waiting for its stream: see `Gpu.captures`.
_RELAXED = 2


def steps_in_graph(launches: int) -> int:
    """Return how many steps of so many launches to record into one graph.

    The host needs some 5 us to launch a graph, a GPU about 1.5 us for a kernel with little to do: a step of few kernels
    would wait for the host. A step of many kernels outlasts its launch, and several of them would only make the graph
    slower to record.
    """
    steps = min(_STEPS, _LAUNCHES // max(launches, 1))
    return steps if steps >= _WORTH else 1


class CudaGraph:
    """Recorded work, which `launch` queues again with the recorded addresses and arguments; created by `capture`.

    Memory, kernels and page-locked arrays that it uses must live as long as it does. A launch waits for the one before,
    on whatever stream. `nodes` counts the operations of a launch.
    """

    def __init__(self) -> None:
        self.nodes = 0
        self._executable = ctypes.c_void_p()

    def launch(self, stream: Any) -> None:
        """Queue the recorded work on a stream of the recording's context; DeviceError if closed or never recorded."""
        if not self._executable:
            raise DeviceError("a CUDA graph was launched after it was closed, or before its capture ended")
        call("cuGraphLaunch", self._executable, handle_of(stream))

    def close(self) -> None:
        """Free the driver's memory; queued launches still run. May be called twice."""
        executable, self._executable = self._executable, ctypes.c_void_p()
        if executable:
            call("cuGraphExecDestroy", executable)

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError, AttributeError, TypeError):
            self.close()


@contextlib.contextmanager
def capture(stream: Any) -> Iterator[CudaGraph]:
    """Record what is queued on a stream (not the default one) in this context, instead of running it; yields the graph.

    Streams that wait for an event recorded in this one are recorded with it, until this one waits for them in turn. The
    graph can be launched once the block has ended; an exception of the block destroys it.

    Raises:
        DeviceError: the stream cannot be recorded, or the block did what a graph cannot hold, such as waiting for it.
    """
    graph, handle, recorded = CudaGraph(), handle_of(stream), ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", handle, _RELAXED)
    try:
        yield graph
    except BaseException:
        with contextlib.suppress(DeviceError):
            call("cuStreamEndCapture", handle, ctypes.byref(recorded))
            call("cuGraphDestroy", recorded)
        raise
    call("cuStreamEndCapture", handle, ctypes.byref(recorded))
    try:
        count = ctypes.c_size_t()
        call("cuGraphGetNodes", recorded, None, ctypes.byref(count))
        graph.nodes = count.value
        call("cuGraphInstantiateWithFlags", ctypes.byref(graph._executable), recorded, ctypes.c_ulonglong(0))
    finally:
        call("cuGraphDestroy", recorded)
