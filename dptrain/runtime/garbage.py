"""Pauses Python's garbage collection, a third of the time of tracing steps and generating their code."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from dptrain.runtime.undisturbed import undisturbed

_lock = Lock()
_pauses = 0
_collects = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collection, which runs again after the last of several such blocks, if it ran before the first."""
    global _pauses, _collects
    with _lock:
        if not _pauses:
            _collects = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with undisturbed(_lock):
            _pauses -= 1
            if not _pauses and _collects:
                gc.enable()
