"""Prints as JSON what the NVIDIA driver reports of the GPUs that this process would see.

A program of its own, run by `dptrain.backend.cuda.gpu.selection`: asking starts the driver, after which
CUDA_VISIBLE_DEVICES has no effect, and a damaged driver can crash the process. It needs only the driver.
"""

import contextlib
import ctypes
import json
import sys
from typing import Any


def main(with_memory: bool) -> dict[str, Any]:
    """Return the driver's CUDA version, errors and GPUs; `with_memory` takes a context on each, for free memory."""
    report: dict[str, Any] = {"cuda": None, "error": None, "gpus": []}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return report | {"error": f"the driver's library does not load ({error})"}
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
        report["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(number),))):
        if code := getattr(driver, call)(*arguments):
            return report | {"error": f"{call} fails: {_error(driver, code)}"}
    report["gpus"] = [_gpu(driver, index, with_memory) for index in range(number.value)]
    return report


def _gpu(driver: ctypes.CDLL, index: int, with_memory: bool) -> dict[str, Any]:
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDeviceGetName(name, 256, index)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), index)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, index)  # compute capability, major and minor
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
    gpu = {
        "name": name.value.decode(errors="replace"),
        "uuid": device_uuid(driver, index),
        "architecture": architecture_of(major.value, minor.value),
        "total": total.value,
        "free": None,
        "error": None,
    }
    if with_memory:
        context, free = ctypes.c_void_p(), ctypes.c_size_t(0)
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
        if code == 0:
            code = driver.cuCtxSetCurrent(context) or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            gpu["free"] = free.value
            driver.cuCtxSetCurrent(None)
            driver.cuDevicePrimaryCtxRelease_v2(index)
        if code:
            gpu |= {"free": None, "error": _error(driver, code)}
    return gpu


def architecture_of(major: int, minor: int) -> str:
    """Return a compute capability's target architecture; 9.0's wgmma, which no later one has, needs "sm_90a"."""
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def device_uuid(driver: ctypes.CDLL, index: int) -> str | None:
    """Return the UUID of a GPU or MIG slice as nvidia-smi prints it, or None if the driver does not report it."""
    # The first version of the call tells the GPU that a slice is of, the second the slice.
    gpu_uuid, slice_uuid = (_uuid(driver, call, index) for call in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"))
    if slice_uuid is None:
        return None if gpu_uuid is None else f"GPU-{gpu_uuid}"
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, 256, index)
    is_slice = slice_uuid != (gpu_uuid or slice_uuid) or b" MIG " in name.value
    return f"MIG-{slice_uuid}" if is_slice else f"GPU-{slice_uuid}"


def _uuid(driver: ctypes.CDLL, call: str, index: int) -> str | None:
    data = (ctypes.c_ubyte * 16)()
    with contextlib.suppress(AttributeError):
        if getattr(driver, call)(data, index) == 0:
            text = bytes(data).hex()
            return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
    return None


def _error(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    with contextlib.suppress(AttributeError):
        driver.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


if __name__ == "__main__":
    print(json.dumps(main("--memory" in sys.argv)))
