"""What stand-ins for libraries queue: reads of device memory, NumPy on the host, and writes, each when a stream comes
to it, so that a graph can hold them. Memory is reached through the driver's copies alone.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Driver:
    """The CUDA driver.

    Args:
        refuse: returns the error that the library raises for a message.
    """

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        self._library, self._refuse = ctypes.CDLL("libcuda.so.1"), refuse
        # What queued work needs, which graphs may launch again, until `release`.
        self._kept: list[Any] = []
        self._pinned: list[ctypes.c_void_p] = []

    def host(self, count: int, dtype: Any) -> np.ndarray:
        """Return a flat array in page-locked memory: of other memory the driver copies what is there at the call."""
        address, kind = ctypes.c_void_p(), np.dtype(dtype)
        self._check(self._library.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(count * kind.itemsize), 0))
        self._pinned.append(address)
        assert address.value is not None
        content = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address.value)
        return np.frombuffer(content, kind)

    def release(self) -> None:
        """Give page-locked memory back, when nothing that was queued will run any more."""
        self._kept.clear()
        while self._pinned:
            self._library.cuMemFreeHost(self._pinned.pop())

    def _check(self, code: int) -> None:
        if code:
            raise self._refuse(f"the driver answers {code}")

    def range(self, name: str, address: int, nbytes: int) -> None:
        """Check that bytes lie within one allocation."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if status or address + nbytes > base.value + size.value:
            left = max(0, base.value + size.value - address)
            raise self._refuse(f"out of bounds: {name} of {nbytes} bytes at {address:#x}, where there are {left}")

    def queue(
        self,
        stream: int,
        reads: dict[int, np.ndarray],
        compute: Callable[[], np.ndarray],
        target: int,
        output: np.ndarray,
        scribbled: tuple[int, int] = (0, 0),
    ) -> None:
        """Queue a call.

        Args:
            stream: the stream's handle.
            reads: arrays on the host that memory is copied to, by address.
            compute: returns what is written; called when the stream comes to it.
            target: where it is written.
            output: an array on the host for it.
            scribbled: address and bytes of the workspace, of whose ends nothing is left as it was.
        """
        handle = ctypes.c_void_p(stream)
        address, nbytes = scribbled
        edge = min(nbytes, 4096)
        for start in (address, address + nbytes - edge):
            if edge:
                byte, count = ctypes.c_ubyte(0xFF), ctypes.c_size_t(edge)
                self._check(self._library.cuMemsetD8Async(ctypes.c_uint64(start), byte, count, handle))
        for address, host in reads.items():
            to, length = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes)
            self._check(self._library.cuMemcpyDtoHAsync_v2(to, ctypes.c_uint64(address), length, handle))

        def reached(_: object) -> None:
            output[...] = compute()

        function = _Function(reached)
        self._kept += [function, output, reads]
        self._check(self._library.cuLaunchHostFunc(handle, function, None))
        source, length = ctypes.c_void_p(output.ctypes.data), ctypes.c_size_t(output.nbytes)
        self._check(self._library.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(target), source, length, handle))
