"""NumPy's own BLAS, as generated code calls it: OpenBLAS with 64-bit lengths, from the library that NumPy loaded."""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from threadpoolctl import threadpool_info


@dataclass(frozen=True)
class Blas:
    """Its functions: addresses of those that generated code calls.

    Attributes:
        sgemm: products of float32.
        dgemm: products of float64.
        set_threads: sets how many threads later calls use.
        get_threads: returns it.
    """

    sgemm: int
    dgemm: int
    set_threads: Any
    get_threads: Any


def address(function: Any) -> int:
    """Return where a C function begins."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def blas() -> Blas | None:
    """Return NumPy's BLAS, None where it is another one than OpenBLAS with 64-bit lengths."""
    for pool in threadpool_info():
        if pool["internal_api"] != "openblas":
            continue
        library = ctypes.CDLL(pool["filepath"])
        for prefix in ("scipy_", ""):
            of_threads = [f"{prefix}openblas_{verb}_num_threads64_" for verb in ("set", "get")]
            names = [f"{prefix}cblas_sgemm64_", f"{prefix}cblas_dgemm64_", *of_threads]
            if all(hasattr(library, name) for name in names):
                functions = [getattr(library, name) for name in names]
                return Blas(address(functions[0]), address(functions[1]), functions[2], functions[3])
    return None
