"""Every op test runs on every backend.

The CUDA backend's run where a driver answers: on a GPU, or under `tests/emulator/run`. DPTRAIN_OPS_EXAMPLES sets how
many random shapes each test draws, for slow devices.
"""

import ctypes
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from dptrain.backend import Backend, best_loops
from dptrain.backend.cpu.backend import NumpyBackend


def no_cuda() -> str:
    """Why the CUDA backend cannot run here, or an empty string."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver; tests/emulator/run python -m pytest tests/ops -k cuda"
    if driver.cuInit(0):
        return "no GPU answers"
    return "" if importlib.util.find_spec("pycuda") else "PyCUDA is not installed: pip install 'dptrain[cuda]'"


@pytest.fixture(
    scope="session",
    params=[
        "numpy-float32-1",
        "numpy-float64-1",
        "numpy-float32-2",
        "numba-float32-1",
        "numba-float64-1",
        "numba-float32-2",
        "cuda-float32-1",
    ],
)
def ops(request: pytest.FixtureRequest) -> Backend:
    """A backend; the parameter is its loops, dtype and threads."""
    loops, dtype, threads = request.param.split("-")
    if loops == "cuda":
        if reason := no_cuda():
            pytest.skip(reason)
        from dptrain.backend.cuda.backend import CudaBackend

        return CudaBackend()
    if loops == "numba":
        pytest.importorskip("numba", reason="compiled loops need the extra 'jit'")
    return NumpyBackend(np.dtype(dtype), int(threads), best_loops(loops))


@pytest.fixture(scope="session")
def cuda_ops() -> Backend:
    """The CUDA backend alone."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.backend import CudaBackend

    return CudaBackend()


def poisoned(ops: Backend, shape: tuple[int, ...], dtype=None):
    """Return an output buffer full of NaN (or of a large integer), which an op that misses an element leaves behind."""
    buffer = ops.empty(shape, dtype)
    bad = np.nan if np.dtype(buffer.dtype).kind == "f" else 99
    ops.write(buffer, np.full(shape, bad, buffer.dtype))
    return buffer


@pytest.fixture(autouse=True)
def in_a_step(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ops run as in training: what the processor flags of floating point is a number there, and no warning."""
    if "ops" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("ops").step_scope():
        yield
