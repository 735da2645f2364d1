"""Writing in the background: a thread that does one job at a time, while the training goes on."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from dptrain.errors import DptrainError

Job = Callable[[], None]


class Background:
    """Does jobs in a thread, in order. What one meets is raised by the next `start` or `wait`."""

    def __init__(self) -> None:
        # One thread for all jobs: starting one waits until it runs, which takes long where all cores are busy.
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the next `start` or `wait` will raise."""
        return self._failure is not None

    def start(self, job: Job) -> None:
        """Begin a job, once the one before is done.

        Raises:
            BaseException: what the one before has met.
        """
        self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dptrain-writer", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when the job is done.

        Raises:
            BaseException: what it has met.
        """
        self._idle.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Let the job end, whatever it meets, and the thread."""
        with suppress(DptrainError):
            self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # raised where it is waited for
                self._failure = error
            del job  # and what it holds
            self._idle.set()
