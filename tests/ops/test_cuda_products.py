"""Matrix products of the CUDA backend, by every provider in every precision.

The reference multiplies factors that it has rounded to the precision as well, in float64: what is left is the error of
float32 sums, so that TF32's own rounding hides no mistake. cuBLASLt is a stand-in on the emulator (tests/standins), the
library itself on a GPU where nvmath-python is installed.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.backend.cuda import products as gemm
from dptrain.backend.cuda.products import product_plan
from dptrain.errors import ConfigError, DeviceError
from tests.emulated import inside_emulator
from tests.ops.conftest import no_cuda, poisoned
from tests.tolerances import assert_near, rounded, tf32

SIZES = st.sampled_from([1, 2, 3, 5, 8, 10, 16, 17, 31, 32, 33, 64, 65, 127, 129])
relaxed = settings(
    max_examples=int(os.environ.get("DPTRAIN_OPS_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
STANDINS = str(Path(__file__).resolve().parents[1] / "standins")


@pytest.fixture(scope="session")
def nvmath() -> Iterator[None]:
    """Let `nvmath` be imported: the stand-in on the emulator, which has no cuBLASLt, the real one on a GPU."""
    if not inside_emulator():
        if importlib.util.find_spec("nvmath") is None:
            pytest.skip("nvmath-python is not installed: pip install 'dptrain[cublaslt]'")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDINS)
        yield


@pytest.fixture(scope="session", params=["dptrain-float32", "dptrain-tf32", "cublaslt-float32", "cublaslt-tf32"])
def products(request):
    """Return (backend, precision)."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.backend import CudaBackend

    provider, precision = request.param.split("-")
    if provider == "cublaslt":
        request.getfixturevalue("nvmath")
        if precision == "tf32" and not inside_emulator():
            pytest.skip(
                "how and where the library rounds to TF32 is its own choice: benchmarks/gemm.py looks at bounds"
            )
    backend = CudaBackend(precision=precision, gemm=provider)
    yield backend, precision
    backend.close()


@pytest.fixture(scope="session", params=["float32", "tf32"])
def own(request):
    """Return (backend, precision) of our own kernels."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.backend import CudaBackend

    backend = CudaBackend(precision=request.param)
    yield backend, request.param
    backend.close()


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def activated(x: np.ndarray, name: str) -> np.ndarray:
    return {"linear": x, "relu": x * (x > 0), "sigmoid": 1 / (1 + np.exp(-x)), "tanh": np.tanh(x)}[name]


def check_dense(products, seed: int, B: int, I: int, O: int, activation: str, use_bias: bool) -> None:  # noqa: E741
    """Compare a dense layer's three products with NumPy."""
    ops, precision = products
    x, kernel, bias, dy = normal(seed, (B, I), (I, O), (O,), (B, O))
    device = {name: ops.upload(one) for name, one in (("x", x), ("kernel", kernel), ("bias", bias), ("dy", dy))}
    y, dkernel, dbias, dx = (poisoned(ops, shape) for shape in [(B, O), (I, O), (O,), (B, I)])
    ops.dense_forward(device["x"], device["kernel"], device["bias"] if use_bias else None, activation, y)
    sums = rounded(x, precision) @ rounded(kernel, precision) + (bias if use_bias else 0)
    assert_near(ops.download(y), activated(sums, activation), precision, scale=4 * I)
    ops.dense_backward(
        device["x"], device["kernel"], y, device["dy"], activation, dkernel, dbias if use_bias else None, dx
    )
    unrounded = ops.download(device["dy"])  # the gradient before the activation, as the device has it
    dz = rounded(unrounded, precision)
    assert_near(ops.download(dkernel), rounded(x, precision).T @ dz, precision, scale=4 * B)
    assert_near(ops.download(dx), dz @ rounded(kernel, precision).T, precision, scale=4 * O)
    if use_bias:
        assert_near(ops.download(dbias), unrounded.astype(np.float64).sum(0), "float32", scale=4 * B)


@relaxed
@given(B=SIZES, I=SIZES, O=SIZES, seed=st.integers(0, 2**32 - 1), use_bias=st.booleans())
@pytest.mark.parametrize("activation", ["linear", "relu", "sigmoid", "tanh"])
def test_products_of_any_size(products, activation, B, I, O, seed, use_bias):  # noqa: E741 - the legend's letters
    check_dense(products, seed, B, I, O, activation, use_bias)


# (B, I, O): each reaches other tiles and slices in its three products; `product_plan` says which.
PRODUCTS = [(32, 784, 128), (33, 783, 10), (7, 1000, 3), (200, 130, 257), (513, 67, 514), (1, 4096, 1), (600, 1, 300)]


@pytest.mark.parametrize(("B", "I", "O"), PRODUCTS)
def test_products_of_every_tile(products, B, I, O):  # noqa: E741 - the legend's letters
    check_dense(products, B, B, I, O, "relu", True)


@pytest.mark.parametrize("tile", gemm.TILES)
@pytest.mark.parametrize("slices", [1, 3])
def test_products_of_a_given_plan(own, monkeypatch, tile, slices):
    """Sizes that choose the large tile by themselves take minutes on an emulator."""
    ops, precision = own
    for M, N, K in [(130, 135, 69), (256, 128, 96), (1, 129, 73)]:
        a, b, bias = normal(M, (M, K), (K, N), (N,))
        b *= np.float32(0.1)  # where tanh is not flat
        expected = np.tanh(rounded(a, precision) @ rounded(b, precision) + bias)
        layouts = {"nn": (a, b), "tn": (np.ascontiguousarray(a.T), b), "nt": (a, np.ascontiguousarray(b.T))}
        depth = -(-K // (slices * 32)) * 32
        monkeypatch.setattr(gemm, "product_plan", lambda *_, depth=depth, K=K: (tile, -(-K // depth), depth))
        for layout, (left, right) in layouts.items():
            out = poisoned(ops, (M, N))
            ops._product(layout, ops.upload(left), ops.upload(right), ops.upload(bias), out, (M, N, K), "tanh")
            assert_near(ops.download(out), expected, precision, scale=4 * K)


def test_slices_of_a_batch_begin_anywhere(products):
    """Rows from the middle of a buffer are aligned to 4 bytes only, after whole buffers of the same shape were not."""
    ops, precision = products
    x, kernel = normal(0, (12, 33), (33, 5))
    x_device, kernel_device = ops.upload(x), ops.upload(kernel)
    for first in (0, 1, 2, 8):
        y = poisoned(ops, (4, 5))
        ops.dense_forward(x_device[first : first + 4], kernel_device, None, "linear", y)
        expected = rounded(x[first : first + 4], precision) @ rounded(kernel, precision)
        assert_near(ops.download(y), expected, precision, scale=4 * 33)


@pytest.mark.parametrize("shifted", ["a", "b", "c", "none"])
@pytest.mark.parametrize("layout", ["nn", "tn", "nt"])
def test_products_from_and_to_any_address(own, layout, shifted):
    """One array at a time begins 4 bytes beyond a multiple of 16, in sizes that allow four floats at once or not."""
    ops, precision = own
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 36):
        a, b = normal(n, (n, n), (n, n))
        start = {name: 1 if name == shifted else 0 for name in "abc"}
        left, right = (
            ops.upload(np.concatenate([np.zeros(start[name], np.float32), factor.ravel()]))[start[name] :]
            for name, factor in (("a", a.T if layout == "tn" else a), ("b", b.T if layout == "nt" else b))
        )
        out = poisoned(ops, (start["c"] + n * n + 1,))
        ops._product(layout, left, right, None, out[start["c"] :], (n, n, n), "linear")
        host = ops.download(out)
        expected = rounded(a, precision) @ rounded(b, precision)
        assert_near(host[start["c"] : -1].reshape(n, n), expected, precision, scale=4 * n)
        assert np.isnan(host[[*range(start["c"]), -1]]).all()


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 2200])
def test_bias_gradients_of_many_rows(own, rows):
    ops, _ = own
    y, dy = normal(rows, (rows, 3), (rows, 3))
    device, dbias = ops.upload(dy), poisoned(ops, (3,))
    ops.dense_backward(
        *(ops.zeros((rows, 1)), ops.zeros((1, 3)), ops.upload(y), device, "relu", poisoned(ops, (1, 3)), dbias, None)
    )
    assert_near(ops.download(dbias), (dy * (y > 0)).astype(np.float64).sum(0), "float32", scale=4 * rows)


def test_layers_of_one_shape_have_their_own_bias(products):
    ops, _ = products
    x, kernel = ops.zeros((3, 8)), ops.zeros((8, 8))
    for value in (1.0, 2.0, 1.0):
        bias, y = ops.upload(np.full(8, value, np.float32)), poisoned(ops, (3, 8))
        ops.dense_forward(x, kernel, bias, "relu", y)
        assert (ops.download(y) == value).all()


def test_no_rows_leave_zero_gradients(products):
    ops, _ = products
    x, kernel, y, dy = ops.empty((0, 5)), ops.zeros((5, 3)), ops.empty((0, 3)), ops.empty((0, 3))
    dkernel, dbias = poisoned(ops, (5, 3)), poisoned(ops, (3,))
    ops.dense_forward(x, kernel, None, "relu", y)
    ops.dense_backward(x, kernel, y, dy, "relu", dkernel, dbias, ops.empty((0, 5)))
    assert not ops.download(dkernel).any()
    assert not ops.download(dbias).any()


def test_tf32_rounds_and_float32_does_not(products):
    """Bits that only float32 keeps: 1 + 2^-11 is a tie that goes up in TF32, 1 + 2^-12 goes down to 1."""
    ops, precision = products
    values = np.array([[1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -(1 + 2**-11), 3e38, 1e-30]], np.float32)
    in_tf32 = np.array([[1 + 2**-10, 1 + 2**-10, 1, -(1 + 2**-10), 0, 0]], np.float32)
    in_tf32[0, 4:] = tf32(values[0, 4:])
    assert (in_tf32[0, 4:] != values[0, 4:]).all()
    assert (tf32(values) == in_tf32).all()
    expected = in_tf32 if precision == "tf32" else values
    identity = ops.upload(np.eye(6, dtype=np.float32))
    for as_first in (True, False):
        y = poisoned(ops, (1, 6) if as_first else (6, 1))
        factor = ops.upload(values if as_first else np.ascontiguousarray(values.T))
        ops.dense_forward(*((factor, identity) if as_first else (identity, factor)), None, "linear", y)
        assert ops.download(y).ravel().tolist() == expected.ravel().tolist()


def test_not_a_number_and_infinity_pass_through(own):
    ops, _ = own
    x = np.array([[np.nan, 1.0], [np.inf, 1.0], [1.0, 1.0]], np.float32)
    y = poisoned(ops, (3, 2))
    ops.dense_forward(ops.upload(x), ops.upload(np.ones((2, 2), np.float32)), None, "relu", y)
    np.testing.assert_array_equal(ops.download(y), [[np.nan] * 2, [np.inf] * 2, [2, 2]])


def test_products_have_the_same_bits_on_every_run(products):
    ops, _ = products
    x, kernel = normal(5, (65, 900), (900, 33))

    def once() -> bytes:
        y = poisoned(ops, (65, 33))
        ops.dense_forward(ops.upload(x), ops.upload(kernel), None, "tanh", y)
        return ops.download(y).tobytes()

    assert len({once() for _ in range(3)}) == 1


def test_precision_and_provider_are_numerics(products):
    ops, precision = products
    assert f"products by {ops.gemm.name}" in ops.numerics
    assert ops.numerics.endswith(f" in {precision}")
    assert ("tf32" in ops.description) == (precision == "tf32")
    assert ("cublaslt" in ops.description) == (ops.gemm.name == "cublaslt")


def test_an_old_gpu_has_no_tf32(monkeypatch):
    if reason := no_cuda():
        pytest.skip(reason)
    from dataclasses import replace

    from dptrain.backend import create
    from dptrain.backend.cuda import backend as cuda

    old = replace(cuda.open_gpu(0, "mask", "here"), architecture="sm_75", name="Old GPU")
    monkeypatch.setattr(cuda, "open_gpu", lambda *_: old)
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match=r"'tf32': Old GPU \(sm_75\) has no TF32.*use --precision float32"):
            create(device, "float32", 1, precision="tf32")


def test_plans_are_kept_and_everything_is_given_back(nvmath):
    if reason := no_cuda():
        pytest.skip(reason)
    if not inside_emulator():
        pytest.skip("looks into the stand-in")
    from nvmath.bindings import cublasLt

    from dptrain.backend.cuda.backend import CudaBackend

    before = set(cublasLt.live)
    backend = CudaBackend(gemm="cublaslt")
    x, kernel, y = backend.zeros((4, 8)), backend.zeros((8, 3)), poisoned(backend, (4, 3))
    cublasLt.calls.clear()
    for _ in range(3):
        backend.dense_forward(x, kernel, None, "relu", y)
    assert cublasLt.calls == ["matmul_algo_get_heuristic", "matmul", "matmul", "matmul"]
    backend.dense_forward(x, kernel, None, "tanh", y)
    assert cublasLt.calls[-2:] == ["matmul_algo_get_heuristic", "matmul"]
    assert len(set(cublasLt.live) - before) == 1 + 2 * 4
    backend.close()
    assert set(cublasLt.live) == before


def test_what_cublaslt_refuses_is_said_in_one_line(nvmath, monkeypatch):
    if reason := no_cuda():
        pytest.skip(reason)
    if not inside_emulator():
        pytest.skip("looks into the stand-in")
    from nvmath.bindings import cublasLt

    from dptrain.backend import create

    def refuse(*_):
        raise cublasLt.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED (15)")

    backend = create("cuda", "float32", 1, gemm="cublaslt")
    x, kernel, y = backend.zeros((4, 8)), backend.zeros((8, 3)), poisoned(backend, (4, 3))
    with monkeypatch.context() as patch:
        patch.setattr(cublasLt, "matmul_algo_get_heuristic", refuse)
        with pytest.raises(DeviceError, match=r"no product of \(4, 8\) and \(8, 3\) .*use --gemm dptrain"):
            backend.dense_forward(x, kernel, None, "relu", y)
    with monkeypatch.context() as patch:
        patch.setattr(cublasLt, "matmul_algo_get_heuristic", lambda *_: None)
        with pytest.raises(DeviceError, match="no algorithm for M, N, K = 4, 3, 8; use --gemm dptrain"):
            backend.dense_forward(x, kernel, None, "relu", y)
    backend.close()
    with monkeypatch.context() as patch:
        patch.setattr(cublasLt, "create", refuse)
        with pytest.raises(DeviceError, match=r"--device cuda: gemm = 'cublaslt': the library does not start"):
            create("cuda", "float32", 1, gemm="cublaslt")
        with pytest.raises(ConfigError, match=r"gemm = 'cublaslt' needs a GPU.*does not start.*use --gemm dptrain"):
            create("auto", "float32", 1, gemm="cublaslt")


def test_without_nvmath(monkeypatch):
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend import create

    monkeypatch.setitem(sys.modules, "nvmath", None)
    for device in ("cuda", "auto"):
        with pytest.raises(ConfigError, match=r"nvmath-python is not installed .*; pip install 'dptrain\[cublaslt\]'"):
            create(device, "float32", 1, gemm="cublaslt")


def test_the_plans_of_the_products_above():
    """They reach the small and the middle tile, whole sums and slices."""
    plans = {product_plan(M, N, K) for a, b, c in PRODUCTS for M, N, K in [(a, c, b), (b, c, a), (a, b, c)]}
    assert {tile for tile, _, _ in plans} >= {32, 64}
    assert {slices > 1 for _, slices, _ in plans} == {True, False}
