"""Flush-to-zero for the calling thread.

Moments of parameters whose gradient is zero decay into denormals after some 800 updates, and a CPU computes these many
times slower. No value above 1.2e-38 changes. The switch is in the C library's floating-point environment (MXCSR bits
FTZ and DAZ on x86-64, FPCR bit FZ on AArch64); on other CPUs nothing is switched, and training is only slower.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# machine -> (32-bit words of fenv_t, word that holds the switch, its bits), from the C library's <fenv.h>.
_SWITCHES = {"x86_64": (8, 7, 0x8040), "aarch64": (2, 0, 1 << 24)}


def _c_library() -> ctypes.CDLL | None:
    if platform.system() != "Linux" or platform.machine() not in _SWITCHES:
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "fegetenv") and hasattr(library, "fesetenv") else None


_LIBRARY = _c_library()
_WORDS, _WORD, _BITS = _SWITCHES.get(platform.machine(), (8, 7, 0))


def enable_flush_to_zero() -> None:
    """Flush denormals to zero in this thread from now on."""
    if _LIBRARY is None:
        return
    environment = (ctypes.c_uint32 * _WORDS)()
    _LIBRARY.fegetenv(environment)
    environment[_WORD] |= _BITS
    _LIBRARY.fesetenv(environment)


@contextmanager
def flush_to_zero() -> Iterator[None]:
    """Flush denormals to zero in this thread inside the `with` block."""
    if _LIBRARY is None:
        yield
        return
    before = (ctypes.c_uint32 * _WORDS)()
    _LIBRARY.fegetenv(before)
    enable_flush_to_zero()
    try:
        yield
    finally:
        _LIBRARY.fesetenv(before)
