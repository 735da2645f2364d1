"""Digests of arrays at memory speed (`kernels/digest.h`), or slower by NumPy, to compare ranks and find NaN."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.cpu.compile import library
from dptrain.runtime.types import type_of

Array = npt.NDArray[Any]

_BLOCK = 512  # DP_BLOCK
_PART = 32  # blocks


class Digests:
    """Digests of C-contiguous arrays that stay in place; `native`: by compiled code, else by NumPy, same bits."""

    def __init__(self, arrays: Sequence[Array], native: bool) -> None:
        self._arrays = list(arrays)
        if any(not array.flags.c_contiguous for array in self._arrays):
            raise AssertionError("the digest of an array that is not contiguous")
        self._found = np.zeros((len(self._arrays), 2), np.uint64)
        self._function = _function() if native else None
        self._table = np.array(
            [[array.ctypes.data for array in arrays], [array.nbytes for array in arrays], list(map(_mask, arrays))],
            np.int64,
        )

    def __call__(self) -> npt.NDArray[np.uint64]:
        """Return (arrays, 2): the digest of each, and whether it holds NaN or infinities."""
        if self._function is None:
            for number, array in enumerate(self._arrays):
                self._found[number] = _by_numpy(array)
        else:
            rows = [row.ctypes.data for row in self._table]
            self._function(*map(ctypes.c_void_p, rows), len(self._arrays), ctypes.c_void_p(self._found.ctypes.data))
        return self._found.copy()


def _mask(array: Array) -> int:
    return type_of(array.dtype).not_finite


@functools.cache
def _function() -> Any:
    function = library("", ("scalar.h", "digest.h")).digest
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    return function


def _odd(numbers: Array) -> Array:
    n = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    n = (n ^ (n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    n = (n ^ (n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (n ^ (n >> np.uint64(31))) | np.uint64(1)


@functools.cache
def _odd_of_places() -> Array:
    return _odd(np.arange(_BLOCK))


def _by_numpy(array: Array) -> tuple[int, bool]:
    flat = array.reshape(-1).view(np.uint8)
    full_words = len(flat) // (8 * _BLOCK) * _BLOCK
    remainder = np.zeros((1, _BLOCK), np.uint64)
    remainder.view(np.uint8)[0, : len(flat) - 8 * full_words] = flat[8 * full_words :]
    words = flat[: 8 * full_words].view(np.uint64).reshape(-1, _BLOCK)
    # In parts that stay in the processor's cache.
    parts = [*(words[begin : begin + _PART] for begin in range(0, len(words), _PART)), remainder]
    sums = np.concatenate([(part ^ (part >> np.uint64(32))) @ _odd_of_places() for part in parts])
    digest = sums @ _odd(np.arange(len(sums)) + (1 << 32))
    floats = [part.view(array.dtype) for part in parts] if _mask(array) else []
    return int(digest), any(not np.isfinite(part).all() for part in floats)
