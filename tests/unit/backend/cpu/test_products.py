"""Products of matrices on a CPU: right, and of the same bits on any number of threads and beside any other rows."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu.compile import compiler, has_tiles, products, shared
from dptrain.backend.cpu.denormals import flush_to_zero
from tests.sample import examples

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 256, 300, 520]))
TOLERANCE = {"float32": 1e-6, "float64": 1e-15}  # of an element, by sqrt(k)


RANGE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def product(a, b, *, threads=1, out=None, epilogue=None, step=1, function=None):
    """Return a times b, each as it lies in memory or transposed; or add it to `out`.

    Of half precision it is float32. An epilogue is called as epilogue(the product so far, low, high); None is returned
    if it was left to the caller. The function is the one that programs call unless another's address is given.
    """
    (m, k), n = a.shape, b.shape[1]
    result = np.full((m, n), np.nan, np.result_type(a.dtype, np.float32)) if out is None else out
    if function is None:
        function = products(a.dtype.name).result()
    kinds = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool, ctypes.c_bool, *[ctypes.c_int64] * 3]
    kinds += [ctypes.c_void_p, ctypes.c_int64] * 2 + [ctypes.c_void_p, ctypes.c_bool]
    kinds += [RANGE, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    callback = RANGE() if epilogue is None else RANGE(lambda _, low, high: epilogue(result, low, high))
    (at, of_a), (bt, of_b) = (
        (not factor.flags.c_contiguous, factor.T if not factor.flags.c_contiguous else factor) for factor in (a, b)
    )
    where = (of_a.ctypes.data, of_a.shape[1], of_b.ctypes.data, of_b.shape[1], result.ctypes.data)
    call = ctypes.CFUNCTYPE(ctypes.c_bool, *kinds)(function)
    executed = call(shared("dp_parallel"), threads, at, bt, m, n, k, *where, out is not None, callback, None, step, 0)
    return result if epilogue is None or executed else None


def matrices(m, n, k, at, bt, dtype, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(k, m) if at else (m, k)), rng.normal(size=(n, k) if bt else (k, n))
    a, b = a.astype(dtype), b.astype(dtype)
    return (a.T if at else a), (b.T if bt else b)


@settings(max_examples=examples(60), deadline=None)
@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.sampled_from(sorted(TOLERANCE)), st.booleans())
def test_against_numpy(m, n, k, at, bt, dtype, add):
    a, b = matrices(m, n, k, at, bt, dtype)
    before = np.ones((m, n), dtype)
    actual = product(a, b, out=before.copy() if add else None)
    expected = a.astype(np.longdouble) @ b.astype(np.longdouble) + add
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * 10 * np.sqrt(k))
    row = m // 2
    alone = product(np.ascontiguousarray(a[row : row + 1]), b, out=before[:1].copy() if add else None)
    np.testing.assert_array_equal(alone[0], actual[row])
    np.testing.assert_array_equal(product(a, b, threads=3, out=before.copy() if add else None), actual)


def copies(a, b):
    """Return float32 matrices of the same numbers, which lie as these do."""
    return (np.asarray(factor, np.float32, order="C" if factor.flags.c_contiguous else "F") for factor in (a, b))


HALF_CHAINS = "DP_PRODUCT(dp_bfloat16)\nDP_PRODUCT(dp_float16)\n"


def half_chains(dtype):
    """Return the product of factors in half precision that every CPU has."""
    name = "dp_" + np.dtype(dtype).name
    return compiling._address(compiling.library(HALF_CHAINS, compiling.PRODUCT)[f"dp_product_{name}"])


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.sampled_from([bfloat16, np.float16]), st.booleans())
def test_factors_of_half_precision_have_the_bits_of_float32_copies(m, n, k, at, bt, dtype, add):
    a, b = matrices(m, n, k, at, bt, dtype)
    before, function = np.ones((m, n), np.float32), half_chains(dtype)
    expected = product(*copies(a, b), out=before.copy() if add else None)
    for threads in (1, 3):
        actual = product(a, b, threads=threads, out=before.copy() if add else None, function=function)
        np.testing.assert_array_equal(actual, expected)


needs_tiles = pytest.mark.skipif(compiler() is None or not has_tiles(), reason="no AMX tiles for bfloat16")


def in_tiles(a, b, before):
    """Return what kernels/native_tiles.h says: per 32 of k, chains of the even and of the odd ones, then their sum."""
    a, b = copies(a, b)
    total = before.copy()
    for first in range(0, a.shape[1], 32):
        chains = np.zeros((2, *total.shape), np.float32)
        for k in range(first, min(first + 32, a.shape[1])):
            chains[k % 2] += a[:, k : k + 1] * b[k]  # a product of two bfloat16 is exact
        total += chains[0] + chains[1]
    return total


@needs_tiles
@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES, st.one_of(SIZES, st.just(1100)), st.booleans(), st.booleans(), st.booleans())
def test_products_in_tiles(m, n, k, at, bt, add):
    a, b = matrices(m, n, k, at, bt, bfloat16)
    before = np.full((m, n), float(add), np.float32)
    expected = in_tiles(a, b, before)
    for threads in (1, 3):
        actual = product(a, b, threads=threads, out=before.copy() if add else None)
        np.testing.assert_array_equal(actual, expected)
    row = m // 2
    alone = product(np.ascontiguousarray(a[row : row + 1]), b, out=before[:1].copy() if add else None)
    np.testing.assert_array_equal(alone[0], expected[row])


@needs_tiles
@pytest.mark.parametrize("at", [False, True])
def test_what_fills_tiles_up_meets_no_infinity(at):
    a, b = matrices(17, 18, 33, at, False, bfloat16)
    a[16, 32], b[32, 17] = np.inf, np.nan
    result = product(a, b)
    assert np.isnan(result[:, 17]).all()
    assert not np.isfinite(result[16]).any()
    assert np.isfinite(result[:16, :17]).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(32, 512, 784), (784, 128, 256), (1500, 70, 300), (40, 1100, 600), (90, 1100, 1000)]
)
@pytest.mark.parametrize("bt", [False, True])
def test_threads_have_one_threads_bits(m, n, k, bt):
    a, b = matrices(m, n, k, False, bt, "float32")
    alone = product(a, b)
    np.testing.assert_allclose(alone, a.astype(float) @ b, rtol=0, atol=1e-5 * np.sqrt(k))
    for threads in (2, 3, 8):
        for _ in range(5):
            np.testing.assert_array_equal(product(a, b, threads=threads), alone)


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize(("m", "n", "k"), [(90, 1100, 1000), (70, 640, 300), (300, 40, 2000)])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=["float32", "bfloat16"])
def test_an_epilogue_finds_its_rows_complete(m, n, k, threads, step, dtype):
    a, b = matrices(m, n, k, False, False, dtype)
    expected, parts = product(a, b), []

    def epilogue(result, low, high):
        parts.append((low, high, np.array_equal(result[low:high], expected[low:high])))

    np.testing.assert_array_equal(product(a, b, threads=threads, epilogue=epilogue, step=step), expected)
    ends = [0, *(high for _, high, _ in sorted(parts))]
    assert [low for low, *_ in sorted(parts)] == ends[:-1]  # each once
    assert all(low % step == 0 for low in ends[:-1])
    assert ends[-1] == m
    assert all(equal for *_, equal in parts)
    assert (threads > 1) == (len(parts) > 1)


def test_few_rows_are_shared_by_columns_and_their_epilogue_is_left():
    a, b = matrices(32, 512, 784, False, False, "float32")
    assert product(a, b, threads=2, epilogue=lambda *_: None) is None


def test_callers_do_not_meet():
    a, b = matrices(300, 300, 300, False, False, "float32")
    expected = product(a, b)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: product(a, b, threads=2), range(60)):
            np.testing.assert_array_equal(actual, expected)


def test_all_threads_flush_to_zero():
    a, b = np.full((512, 64), 1e-30, np.float32), np.full((64, 512), 1e-10, np.float32)
    assert product(a, b).max() > 0
    with flush_to_zero():
        for _ in range(20):
            assert product(a, b, threads=3).max() == 0
    assert product(a, b, threads=3).min() > 0


FORK = """
import os, numpy as np
from tests.unit.backend.cpu.test_products import matrices, product
a, b = matrices(512, 512, 64, False, False, "float32")
expected = product(a, b, threads=3)
child = os.fork()
same = np.array_equal(product(a, b, threads=3), expected)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""


def test_after_a_fork_there_are_threads_again():
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
