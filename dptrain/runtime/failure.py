"""How a job ends when something goes wrong: one line that says who and where, and every rank with it.

Under mpirun an uncaught exception on one rank would leave the others waiting for it for ever: the failed process
itself waits in MPI_Finalize. So whoever fails ends the job. Errors that all ranks know of (`AgreedError`) are printed
by rank 0 alone and each rank ends by itself.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

from dptrain.errors import AgreedError, DptrainError, ExitCode, PreemptedError, printable
from dptrain.runtime import exit_codes, signals, streams
from dptrain.runtime.exit_codes import as_status, replace_exits
from dptrain.runtime.launcher import (
    LaunchInfo,
    abort_by_launcher,
    detect_launch,
    has_mpi,
    launcher_can_abort,
    start_mpi,
)

# Of the name of a phase, where peers see it.
NAME_BYTES = 48


class Phase:
    """What this process is doing, for messages."""

    def __init__(self, name: str = "start-up") -> None:
        self._numbers = memoryview(bytearray(16)).cast("q")  # epoch and step; 0 for none
        self._shown: memoryview | None = None
        self._failed = False
        self.name = name

    @property
    def name(self) -> str:
        """In words, such as "start-up" or "training"."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name, self._failed = name, False
        if self._shown is not None:
            self._shown[:] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")

    @property
    def epoch(self) -> int | None:
        """The current epoch from 1, or None outside training."""
        return self._numbers[0] or None

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._numbers[0] = epoch or 0

    @property
    def step(self) -> int | None:
        """The current step of the epoch from 1, or None."""
        return self._numbers[1] or None

    @step.setter
    def step(self, step: int | None) -> None:
        self._numbers[1] = step or 0

    def show(self, name: memoryview, numbers: memoryview) -> None:
        """Live in other memory from now on.

        Args:
            name: `NAME_BYTES` bytes.
            numbers: two int64, epoch and step.
        """
        numbers[:] = self._numbers
        self._shown, self._numbers = name, numbers
        self.name = self._name

    def hide(self) -> None:
        """Live in memory of this process's own again."""
        self._shown, self._numbers = None, memoryview(bytearray(self._numbers)).cast("q")

    def enter(self, name: str) -> None:
        """Begin a phase outside training."""
        self.name, self.epoch, self.step = name, None, None

    def fail(self) -> None:
        """Note that an error has ended the phase, whose name stays for the error's message."""
        self._failed = True

    @property
    def for_others(self) -> str:
        """The phase as text, "user code" where it has failed."""
        return "user code" if self._failed else str(self)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Do something else for a while: what was being done goes on where the block ends well."""
        before = self.name
        self.name = name
        yield
        self.name = before

    def __str__(self) -> str:
        """Return "training, epoch 2, step 17"."""
        return words(self.name, self._numbers[0], self._numbers[1])


def words(name: str, epoch: int, step: int) -> str:
    """Return "training, epoch 2, step 17"; a number that is 0 is left out."""
    return ", ".join([name, *([f"epoch {epoch}"] if epoch else []), *([f"step {step}"] if step else [])])


# One process does one thing at a time.
phase = Phase()

# What else lets go of the other ranks when a rank ends the job.
at_abort: list[Callable[[], None]] = []

# How long the ranks wait for each lower one to speak of a signal that all got: longer than an abort takes.
_TURN_SECONDS, _MOST_TURNS = 1.0, 8

# Whether this rank has begun to end the job, and says why.
ending = False

# Whether failures show their traceback (--debug).
show_traceback = False

# Tell the watchdog that this rank waits for the others before it ends the job: in MPI's start, where it has not joined
# them yet, and then in a barrier. The watchdog puts its own in their place.
joining_at_the_end: Callable[[], AbstractContextManager[object]] = nullcontext
collective_at_the_end: Callable[[], AbstractContextManager[object]] = nullcontext


def exit_code_of(error: BaseException, unknown: int = int(ExitCode.INTERNAL)) -> int:
    """Return the exit code that an error ends the process with; `unknown` for what is not dptrain's own."""
    if isinstance(error, DptrainError):
        return int(error.exit_code)
    if isinstance(error, signals.SignalledError):
        return int(ExitCode.PREEMPTED)
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    if isinstance(error, MemoryError):
        return int(ExitCode.DEVICE)
    if isinstance(error, SystemExit):
        return as_status(error.code) if isinstance(error.code, int) else int(error.code is not None)
    return unknown


def describe(error: BaseException) -> str:
    """Return an error as one line; what is no `DptrainError` is named with the place that raised it."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, DptrainError):
        return text
    if isinstance(error, signals.SignalledError):
        return f"ended by {text}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != exit_codes.__file__]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def report(error: BaseException) -> None:
    """Print an error of this rank alone to standard error, as one line, or with its traceback where asked for."""
    _print(error, who())


def who() -> str:
    """Return how a line of this process begins: "dptrain", or its rank, host, PID and phase."""
    launch = detect_launch()
    return "dptrain" if launch is None else _who(launch)


def _who(launch: LaunchInfo) -> str:
    return f"dptrain: rank {launch.rank}/{launch.size} host {socket.gethostname()} pid {os.getpid()} {phase}"


def _print(error: BaseException, name: str) -> None:
    if sys.stderr is None:  # closed when the process began, or set so by the user's code
        lines = traceback.format_exception(error) if show_traceback else []
        streams.write_error(f"{''.join(lines)}{name}: {describe(error)}\n")
        return
    if show_traceback:
        traceback.print_exception(error, file=sys.stderr)
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{name}: {describe(error)}\n")
    sys.stderr.flush()


def end_job(error: BaseException, unknown: int = int(ExitCode.INTERNAL)) -> int:
    """Report an error that only this rank is known to have, end all ranks, and return the exit code for this one.

    Under a launcher it does not return. If MPI has not been started yet, the other ranks may be waiting in
    MPI_Init for this one: MPICH's launcher ends them then, with others only a process that has joined can.

    Ctrl-C reaches all ranks at once, and the lowest one that can says so. A rank that waits for another in MPI cannot:
    Python handles signals between its own instructions.
    """
    global ending
    ending = True
    if isinstance(error, KeyboardInterrupt):
        _take_turns()
    report(error)
    code = exit_code_of(error, unknown)
    if _world_size() > 1:
        _abort(code or ExitCode.STUCK)  # who leaves the others waiting has not done well, whatever it says
    return code


def end_together(error: DptrainError) -> int:
    """End all ranks with an error that they all have, after rank 0 has reported it; return the exit code.

    Under a launcher it does not return. Ranks that simply exited one after the other would not do: MPICH's mpirun
    kills the others when the first exits with an error, and may then exit with the signal's number instead.
    """
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        _print(error, "dptrain")
    code = int(error.exit_code)
    world = _world()
    if world is not None and world.size > 1:
        with collective_at_the_end():  # a rank whose own sys.excepthook stands before ours never comes
            world.Barrier()  # rank 0 has reported
            if world.rank == 0:
                _abort(code)
            world.Barrier()  # until rank 0's abort
    return code


def leave(error: PreemptedError) -> NoReturn:
    """End a user's own script on all ranks after a signal, as the command line does.

    Raises:
        SystemExit: with the exit code.
        KeyboardInterrupt: alone after Ctrl-C, as Python itself ends a script.
    """
    code = end_together(error)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt from error
    raise SystemExit(code) from error


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """End the job by SIGTERM and SIGUSR1 at once, with a line and an exit code that ask to try again.

    Raises:
        SystemExit: in a process alone.
    """
    try:
        with signals.interrupting():
            yield
    except signals.SignalledError as error:
        raise SystemExit(end_job(error)) from None


def install_excepthook() -> None:
    """Make an uncaught exception in a user's own script end all ranks, and no failure leave with 0.

    Does nothing without a launcher.
    """
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return
    replace_exits(lambda text: streams.write_error(f"{_who(launch)}: {text}\n"))
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global ending
        exit_codes.asked = 1
        ending = not isinstance(error, AgreedError)
        agreed = isinstance(error, AgreedError)
        if not isinstance(error, KeyboardInterrupt) and (not agreed or launch.rank == 0):
            previous(kind, error, trace)  # a script's author wants to see where
        if isinstance(error, AgreedError):
            end_together(error)
        else:
            end_job(error, unknown=1)  # as Python itself ends a script

    sys.excepthook = hook


def report_uncaught() -> None:
    """Name this rank where an exception ends its script past our hook: the script has one of its own."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # last_exc from Python 3.12 on
    # Who catches such an error and then calls `sys.exit` (pytest, say) has said what there is to say.
    if error is not None and not exit_codes.asked and not isinstance(error, AgreedError | KeyboardInterrupt):
        report(error)


def _take_turns() -> None:
    """Wait for lower ranks to end the job with their own message, after a signal that all have got."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return
    # A launcher may forward what the terminal has sent already.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _world_size()  # joins, where rank 0 may wait in MPI_Init for this one
    time.sleep(min(launch.rank, _MOST_TURNS) * _TURN_SECONDS)


def warn(message: str) -> None:
    """Warn (a `UserWarning`) of something that all ranks see, once: on rank 0."""
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        warnings.warn(printable(message, "\n"), stacklevel=2)


def _world_size() -> int:
    """Ranks that would wait for this one; 1 where MPI's world is not the launcher's."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return 1
    if launcher_can_abort():
        return launch.size
    world = _world()
    return 1 if world is None else int(world.size)


def _world() -> Any:
    """Return MPI's world, None where there is no launcher, or without MPI: then nobody waits."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return None
    try:
        with joining_at_the_end():
            return start_mpi().COMM_WORLD
    except (ImportError, RuntimeError):
        return None


def _abort(code: int) -> NoReturn:
    """End all ranks, without MPI's own message: ours says more, and is one line."""
    streams.flush()
    abort(code)


def abort(code: int) -> NoReturn:
    """End all ranks, from any thread; what is to be read has been written."""
    for let_go in at_abort:
        let_go()
    # MPICH's launcher drops what it has not forwarded yet when it sees the abort: let it read our message first.
    time.sleep(0.3)
    if not show_traceback and sys.__stderr__ is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if launcher_can_abort():
        abort_by_launcher(code)
    elif has_mpi():
        start_mpi().COMM_WORLD.Abort(code)
    else:
        exit_at_once(code)  # which other launchers take for a failure of all
    # An abort may return before the launcher has killed this process; whatever ran then would race with the kill.
    time.sleep(5)
    exit_at_once(code)


def abort_with_success() -> NoReturn:
    """End all ranks where a script calls MPI_Abort with 0, which mpirun would take for success."""
    launch = detect_launch()
    if launch is not None:
        streams.write_error(f"{_who(launch)}: MPI_Abort(0) would be taken for success; it leaves with 1\n")
    _abort(1)


# `os._exit` itself: the watchdog puts something else in its place.
exit_at_once = os._exit
