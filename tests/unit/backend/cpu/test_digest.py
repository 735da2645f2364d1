"""Digests: the same by NumPy and by compiled code, and changed by whatever changes."""

import numpy as np
import pytest
from ml_dtypes import finfo

from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.digest import Digests
from dptrain.runtime.types import TYPES

FLOATS = [known.storage for known in TYPES.values() if known.is_float]
BY_NUMPY_AND_COMPILED = [False, True] if compiler() is not None else [False]


def digest(array: np.ndarray, native: bool = False) -> int:
    return int(Digests([array], native)()[0, 0])


def filled(size: int, dtype: type) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=size) * 100).astype(dtype)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [*FLOATS, np.uint8, np.int64, np.bool_])
def test_compiled_code_and_numpy_agree(dtype):
    arrays = [filled(size, dtype) for size in (0, 1, 2, 3, 7, 511, 512, 513, 1023, 1024, 1025, 4096, 5000)]
    np.testing.assert_array_equal(Digests(arrays, True)(), Digests(arrays, False)())
    assert len(set(Digests(arrays, True)()[1:, 0])) == len(arrays) - 1


@pytest.mark.parametrize("native", BY_NUMPY_AND_COMPILED)
def test_every_flipped_bit_changes_a_digest(native):
    array = filled(1031, np.float32)
    digests = Digests([array], native)
    distinct = {int(digests()[0, 0])}
    for place in range(0, array.nbytes, 97):
        for bit in range(8):
            array.view(np.uint8)[place] ^= 1 << bit
            distinct.add(int(digests()[0, 0]))
            array.view(np.uint8)[place] ^= 1 << bit
    assert len(distinct) == 1 + 8 * len(range(0, array.nbytes, 97))


def test_values_that_change_places_change_a_digest():
    array = filled(3000, np.float64)
    before = digest(array)
    for place, other in [(0, 1), (0, 512), (511, 512), (7, 7 + 1024), (2998, 2999), (0, 2999)]:
        array[[place, other]] = array[[other, place]]
        assert digest(array) != before
        array[[place, other]] = array[[other, place]]
    assert digest(array) == before


@pytest.mark.parametrize("native", BY_NUMPY_AND_COMPILED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_seen_wherever_it_is(dtype, value, native):
    array = np.full(1027, finfo(dtype).max, dtype)
    digests = Digests([array, np.full(8, -1)], native)
    assert digests()[:, 1].tolist() == [0, 0]  # the integers have bits that a float would have as NaN
    for place in (0, 1, 511, 512, 1025, 1026):
        array[place] = value
        assert digests()[:, 1].tolist() == [1, 0]
        array[place] = 0


def test_a_digest_stays_as_it_is():
    """Ranks on machines with other compilers compare theirs."""
    assert digest(np.arange(1200, dtype=np.float32)) == 11724338920424849408
