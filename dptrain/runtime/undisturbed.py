"""Waiting for a lock to undo something, which a signal's handler must not prevent."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


@contextmanager
def undisturbed(lock: Lock) -> Iterator[None]:
    """Hold a lock; an exception that comes while waiting for it, such as Ctrl-C, is raised when the block has ended."""
    error = acquire(lock)
    try:
        yield
    finally:
        lock.release()
    if error is not None:
        raise error


def acquire(lock: Lock) -> BaseException | None:
    """Acquire a lock, and return the last exception that came meanwhile."""
    error: BaseException | None = None
    while True:
        try:
            lock.acquire()
        except BaseException as raised:  # of a handler
            error = raised
        else:
            return error
