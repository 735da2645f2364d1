"""Signals that ask a training to save and end: SIGTERM and SIGUSR1 of clusters, SIGINT of Ctrl-C.

A handler only notes the first one; the training looks at it between its steps, where all ranks agree on one. A second
signal ends the process at once. No NumPy, no MPI: this is the first thing that `python -m dptrain` imports.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

Handler = Callable[[int, Any], Any] | int | None

# In the order in which they decide how the job ends, where several have come. SIGUSR1 is not everywhere.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
# Those that come from a scheduler, before there is anything to interrupt as well.
FROM_OUTSIDE = SIGNALS[1:]
# A terminal sends Ctrl-C to all ranks and to mpirun, which forwards it: within this many seconds that is one signal.
_ONE_SECONDS = 1.0

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Of functions that compiled code calls, and an error of a handler that came as one of them began.
_deferring: set[CodeType] = set()
_deferred: BaseException | None = None

_caught: int | None = None
_caught_at = 0.0


class SignalledError(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 where there is nothing to save: it ends what is under way, as Ctrl-C does."""


def caught() -> int | None:
    """Return the first signal that has come and is to be obeyed."""
    return _caught


def deferring(function: _Function) -> _Function:
    """Let no handler raise in a function that compiled code calls: Python would print the error, and forget it.

    The function calls `raise_deferred` where it can catch what that raises, and so does who has called the code.
    """
    _deferring.add(function.__code__)
    return function


def raise_in(frame: Any, error: BaseException) -> None:
    """Raise a handler's error, given the frame that it has interrupted, now or as soon as that can be."""
    global _deferred
    if frame is None or frame.f_code not in _deferring:
        raise error
    _deferred = error


def raise_deferred() -> None:
    """Raise the error of a handler that could not."""
    global _deferred
    if _deferred is not None:
        error, _deferred = _deferred, None
        raise error


def raise_caught() -> None:
    """End what waits where a signal has come that was noted.

    Raises:
        KeyboardInterrupt: after Ctrl-C; a `SignalledError` after those of a scheduler.
    """
    if _caught is not None:
        raise KeyboardInterrupt if _caught == signal.SIGINT else SignalledError(name_of(_caught))


def name_of(number: int) -> str:
    """Return "SIGTERM"."""
    return signal.Signals(number).name


@contextmanager
def catching(numbers: tuple[int, ...] = SIGNALS) -> Iterator[None]:
    """Note these signals while the context lasts, and then let them do what they did before.

    Only the main thread can: elsewhere nothing changes.
    """
    global _caught
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Handler] = {number: signal.signal(number, _note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if _note not in before.values():  # the outermost
            _caught = None


@contextmanager
def interrupting() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 raise a `SignalledError` in the main thread while the context lasts.

    Handlers of the user's own stay.
    """
    global _caught
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that is not Python's, such as MPICH's for SIGUSR1, is None.
    taken = [number for number in FROM_OUTSIDE if signal.getsignal(number) in (signal.SIG_DFL, None)]
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if taken:
            _caught = None


def catch_early() -> None:
    """Note SIGTERM and SIGUSR1 from the start of a process, which would end it: a training looks at them later."""
    for number in FROM_OUTSIDE:
        signal.signal(number, _note)


def release_early() -> None:
    """Let them end the process again, what is no training; a SIGTERM that has come does so now."""
    global _caught
    if threading.current_thread() is not threading.main_thread():
        return
    for number in FROM_OUTSIDE:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_DFL)
    came, _caught = _caught, None
    if came == signal.SIGTERM:
        os.kill(os.getpid(), came)


def _interrupt(number: int, frame: Any) -> None:
    is_first = _caught is None
    _note(number, frame)
    if is_first:
        raise_in(frame, SignalledError(name_of(number)))


def _note(number: int, frame: Any) -> None:
    global _caught, _caught_at
    now = time.monotonic()
    if _caught is None:
        _caught, _caught_at = number, now
    elif now - _caught_at > _ONE_SECONDS:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
