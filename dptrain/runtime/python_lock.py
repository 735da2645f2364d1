"""A lock on Python that a thread holds while it executes Python, and releases while compiled code computes.

Several trainings of a process can so go on at once, each in a thread, although nothing in dptrain is made for threads:
whoever executes Python is alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_own = threading.local()


@contextmanager
def acquired() -> Iterator[None]:
    """Hold the lock: of the threads in such a block one at a time executes Python, but for what is in `released`."""
    with _lock:
        _own.holds = True
        try:
            yield
        finally:
            _own.holds = False


@contextmanager
def released() -> Iterator[None]:
    """Let another thread have the lock meanwhile; the block must touch nothing that other trainings do."""
    if not getattr(_own, "holds", False):
        yield
        return
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
