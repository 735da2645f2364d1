"""Half precision and float8 in C++: all their numbers, and roundings of wider types, as by NumPy and ml_dtypes."""

import ctypes

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

from dptrain.backend.cpu.compile import compiler, library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SOURCE = """
extern "C" void widen(const {kind} *x, float *y, int64_t n) {{ for (int64_t i = 0; i < n; ++i) y[i] = (float)x[i]; }}
template <typename T> void narrow(const T *x, {kind} *y, int64_t n) {{
    for (int64_t i = 0; i < n; ++i) y[i] = ({kind})x[i];
}}
extern "C" void of_float32(const float *x, {kind} *y, int64_t n) {{ narrow(x, y, n); }}
extern "C" void of_float64(const double *x, {kind} *y, int64_t n) {{ narrow(x, y, n); }}
extern "C" void of_int64(const int64_t *x, {kind} *y, int64_t n) {{ narrow(x, y, n); }}
"""


TYPES = [bfloat16, np.float16, float8_e4m3fn, float8_e5m2]


def every_number(dtype):
    bits = 8 * np.dtype(dtype).itemsize
    return np.arange(2**bits, dtype=f"u{bits // 8}").view(dtype)


def roundings():
    """Numbers around every narrow number: it, its neighbours, what lies halfway, and other magnitudes."""
    rng = np.random.default_rng(0)
    bits = np.concatenate([every_number(dtype).astype(np.float32) for dtype in TYPES]).view(np.uint32)
    halfway = [0x8000, 0x1000, 0x80000, 0x100000]
    steps = np.array([0, 1, -1, *halfway, *(step - 1 for step in halfway), *(step + 1 for step in halfway)], np.int64)
    near = ((bits[:, None].astype(np.int64) + steps) % 2**32).astype(np.uint32).view(np.float32).ravel()
    return np.concatenate([near, rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)])


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
def test_conversions(dtype):
    compiled = library(SOURCE.format(kind=f"dp_{np.dtype(dtype).name}"), ("scalar.h", "half.h"))
    halves = every_number(dtype)
    wide = np.empty(halves.size, np.float32)
    compiled.widen(*(ctypes.c_void_p(array.ctypes.data) for array in (halves, wide)), ctypes.c_int64(wide.size))
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    assert np.array_equal(np.signbit(wide), np.signbit(halves.astype(np.float32)))
    near = roundings()
    with np.errstate(all="ignore"):
        ordered = np.sort(halves.astype(np.float64)[np.isfinite(halves)])
        halfway = (ordered[1:] + ordered[:-1]) / 2
        doubles = np.concatenate([near, halfway, halfway * (1 + 2**-40), halfway * (1 - 2**-40), [1e300, -1e-320]])
    numbers = {"float32": near, "float64": doubles, "int64": np.arange(-70_000, 70_000)}
    for name, x in numbers.items():
        narrowed = np.empty(x.size, dtype)
        narrow = getattr(compiled, f"of_{name}")
        narrow(x.ctypes.data_as(ctypes.c_void_p), narrowed.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size))
        with np.errstate(all="ignore"):
            expected = x.astype(dtype)
        np.testing.assert_array_equal(narrowed.astype(np.float32), expected.astype(np.float32), err_msg=name)
        assert np.array_equal(np.signbit(narrowed), np.signbit(expected)), name
