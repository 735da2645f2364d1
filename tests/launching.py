"""Starting dptrain as users do, under a time limit, killing only what was started here."""

import atexit
import ctypes
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sample import SAMPLED

# Linux's PR_SET_TIMERSLACK.
_TIMER_SLACK = 29
if sys.platform.startswith("linux"):
    # Let short sleeps of this process, and of what it starts, take 0.2 ms instead of 0.05: a waiting rank of MPICH asks
    # after each, which costs a ninth of a core, and so a thirtieth.
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 200_000, 0, 0, 0)

# Tests share a cache: one that compiles holds up others, on a busy machine long enough for them to say so.
_NOTICE = re.compile(r"^dptrain: waiting for (process \d+|another process), which compiles .*\n", re.MULTILINE)


# JAX's compiler takes most of the time that small trainings take; what it computes stays, to rounding.
COMPILES_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def without_notices(err: str) -> str:
    """Leave out of standard error what a busy machine adds to it."""
    return _NOTICE.sub("", err)


@dataclass(frozen=True)
class Finished:
    """A process that ended.

    Attributes:
        code: its exit code.
        out: standard output.
        err: standard error, without notices that another test's process compiles.
    """

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "err", without_notices(self.err))

    @property
    def messages(self) -> list[str]:
        """The lines of standard error that dptrain wrote."""
        return [line for line in self.err.splitlines() if line.startswith("dptrain: ")]


def completed(environment: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of what tests start, with more variables; one that is None is not there."""
    wanted = {
        **os.environ,
        "PYTHONWARNINGS": "error",
        "PYTHONUNBUFFERED": None,  # set in many containers: print then writes a line in two parts, which ranks mix
        # MPICH's waiting ranks sleep for moments instead of asking on: with more ranks than cores others need those.
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        **environment,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def run(command: list[str], *, timeout: float = 120, cwd: Path | None = None, **environment: str | None) -> Finished:
    """Run a command in a process group of its own; where it does not end in time, kill the group and fail the test.

    A variable that is None is not there.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=completed(environment),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end within {timeout} s\n{out}\n{err}")
    return Finished(process.returncode, out, err)


def when_ready(
    command: list[str], ready: str, act: Callable[["subprocess.Popen[str]", list[str]], None], cwd: Path
) -> tuple[int, str]:
    """Do something to a command, in a process group of its own, once it has printed a line with `ready`.

    Args:
        command: the command.
        ready: what the line holds.
        act: is given the process, and the lines until then.
        cwd: where the command runs.

    Returns:
        Its exit code and standard error, as `Finished` has it.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
        # What a shell starts in the background ignores Ctrl-C, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    timer = threading.Timer(100, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if ready in line:
                break
        else:
            pytest.fail(f"{' '.join(command)} has not said {ready!r}\n{process.communicate()[1]}")
        act(process, lines)
        _, err = process.communicate()
    finally:
        timer.cancel()
    return process.returncode, without_notices(err)


def sleep_of(folder: Path) -> str:
    """Return a `sleep` whose path, and so its command line, no other test and no other run of the tests has."""
    path, real = folder / "sleep", shutil.which("sleep")
    assert real is not None
    path.symlink_to(real)
    return str(path)


def is_gone(command: str) -> bool:
    """Whether nothing of this command line runs, or is about to end; see `sleep_of`."""
    end = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", command], check=False, capture_output=True).stdout:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def on_terminal(
    command: list[str], *, columns: int = 80, timeout: float = 120, cwd: Path | None = None, **environment: str
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
    return Finished(process.wait(60), text.decode(), "")


def shown(text: str) -> list[str]:
    """Return the lines left on a terminal in the end: without escape codes, and of a line drawn anew the last."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]


def find_mpirun() -> str:
    """Return the launcher; skip the test where there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun: pip install mpich")
    return launcher


# How the names of variables begin that are read once, when a process starts or loads a library.
_READ_ONCE = ("PYTHON", "LD_", "DYLD_", "OPENBLAS_", "OMP_", "MKL_", "MALLOC_", "GLIBC_", "LANG", "LC_")
# Starts in an environment by which a server pays.
_STARTS = 3
_started: Counter[tuple[tuple[str, str], ...]] = Counter()
_servers: dict[tuple[tuple[str, str], ...], tuple["subprocess.Popen[str]", str]] = {}


def interpreter(environment: Mapping[str, str], arguments: Sequence[str], fresh: bool) -> list[str]:
    """Return the command that runs Python: its own, or one that has it run by a fork of a server (fork_server.py).

    Each kind of environment has a server of its own, from the third start in it on. DPTRAIN_TEST_FRESH=1 asks for none.

    Args:
        environment: of the process.
        arguments: of Python.
        fresh: let Python start itself.
    """
    fresh = fresh or os.environ.get("DPTRAIN_TEST_FRESH") == "1" or not sys.platform.startswith("linux")
    if fresh or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return [sys.executable]
    kind = tuple(sorted(item for item in environment.items() if item[0].startswith(_READ_ONCE)))
    _started[kind] += 1
    if kind not in _servers:
        if _started[kind] < _STARTS:
            return [sys.executable]
        place = os.path.join(tempfile.mkdtemp(prefix="dptrain-tests-"), "socket")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", place],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in environment.items() if not name.startswith(("PMI_", "OMPI_"))},
            start_new_session=True,
        )
        atexit.register(server.communicate)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "the fork server does not start; see standard error"
        _servers[kind] = server, place
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("fork_client.py")), _servers[kind][1]]


def python(
    ranks: int,
    *arguments: str,
    timeout: float = 120,
    cwd: Path | None = None,
    fresh: bool = False,
    through: Sequence[str] = (),
    **environment: str | None,
) -> Finished:
    """Run `python ARGUMENTS`, alone for 0 ranks, else under mpirun.

    Args:
        ranks: how many; 0 runs it without mpirun.
        arguments: of Python.
        timeout: in seconds.
        cwd: the working directory.
        fresh: let Python start itself; else a fork of a process that has imported dptrain may do what it would.
        through: a command that starts Python on each rank.
        environment: more variables.
    """
    command = [*through, *interpreter(completed(environment), arguments, fresh), *arguments]
    launcher = [find_mpirun(), "-n", str(ranks)] if ranks else []
    return run([*launcher, *command], timeout=timeout, cwd=cwd, **environment)


def mpirun(ranks: int, *arguments: str, **options: Any) -> Finished:
    """Run `python ARGUMENTS` on that many ranks, as `python` does."""
    assert ranks > 0
    return python(ranks, *arguments, **options)


def dptrain(ranks: int, *arguments: str, **options: Any) -> Finished:
    """Run the command line, alone for 0 ranks, else under mpirun, as `python` does."""
    return python(ranks, "-m", "dptrain", *arguments, **options)


def in_turn(
    ranks: int,
    cases: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    limit: float = 120,
    launch: Callable[..., Finished] = python,
    cwd: Path | None = None,
    seeds: bool = False,
    **environment: str,
) -> dict[str, Finished]:
    """Run scripts one after the other in one launch, which costs a start of each rank once.

    Ranks are fresh, each with a seed of `hash` of its own; in a run of samples only those that ask for that.

    A script that ends the job has the launch's exit code; those behind it are launched again. That is one that fails on
    some ranks alone: what all ranks end together ends the script, with all that is said then, but not the job.

    Args:
        ranks: how many; 0 runs them without mpirun.
        cases: a script and its arguments, or "-m", a module and its arguments, by name.
        folder: for what they print; new.
        limit: seconds for each of them.
        launch: `python`, or what starts it elsewhere.
        cwd: the working directory of all of them.
        seeds: whether ranks have seeds of their own in a run of samples as well.
        environment: of the launch.

    Returns:
        What each of them printed, rank by rank, and its exit code.
    """
    folder.mkdir(parents=True)
    script = Path(__file__).parent / "mpi" / "scripts" / "in_turn.py"
    finished: dict[str, Finished] = {}

    def printed(number: int, ending: str) -> str:
        found = sorted(folder.glob(f"{number}-*.{ending}"), key=lambda path: int(path.stem.split("-")[1]))
        return "".join(path.read_text() for path in found)

    while len(finished) < len(cases):
        left = [(number, name) for number, name in enumerate(cases) if name not in finished]
        plan = folder / "plan.json"
        plan.write_text(json.dumps([[number, limit, list(cases[name])] for number, name in left]))
        timeout = 30 + limit * len(left)
        fresh = ranks > 0 and (seeds or not os.environ.get(SAMPLED))
        environment = {"DPTRAIN_LOG_FORMAT": "plain", **environment}  # each script prints into a file
        done = launch(ranks, str(script), str(plan), str(folder), timeout=timeout, cwd=cwd, fresh=fresh, **environment)
        for number, name in left:
            whole = len(list(folder.glob(f"{number}-*.done"))) == max(ranks, 1)
            out, err = printed(number, "out"), _NOTICE.sub("", printed(number, "err"))
            if whole:
                code = max(int(path.read_text()) for path in folder.glob(f"{number}-*.done"))
                more = ("", "") if done.code else (done.out, done.err)
                finished[name] = Finished(code, out + more[0], err + more[1])
            else:
                early = "" if done.code else "the job ended well, but before this script\n"
                finished[name] = Finished(done.code, out + done.out, err + done.err + early)
                break
        else:
            if done.code:  # after the last script: any of them may be the cause
                late = f"all scripts ended, and then the launch with {done.code}\n{done.out}{done.err}"
                finished |= {
                    name: Finished(done.code, finished[name].out, finished[name].err + late) for _, name in left
                }
    return finished
