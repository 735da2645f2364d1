"""Loading kernels, and what is said where they do not load; on the emulated driver."""

import sys
from pathlib import Path

import pytest

from dptrain.backend.cuda.compile import parse_release, too_new
from dptrain.runtime.storage import cache
from tests.emulated import emulated, inside_emulator

OPEN = """
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.errors import DeviceError
try:
    CudaBackend()
    print("loaded")
except DeviceError as error:
    print(error)
"""
RUN = """
    import dptrain.ops
    from dptrain.program.program import trace
    CudaBackend().executable(trace(lambda x: {"y": x + 1}, {"x": ((3,), "float32")}), {"x": np.zeros(3, np.float32)})
"""
outside_emulator = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")


def test_which_drivers_load_what_an_nvcc_makes():
    assert parse_release("Cuda compilation tools, release 12.8, V12.8.93") == (12, 8)
    assert parse_release("release 2") is None
    for toolkit, driver in [
        ((12, 8), (12, 4)),
        ((12, 0), (13, 0)),
        ((13, 0), (13, 0)),
        (None, (12, 0)),
        ((13, 0), None),
    ]:
        assert too_new(toolkit, driver) is None
    assert too_new((13, 0), (12, 4)) == (
        "nvcc is from CUDA 13.0, but this driver supports CUDA 12.x at most (it reports 12.4)",
        "update the NVIDIA driver (CUDA 13 needs R580 or later), or put the nvcc of a CUDA 12 toolkit first on PATH",
    )


@outside_emulator
def test_a_driver_that_is_too_old_for_the_nvcc(tmp_path):
    process = emulated(sys.executable, "-c", OPEN, EMULATOR_DRIVER="12.4", DPTRAIN_CACHE=str(tmp_path))
    assert (process.code, process.err) == (0, "")
    assert process.out.startswith(
        "nvcc is from CUDA 13.0, but this driver supports CUDA 12.x at most (it reports 12.4)"
    )
    assert not list(tmp_path.rglob("*.cubin")), "nothing is compiled in vain"


@outside_emulator
def test_kernels_that_do_not_load_for_another_reason(tmp_path):
    code = f"{OPEN.replace('    CudaBackend()', RUN)}"
    process = emulated(sys.executable, "-c", code, DPTRAIN_CACHE=str(tmp_path))
    assert (process.code, process.out, process.err) == (0, "loaded\n", "")
    for path in tmp_path.rglob("*.cubin"):
        path.write_bytes(b"damaged")
        Path(f"{path}.sha256").write_bytes(cache._checksum(path.name, b"damaged"))  # else it is compiled again
    process = emulated(sys.executable, "-c", code, DPTRAIN_CACHE=str(tmp_path))
    assert "compiled kernels cannot be loaded (cuModuleLoadDataEx failed: device kernel image is invalid" in process.out
    assert f"remove {tmp_path}" in process.out
