"""Memory of programs."""

import numpy as np
import pytest

from dptrain.program.memory import ALIGNMENT, aligned, arrange


def test_arrays_begin_on_a_cache_line():
    for shape in ((), (3,), (2, 5)):
        array = aligned(shape, np.float32)
        assert (array.shape, array.dtype) == (shape, np.float32)
        assert array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 63,), (1 << 32, 1 << 32), (1 << 40, 1 << 40, 1 << 40)])
def test_more_than_any_memory_is_an_error_of_memory(shape):
    with pytest.raises(MemoryError, match="unable to allocate"):
        aligned(shape, np.float32)


def test_what_lives_together_lies_apart():
    lives = [(100, 0, 2), (64, 1, 3), (10, 3, 4), (100, 4, 5), (0, 0, 5)]
    offsets, size = arrange(lives)
    assert size == 256
    for first in range(len(lives)):
        for second in range(first):
            (a, born, died), (b, birth, death) = lives[first], lives[second]
            if born <= death and birth <= died and a and b:
                assert offsets[first] + a <= offsets[second] or offsets[second] + b <= offsets[first]
