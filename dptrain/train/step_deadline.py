"""Abandons a step that does not end after a signal: a cluster's SIGTERM is followed by SIGKILL in half a minute.

Compiled loops of unknown length, and Python, let a handler end a step in the middle; it has changed nothing by then.
Other calls of C, such as those of MPI, do not: after a SIGTERM the job then ends without saving.
"""

import signal
import threading
import time
from typing import Self

from dptrain.comm import Communicator
from dptrain.errors import ExitCode
from dptrain.runtime import failure, signals
from dptrain.runtime.output import streams
from dptrain.runtime.watch import watchdog

# Seconds after a signal: until a step is abandoned, and until a job that goes on nevertheless ends after SIGTERM.
_PATIENCE, _LAST = 8.0, 22.0
# Between two attempts to abandon a step; the turn of a rank that reports.
_AGAIN, _TURN = 0.5, 1.0


class StepDeadline:
    """Waits for the sync point after a signal, in a thread that begins with the signal; a context."""

    def __init__(self, comm: Communicator) -> None:
        self._rank, self._size = comm.rank, comm.size
        self._obeyed = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_main:
            signals.at_first.append(self._begin)
            watchdog.at_signal.append(self._follow)
        return self

    def __exit__(self, *error: object) -> None:
        self.obey()
        if self._is_main:
            signals.at_first.remove(self._begin)
            watchdog.at_signal.remove(self._follow)

    def obey(self) -> None:
        """Note that the training ends because of the signal."""
        self._obeyed.set()

    def _begin(self, number: int) -> None:
        self._start(number, _PATIENCE)

    def _follow(self, number: int) -> None:
        """Abandon the step as another rank does, which may be the only one with a signal."""
        signals.note(number)
        self._start(number, 0.0)

    def _start(self, number: int, seconds: float) -> None:
        if not self._obeyed.is_set():
            arguments = (number, seconds)
            threading.Thread(target=self._wait, args=arguments, name="dptrain deadline", daemon=True).start()

    def _wait(self, number: int, seconds: float) -> None:
        begun = time.monotonic()
        if self._obeyed.wait(seconds):
            return
        watchdog.record().signal = number
        while not self._obeyed.wait(_AGAIN):
            signals.abandon_step(number)
            if number == signal.SIGTERM and time.monotonic() - begun > _LAST - _PATIENCE:
                if not self._obeyed.wait(min(self._rank, 3) * _TURN):
                    self._give_up(number)
                return

    def _give_up(self, number: int) -> None:
        text = (
            f"{signals.name_of(number)} came {_LAST:.0f} s ago, and the step has not ended; start again to continue "
            "from the last checkpoint"
        )
        streams.write_error(f"{failure.who()}: {text}\n")
        flushing = threading.Thread(target=streams.flush, daemon=True)
        flushing.start()
        flushing.join(_AGAIN)
        failure.abort(ExitCode.PREEMPTED)
