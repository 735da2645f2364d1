"""One thread of a rank at a time meets the other ranks.

Two threads would enter their collectives in another order on each rank, and one model's numbers would meet another's.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from dptrain.errors import ThreadOrderError
from dptrain.runtime import failure


@dataclass
class _Meeting:
    """What a thread does with the other ranks, such as `fit`."""

    thread: threading.Thread
    call: str


_lock = threading.Lock()
_meeting: _Meeting | None = None
# Names of the threads that have met the other ranks, without numbers, which count other threads as well.
_names: set[str] = set()


@contextmanager
def meeting(call: str) -> Iterator[None]:
    """Let no other thread of this rank meet the other ranks during the block; it ends the job if one does already."""
    global _meeting
    mine = _Meeting(threading.current_thread(), call)
    try:
        with _lock:
            outer = _meeting
            if outer is None:
                _meeting = mine
                _names.add(_name())
        if outer is not None and outer.thread is not mine.thread:
            refuse(outer, call)
        yield
    except BaseException as error:
        failure.leaving_the_ranks(error)
        raise
    finally:
        if _meeting is mine:
            _meeting = None


def name_among_several() -> str | None:
    """Return this thread's name if several have met the other ranks one after the other; ranks compare it."""
    return _name() if len(_names) > 1 else None


def _name() -> str:
    return re.sub(r"\d+", "", threading.current_thread().name)


def check(call: str) -> None:
    """End the job if another thread meets the other ranks."""
    current = _meeting
    if current is not None and current.thread.ident != threading.get_ident():
        refuse(current, call)


def refuse(current: _Meeting, call: str) -> NoReturn:
    """End the job: this thread wants to meet the other ranks while another does."""
    error = ThreadOrderError(
        f"thread {threading.current_thread().name!r} calls {call} while thread {current.thread.name!r} is in "
        f"{current.call}: of each rank only one thread at a time may train, evaluate, predict, load or save, since "
        "those of different ranks would meet in another order; call them one after the other, or start a job for each"
    )
    failure.end_job(error)
    raise error


def forget() -> None:
    """Leave a forked child without the threads of its parent."""
    global _lock, _meeting
    _lock, _meeting = threading.Lock(), None
