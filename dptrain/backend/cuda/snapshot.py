"""The state of a training in a GPU's memory: its digests by one kernel, and a copy if there is room."""
# ruff: noqa: D102 - each method is documented once, in backend/base.py

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dptrain.backend.cuda.compile import compiled_text
from dptrain.backend.cuda.gpu.device import cuda
from dptrain.backend.cuda.memory import DeviceArray
from dptrain.errors import DeviceMemoryError
from dptrain.runtime.types import type_of

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

# Blocks that share an array, and the threads of each; those of small arrays have nothing to do.
_BLOCKS, _THREADS = 64, 256
# The part of the free memory that a copy of the state may take.
_COPY = 0.25


class DeviceSnapshot:
    """A `Snapshot` of variables' buffers on a backend."""

    def __init__(self, backend: "CudaBackend", buffers: Sequence[DeviceArray]) -> None:
        self._backend, self._buffers = backend, list(buffers)
        entries = [[buffer.pointer, buffer.nbytes, type_of(buffer.dtype).not_finite] for buffer in buffers]
        self._table = backend.upload(np.array(entries, np.int64).reshape(-1, 3), "digests")
        self._found = backend.empty((len(entries), 2), np.uint64, "digests")
        self._copies: list[DeviceArray] = []
        gpu = backend.gpu_record
        cubin = compiled_text("digest", '#include "digest.h"\n', gpu.architecture)
        self._kernel = gpu.module(cubin).get_function("digest")
        self._kernel.prepare("PP")

    def digests(self) -> npt.NDArray[np.uint64]:
        stream, sums = self._backend.stream, self._found
        if not self._buffers:
            return np.zeros((0, 2), np.uint64)
        cuda.memset_d8_async(sums.pointer, 0, sums.nbytes, stream)
        grid, block = (_BLOCKS, len(self._buffers)), (_THREADS, 1, 1)
        self._kernel.prepared_async_call(grid, block, stream, self._table.pointer, sums.pointer)
        digests = self._backend.download(sums)
        digests[:, 1] = digests[:, 1] != 0
        return digests

    def take(self) -> bool:
        if not self._copies:
            if sum(buffer.nbytes for buffer in self._buffers) > _COPY * cuda.mem_get_info()[0]:
                return False
            try:
                self._copies = [
                    self._backend.empty(buffer.shape, buffer.dtype, "copy of the state") for buffer in self._buffers
                ]
            except DeviceMemoryError:
                return False
        self._copy(self._buffers, self._copies)
        return True

    def restore(self) -> None:
        self._copy(self._copies, self._buffers)

    def _copy(self, sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if source.nbytes:
                cuda.memcpy_dtod_async(target.pointer, source.pointer, source.nbytes, self._backend.stream)
