"""Locks on files and directories, one owner at a time."""

import datetime
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dptrain.errors import DataError, OutputError
from dptrain.runtime import signals
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.storage.files import FILE, open_directory

# The lock's files: the first stays, the second exists while it is held.
LOCK, HOLDER = "lock", "holder"
# Seconds for a killed job's processes to release the lock.
_PATIENCE = 1.0
# Seconds until the holder is printed, and between two checks for a signal.
NOTICE, _INTERVAL = 5.0, 0.2
# The most bytes of the holder file.
_MAX_HOLDER = 4096


@contextmanager
def held(path: Path, seconds: float, does: str, *, in_background: bool = False) -> Iterator[None]:
    """Hold a file's lock, waiting at most `seconds`, and not for a stopped process.

    A line names the holder; `does` says what it does, for messages. TimeoutError names it, too; a noted signal ends the
    waiting. In a thread in the background nothing is said, and signals are the main thread's.
    """
    from filelock import FileLock, Timeout  # imported here, as it takes longer than `--help`

    lock = FileLock(path)
    begun, announced = time.monotonic(), False
    while not lock.is_locked:
        waited = time.monotonic() - begun
        try:
            lock.acquire(timeout=max(0.0, min(_INTERVAL, seconds - waited)))
        except Timeout:
            if not in_background:
                signals.raise_caught()
            waited = time.monotonic() - begun
            if waited < min(NOTICE, seconds):
                continue
            holder = _holder(path)
            who = f"{'another process' if holder is None else f'process {holder}'}, which {does}"
            if holder is not None and _is_stopped(holder):
                raise TimeoutError(f"{who}, is stopped") from None
            if waited >= seconds:
                raise TimeoutError(f"{who}, has not ended within {seconds:g} s") from None
            if not announced and not in_background:
                announced = True
                write_error(f"dptrain: waiting for {who}\n")
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> int | None:
    """Return the PID of a lock's holder; None where the system does not tell."""
    with suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode and int(words[4]) > 0:
                return int(words[4])
    return None


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("T", "t")
    return False


@contextmanager
def locked(path: Path, what: str, advice: str) -> Iterator[None]:
    """Hold the lock of an existing directory; messages say that `what` uses it, and end with `advice`.

    The lock is the kernel's (flock), so a killed process leaves none behind. Some network file systems have no flock,
    or one that other machines do not see: there two jobs on two machines are not kept apart. Without flock, filelock
    warns and uses a file that a killed process leaves behind.
    """
    from filelock import FileLock, Timeout  # imported here, as it takes longer than `--help`

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
            raise OutputError(f"{path}: another {what} is using it{who}; stop it, or {advice}") from None
        try:
            now = datetime.datetime.now().isoformat(" ", "seconds")
            folder.replace(HOLDER, [f"host {socket.gethostname()}, pid {os.getpid()}, since {now}".encode()])
            yield
        finally:
            # The disk may have gone. The lock's own file stays: without its name, two could hold two files.
            with suppress(OSError, DataError):
                folder.remove(HOLDER)
            lock.release()
