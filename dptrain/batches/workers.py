"""Threads that draw batches in the background."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from dptrain.runtime.launch.children import ending_forks

T = TypeVar("T")

# Seconds that `close` waits for a batch being drawn.
_PATIENCE = 5.0


class Workers:
    """Daemon threads that run jobs in order; unlike `concurrent.futures`, endless generators do not keep them alive."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Run `job` in the background; return its future."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """End the threads: cancel pending jobs, and wait up to `_PATIENCE` seconds for running ones."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, action = job
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(ending_forks(action))
            except BaseException as error:
                future.set_exception(error)
            del future, action, job  # the last batch would stay in memory while the thread waits
