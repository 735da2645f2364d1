"""Trying in a process of its own what could end this one, such as handing device memory to a library."""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from dptrain.runtime.launcher import LAUNCHER_PREFIXES

# What such a process prints in the end.
WORKED = "it works"
# Seconds in which a copy of a few kilobytes must be done.
_PATIENCE = 60.0
SIZE = 1 << 14


def why_not(module: str) -> str:
    """Run a module and return what went wrong, or an empty string where it has printed `WORKED`."""
    # A process that no launcher knows of, or it would take part in this job.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            env=alone,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried ({error})"
    if done.returncode == 0 and done.stdout.strip() == WORKED:
        return ""
    if done.returncode < 0:
        return f"it died of {signal.Signals(-done.returncode).name}"
    return ((done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"])[-1]


class Device:
    """The first visible GPU, without PyCUDA. A context manager."""

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
    """`SIZE` float32 on a device, as libraries take them."""

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
        """Free it."""
        check(self._driver.cuMemFree_v2(self._pointer), "cuMemFree")


def check(status: int, what: str) -> None:
    """Raise where the driver has answered with an error."""
    if status:
        raise RuntimeError(f"the driver's {what} fails with error {status}")
