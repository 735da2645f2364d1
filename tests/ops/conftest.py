"""Programs on the CUDA backend, where a driver answers: on a GPU, or under `tests/emulator/run`."""

import ctypes
import importlib.util

import pytest


def no_cuda() -> str:
    """Why the CUDA backend cannot run here, or an empty string."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver; tests/emulator/run python -m pytest tests/ops"
    if driver.cuInit(0):
        return "no GPU answers"
    return "" if importlib.util.find_spec("pycuda") else "PyCUDA is not installed: pip install 'pycuda>=2026.1'"


@pytest.fixture(scope="session")
def cuda_backend():
    """The CUDA backend."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.backend import CudaBackend

    return CudaBackend()


@pytest.fixture
def another(cuda_backend):
    """Return a function that opens a further backend, whose runs join packs."""
    opened = []

    def backend():
        opened.append(type(cuda_backend)())
        opened[-1].joins_packs = True
        return opened[-1]

    yield backend
    for one in opened:
        one.close()
