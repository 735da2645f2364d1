"""Ends a job when something goes wrong: one line that says who and where, on all ranks.

Under mpirun an uncaught exception on one rank would leave the others waiting for ever, so whoever fails ends the job.
Errors that all ranks know of (`AgreedError`) are printed by rank 0 alone, and each rank ends by itself.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, NoReturn

from dptrain.errors import (
    LIST,
    AgreedError,
    CompilerError,
    DptrainError,
    ExitCode,
    PreemptedError,
    ThreadOrderError,
    printable,
)
from dptrain.runtime import exit_codes, signals
from dptrain.runtime.exit_codes import as_status, replace_exits
from dptrain.runtime.launch.launcher import (
    LaunchInfo,
    abort_by_launcher,
    detect_launch,
    has_mpi,
    launcher_can_abort,
    start_mpi,
)
from dptrain.runtime.output import streams

# Bytes of a phase's name in shared memory.
NAME_BYTES = 48


class Phase:
    """What this process is doing, for messages; its numbers may live in memory that peers see."""

    def __init__(self, name: str = "start-up") -> None:
        self._numbers = memoryview(bytearray(16)).cast("q")  # epoch and step; 0 for none
        self._shown: memoryview | None = None
        self._failed = False
        self.name = name

    @property
    def name(self) -> str:
        """Such as "start-up" or "training"."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name, self._failed = name, False
        if self._shown is not None:
            self._shown[:] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")

    @property
    def epoch(self) -> int | None:
        """Current epoch from 1, or None outside training."""
        return self._numbers[0] or None

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._numbers[0] = epoch or 0

    @property
    def step(self) -> int | None:
        """Current step of the epoch from 1, or None."""
        return self._numbers[1] or None

    @step.setter
    def step(self, step: int | None) -> None:
        self._numbers[1] = step or 0

    def show(self, name: memoryview, numbers: memoryview) -> None:
        """Move to shared memory: `NAME_BYTES` bytes for the name, two int64 for epoch and step."""
        numbers[:] = self._numbers
        self._shown, self._numbers = name, numbers
        self.name = self._name

    def hide(self) -> None:
        """Move back to this process's own memory."""
        self._shown, self._numbers = None, memoryview(bytearray(self._numbers)).cast("q")

    def enter(self, name: str) -> None:
        """Begin a phase outside training."""
        self.name, self.epoch, self.step = name, None, None

    def fail(self) -> None:
        """Mark the phase as ended by an error; its name stays for the message."""
        self._failed = True

    @property
    def for_others(self) -> str:
        """The phase as text; "user code" once it has failed."""
        return "user code" if self._failed else str(self)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Enter another phase for the block, and return to this one if the block succeeds."""
        before = self.name
        self.name = name
        yield
        self.name = before

    def __str__(self) -> str:
        return words(self.name, self._numbers[0], self._numbers[1])


def words(name: str, epoch: int, step: int) -> str:
    """Return "training, epoch 2, step 17", without numbers that are 0."""
    return ", ".join([name, *([f"epoch {epoch}"] if epoch else []), *([f"step {step}"] if step else [])])


# The phase of this process, which does one thing at a time.
phase = Phase()

# Further cleanup when a rank ends the job.
at_abort: list[Callable[[], None]] = []

# Seconds that a rank gives each lower one to report an error that all have: longer than an abort takes.
_TURN_SECONDS, _MOST_TURNS = 1.0, 8

# Whether this rank is ending the job and reports why.
ending = False

# Whether failures show their traceback (--debug).
show_traceback = False

# Hooks, replaced by the watchdog's, for a rank that waits for the others before it ends the job: in MPI's start, before
# it has joined them, and then in a barrier.
joining_at_the_end: Callable[[], AbstractContextManager[object]] = nullcontext
collective_at_the_end: Callable[[], AbstractContextManager[object]] = nullcontext


def exit_code_of(error: BaseException, unknown: int = int(ExitCode.INTERNAL)) -> int:
    """Return the exit code of an error; `unknown` for errors that are not dptrain's own."""
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
    """Return an error as one line, with type and place unless it is a `DptrainError`, which may have a list."""
    if isinstance(error, DptrainError):
        lines = [" ".join(line.split()) for line in str(error).split(LIST)]
        return printable(LIST.join(lines), "\n")
    text = printable(" ".join(str(error).split()))
    if isinstance(error, signals.SignalledError):
        return f"ended by {text}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != exit_codes.__file__]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}{place}"


def report(error: BaseException) -> None:
    """Print an error of this rank to standard error, with its traceback under --debug."""
    _print(error, who())


def who() -> str:
    """Return the start of a message: "dptrain", or rank, host, PID and phase."""
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
    """Report an error of this rank, end all ranks and return the exit code; does not return under a launcher.

    If MPI has not started, the others may wait for this rank in MPI_Init: MPICH's launcher then ends them, with other
    launchers this process has to join first. Ctrl-C reaches all ranks at once; the lowest rank not blocked in MPI
    reports.
    """
    global ending
    ending = True
    if isinstance(error, KeyboardInterrupt | CompilerError | ThreadOrderError):
        _take_turns()
    report(error)
    code = exit_code_of(error, unknown)
    if _world_size() > 1:
        _abort(code or ExitCode.STUCK)  # a rank that others wait for has failed, whatever its code
    return code


def end_together(error: DptrainError) -> int:
    """End all ranks with an error that they share, reported by rank 0; does not return under a launcher.

    Ranks that exited one by one would not do: MPICH's mpirun kills the others at the first error exit, and may then
    exit with the signal's number.
    """
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        _print(error, "dptrain")
    code = int(error.exit_code)
    world = _world()
    if world is not None and world.size > 1:
        with collective_at_the_end():  # a rank with its own sys.excepthook may never get here
            world.Barrier()  # rank 0 has reported
            if world.rank == 0:
                _abort(code)
            world.Barrier()  # until rank 0's abort
    return code


def leave(error: PreemptedError) -> NoReturn:
    """End a user's script on all ranks after a signal, by SystemExit, or KeyboardInterrupt after Ctrl-C."""
    code = end_together(error)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt from error
    raise SystemExit(code) from error


class ReportedExit(SystemExit):
    """An exit whose reason has been reported."""


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """End the job at SIGTERM and SIGUSR1 with a line and the exit code that asks to try again."""
    try:
        with signals.interrupting():
            yield
    except signals.SignalledError as error:
        raise ReportedExit(end_job(error)) from None


def install_excepthook() -> None:
    """Make an uncaught exception in a user's script end all ranks; does nothing without a launcher."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return
    replace_exits(lambda text: streams.write_error(f"{_who(launch)}: {text}\n"))
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global ending
        exit_codes.requested = 1
        ending = not isinstance(error, AgreedError)
        agreed = isinstance(error, AgreedError)
        if not isinstance(error, KeyboardInterrupt) and (not agreed or launch.rank == 0):
            previous(kind, error, trace)  # show the script's author where
        if isinstance(error, AgreedError):
            end_together(error)
        else:
            end_job(error, unknown=1)  # as Python itself ends a script

    sys.excepthook = hook
    usual = threading.excepthook

    def hook_of_threads(arguments: threading.ExceptHookArgs) -> None:
        """End all ranks for an error with which a thread left them; others end only their thread, as in Python."""
        error = arguments.exc_value
        if error is None or not left_the_ranks(error):
            usual(arguments)
        else:
            hook(arguments.exc_type, error, arguments.exc_traceback)

    threading.excepthook = hook_of_threads


def leaving_the_ranks(error: BaseException) -> None:
    """Mark an error that ends what a thread does with the other ranks."""
    with suppress(AttributeError):  # of exceptions with slots
        error.left_the_ranks = True  # type: ignore[attr-defined]


def left_the_ranks(error: BaseException) -> bool:
    """Whether an error has been marked by `leaving_the_ranks`."""
    return getattr(error, "left_the_ranks", False)


def report_uncaught() -> None:
    """Report an exception that ends a script with a `sys.excepthook` of its own."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # last_exc from Python 3.12 on
    # A caller that catches the error and calls `sys.exit` (pytest, say) has reported it.
    if error is not None and not exit_codes.requested and not isinstance(error, AgreedError | KeyboardInterrupt):
        report(error)


def _take_turns() -> None:
    """Wait for lower ranks to report an error that all have."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return
    # A launcher may forward what the terminal has sent already.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _world_size()  # joins, where rank 0 may wait in MPI_Init for this one
    time.sleep(min(launch.rank, _MOST_TURNS) * _TURN_SECONDS)


def warn(message: str) -> None:
    """Issue a `UserWarning` on rank 0, about something that all ranks see."""
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        warnings.warn(printable(message, "\n"), stacklevel=2)


def _world_size() -> int:
    """Number of ranks that would wait for this one; 1 where MPI's world is not the launcher's."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return 1
    if launcher_can_abort():
        return launch.size
    world = _world()
    return 1 if world is None else int(world.size)


def _world() -> Any:
    """Return MPI's world, or None without a launcher or MPI: then nobody waits."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return None
    try:
        with joining_at_the_end():
            return start_mpi().COMM_WORLD
    except (ImportError, RuntimeError):
        return None


def _abort(code: int) -> NoReturn:
    streams.flush()
    abort(code)


def abort(code: int) -> NoReturn:
    """End all ranks, from any thread, without MPI's own message; ours has been written."""
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
        exit_at_once(code)  # other launchers then report a failure of all ranks
    # An abort may return before the launcher has killed this process; whatever ran then would race with the kill.
    time.sleep(5)
    exit_at_once(code)


def abort_with_success() -> NoReturn:
    """End all ranks with 1 where a script calls MPI_Abort(0), which mpirun would take for success."""
    launch = detect_launch()
    if launch is not None:
        streams.write_error(f"{_who(launch)}: MPI_Abort(0) would be read as success; exiting with 1 instead\n")
    _abort(1)


# The original `os._exit`, which the watchdog replaces.
exit_at_once = os._exit
