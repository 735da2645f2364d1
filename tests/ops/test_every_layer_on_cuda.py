"""Every layer on CUDA, in one program, against NumPy in float64."""

import numpy as np
import pytest

from tests.ops.test_programs_on_cuda import both, check, check_state
from tests.unit.layers.together import program_of_all


@pytest.mark.long
def test_layers_compute_what_numpy_computes(cuda_backend):
    program, values = program_of_all()
    _, actual, expected, state = both(cuda_backend, program, values, steps=2)
    check(actual, expected, 1e-9)
    check_state(state, 1e-9)
    assert all(np.isfinite(array).all() for array in actual.values())
