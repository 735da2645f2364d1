"""A lock that trainings in threads hold while they execute Python, and release while compiled code computes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dptrain.runtime.undisturbed import acquire

_lock = threading.Lock()
_local = threading.local()


@contextmanager
def acquired() -> Iterator[None]:
    """Hold the lock during the block, except in `released` parts."""
    with _lock:
        _local.holds = True
        try:
            yield
        finally:
            _local.holds = False


@contextmanager
def released() -> Iterator[None]:
    """Release the lock during the block, which must touch nothing that other trainings do."""
    if not getattr(_local, "holds", False):
        yield
        return
    _lock.release()
    try:
        yield
    finally:
        error = acquire(_lock)
    if error is not None:
        raise error
