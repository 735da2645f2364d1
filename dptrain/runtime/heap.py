"""The C library's heap, where arrays are allocated."""

import ctypes
from contextlib import suppress


def trim() -> None:
    """Return unused memory to the system, where the C library (glibc) can.

    glibc does not by itself while something in use lies behind it; arrays of up to 32 MB live in the heap once another
    of that size was freed. Source: malloc_trim(3); M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
