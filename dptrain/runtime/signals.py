"""Signals that ask a training to save and end: a cluster's SIGTERM and SIGUSR1, and SIGINT of Ctrl-C.

A handler only notes the first; the training checks between steps, where all ranks agree on one. A second signal ends
the process at once. Imports neither NumPy nor MPI, as `python -m dptrain` imports it first.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from dptrain.runtime.undisturbed import undisturbed

Handler = Callable[[int, Any], Any] | int | None

# In order of precedence for the job's end. Not every system has SIGUSR1.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
# A scheduler's signals, which may arrive before there is anything to interrupt.
FROM_OUTSIDE = SIGNALS[1:]
# A terminal sends Ctrl-C to all ranks and to mpirun, which forwards it: within this many seconds that is one signal.
_ONE_SECONDS = 1.0

_caught: int | None = None
_caught_at = 0.0

# Called with the first signal, in its handler.
at_first: list[Callable[[int], None]] = []
# Whether the main thread executes a step that may be abandoned, and whether the next signal abandons it.
_is_in_step = _abandons = False
# Held while handlers are restored, or a signal is sent to one.
_handlers_lock = threading.Lock()


class EndlessStepError(KeyboardInterrupt):
    """A step was abandoned, since it did not end after a signal; `finished` steps of the same call have ended."""

    finished = 0


class SignalledError(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 while there is nothing to save: interrupts like Ctrl-C."""


def caught() -> int | None:
    """Return the first signal received, or None."""
    return _caught


def seconds_since_caught() -> float | None:
    """Return how long ago the first signal came, or None."""
    return None if _caught is None else time.monotonic() - _caught_at


def raise_caught() -> None:
    """Raise KeyboardInterrupt (`SignalledError` for a scheduler's signal) if one was noted."""
    if _caught is not None:
        raise KeyboardInterrupt if _caught == signal.SIGINT else SignalledError(name_of(_caught))


def name_of(number: int) -> str:
    """Return "SIGTERM"."""
    return signal.Signals(number).name


@contextmanager
def in_step(value: bool = True) -> Iterator[None]:
    """Let `abandon_step` raise EndlessStepError in this block, which changes nothing until it has ended; or not."""
    global _is_in_step
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _is_in_step = _is_in_step, value
    try:
        yield
    finally:
        _is_in_step = before


@contextmanager
def abandoned_after(finished: int) -> Iterator[None]:
    """As `in_step`, after so many steps of the same call."""
    try:
        with in_step():
            yield
    except EndlessStepError as error:
        error.finished = finished
        raise


def abandon_step(number: int) -> None:
    """Raise EndlessStepError in the main thread if it is `in_step`; from another thread."""
    global _abandons
    ident = threading.main_thread().ident
    with _handlers_lock:
        if ident is not None and signal.getsignal(number) is _note:
            _abandons = True
            signal.pthread_kill(ident, number)


def note(number: int) -> None:
    """Note a signal that another rank has received."""
    global _caught, _caught_at
    if _caught is None:
        _caught, _caught_at = number, time.monotonic()


@contextmanager
def catching(numbers: tuple[int, ...] = SIGNALS) -> Iterator[None]:
    """Note these signals during the block, then restore their handlers; only works in the main thread."""
    global _caught
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Handler] = {number: signal.signal(number, _note) for number in numbers}
    try:
        yield
    finally:
        with undisturbed(_handlers_lock):
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if not {_note, _interrupt} & {*before.values()}:  # the outermost
            _caught = None


@contextmanager
def interrupting() -> Iterator[None]:
    """Make SIGTERM and SIGUSR1 raise a `SignalledError` in the main thread, unless the user handles them."""
    global _caught
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that is not Python's, such as MPICH's for SIGUSR1, is None.
    replaced = [number for number in FROM_OUTSIDE if signal.getsignal(number) in (signal.SIG_DFL, None)]
    for number in replaced:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
        if replaced:
            _caught = None


def starts_as_module(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Return whether `python -m dptrain` is being imported, given `sys.argv` and `sys.orig_argv`."""
    runs = any(word.startswith("-") and word.endswith("m") and name == "dptrain" for word, name in pairwise(orig_argv))
    return argv[:1] == ["-m"] and runs  # "-m" stands there while the package is imported


def catch_early() -> None:
    """Note SIGTERM and SIGUSR1 from process start; a training checks them later."""
    for number in FROM_OUTSIDE:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)  # held back until now by `env --block-signal`


def interrupt_early() -> None:
    """Let SIGTERM and SIGUSR1 interrupt from now on; one that was noted earlier does so now.

    A handler of Python's stays in place, so that MPICH, which has one for SIGUSR1, passes it on.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in FROM_OUTSIDE:
        if signal.getsignal(number) is _note:
            signal.signal(number, _interrupt)
    raise_caught()


def release_early() -> None:
    """Restore SIGTERM and SIGUSR1 where no training follows; a SIGTERM received earlier takes effect now."""
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
        raise SignalledError(name_of(number))


def _note(number: int, frame: Any) -> None:
    global _caught, _caught_at, _abandons
    if _abandons:
        _abandons = False
        if _is_in_step:
            raise EndlessStepError(name_of(number))
        return
    now = time.monotonic()
    if _caught is None:
        _caught, _caught_at = number, now
        for begin in at_first:
            begin(number)
    elif now - _caught_at > _ONE_SECONDS:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
