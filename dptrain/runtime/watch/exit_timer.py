"""Ends this process after some seconds, even while Python shuts down and runs no other thread.

At the very end only destructors run, and one that blocks blocks for ever. So the C library calls functions of its own
when a timer expires: `warnx`, which prints a line, and `_exit`.
"""

import ctypes
from contextlib import suppress

# SIGEV_THREAD, CLOCK_MONOTONIC; bytes of a `sigevent`.
_IN_A_THREAD, _MONOTONIC, _EVENT_BYTES = 2, 1, 64
# Seconds between the line and the end.
_PASS_ON = 0.3


class _Event(ctypes.Structure):
    """`struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * (_EVENT_BYTES - 32)),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: interval and delay, seconds and ns each."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))


def exit_after(seconds: float, line: str, code: int) -> None:
    """Print "dptrain: " and a line, and exit, unless this process ends before; nothing where the system cannot."""
    with suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.strdup.restype = ctypes.c_void_p  # copies, which Python does not free while it ends
        name = ctypes.c_void_p.in_dll(library, "program_invocation_short_name")
        text = library.strdup(line.replace("%", "%%").encode())
        exits = ctypes.cast(library._exit, ctypes.c_void_p).value
        prints = ctypes.cast(library.warnx, ctypes.c_void_p).value
        name.value = library.strdup(b"dptrain")
        _call_after(library, seconds, prints, text)
        _call_after(library, seconds + _PASS_ON, exits, code)


def _call_after(library: ctypes.CDLL, seconds: float, function: int | None, argument: int) -> None:
    event = _Event(value=argument, notify=_IN_A_THREAD, function=function)
    timer = ctypes.c_void_p()
    if library.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        return
    whole = int(seconds)
    times = _Times(0, 0, whole, int((seconds - whole) * 1e9))
    library.timer_settime(timer, 0, ctypes.byref(times), None)
