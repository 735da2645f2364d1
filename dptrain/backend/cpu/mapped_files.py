"""Turns the truncation of a mapped file into an error that names it, instead of a signal that ends the process.

NumPy's memory maps (`numpy.load(mmap_mode="r")`, `.npy` files on the command line) read pages on use. If another
process has truncated the file meanwhile, the system sends SIGBUS (`kernels/native_maps.h`).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

from dptrain.backend.cpu.compile import compiler, library
from dptrain.errors import DataError, DptrainError, ExitCode
from dptrain.runtime.failure import who

_HEADERS = ("native_maps.h",)
# Seconds within which missing pages are reported once.
_SAME = 2.0

_guarded = _raises = False
_raised_at = -_SAME


def guard_mapped_files() -> None:
    """Report a truncated mapped file as an error from now on, if there is a compiler.

    In the main thread a `DataError` is raised; in others a line is written and the process ends. A handler that the
    user has set stays.
    """
    global _guarded, _raises
    can_raise = threading.current_thread() is threading.main_thread()
    if _raises or (_guarded and not can_raise) or sys.platform != "linux" or compiler() is None:
        return
    if signal.getsignal(signal.SIGBUS) != signal.SIG_DFL:
        return
    try:
        guard = library("", _HEADERS)
    except DptrainError:  # reported when a step is compiled
        return
    interrupt = None
    if not _guarded:
        guard.dp_maps_before()
    if can_raise:
        signal.signal(signal.SIGBUS, lambda number, frame: _raise(guard))
        interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)
    guard.dp_maps_guard(interrupt, int(ExitCode.DATA), f"{who()}: ".encode())
    _guarded, _raises = True, can_raise


def guard_what_is_mapped() -> None:
    """Do so if this process maps a file that looks like data, for example a generator's."""
    if not _guarded:
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                is_mapped = any(" r--s " in line and " /usr/" not in line and "/" in line for line in maps)
        except OSError:
            return
        if is_mapped:
            guard_mapped_files()


def _raise(guard: Any) -> None:
    """Raise the error in the main thread, once for pages that are missed together."""
    global _raised_at
    now = time.monotonic()
    if now - _raised_at < _SAME:
        return
    _raised_at = now
    guard.dp_maps_file.restype = ctypes.c_char_p
    path = os.fsdecode(guard.dp_maps_file())
    raise DataError(f"{path}: truncated while in use: it is shorter now than when it was mapped; copy the file again")
