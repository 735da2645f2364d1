"""Whether MPI can be given a GPU's memory.

Handing device memory to an MPI that does not know GPUs is no error but a segmentation fault. So MPI is asked what it
knows; and if it claims to know GPUs, another process tries, whose crash harms nobody. Run as a module, this file is
that process.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from dptrain.runtime.launcher import LAUNCHER_PREFIXES, start_mpi

# Seconds in which a copy of a few kilobytes must be done.
_PATIENCE = 60.0
_SIZE = 1 << 14


def why_not() -> str:
    """Return why device memory cannot be handed to MPI, or an empty string if it can."""
    kinds = start_mpi().COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if not any(kind.strip().startswith("cuda") for kind in kinds.split(",")) and not _query():
        return "this MPI library does not say that it is CUDA-aware (mpi_memory_alloc_kinds, MPIX_Query_cuda_support)"
    return _try()


def _query() -> bool:
    """Ask `MPIX_Query_cuda_support`, which MPICH and Open MPI have beyond the standard."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split()[-1] for line in maps if "/libmpi" in line}
    for library in (None, *sorted(loaded)):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def _try() -> str:
    """Let MPI move device memory in a process of its own."""
    # A process that no launcher knows of, or it would take part in this job.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=alone,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"this MPI library says that it is CUDA-aware, but could not be tried ({error})"
    if done.returncode == 0 and done.stdout.strip() == "moved":
        return ""
    if done.returncode < 0:
        what = f"it died of {signal.Signals(-done.returncode).name}"
    else:
        what = ((done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"this MPI library says that it is CUDA-aware, but fails when it is given device memory: {what}"


class _DeviceMemory:
    """Memory of the first visible GPU, as mpi4py takes it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.pointer = ctypes.c_uint64()
        _check(driver.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(4 * _SIZE)), "cuMemAlloc")
        self.__cuda_array_interface__ = {
            "shape": (_SIZE,),
            "typestr": "<f4",
            "data": (self.pointer.value, False),
            "version": 3,
        }

    def write(self, values: np.ndarray[Any, Any]) -> None:
        _check(self._driver.cuMemcpyHtoD_v2(self.pointer, ctypes.c_void_p(values.ctypes.data), values.nbytes), "write")

    def read(self) -> np.ndarray[Any, Any]:
        values = np.empty(_SIZE, np.float32)
        _check(self._driver.cuMemcpyDtoH_v2(ctypes.c_void_p(values.ctypes.data), self.pointer, values.nbytes), "read")
        return values


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"the driver's {what} fails with error {status}")


def main() -> None:
    """Send and sum device memory within this one process; print "moved" if the values arrive."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    mpi = start_mpi()
    expected = np.arange(_SIZE, dtype=np.float32)
    first, second, third = (_DeviceMemory(driver) for _ in range(3))
    first.write(expected)
    second.write(np.zeros_like(expected))
    third.write(np.zeros_like(expected))
    _check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
    mpi.COMM_SELF.Sendrecv(first, dest=0, recvbuf=second, source=0)
    mpi.COMM_SELF.Allreduce(second, third, op=mpi.SUM)
    mpi.COMM_SELF.Allreduce(mpi.IN_PLACE, third, op=mpi.SUM)
    if not np.array_equal(third.read(), expected):
        raise RuntimeError("the values that arrive are not those that were sent")
    for memory in (first, second, third):
        _check(driver.cuMemFree_v2(memory.pointer), "cuMemFree")
    _check(driver.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")
    print("moved")


if __name__ == "__main__":
    main()
