"""What tests of kernels for hardware share."""

import shutil
import subprocess

import pytest

from dptrain.backend.cuda.compile import find_nvcc
from dptrain.errors import DeviceError


@pytest.fixture(scope="session")
def nvcc() -> str:
    """NVIDIA's nvcc."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler: nvcc needs g++ on PATH")
    try:
        compiler = find_nvcc()
    except DeviceError as error:
        pytest.skip(str(error))
    if "emulated" in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("nvcc is the emulator's")
    return compiler
