"""Every op test runs on every backend."""

import numpy as np
import pytest

from dptrain.backend import Backend, best_loops
from dptrain.backend.numpy import NumpyBackend


@pytest.fixture(
    scope="session",
    params=[
        "numpy-float32-1",
        "numpy-float64-1",
        "numpy-float32-2",
        "numba-float32-1",
        "numba-float64-1",
        "numba-float32-2",
    ],
)
def ops(request: pytest.FixtureRequest) -> Backend:
    """A backend; the parameter is its loops, dtype and threads."""
    loops, dtype, threads = request.param.split("-")
    if loops == "numba":
        pytest.importorskip("numba", reason="compiled loops need the extra 'jit'")
    return NumpyBackend(np.dtype(dtype), int(threads), best_loops(loops))


def poisoned(ops: Backend, shape: tuple[int, ...], dtype=None):
    """Return an output buffer full of NaN (or of a large integer), which an op that misses an element leaves behind."""
    buffer = ops.empty(shape, dtype)
    bad = np.nan if np.dtype(buffer.dtype).kind == "f" else 99
    ops.write(buffer, np.full(shape, bad, buffer.dtype))
    return buffer
