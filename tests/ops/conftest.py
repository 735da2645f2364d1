"""Every op test runs on every backend."""

import numpy as np
import pytest

from dptrain.backend.base import Backend
from dptrain.backend.numpy import NumpyBackend


@pytest.fixture(scope="session", params=["numpy-float32", "numpy-float64", "numpy-float32-2-threads"])
def ops(request: pytest.FixtureRequest) -> Backend:
    name = request.param
    return NumpyBackend(np.float64 if "float64" in name else np.float32, threads=2 if "threads" in name else 1)


def poisoned(ops: Backend, shape: tuple[int, ...], dtype=None):
    """Return an output buffer full of NaN (or of a large integer), which an op that misses an element leaves behind."""
    buffer = ops.empty(shape, dtype)
    bad = np.nan if np.dtype(buffer.dtype).kind == "f" else 99
    ops.write(buffer, np.full(shape, bad, buffer.dtype))
    return buffer
