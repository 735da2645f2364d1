"""Measures the launches of steps by CUDA events."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.description import kernels_of
from dptrain.backend.cuda.generate import launched
from dptrain.backend.cuda.gpu.device import cuda
from dptrain.program.schedule.clock import Clock, Span
from dptrain.program.schedule.description import KernelDescription


class Measuring:
    """The launches of an executable's steps, one after the other; `names` are those of kernels by a launch's `id`."""

    def __init__(self, clock: Clock, composition: Composition, names: Mapping[int, str]) -> None:
        self._clock, self._names = clock, names
        kernels = [kernel for kernel, _ in launched(kernel for stage in composition.stages for kernel in stage)]
        self._numbers = {kernel.name: number for number, kernel in enumerate(kernels)}
        message = KernelDescription("message", "messages of ranks", [], {"messages": 0})
        self._first = clock.measures([*kernels_of(composition), message])
        self._message = len(kernels)

    def begin(self, stream: Any) -> None:
        """Begin a step, once the stream has no other work."""
        stream.synchronize()
        self._stream, self._spans, self._events = stream, list[Span](), list[tuple[int, Any, Any]]()
        self._start, self._began = cuda.Event(), time.monotonic_ns()
        self._start.record(stream)

    @contextmanager
    def launch(self, launch: Any) -> Iterator[None]:
        """Measure a launch on the device."""
        before, after = cuda.Event(), cuda.Event()
        before.record(self._stream)
        yield
        after.record(self._stream)
        name = self._names.get(id(launch))
        self._events.append((self._message if name is None else self._numbers[name], before, after))

    @contextmanager
    def message(self) -> Iterator[None]:
        """Measure a message on the host."""
        begin = time.monotonic_ns()
        yield
        self._spans.append(Span(self._message, begin, time.monotonic_ns()))

    def end(self) -> None:
        """Wait for the step, and hand its executions to the clock."""
        self._stream.synchronize()
        for number, before, after in self._events:
            begin, end = (self._began + int(1e6 * self._start.time_till(event)) for event in (before, after))
            self._spans.append(Span(number, begin, end))
        self._clock.add_step(sorted(self._spans, key=lambda span: span.begin), self._first)
