"""Writing in the background: a thread that runs one job at a time, while the training continues."""

import _thread
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from dptrain.errors import DptrainError


class Background:
    """Runs jobs in a thread, in order; the next `start` or `wait` raises a job's error."""

    def __init__(self) -> None:
        self._idle = threading.Event()
        self._idle.set()
        self._process = os.getpid()  # of the running job
        self._failure: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way."""
        return self._idle.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the next `start` or `wait` will raise."""
        return self._failure is not None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job, once the previous one is done; raise that one's error."""
        self.wait()
        self._idle.clear()
        self._process = os.getpid()
        try:
            # Not threading.Thread, which waits until the thread runs: milliseconds where all cores are busy.
            _thread.start_new_thread(self._run, (job,))
        except BaseException:
            self._idle.set()
            raise

    def wait(self) -> None:
        """Wait for the job; raise its error."""
        if self._process != os.getpid():  # a fork, which lacks the thread
            self._idle.set()
        self._idle.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for the job, and ignore its error."""
        with suppress(DptrainError):
            self.wait()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised by the next `start` or `wait`
            self._failure = error
        finally:
            self._idle.set()
