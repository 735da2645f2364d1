"""The heap of the C library, from which arrays have their memory."""

import ctypes
from contextlib import suppress


def trim() -> None:
    """Give memory that nobody uses back to the system, where the C library can: glibc's.

    By itself it does not where something lies behind it that is used. Arrays of up to 32 MB lie in the heap as soon as
    another one of the size was freed.

    Source: malloc_trim(3); M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
