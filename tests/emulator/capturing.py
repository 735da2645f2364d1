"""Stream capture and graphs for checks and planted bugs, through the driver: PyCUDA has neither."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pycuda.driver as cuda

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NON_BLOCKING = 1
DRIVER = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """One call of the driver's; where it fails, PyCUDA's exception."""
    if code := getattr(DRIVER, name)(*arguments):
        text = ctypes.c_char_p()
        DRIVER.cuGetErrorString(code, ctypes.byref(text))
        raise cuda.LogicError(f"{name} failed: {(text.value or b'').decode()}")


def handle(stream: cuda.Stream) -> ctypes.c_void_p:
    """The driver's handle of a stream."""
    return ctypes.c_void_p(stream.handle)


def begin(stream: cuda.Stream, mode: int = RELAXED) -> None:
    """Starts a capture."""
    call("cuStreamBeginCapture_v2", handle(stream), mode)


def end(stream: cuda.Stream) -> ctypes.c_void_p:
    """Ends it: the graph."""
    graph = ctypes.c_void_p()
    call("cuStreamEndCapture", handle(stream), ctypes.byref(graph))
    return graph


def status(stream: cuda.Stream) -> int:
    """0: no capture, 1: one that goes on, 2: one that is invalid."""
    result = ctypes.c_int()
    call("cuStreamIsCapturing", handle(stream), ctypes.byref(result))
    return result.value


class Replay:
    """An executable graph."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()

    def launch(self, stream: cuda.Stream) -> None:
        """Queues it."""
        call("cuGraphLaunch", self.handle, handle(stream))

    def close(self) -> None:
        """Destroys it."""
        call("cuGraphExecDestroy", self.handle)


@contextmanager
def captured(stream: cuda.Stream, mode: int = RELAXED) -> Iterator[Replay]:
    """Records what the block queues on the stream."""
    replay = Replay()
    begin(stream, mode)
    try:
        yield replay
    except BaseException:
        DRIVER.cuStreamEndCapture(handle(stream), ctypes.byref(ctypes.c_void_p()))
        raise
    graph = end(stream)
    call("cuGraphInstantiateWithFlags", ctypes.byref(replay.handle), graph, ctypes.c_ulonglong(0))
    call("cuGraphDestroy", graph)


def after(stream: cuda.Stream, other: cuda.Stream) -> None:
    """What comes next in the stream waits for what the other has."""
    event = cuda.Event(cuda.event_flags.DISABLE_TIMING)
    event.record(other)
    stream.wait_for_event(event)
