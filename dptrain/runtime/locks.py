"""One owner at a time for a directory."""

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dptrain.errors import OutputError

# What the lock leaves in a directory, and while it is held.
LOCK, HOLDER = "lock", "holder"
# Seconds that a killed job's processes may take to let go of the lock.
_PATIENCE = 1.0


@contextmanager
def locked(path: Path, what: str, advice: str) -> Iterator[None]:
    """Hold the lock of a directory that is there.

    It is the kernel's (flock): a process that is killed leaves no lock behind. Some network file systems have no flock,
    or one that other machines do not see: there two jobs on two machines are not kept apart. Where flock is missing
    altogether, filelock warns and falls back on a file that a killed process leaves behind.

    Args:
        path: the directory.
        what: works there, for the message: "training", "sweep".
        advice: the end of the message.

    Raises:
        OutputError: another process holds it; says which.
        OSError: the system's.
        NotImplementedError: a file system without locks.
    """
    from filelock import FileLock, Timeout  # which takes longer to import than `--help`

    # A file beside the lock: older versions of filelock empty the lock's file when they try it.
    holder = path / HOLDER
    # Closing from another thread than the opening one must release it.
    lock = FileLock(path / LOCK, timeout=_PATIENCE, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        try:
            who = f" ({holder.read_text(encoding='utf-8')})"
        except (OSError, UnicodeDecodeError):
            who = ""
        raise OutputError(f"{path}: another {what} works there{who}; end it, or {advice}") from None
    try:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        holder.write_text(f"host {socket.gethostname()}, pid {os.getpid()}, since {now}", encoding="utf-8")
        yield
    finally:
        # Somebody may have moved the directory, or the disk has gone. The lock's own file stays: without its name, two
        # could hold two files.
        with suppress(OSError):
            holder.unlink()
        lock.release()
