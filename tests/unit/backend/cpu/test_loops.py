"""Memory of the CPU's inner loops."""

import numpy as np
import pytest
from dptrain.backend.cpu.loops import CACHE_LINE, aligned_empty


def test_arrays_begin_on_a_cache_line():
    for shape in ((), (3,), (2, 5)):
        array = aligned_empty(shape, np.float32)
        assert (array.shape, array.dtype) == (shape, np.float32)
        assert array.ctypes.data % CACHE_LINE == 0


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 63,), (1 << 32, 1 << 32), (1 << 40, 1 << 40, 1 << 40)])
def test_more_than_any_memory_is_an_error_of_memory(shape):
    with pytest.raises(MemoryError, match="unable to allocate"):
        aligned_empty(shape, np.float32)
