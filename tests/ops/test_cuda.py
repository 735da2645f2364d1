"""What only the CUDA backend has: its memory, the stored types, dropout's bits."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dptrain.backend.base import RowSum
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches import feed
from dptrain.batches.sampling import Shard
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


@relaxed
@given(
    B=st.integers(1, 9),
    F=st.sampled_from([4, 8, 12, 100, 784, 1028, 1032]),
    scale=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("stored", ["uint8", "int8"])
def test_four_bytes_a_thread_have_the_bits_of_one(cuda_ops, stored, B, F, scale, seed):
    """The same rows from and to addresses that do not allow four at once."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(stored)
    x = rng.integers(info.min, info.max + 1, (11, F), stored)
    rows = cuda_ops.upload(rng.integers(-2, 13, B))  # some outside, which are clipped
    shifted = cuda_ops.upload(np.concatenate([np.zeros(1, stored), x.reshape(-1)]))[1:].reshape(11, F)
    found = []
    for source in (cuda_ops.upload(x), shifted):
        for start in (0, 1):
            out = poisoned(cuda_ops, (B * F + start + 1,))
            cuda_ops.gather(source, rows, scale, 0.1, out[start : start + B * F].reshape(B, F))
            host = cuda_ops.download(out)
            assert np.isnan(host[:start]).all()
            assert np.isnan(host[start + B * F :]).all()
            found.append(host[start : start + B * F].tobytes())
    assert len(set(found)) == 1


def test_which_gathers_take_four_bytes_a_thread(cuda_ops, monkeypatch):
    launched: list[str] = []
    launch = cuda_ops._launch
    monkeypatch.setattr(cuda_ops, "_launch", lambda kernel, *more: (launched.append(kernel), launch(kernel, *more)))
    rows = cuda_ops.upload(np.array([1, 0]))
    wide = [(8, "uint8", 0, 0), (8, "bool", 0, 0), (8, "int8", 4, 4)]
    single = [(8, "uint8", 1, 0), (8, "uint8", 0, 1), (6, "uint8", 0, 0), (8, "int16", 0, 0)]
    for features, stored, x_start, out_start in wide + single:
        x = cuda_ops.upload(np.zeros(2 * features + x_start, stored))[x_start:].reshape(2, features)
        out = poisoned(cuda_ops, (2 * features + out_start,))[out_start:].reshape(2, features)
        cuda_ops.gather(x, rows, 1.0, 0.0, out)
        assert not cuda_ops.download(out).any()
    assert launched == [
        *("gather_uint8_quads", "gather_uint8_quads", "gather_int8_quads"),
        *("gather_uint8", "gather_uint8", "gather_uint8", "gather_int16"),
    ]


# The kernels' common code takes rows times elements: bytes one by one, bytes in fours, and bytes without a cast.
@pytest.mark.parametrize(("op", "F", "unit"), [("gather", 1021, 1), ("gather", 4096, 4), ("gather_targets", 1021, 1)])
def test_rows_that_begin_beyond_32_bits(cuda_ops, op, F, unit):
    """Row times elements is more than 2^31, and then 2^32. Nothing but two rows is written: no memory is filled."""
    rows = [2**31 * unit // F + 1, 2**32 * unit // F + 1]
    if cuda_ops.room_for_data() < (rows[1] + 1) * F:
        pytest.skip(f"needs {(rows[1] + 1) * F / 2**30:.1f} GiB of free device memory (EMULATOR_MEMORY=32G)")
    x, stored = cuda_ops.empty((rows[1] + 1, F), np.uint8), np.random.default_rng(0).integers(0, 256, (2, F), np.uint8)
    for row, values in zip(rows, stored, strict=True):
        cuda_ops.write(x[row : row + 1], values[None])
    out = poisoned(cuda_ops, (2, F), np.float32 if op == "gather" else np.uint8)
    getattr(cuda_ops, op)(x, cuda_ops.upload(np.array(rows)), *((1.0, 0.0) if op == "gather" else ()), out)
    assert np.array_equal(cuda_ops.download(out), stored)


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
# Places and steps on both sides of 2^32, where a counter of 32 bits begins anew.
@example(rate=0.5, seed=7, step=2, layer=1, first_row=2**31 - 2, B=5, F=12)
@example(rate=0.5, seed=7, step=2, layer=1, first_row=2**32 - 2, B=5, F=3)
@example(rate=0.5, seed=2**40 + 7, step=2**32 + 2, layer=1, first_row=2**32 + 9, B=2, F=9)
def test_dropout_has_the_bits_of_numpy(cuda_ops, rate, seed, step, layer, first_row, B, F):
    numpy_ops = NumpyBackend()
    mine, theirs = poisoned(cuda_ops, (B, F)), numpy_ops.empty((B, F))
    cuda_ops.dropout_mask(rate, seed, step, layer, first_row, mine)
    numpy_ops.dropout_mask(rate, seed, step, layer, first_row, theirs)
    assert cuda_ops.download(mine).tobytes() == theirs.tobytes()


def test_no_rows_leave_zero_gradients_and_sums(cuda_ops):
    x, kernel, bias = cuda_ops.empty((0, 5)), cuda_ops.zeros((5, 3)), cuda_ops.zeros((3,))
    y, dy, dx = cuda_ops.empty((0, 3)), cuda_ops.empty((0, 3)), cuda_ops.empty((0, 5))
    dkernel, dbias, total = poisoned(cuda_ops, (5, 3)), poisoned(cuda_ops, (3,)), cuda_ops.zeros((1,))
    labels = cuda_ops.empty((0,), np.int64)
    cuda_ops.gather(cuda_ops.upload(np.zeros((4, 5), np.uint8)), labels, 1.0, 0.0, x)
    cuda_ops.dense_forward(x, kernel, bias, "softmax", y)
    values, targets = cuda_ops.empty((0,)), cuda_ops.empty((0, 3))
    cuda_ops.softmax_cross_entropy(y, labels, values, None, dy, values, values)
    cuda_ops.dense_cross_entropy(y, targets, 1.0, 0.0, None, dy, values)
    cuda_ops.probability_cross_entropy(y, labels, 1.0, 0.0, 1, None, dy, values)
    cuda_ops.pointwise_loss("squared", 0.0, y, targets, 1.0, 0.0, None, dy, values)
    cuda_ops.highest(y, labels)
    cuda_ops.top1_correct(y, labels, values)
    cuda_ops.label_in_top(y, labels, 1, values)
    cuda_ops.confusion(y, targets, 0.5, values, values, values)
    cuda_ops.labels_other_than(labels, 1, values)
    cuda_ops.sum_rows(RowSum(values, None, total, total), RowSum(values, values, total, total))
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


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_mpi_changes_reaches_the_device(cuda_ops, dtype, direct):
    empty = cuda_ops.exchange(cuda_ops.empty((0,), dtype), direct=direct)
    empty.begin()
    assert empty.values().shape == (0,)
    empty.end()
    size = 50_000
    buffer = cuda_ops.upload(np.arange(size, dtype=dtype))
    exchange = cuda_ops.exchange(buffer, direct=direct)
    for _ in range(3):
        cuda_ops.add(buffer, buffer)
        exchange.begin()
        values = exchange.values()
        if direct:
            assert values.__cuda_array_interface__["data"] == (buffer.pointer, False)
            cuda_ops.write(values, cuda_ops.download(values) + 1)  # in place of an MPI that knows GPUs
        else:
            values += 1
        exchange.end()
        cuda_ops.add(buffer, buffer)
    expected = np.arange(size, dtype=dtype)
    for _ in range(3):
        expected = (expected * 2 + 1) * 2
    np.testing.assert_array_equal(cuda_ops.download(buffer), expected)


def test_a_buffer_travels_while_ops_on_others_run(cuda_ops):
    """What is queued after `begin` neither holds it up nor changes what it sends."""
    whole = cuda_ops.zeros((30_000,))
    high, low = whole[20_000:], whole[:20_000]
    exchanges = [cuda_ops.exchange(high), cuda_ops.exchange(low)]
    for step in range(1, 4):
        cuda_ops.fill(high, step)
        exchanges[0].begin()
        cuda_ops.fill(low, 10 * step)
        exchanges[1].begin()
        for exchange, value in zip(exchanges, (step, 10 * step), strict=True):
            assert (exchange.values() == value).all()
            exchange.values()[:] *= 2
            exchange.end()
        cuda_ops.add(whole, whole)
        assert np.unique(cuda_ops.download(whole)).tolist() == [4 * step, 40 * step]


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float16, np.bool_])
def test_staged_rows_arrive_and_are_not_overwritten_too_early(cuda_ops, dtype):
    """Two slots in turn, as a streamed data set uses them."""
    rng = np.random.default_rng(0)
    rows, features = 40, 300
    slots = [cuda_ops.staging((rows, features), dtype) for _ in range(2)]
    order = cuda_ops.upload(np.arange(rows))
    total, expected = cuda_ops.zeros((rows, features)), np.zeros((rows, features), np.float32)
    batch = cuda_ops.empty((rows, features))
    for turn in range(6):
        slot = slots[turn % 2]
        count = rows - turn
        x = rng.integers(0, 2, (count, features)).astype(dtype)
        slot.reuse()
        slot.host[:count] = x
        slot.send(count)
        slot.arrive()
        cuda_ops.gather(slot.device, order[:count], 1.0, 0.0, batch[:count])
        cuda_ops.add(batch[:count], total[:count])
        slot.release()
        expected[:count] += x
    np.testing.assert_array_equal(cuda_ops.download(total), expected)


def test_streamed_chunks_are_not_refilled_too_early(cuda_ops):
    """The host meets no other wait: what is gathered into a chunk's memory waits for that memory's last copy."""
    rng = np.random.default_rng(0)
    samples, chunk, features = 48, 4, 500
    x, order = rng.random((samples, features), np.float32), rng.permutation(samples)
    shards = [Shard(begin, begin + chunk, 0) for begin in range(0, samples, chunk)]
    batch, total = cuda_ops.empty((chunk, features)), cuda_ops.zeros((chunk, features))
    with feed.StreamedFeed(cuda_ops, [x], chunk) as streamed:
        for _ in range(2):
            streamed.start(order, shards)
            for shard in shards:
                rows = streamed.rows(shard)
                cuda_ops.gather(rows.arrays[0], rows.chosen, 1.0, 0.0, batch)
                cuda_ops.add(batch, total)
        found = cuda_ops.download(total)
    expected = np.zeros((chunk, features), np.float32)
    for part in [*np.split(x[order], len(shards))] * 2:
        expected += part
    np.testing.assert_array_equal(found, expected)


def test_room_for_data_is_what_is_left(cuda_ops):
    before = cuda_ops.room_for_data()
    held = cuda_ops.empty((64 << 20,), np.uint8)
    assert 0 <= cuda_ops.room_for_data() <= before - held.nbytes


def test_samples_that_backends_share_are_on_the_device_once(cuda_ops):
    other = type(cuda_ops)()
    x = np.arange(1 << 21, dtype=np.float16).reshape(-1, 16)
    assert other.missing_samples(x) == 2 * x.nbytes  # kept as float32
    own = [ops.upload_samples(x) for ops in (cuda_ops, other)]
    assert own[0].pointer != own[1].pointer
    cuda_ops.shares_samples = other.shares_samples = True
    try:
        first = cuda_ops.upload_samples(x)
        assert other.missing_samples(x) == 0
        assert other.missing_samples(x[1:]) > 0
        second = other.upload_samples(x)
        assert second.pointer == first.pointer != own[0].pointer
        del first
        np.testing.assert_array_equal(other.download(second), x.astype(np.float32))
        del second
        assert other.missing_samples(x) == 0  # kept for the next model
        for number in range(20):
            other.upload_samples(np.arange(number, 9 + number))
            cuda_ops.upload_samples(np.arange(number, 7 + number))
        assert other.missing_samples(x) == 2 * x.nbytes
        assert cuda_ops.upload_samples(x).pointer != own[0].pointer
        assert other.missing_samples(x) == 0
    finally:
        cuda_ops.shares_samples = False
        cuda_ops._last_samples.clear()
        other.close()
    assert cuda_ops.missing_samples(x) == 2 * x.nbytes


def test_totals_add_float32_to_float64(cuda_ops):
    totals = cuda_ops.zeros((3,), np.float64)
    cuda_ops.fill(totals, 2.0**40)
    cuda_ops.add(cuda_ops.upload(np.array([1, 2, 3], np.float32)), totals)
    assert cuda_ops.download(totals).tolist() == [2.0**40 + 1, 2.0**40 + 2, 2.0**40 + 3]


def test_the_first_of_equals_in_one_lane_and_across_lanes(cuda_ops):
    """A warp looks at 32 classes at a time: equals may be with one lane or with two. NaN is highest, as in NumPy."""
    scores = np.zeros((7, 70), np.float32)
    for row, places in enumerate([(3, 35, 67), (40, 41), (31, 32), (69,), (), (5,), (8,)]):
        scores[row, list(places)] = 2
    scores[5, [20, 60]] = np.nan
    scores[6, 40] = np.nan
    best = scores.argmax(1)
    assert best.tolist() == [3, 40, 31, 69, 0, 20, 40]
    logits = cuda_ops.upload(scores)
    for labels in (best, best + 1):
        values, correct, places = poisoned(cuda_ops, (7,)), poisoned(cuda_ops, (7,)), poisoned(cuda_ops, (7,), np.int64)
        device_labels = cuda_ops.upload(labels)
        cuda_ops.highest(logits, places)
        assert cuda_ops.download(places).tolist() == best.tolist()
        cuda_ops.top1_correct(logits, device_labels, values)
        assert cuda_ops.download(values).tolist() == (best == labels).tolist()
        cuda_ops.softmax_cross_entropy(logits, device_labels, None, None, None, values, correct)
        assert cuda_ops.download(correct).tolist() == (best == labels).tolist()


def test_not_a_number_stays_one(cuda_ops):
    """A loss that is no longer finite must be seen, not turned to zero by a relu."""
    x = cuda_ops.upload(np.array([[np.nan, 1.0, -1.0]], np.float32))
    y, total = cuda_ops.empty((1, 3)), cuda_ops.zeros((1,))
    cuda_ops.activation_forward(x, "relu", y)
    np.testing.assert_array_equal(cuda_ops.download(y), [[np.nan, 1, 0]])
    cuda_ops.softmax_cross_entropy(x, cuda_ops.upload(np.array([1])), None, None, None, total, None)
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


@pytest.mark.parametrize("op", ["sum", "squared_norm", "count_nonfinite"])
def test_sums_have_the_same_bits_on_any_grid(cuda_ops, op, monkeypatch):
    import dptrain.backend.cuda.backend as module

    host = np.random.default_rng(0).standard_normal(50_001).astype(np.float32) * np.float32(1e10)
    host[::1000] = np.inf if op == "count_nonfinite" else 1e-10
    x = cuda_ops.upload(host)
    found = set()
    for blocks in (1, 2, 3, 5, 2048):
        monkeypatch.setattr(module, "_BLOCKS", blocks)
        total = cuda_ops.zeros((1,), np.float64)
        getattr(cuda_ops, op)(x, total)
        found.add(cuda_ops.download(total).tobytes())
    assert len(found) == 1
    wide = host.astype(np.float64)
    expected = {"sum": wide.sum(), "squared_norm": (wide * wide).sum(), "count_nonfinite": 51}[op]
    np.testing.assert_allclose(np.frombuffer(found.pop()), [expected], rtol=1e-9)


def test_a_sum_of_more_than_one_grid(cuda_ops):
    """A block of the full grid takes a second chunk: every element is counted once, the last ones too."""
    import dptrain.backend.cuda.backend as module

    P = module._BLOCKS * module._SUM_CHUNK + module._SUM_CHUNK + 3
    x = cuda_ops.zeros((P,))
    cuda_ops.fill(x[P - 5 :], np.inf)
    cuda_ops.fill(x[:2], np.nan)
    total = cuda_ops.zeros((1,), np.float64)
    cuda_ops.count_nonfinite(x, total)
    assert cuda_ops.download(total).tolist() == [7]
    cuda_ops.fill(x, 1)
    cuda_ops.sum(x, total)
    assert cuda_ops.download(total).tolist() == [7 + P]


# Calls of every kernel that loops over elements: a, b and c are 900 float32 each, d is 900 float64, w is one float32.
LOOPS = {
    "fill": lambda ops, a, b, c, d, w: (ops.fill(a, 2.0), ops.fill(d, 3.0)),
    "add": lambda ops, a, b, c, d, w: (ops.add(a, b), ops.add(a, d), ops.add(d, d)),
    "affine": lambda ops, a, b, c, d, w: ops.affine(a, 2.0, 1.0, b),
    "axpby": lambda ops, a, b, c, d, w: ops.axpby(2.0, a, 3.0, b, c),
    "multiply": lambda ops, a, b, c, d, w: ops.multiply(a, b, c),
    "divide": lambda ops, a, b, c, d, w: ops.divide(a, b, c),
    "maximum": lambda ops, a, b, c, d, w: ops.maximum(a, b, c),
    "minimum": lambda ops, a, b, c, d, w: ops.minimum(a, b, c),
    "absolute": lambda ops, a, b, c, d, w: ops.absolute(a, c),
    "sign": lambda ops, a, b, c, d, w: ops.sign(a, c),
    "square_root": lambda ops, a, b, c, d, w: ops.sqrt(a, c),
    "clip": lambda ops, a, b, c, d, w: ops.clip(a, -0.5, 0.5, c),
    "clip_divisors": lambda ops, a, b, c, d, w: ops.clip_divisors(d, w, 0.5, c),
    "adam": lambda ops, a, b, c, d, w: ops.adam(a, a, b, c, w, 0.1, 0.9, 0.999, 1e-7),
    "rmsprop": lambda ops, a, b, c, d, w: ops.rmsprop(a, a, c, w, 0.1, 0.9, 1e-7),
    "sgd": lambda ops, a, b, c, d, w: ops.sgd(a, a, c, w, 0.1, 0.9),
    "activation_forward": lambda ops, a, b, c, d, w: ops.activation_forward(a, "gelu", b),
    "activation_backward": lambda ops, a, b, c, d, w: ops.activation_backward(a, b, "tanh", c),
    "dropout_mask": lambda ops, a, b, c, d, w: ops.dropout_mask(0.5, 1, 2, 3, 4, c.reshape(900, 1)),
    "labels_other_than": lambda ops, a, b, c, d, w: ops.labels_other_than(ops.upload(np.arange(900)), 5, c),
    "add_totals": lambda ops, a, b, c, d, w: ops.add_totals(a, d),
    "gemm_finish": lambda ops, a, b, c, d, w: ops._elementwise(
        *("gemm_finish", 450, a.pointer, b.pointer, c.pointer, 10, 45, 2, 1)
    ),
    "sum_partials": lambda ops, a, b, c, d, w: ops._elementwise("sum_partials", 450, a.pointer, c.pointer, 450, 2),
    "batch_totals": lambda ops, a, b, c, d, w: ops.batch_sums(a.reshape(1, 900), d),
    "batch_statistics": lambda ops, a, b, c, d, w: ops.batch_statistics(
        *(ops.upload(np.full(901, 2.0)), d, 0.9, a, b, c, a)
    ),
    "batch_normalize": lambda ops, a, b, c, d, w: ops.batch_normalize(
        *(a.reshape(30, 30), b[:30], b[30:60], None, None, 1e-3, c.reshape(30, 30))
    ),
    "batch_normalize_backward": lambda ops, a, b, c, d, w: ops.batch_normalize_backward(
        *(a.reshape(30, 30), b.reshape(30, 30), b[:30], b[30:60], None, 1e-3, None, None, c.reshape(30, 30))
    ),
}


@pytest.mark.parametrize("kernel", LOOPS)
def test_a_grid_smaller_than_the_buffer(cuda_ops, monkeypatch, kernel):
    """In training it is, from 524,289 elements on; here a single block has to loop over 900."""
    import dptrain.backend.cuda.backend as module

    launched: set[str] = set()
    launch = cuda_ops._launch
    monkeypatch.setattr(cuda_ops, "_launch", lambda name, *more: (launched.add(name), launch(name, *more)))
    found = []
    for blocks in (module._BLOCKS, 1):
        monkeypatch.setattr(module, "_BLOCKS", blocks)
        rng = np.random.default_rng(1)
        buffers = [cuda_ops.upload(rng.uniform(0.1, 2, 900).astype(dtype)) for dtype in "fffd"]
        LOOPS[kernel](cuda_ops, *buffers, cuda_ops.upload(np.ones(1, np.float32)))
        found.append([cuda_ops.download(buffer).tobytes() for buffer in buffers])
    assert found[0] == found[1]
    assert any(name.startswith(kernel) for name in launched)


def test_sums_take_the_backends_dtype(cuda_ops):
    wide = cuda_ops.zeros((3,), np.float64)
    with pytest.raises(TypeError, match="sum adds float32 to float64, not float64 to float64"):
        cuda_ops.sum(wide, wide)


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
    from dptrain.backend.cuda.selection import visible_device

    assert [visible_device(None, n) for n in (0, 3)] == ["0", "3"]
    assert [visible_device("2, 5,GPU-ab", n) for n in (0, 1, 2, 3)] == ["2", "5", "GPU-ab", ""]
    assert visible_device("", 0) == ""
