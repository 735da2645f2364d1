"""Fingerprints that tell sets of samples apart."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.cpu.digest import Digests
from dptrain.data.lazy import LazyArray

Array = npt.NDArray[Any]

# Advice if the ranks' samples differ.
DRAW_THE_SAME = (
    "every rank needs the same data: seed random numbers, with dp.utils.set_random_seed(0) at the top of the script or "
    "np.random.default_rng(0)"
)

# Bytes copied at once of an array that is not contiguous.
_CHUNK_BYTES = 1 << 24
# Sampled rows of a memory map or a lazy array, which may exceed memory, or be on a shared disk.
_SAMPLED_ROWS = 64


def fingerprint(*arrays: Array) -> list[Any]:
    """Return shapes, dtypes and a checksum (5 GB/s) of arrays (rows, ...); memory maps are sampled."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        for part in _parts(array):
            digest.update(Digests([part], native=False)()[:, 0].tobytes())
    return [*(fact for array in arrays for fact in (list(array.shape), str(array.dtype))), digest.hexdigest()]


def _parts(array: Array) -> Iterator[Array]:
    """Yield contiguous pieces; their number depends on shape and dtype alone."""
    if is_mapped(array):
        array = array[np.linspace(0, max(len(array) - 1, 0), num=min(len(array), _SAMPLED_ROWS), dtype=np.int64)]
    rows = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for begin in range(0, len(array), rows):
        yield np.ascontiguousarray(array[begin : begin + rows])


def is_mapped(array: Any) -> bool:
    """Whether rows are read on use: a memory map, a view of one, or a lazy array."""
    if isinstance(array, LazyArray):
        return True
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False
