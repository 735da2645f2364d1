"""Starting dptrain as users do, under a time limit, killing only what was started here."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Finished:
    """A process that ended.

    Attributes:
        code: its exit code.
        out: standard output.
        err: standard error.
    """

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """The lines of standard error that dptrain wrote."""
        return [line for line in self.err.splitlines() if line.startswith("dptrain: ")]


def run(command: list[str], *, timeout: float = 60, cwd: Path | None = None, **environment: str | None) -> Finished:
    """Run a command in a process group of its own; where it does not end in time, kill the group and fail the test.

    A variable that is None is not there.
    """
    wanted = {**os.environ, "PYTHONWARNINGS": "error", **environment}
    env = {name: value for name, value in wanted.items() if value is not None}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end within {timeout} s\n{out}\n{err}")
    return Finished(process.returncode, out, err)


def on_terminal(
    command: list[str], *, columns: int = 80, timeout: float = 60, cwd: Path | None = None, **environment: str
) -> Finished:
    """Run a command on a terminal of its own; `out` is all that it wrote there, escape codes included."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    env = {**inherited, "PYTHONWARNINGS": "error", "TERM": "xterm", **environment}
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, cwd=cwd, env=env, start_new_session=True
    )
    os.close(child)
    text, end = b"", time.monotonic() + timeout
    while time.monotonic() < end:
        if select.select([parent], [], [], 0.5)[0]:
            try:
                piece = os.read(parent, 65536)
            except OSError:  # the terminal is gone with the process
                break
            if not piece:
                break
            text += piece
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{' '.join(command)} did not end within {timeout} s\n{text.decode(errors='replace')}")
    os.close(parent)
    return Finished(process.wait(10), text.decode(), "")


def shown(text: str) -> list[str]:
    """Return the lines left on a terminal in the end: without escape codes, and of a line drawn anew the last."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]


def find_mpirun() -> str:
    """Return the launcher; skip the test where there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun: pip install 'dptrain[mpich]'")
    return launcher


def mpirun(ranks: int, *arguments: str, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Finished:
    """Run `python ARGUMENTS` on that many ranks."""
    command = [find_mpirun(), "-n", str(ranks), sys.executable, *arguments]
    return run(command, timeout=timeout, cwd=cwd, **environment)


def dptrain(ranks: int, *arguments: str, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Finished:
    """Run the command line, alone for 0 ranks, else under mpirun."""
    if ranks == 0:
        return run([sys.executable, "-m", "dptrain", *arguments], timeout=timeout, cwd=cwd, **environment)
    return mpirun(ranks, "-m", "dptrain", *arguments, timeout=timeout, cwd=cwd, **environment)
