"""Every function of elements on CUDA at 0, at corners, ties and infinities: what NumPy computes there."""

import pytest

from tests.sample import sample
from tests.unit.ops import points


@pytest.mark.long
@pytest.mark.parametrize("dtype", sample(["float32", "float64"], 2))
def test_the_kernels_compute_what_numpy_does(cuda_backend, dtype):
    executable = cuda_backend.executable(points.program(dtype), points.operands(dtype))
    executable.run()
    assert points.wrong(executable.outputs, dtype) == {}
