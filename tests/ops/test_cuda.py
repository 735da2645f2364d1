"""What only the CUDA backend has: its memory, its table of tiles, the stored types, dropout's bits."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.backend.numpy import NumpyBackend
from dptrain.errors import ConfigError, DeviceError
from tests.ops.conftest import poisoned
from tests.tolerances import assert_near

relaxed = settings(
    max_examples=int(os.environ.get("DPTRAIN_OPS_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
STORED = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("stored", STORED)
def test_every_stored_type_is_gathered(cuda_ops, stored):
    x = (np.random.default_rng(1).integers(0, 100, (20, 7)) - (50 if np.dtype(stored).kind in "if" else 0)).astype(
        stored
    )
    rows = np.array([19, 0, 3, 3, 7])
    out = poisoned(cuda_ops, (5, 7))
    cuda_ops.gather(cuda_ops.upload(x), cuda_ops.upload(rows), 0.5, -2.0, out)
    assert_near(cuda_ops.download(out), x[rows].astype(np.float64) * 0.5 - 2, "float32", scale=50)


@pytest.mark.parametrize("stored", ["bool", "int16", "float32", "int64"])
def test_targets_of_every_size_and_shape(cuda_ops, stored):
    y = np.random.default_rng(1).integers(0, 2, (20, 3, 2)).astype(stored)
    rows = np.array([19, 0, 3, 3, 7])
    device = cuda_ops.upload(y)
    out = cuda_ops.empty((5, 3, 2), device.dtype)
    cuda_ops.gather_targets(device, cuda_ops.upload(rows), out)
    assert np.array_equal(cuda_ops.download(out), y[rows])


@relaxed
@given(
    rate=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    layer=st.integers(0, 5),
    first_row=st.integers(0, 2**33),
    B=st.integers(1, 9),
    F=st.integers(1, 40),
)
def test_dropout_has_the_bits_of_numpy(cuda_ops, rate, seed, step, layer, first_row, B, F):
    numpy_ops = NumpyBackend()
    mine, theirs = poisoned(cuda_ops, (B, F)), numpy_ops.empty((B, F))
    cuda_ops.dropout_mask(rate, seed, step, layer, first_row, mine)
    numpy_ops.dropout_mask(rate, seed, step, layer, first_row, theirs)
    assert cuda_ops.download(mine).tobytes() == theirs.tobytes()


# (B, I, O): each reaches other tiles and slices in its three products; `product_plan` says which.
PRODUCTS = [(32, 784, 128), (33, 783, 10), (7, 1000, 3), (200, 130, 257), (513, 67, 514), (1, 4096, 1), (300, 1, 300)]


@pytest.mark.parametrize(("B", "I", "O"), PRODUCTS)
def test_products_of_every_tile(cuda_ops, B, I, O):  # noqa: E741 - the legend's letters
    rng = np.random.default_rng(B)
    host = [rng.standard_normal(shape).astype(np.float32) for shape in [(B, I), (I, O), (O,), (B, O)]]
    x, kernel, bias, dy = (cuda_ops.upload(one) for one in host)
    x64, kernel64, bias64, dy64 = (one.astype(np.float64) for one in host)
    y, dkernel, dbias, dx = (poisoned(cuda_ops, shape) for shape in [(B, O), (I, O), (O,), (B, I)])
    cuda_ops.dense_forward(x, kernel, bias, "relu", y)
    got = cuda_ops.download(y)
    assert_near(got, np.maximum(x64 @ kernel64 + bias64, 0), "float32", scale=4 * I)
    cuda_ops.dense_backward(x, kernel, y, dy, "relu", dkernel, dbias, dx)
    dz64 = dy64 * (got > 0)
    assert_near(cuda_ops.download(dy), dz64, "float32")
    assert_near(cuda_ops.download(dkernel), x64.T @ dz64, "float32", scale=4 * B)
    assert_near(cuda_ops.download(dbias), dz64.sum(0), "float32", scale=4 * B)
    assert_near(cuda_ops.download(dx), dz64 @ kernel64.T, "float32", scale=4 * O)


def test_the_table_of_tiles_is_reached(cuda_ops):
    from dptrain.backend.cuda import product_plan

    plans = {product_plan(M, N, K) for a, b, c in PRODUCTS for M, N, K in [(a, c, b), (b, c, a), (a, b, c)]}
    assert {tile for tile, _, _ in plans} >= {32, 64}
    assert {slices > 1 for _, slices, _ in plans} == {True, False}
    assert product_plan(1024, 4096, 4096)[:2] == (128, 1)
    for M, N, K in [(1, 1, 1), (32, 10, 784), (32, 128, 0), (5, 7, 100_000)]:
        _, slices, depth = product_plan(M, N, K)
        assert slices * depth >= K > (slices - 1) * depth or K == 0


def test_large_tiles(cuda_ops):
    """Through `_gemm`, because sizes that choose the large tile take minutes on an emulator."""
    import dptrain.backend.cuda as module

    rng = np.random.default_rng(2)
    for M, N, K in [(130, 135, 21), (256, 128, 16), (1, 129, 9)]:
        a, b = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((K, N)).astype(np.float32)
        expected = a.astype(np.float64) @ b
        bias = cuda_ops.upload(np.ones(N, np.float32))
        layouts = {"nn": (a, b), "tn": (np.ascontiguousarray(a.T), b), "nt": (a, np.ascontiguousarray(b.T))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "product_plan", lambda M, N, K: (128, 1, -(-K // 32) * 32))
            for layout, (left, right) in layouts.items():
                out = poisoned(cuda_ops, (M, N))
                cuda_ops._gemm(layout, cuda_ops.upload(left), cuda_ops.upload(right), bias, out, (M, N, K), "linear")
                assert_near(cuda_ops.download(out), expected + 1, "float32", scale=4 * K)


def test_no_rows_leave_zero_gradients_and_sums(cuda_ops):
    x, kernel, bias = cuda_ops.empty((0, 5)), cuda_ops.zeros((5, 3)), cuda_ops.zeros((3,))
    y, dy, dx = cuda_ops.empty((0, 3)), cuda_ops.empty((0, 3)), cuda_ops.empty((0, 5))
    dkernel, dbias, total = poisoned(cuda_ops, (5, 3)), poisoned(cuda_ops, (3,)), cuda_ops.zeros((1,))
    labels = cuda_ops.empty((0,), np.int64)
    cuda_ops.gather(cuda_ops.upload(np.zeros((4, 5), np.uint8)), labels, 1.0, 0.0, x)
    cuda_ops.dense_forward(x, kernel, bias, "softmax", y)
    cuda_ops.softmax_cross_entropy(y, labels, dy, total)
    cuda_ops.count_correct(y, labels, total)
    cuda_ops.dense_backward(x, kernel, y, dy, "softmax", dkernel, dbias, dx)
    assert not cuda_ops.download(dkernel).any()
    assert not cuda_ops.download(dbias).any()
    assert cuda_ops.download(total).tolist() == [0]
    assert cuda_ops.download(y).shape == (0, 3)


def test_parts_and_shapes_share_memory(cuda_ops):
    host = np.arange(24, dtype=np.float32).reshape(6, 4)
    whole = cuda_ops.upload(host)
    part = whole[1:5]
    assert (len(part), part.shape, part.size, part.dtype) == (4, (4, 4), 16, np.float32)
    assert np.array_equal(cuda_ops.download(part[-2:].reshape(2, -1, 2)), host[3:5].reshape(2, 2, 2))
    assert np.array_equal(cuda_ops.download(whole.reshape((2, 12))[1:]), host.reshape(2, 12)[1:])
    assert whole[4:2].shape == (0, 4)
    cuda_ops.fill(part, 7)
    host[1:5] = 7
    assert np.array_equal(cuda_ops.download(whole), host)
    with pytest.raises(ValueError, match="cannot reshape"):
        whole.reshape(5, 5)
    with pytest.raises(ValueError, match="steps of 1"):
        whole[::2]
    with pytest.raises(ValueError, match="cannot write"):
        cuda_ops.write(whole, host[:2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_mpi_changes_reaches_the_device(cuda_ops, dtype):
    assert cuda_ops.host_view(cuda_ops.empty((0,), dtype)).shape == (0,)
    buffer = cuda_ops.upload(np.arange(5, dtype=dtype))
    for _ in range(2):
        host = cuda_ops.host_view(buffer)
        host *= 2
        cuda_ops.commit(buffer, host)
        cuda_ops.add(buffer, buffer)
    assert cuda_ops.download(buffer).tolist() == [0, 16, 32, 48, 64]


def test_totals_add_float32_to_float64(cuda_ops):
    totals = cuda_ops.zeros((3,), np.float64)
    cuda_ops.fill(totals, 2.0**40)
    cuda_ops.add(cuda_ops.upload(np.array([1, 2, 3], np.float32)), totals)
    assert cuda_ops.download(totals).tolist() == [2.0**40 + 1, 2.0**40 + 2, 2.0**40 + 3]


def test_the_first_of_equals_in_one_lane_and_across_lanes(cuda_ops):
    """A warp looks at 32 classes at a time: equals may be with one lane or with two. NaN is highest, as in NumPy."""
    scores = np.zeros((6, 70), np.float32)
    for row, places in enumerate([(3, 35, 67), (40, 41), (31, 32), (69,), (), (5,)]):
        scores[row, list(places)] = 2
    scores[5, [20, 60]] = np.nan
    best = scores.argmax(1)
    assert best.tolist() == [3, 40, 31, 69, 0, 20]
    for labels in (best, best + 1):
        total = cuda_ops.zeros((1,))
        cuda_ops.count_correct(cuda_ops.upload(scores), cuda_ops.upload(labels), total)
        assert cuda_ops.download(total).tolist() == [(best == labels).sum()]


def test_not_a_number_stays_one(cuda_ops):
    """A loss that is no longer finite must be seen, not turned to zero by a relu."""
    x = cuda_ops.upload(np.array([[np.nan, 1.0, -1.0]], np.float32))
    y, total = cuda_ops.empty((1, 3)), cuda_ops.zeros((1,))
    cuda_ops.activation_forward(x, "relu", y)
    np.testing.assert_array_equal(cuda_ops.download(y), [[np.nan, 1, 0]])
    cuda_ops.softmax_cross_entropy(x, cuda_ops.upload(np.array([1])), None, total)
    assert np.isnan(cuda_ops.download(total)[0])


def test_gradients_of_many_rows_have_the_same_bits_on_every_run(cuda_ops):
    rng = np.random.default_rng(0)
    y, dy, x = (rng.standard_normal(shape).astype(np.float32) for shape in [(300, 33), (300, 33), (300, 65)])
    kernel = cuda_ops.upload(rng.standard_normal((65, 33)).astype(np.float32))

    def once() -> bytes:
        outputs = [poisoned(cuda_ops, shape) for shape in [(65, 33), (33,), (300, 65)]]
        cuda_ops.dense_backward(cuda_ops.upload(x), kernel, cuda_ops.upload(y), cuda_ops.upload(dy), "tanh", *outputs)
        return b"".join(cuda_ops.download(one).tobytes() for one in outputs)

    assert len({once() for _ in range(3)}) == 1


def test_too_large_for_the_device(cuda_ops):
    with pytest.raises(
        DeviceError, match=r"CUDA out of memory on .*: asked for 1048576\.0 GiB \(everything\), .* are free"
    ):
        cuda_ops.empty((2**48,), name="everything")


def test_other_precision_is_refused(cuda_ops):
    from dptrain.backend import create

    with pytest.raises(ConfigError, match="compute in float32"):
        create("cuda", "float64", 1)


def test_a_device_within_a_mask(cuda_ops):
    from dptrain.backend.cuda import visible_device

    assert [visible_device(None, n) for n in (0, 3)] == ["0", "3"]
    assert [visible_device("2, 5,GPU-ab", n) for n in (0, 1, 2, 3)] == ["2", "5", "GPU-ab", ""]
    assert visible_device("", 0) == ""
