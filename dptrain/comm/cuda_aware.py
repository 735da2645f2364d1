"""Whether MPI accepts GPU memory.

Passing device memory to an MPI without CUDA support is a segmentation fault, not an error. So MPI is asked; if it
claims support, another process tries, whose crash does no harm. Run as a module, this file is that process.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from dptrain.runtime.launch.launcher import LAUNCHER_PREFIXES, start_mpi
from dptrain.runtime.programs import run_program

# The last line of such a process.
WORKED = "it works"
# Time limit in seconds of a copy of a few kilobytes.
_PATIENCE = 60.0
SIZE = 1 << 14


def why_not() -> str:
    """Return why MPI cannot take device memory, or an empty string if it can."""
    kinds = start_mpi().COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if not any(kind.strip().startswith("cuda") for kind in kinds.split(",")) and not _query():
        return "this MPI library does not report CUDA support (mpi_memory_alloc_kinds, MPIX_Query_cuda_support)"
    return _try()


def _query() -> bool:
    """Call `MPIX_Query_cuda_support`, an extension of MPICH and Open MPI."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split()[-1] for line in maps if "/libmpi" in line}
    for library in (None, *sorted(loaded)):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def _try() -> str:
    """Let MPI move device memory in a child process; return what went wrong."""
    what = _run()
    text = "this MPI library claims to be CUDA-aware, but fails with device memory"
    return f"{text}: {what}" if what else ""


def _run() -> str:
    """Run this module; return what went wrong, or an empty string where it printed `WORKED`."""
    # Without the launcher's variables, or the process would take part in this job.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    try:
        completed = run_program([sys.executable, "-m", __name__], _PATIENCE, environ=alone)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried ({error})"
    if completed.returncode == 0 and completed.stdout.decode(errors="replace").strip() == WORKED:
        return ""
    if completed.returncode < 0:
        return f"it was killed by {signal.Signals(-completed.returncode).name}"
    output = (completed.stderr or completed.stdout).decode(errors="replace")
    return (output.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]


class Device:
    """The first visible GPU, without PyCUDA; a context manager."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._device = ctypes.c_int()

    def __enter__(self) -> "Device":
        context = ctypes.c_void_p()
        check(self.driver.cuInit(0), "cuInit")
        check(self.driver.cuDeviceGet(ctypes.byref(self._device), 0), "cuDeviceGet")
        check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device), "cuDevicePrimaryCtxRetain")
        check(self.driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        return self

    def __exit__(self, *_: object) -> None:
        check(self.driver.cuDevicePrimaryCtxRelease_v2(self._device), "cuDevicePrimaryCtxRelease")

    def wait(self) -> None:
        """Wait for all work."""
        check(self.driver.cuCtxSynchronize(), "cuCtxSynchronize")


class Memory:
    """`SIZE` float32 on a device, with `__cuda_array_interface__`."""

    def __init__(self, device: Device, values: "np.ndarray[Any, Any]") -> None:
        self._driver, self._pointer = device.driver, ctypes.c_uint64()
        check(self._driver.cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(4 * SIZE)), "cuMemAlloc")
        source = ctypes.c_void_p(values.ctypes.data)
        check(self._driver.cuMemcpyHtoD_v2(self._pointer, source, ctypes.c_size_t(values.nbytes)), "write")
        self.__cuda_array_interface__ = {
            "shape": (SIZE,),
            "typestr": "<f4",
            "data": (self._pointer.value, False),
            "version": 3,
        }

    def read(self) -> "np.ndarray[Any, Any]":
        """Return the values."""
        values = np.empty(SIZE, np.float32)
        target = ctypes.c_void_p(values.ctypes.data)
        check(self._driver.cuMemcpyDtoH_v2(target, self._pointer, ctypes.c_size_t(values.nbytes)), "read")
        return values

    def free(self) -> None:
        """Free the memory."""
        check(self._driver.cuMemFree_v2(self._pointer), "cuMemFree")


def check(status: int, what: str) -> None:
    """Raise where the driver returned an error."""
    if status:
        raise RuntimeError(f"the driver's {what} fails with error {status}")


def main() -> None:
    """Send and sum device memory within this one process."""
    with Device() as device:
        mpi = start_mpi()
        expected = np.arange(SIZE, dtype=np.float32)
        first, second, third = (Memory(device, values) for values in (expected, 0 * expected, 0 * expected))
        device.wait()
        mpi.COMM_SELF.Sendrecv(first, dest=0, recvbuf=second, source=0)
        mpi.COMM_SELF.Allreduce(second, third, op=mpi.SUM)
        mpi.COMM_SELF.Allreduce(mpi.IN_PLACE, third, op=mpi.SUM)
        if not np.array_equal(third.read(), expected):
            raise RuntimeError("the values received differ from those sent")
        for memory in (first, second, third):
            memory.free()
    print(WORKED)


if __name__ == "__main__":
    main()
