"""How a job ends when something goes wrong: one line that says who and where, and every rank with it.

Under mpirun an uncaught exception on one rank would leave the others waiting for it for ever: the failed process
itself waits in MPI_Finalize. So whoever fails ends the job. Errors that all ranks know of (`AgreedError`) are printed
by rank 0 alone and each rank ends by itself.
"""

import os
import socket
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from dptrain.errors import DptrainError, ExitCode
from dptrain.launcher import detect_launch


@dataclass
class Phase:
    """What this process is doing, for messages.

    Attributes:
        name: in words, such as "start-up" or "training".
        epoch: the current epoch from 1, or None outside training.
        step: the current step of the epoch from 1, or None.
    """

    name: str = "start-up"
    epoch: int | None = None
    step: int | None = None

    def enter(self, name: str) -> None:
        """Begin a phase outside training."""
        self.name, self.epoch, self.step = name, None, None

    def __str__(self) -> str:
        """Return "training, epoch 2, step 17"."""
        parts = [self.name]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}")
        if self.step is not None:
            parts.append(f"step {self.step}")
        return ", ".join(parts)


# One process does one thing at a time.
phase = Phase()

# Whether failures show their traceback (--debug).
show_traceback = False


def exit_code_of(error: BaseException, unknown: int = int(ExitCode.INTERNAL)) -> int:
    """Return the exit code that an error ends the process with; `unknown` for what is not dptrain's own."""
    if isinstance(error, DptrainError):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, MemoryError):
        return int(ExitCode.DEVICE)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return unknown


def describe(error: BaseException) -> str:
    """Return an error as one line; what is no `DptrainError` is named with the place that raised it."""
    text = " ".join(str(error).split())
    if isinstance(error, DptrainError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def report(error: BaseException) -> None:
    """Print an error of this rank alone to standard error, as one line, or with its traceback where asked for."""
    launch = detect_launch()
    if launch is None:
        who = "dptrain"
    else:
        who = f"dptrain: rank {launch.rank}/{launch.size} host {socket.gethostname()} pid {os.getpid()} {phase}"
    if show_traceback:
        traceback.print_exception(error, file=sys.stderr)
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{who}: {describe(error)}\n")
    sys.stderr.flush()


def report_agreed(error: DptrainError) -> None:
    """Print an error that all ranks have; rank 0 calls it for all."""
    if show_traceback:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"dptrain: {describe(error)}\n")
    sys.stderr.flush()


def pid() -> int:
    """Return this process's number."""
    return os.getpid()


def end_job(error: BaseException, unknown: int = int(ExitCode.INTERNAL)) -> int:
    """Report an error that only this rank is known to have, end all ranks, and return the exit code for this one.

    Under a launcher it does not return. If MPI has not been started yet, the other ranks may be waiting in
    MPI_Init for this one, and only a process that has joined can end them.
    """
    report(error)
    code = exit_code_of(error, unknown)
    launch = detect_launch()
    if launch is not None and launch.size > 1:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
    return code


def install_excepthook() -> None:
    """Make an uncaught exception in a user's own script end all ranks; does nothing without a launcher."""
    launch = detect_launch()
    if launch is None or launch.size == 1:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from dptrain.comm import AgreedError

        if isinstance(error, AgreedError):
            # Every rank is here with the same error: rank 0 speaks for all, then each ends by itself.
            if launch.rank == 0:
                previous(kind, error, trace)
            os_exit_code(int(error.exit_code))
        previous(kind, error, trace)
        end_job(error, unknown=1)  # as Python itself ends a script

    sys.excepthook = hook


def os_exit_code(code: int) -> None:
    """End this process with `code` from inside an excepthook, where `sys.exit` has no effect, MPI closed in order."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    os._exit(code)
