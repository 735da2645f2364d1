"""Starting dptrain as users do, under a time limit, killing only what was started here."""

import os
import shutil
import signal
import subprocess
import sys
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


def mpirun(ranks: int, *arguments: str, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Finished:
    """Run `python ARGUMENTS` on that many ranks."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun: pip install 'dptrain[mpich]'")
    command = [launcher, "-n", str(ranks), sys.executable, *arguments]
    return run(command, timeout=timeout, cwd=cwd, **environment)


def dptrain(ranks: int, *arguments: str, timeout: float = 60, cwd: Path | None = None, **environment: str) -> Finished:
    """Run the command line, alone for 0 ranks, else under mpirun."""
    if ranks == 0:
        return run([sys.executable, "-m", "dptrain", *arguments], timeout=timeout, cwd=cwd, **environment)
    return mpirun(ranks, "-m", "dptrain", *arguments, timeout=timeout, cwd=cwd, **environment)
