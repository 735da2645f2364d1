"""The CUDA backend's memory, and the ways between it and the host."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from dptrain import ops
from dptrain.batches import feed
from dptrain.batches.sampling import Shard
from dptrain.errors import ConfigError, DeviceError
from dptrain.ops.indexing import take_rows
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.sample import sample


def doubling(cuda_backend, variable):
    """Return what queues doubling a variable, and its memory."""
    program = trace(lambda: (variable.assign_add(variable), {})[1], {})
    return cuda_backend.executable(program, {}).run, cuda_backend.state.array(variable)


def adding(cuda_backend, array, total):
    """Return what queues adding rows of an array, by their numbers, to a variable."""

    def step(stored, rows):
        total.assign_add(ops.cast(take_rows(stored, rows), "float32"))
        return {}

    count = total.shape[0]
    specs = {"stored": (array.shape, array.dtype), "rows": ((Dim.rows(count),), "int64")}
    program = trace(step, specs)
    order = cuda_backend.upload(np.arange(len(array)))
    return cuda_backend.executable(program, {"stored": array, "rows": order}).run


def test_parts_and_shapes_share_memory(cuda_backend):
    host = np.arange(24, dtype=np.float32).reshape(6, 4)
    uploaded = cuda_backend.upload(host)
    part = uploaded[1:5]
    assert (len(part), part.shape, part.size, part.dtype) == (4, (4, 4), 16, np.float32)
    assert np.array_equal(cuda_backend.download(part[-2:].reshape(2, -1, 2)), host[3:5].reshape(2, 2, 2))
    assert np.array_equal(cuda_backend.download(uploaded.reshape((2, 12))[1:]), host.reshape(2, 12)[1:])
    assert uploaded[4:2].shape == (0, 4)
    cuda_backend.write(part, np.full((4, 4), 7))
    host[1:5] = 7
    assert np.array_equal(cuda_backend.download(uploaded), host)
    with pytest.raises(ValueError, match="cannot reshape"):
        uploaded.reshape(5, 5)
    with pytest.raises(ValueError, match="must have step 1"):
        uploaded[::2]
    with pytest.raises(ValueError, match="cannot write"):
        cuda_backend.write(uploaded, host[:2])


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", sample([np.float32, np.float64], 2))
def test_what_mpi_changes_reaches_the_device(cuda_backend, dtype, direct):
    empty = cuda_backend.exchange(cuda_backend.empty((0,), dtype), direct=direct)
    empty.begin()
    assert empty.values().shape == (0,)
    empty.end()
    size = 50_000
    variable = Variable(np.arange(size, dtype=dtype), "x", trainable=False)
    double, buffer = doubling(cuda_backend, variable)
    exchange = cuda_backend.exchange(buffer, direct=direct)
    for _ in range(3):
        double()
        exchange.begin()
        values = exchange.values()
        if direct:
            assert values.__cuda_array_interface__["data"] == (buffer.pointer, False)
            cuda_backend.write(values, cuda_backend.download(values) + 1)  # in place of an MPI that knows GPUs
        else:
            values += 1
        exchange.end()
        double()
    expected = np.arange(size, dtype=dtype)
    for _ in range(3):
        expected = (expected * 2 + 1) * 2
    np.testing.assert_array_equal(variable.numpy(), expected)


def test_a_buffer_travels_while_work_on_others_runs(cuda_backend):
    """What is queued after `begin` neither holds it up nor changes what it sends."""
    variables = [Variable(np.ones(n, np.float32), "x", trainable=False) for n in (10_000, 20_000)]
    doubles, buffers = zip(*(doubling(cuda_backend, variable) for variable in variables), strict=True)
    exchanges = [cuda_backend.exchange(buffer) for buffer in buffers]
    for step in range(1, 4):
        doubles[0]()
        exchanges[0].begin()
        doubles[1]()
        doubles[1]()
        exchanges[1].begin()
        for exchange, factor in zip(exchanges, (6, 12), strict=True):
            assert (exchange.values() == factor**step / 3).all()
            exchange.values()[:] *= 3
            exchange.end()
        assert [np.unique(variable.numpy()).tolist() for variable in variables] == [[6.0**step], [12.0**step]]


@pytest.mark.parametrize("dtype", sample([np.uint8, np.int64, np.float32, np.float16, np.bool_], 2))
def test_staged_rows_arrive_and_are_not_overwritten_too_early(cuda_backend, dtype):
    """Two slots in turn, as a streamed data set uses them."""
    rng = np.random.default_rng(0)
    rows, features = 40, 300
    slots = [cuda_backend.staging((rows, features), dtype) for _ in range(2)]
    total, expected = Variable(np.zeros((rows, features), np.float32), "total"), np.zeros((rows, features), np.float32)

    def step(x):
        total.assign_add(ops.cast(x, "float32"))
        return {}

    program = trace(step, {"x": (slots[0].device.shape, slots[0].device.dtype)})
    adds = [cuda_backend.executable(program, {"x": slot.device}).run for slot in slots]
    for turn in range(20):
        slot = slots[turn % 2]
        x = rng.integers(0, 2, (rows, features)).astype(dtype)
        slot.reuse()
        slot.host[:] = x
        slot.send(rows)
        slot.arrive()
        adds[turn % 2]()
        slot.release()
        expected += x
    np.testing.assert_array_equal(total.numpy(), expected)


def test_streamed_chunks_are_not_refilled_too_early(cuda_backend):
    """The host meets no other wait: what is gathered into a chunk's memory waits for that memory's last copy."""
    rng = np.random.default_rng(0)
    samples, chunk, features = 48, 4, 500
    x, order = rng.random((samples, features), np.float32), rng.permutation(samples)
    steps = [[Shard(begin, begin + chunk, 0, chunk)] for begin in range(0, samples, chunk)]
    total, adds = Variable(np.zeros((chunk, features), np.float32), "total"), {}
    with feed.StreamedFeed(cuda_backend, [x], chunk) as streamed:
        for _ in range(2):
            streamed.start(order, steps)
            for step in steps:
                rows = streamed.rows([step])
                (array,) = rows.arrays
                if array.pointer not in adds:
                    adds[array.pointer] = adding(cuda_backend, array, total)
                adds[array.pointer](rows.starts)
        actual = total.numpy()
    expected = np.zeros((chunk, features), np.float32)
    for part in [*np.split(x[order], len(steps))] * 2:
        expected += part
    np.testing.assert_array_equal(actual, expected)


def test_what_is_sent_travels_from_pinned_memory_as_it_was(cuda_backend, monkeypatch):
    from dptrain.backend.cuda import memory  # which needs PyCUDA

    cuda, pinned = memory.cuda, []

    def noted(pointer, array, stream):
        pinned.append(any(np.shares_memory(array, block.host) for block in cuda_backend.heap.pinned))
        cuda.memcpy_htod_async(pointer, array, stream)

    monkeypatch.setattr(memory, "cuda", SimpleNamespace(**vars(cuda) | {"memcpy_htod_async": noted}))
    sizes = [1000, 1, 700, 3, 0] * 40
    buffers = [cuda_backend.empty((size,), np.int64) for size in sizes]
    array = np.empty(1000, np.int64)
    for number, buffer in enumerate(buffers):
        array[:] = number
        cuda_backend.send(buffer, array[: buffer.size])
    for number, buffer in enumerate(buffers):
        np.testing.assert_array_equal(cuda_backend.download(buffer), np.full(buffer.size, number))
    assert len(pinned) == 160
    assert all(pinned), "a copy from other memory may wait for the stream"
    large = cuda_backend.empty((10_000,), np.int64)
    cuda_backend.send(large, np.arange(10_000))
    np.testing.assert_array_equal(cuda_backend.download(large), np.arange(10_000))


def test_room_for_data_is_what_is_left(cuda_backend):
    before = cuda_backend.room_for_data()
    array = cuda_backend.empty((64 << 20,), np.uint8)
    assert 0 <= cuda_backend.room_for_data() <= before - array.nbytes


def test_samples_that_backends_share_are_on_the_device_once(cuda_backend):
    other = type(cuda_backend)()
    x = np.arange(1 << 21, dtype=np.float16).reshape(-1, 16)
    assert other.missing_samples(x) == 2 * x.nbytes  # kept as float32
    copies = [backend.upload_samples(x) for backend in (cuda_backend, other)]
    assert copies[0].pointer != copies[1].pointer
    cuda_backend.shares_samples = other.shares_samples = True
    try:
        first = cuda_backend.upload_samples(x)
        assert other.missing_samples(x) == 0
        assert other.missing_samples(x[1:]) > 0
        second = other.upload_samples(x)
        assert second.pointer == first.pointer != copies[0].pointer
        del first
        np.testing.assert_array_equal(other.download(second), x.astype(np.float32))
        del second
        assert other.missing_samples(x) == 0  # kept for the next model
        for number in range(20):
            other.upload_samples(np.arange(number, 9 + number))
            cuda_backend.upload_samples(np.arange(number, 7 + number))
        assert other.missing_samples(x) == 2 * x.nbytes
        assert cuda_backend.upload_samples(x).pointer != copies[0].pointer
        assert other.missing_samples(x) == 0
    finally:
        cuda_backend.shares_samples = False
        cuda_backend._last_samples.clear()
        other.close()
    assert cuda_backend.missing_samples(x) == 2 * x.nbytes


def test_shared_samples_outlive_the_backend_that_brought_them(cuda_backend):
    """They go with the last backend that uses them; whoever holds them longer keeps nobody from a copy of its own."""
    x = np.arange(6000, dtype=np.float32)
    first, second, third = (type(cuda_backend)() for _ in range(3))
    for backend in (first, second, third):
        backend.shares_samples = True
    arrays = [backend.upload_samples(x) for backend in (first, second)]
    first.close()
    np.testing.assert_array_equal(second.download(arrays[1]), x)
    assert third.missing_samples(x) == 0
    second.close()
    assert third.missing_samples(x) == x.nbytes
    np.testing.assert_array_equal(third.download(third.upload_samples(x)), x)
    third.close()


def test_variables_move_to_the_device_and_back(cuda_backend):
    variables = [Variable(np.arange(n, dtype=np.float64), f"x{n}", trainable=False) for n in (0, 1, 33)]
    cuda_backend.adopt(variables)
    cuda_backend.adopt(variables[1:])
    pointers = [cuda_backend.state.array(variable).pointer for variable in variables]
    assert all(pointer % 256 == 0 for pointer in pointers)
    variables[2].assign(variables[2].numpy() + 1)
    for variable in variables:
        variable._move(None)
    cuda_backend.release(variables)
    assert [variable.numpy().tolist() for variable in variables[:2]] == [[], [0.0]]
    np.testing.assert_array_equal(variables[2].numpy(), np.arange(33) + 1)


def test_what_a_garbage_collection_drops_during_a_capture_is_freed_afterwards(cuda_backend):
    """Freeing waits for the streams, which nothing may while one of them is captured."""
    total = Variable(np.ones(3, np.float32), "total", trainable=False)
    program = trace(lambda: (total.assign(total / ops.sum(total) + ops.sum(ops.exp(total))), {})[1], {})
    executable = cuda_backend.executable(program, {})
    (part,) = executable._stages[0]
    assert len(part.launches) > 1, "else nothing is captured"
    other, array = type(cuda_backend)(), np.zeros(5)
    shared = other.upload_samples(array) if other.shares_samples else other.upload(array)
    cycle = [shared, cuda_backend.empty((1000,)), cuda_backend.staging((2,), np.float32), other]
    cycle.append(cycle)
    del shared, other, cycle
    retired = cuda_backend.gpu_record.retired
    part.launches.insert(0, lambda table, runs: gc.collect())
    gc.disable()
    try:
        executable.run()
        assert retired
    finally:
        gc.enable()
    np.testing.assert_allclose(total.numpy(), 1 / 3 + 3 * np.e, rtol=1e-6)
    assert not retired
    executable.close()


def test_a_capture_that_fails_leaves_no_graph_behind(cuda_backend):
    total = Variable(np.ones(3, np.float32), "total", trainable=False)
    program = trace(lambda: (total.assign(total / ops.sum(total) + ops.sum(ops.exp(total))), {})[1], {})
    executable = cuda_backend.executable(program, {})
    (part,) = executable._stages[0]
    part.launches.insert(0, lambda table, runs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        executable.run()
    del part.launches[0]
    executable.run()
    np.testing.assert_allclose(total.numpy(), 1 / 3 + 3 * np.e, rtol=1e-6)


def test_too_large_for_the_device(cuda_backend):
    with pytest.raises(
        DeviceError, match=r"CUDA out of memory on .*: tried to allocate 1048576\.0 GiB \(everything\), .* are free"
    ):
        cuda_backend.empty((2**48,), name="everything")


def test_other_precision_is_refused(cuda_backend):
    from dptrain.backend import create

    with pytest.raises(ConfigError, match="compute in float32"):
        create("cuda", "float64", 1)


def test_a_device_within_a_mask(cuda_backend):
    from dptrain.backend.cuda.gpu.selection import visible_device

    assert [visible_device(None, n) for n in (0, 3)] == ["0", "3"]
    assert [visible_device("2, 5,GPU-ab", n) for n in (0, 1, 2, 3)] == ["2", "5", "GPU-ab", ""]
    assert visible_device("", 0) == ""
