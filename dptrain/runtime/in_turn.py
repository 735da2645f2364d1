"""Threads that take turns with Python, and leave it to each other while compiled code computes.

Several trainings of a process can so go on at once, each in a thread, although nothing in dptrain is made for threads:
whoever executes Python is alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.Lock()
_mine = threading.local()


@contextmanager
def in_turn() -> Iterator[None]:
    """Execute Python alone among the threads that do so in such a block, but for what is `aside`."""
    with _turn:
        _mine.turn = True
        try:
            yield
        finally:
            _mine.turn = False


@contextmanager
def aside() -> Iterator[None]:
    """Let another thread have its turn meanwhile; the block must touch nothing that other trainings do."""
    if not getattr(_mine, "turn", False):
        yield
        return
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
