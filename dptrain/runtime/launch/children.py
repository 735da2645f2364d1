"""Child processes of ranks: they inherit the launcher's variables but are not ranks, and run alone.

A rank leaves its PID in the environment. A process with that PID among its ancestors is its child, unless a launcher
stands between them.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import NoReturn, TypeVar

from dptrain.runtime.exit_codes import as_status
from dptrain.runtime.output import streams

T = TypeVar("T")

# The environment variable that holds a rank's PID.
VARIABLE = "DPTRAIN_RANK_PID"
# Programs that start ranks and write what they print, and their daemons; names as the system cuts them.
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "mpiexec.gforker", "orterun", "prterun", "srun"}
_DAEMONS = {"prted", "orted", "slurmstepd"}


def mark(environ: MutableMapping[str, str] = os.environ) -> None:
    """Leave this rank's PID to the processes that it starts."""
    environ[VARIABLE] = str(os.getpid())


def parent_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the PID of the rank that started this process, or None."""
    text = environ.get(VARIABLE, "")
    if not text.isdecimal() or int(text) == os.getpid():
        return None
    return int(text) if _descends(int(text), os.getpid()) else None


@cache
def _descends(rank: int, _: int) -> bool:
    """Whether a rank is, or was, an ancestor with no launcher in between. The second argument keys the cache by PID."""
    try:
        for pid, name in ancestors():
            if pid == rank:
                return True
            if is_launcher(name):
                return False
    except (OSError, IndexError):  # no /proc
        return os.getppid() == rank
    return True


def ending_forks(action: Callable[[], T]) -> T:
    """Run user code in one of our threads; a fork that returns from it ends instead.

    A fork keeps only the thread that forked: it would wait for work that nobody gives it, and the launcher for the
    orphan.
    """
    process = os.getpid()
    try:
        result = action()
    except BaseException as error:
        if os.getpid() != process:
            _end_fork(error)
        raise
    if os.getpid() != process:
        _end_fork(None)
    return result


def _end_fork(error: BaseException | None) -> NoReturn:
    code: object = None
    if isinstance(error, SystemExit):
        code = error.code
        if not isinstance(code, int | None):
            streams.write_error(f"{code}\n")
    elif error is not None:
        code = 1
        streams.write_error("".join(traceback.format_exception(error)))
    streams.flush()
    os._exit(as_status(code) if isinstance(code, int) else int(code is not None))


def is_launcher(name: str) -> bool:
    """Whether a program of this name starts ranks."""
    return name in LAUNCHERS or name in _DAEMONS or name.endswith("proxy")


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield PID and name of the parent, its parent and so on; OSError where the system does not tell."""
    pid = os.getppid()
    while pid > 0:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        before, _, after = text.rpartition(")")
        yield pid, before.partition("(")[2]
        pid = int(after.split()[1])
