"""One owner at a time for a directory."""

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dptrain.errors import DataError, OutputError
from dptrain.runtime.files import FILE, open_directory

# What the lock leaves in a directory, and while it is held.
LOCK, HOLDER = "lock", "holder"
# Seconds that a killed job's processes may take to let go of the lock.
_PATIENCE = 1.0
# Bytes that say who holds it.
_MAX_HOLDER = 4096


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
        DataError: one of the two files is a link, a named pipe or the like.
        OSError: the system's.
        NotImplementedError: a file system without locks.
    """
    from filelock import FileLock, Timeout  # which takes longer to import than `--help`

    with open_directory(path) as folder:
        for name in (LOCK, HOLDER):
            folder.expect(name, FILE)
        # Closing from another thread than the opening one must release it.
        lock = FileLock(path / LOCK, timeout=_PATIENCE, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            # A file beside the lock: older versions of filelock empty the lock's file when they try it.
            try:
                who = f" ({folder.read(HOLDER, _MAX_HOLDER).decode()})"
            except (OSError, DataError, UnicodeDecodeError):
                who = ""
            raise OutputError(f"{path}: another {what} works there{who}; end it, or {advice}") from None
        try:
            now = datetime.datetime.now().isoformat(" ", "seconds")
            folder.replace(HOLDER, [f"host {socket.gethostname()}, pid {os.getpid()}, since {now}".encode()])
            yield
        finally:
            # The disk may have gone. The lock's own file stays: without its name, two could hold two files.
            with suppress(OSError, DataError):
                folder.remove(HOLDER)
            lock.release()
