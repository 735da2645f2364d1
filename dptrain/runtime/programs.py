"""Runs other programs, such as compilers, with a time limit, and without delaying signals."""

import atexit
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from dptrain.runtime import signals

# Seconds left to programs after a signal to this process: enough for most compilations.
GRACE = 10.0
_INTERVAL = 0.2
# A shell whose standard input ends without a line when the process that writes to it has ended.
_GUARD = 'read -r line || kill -s KILL -- "-$1"'
# PIDs of running programs, and of the process that has started them.
_running: dict[int, int] = {}


def run_program(
    command: Sequence[str],
    patience: float,
    content: bytes = b"",
    *,
    environ: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.CompletedProcess[bytes]":
    """Run a program to its end in its own session, which Ctrl-C does not reach.

    TimeoutExpired kills it with everything it started; so do a noted signal once `GRACE` has passed, and this process's
    end, however it comes.
    """
    with tempfile.TemporaryFile() if content else nullcontext(subprocess.DEVNULL) as source:
        if not isinstance(source, int):
            source.write(content)
            source.seek(0)
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environ,
            pass_fds=pass_fds,
        )
    with process, _guarded(process.pid):
        _running[process.pid] = os.getpid()
        try:
            output, errors = _heard(process, patience)
        except BaseException:
            _kill(process.pid)
            raise
        finally:
            del _running[process.pid]
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextmanager
def _guarded(group: int) -> Iterator[None]:
    """Have a shell wait beside a program that kills its group if this process ends first, by SIGKILL for example."""
    try:
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "dptrain-program-guard", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # which the launcher of ranks waits for otherwise
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no shell
        yield
        return
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            guard.communicate(b"\n")


def _heard(process: "subprocess.Popen[bytes]", patience: float) -> tuple[bytes, bytes]:
    end = time.monotonic() + patience
    while True:
        try:
            return process.communicate(timeout=_INTERVAL)
        except subprocess.TimeoutExpired:
            pass
        if (signals.seconds_since_caught() or 0.0) > GRACE:
            signals.raise_caught()
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, patience)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@atexit.register
def _kill_running() -> None:
    """Kill programs that a thread still waits for at exit."""
    for pid, parent in list(_running.items()):
        if parent == os.getpid():
            _kill(pid)
