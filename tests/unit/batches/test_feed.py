"""Samples on the device and samples that are streamed to it give the same batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain as dp
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.batches.base import ArrayBatches
from dptrain.batches.feed import Feed, FeedPool, ResidentFeed, StreamedFeed, make_feed, padded_rows
from dptrain.batches.inputs import Samples
from dptrain.batches.sampling import GlobalSampler, LocalSampler, Sampler, Shard
from dptrain.callbacks import Callback, CallbackList, History
from dptrain.comm import current
from dptrain.data.lazy import LazyArray, RowSource
from dptrain.layers import Dense, Dropout
from dptrain.train.programs import Programs
from dptrain.train.trainer import Trainer, run_to_end

BACKEND = CpuBackend(np.float64)


def samples_of(feed: Feed, steps: list[list[Shard]]) -> list[tuple[np.ndarray, ...]]:
    """Return the samples of the next steps, of as many as the feed gives at once."""
    rows = feed.rows(steps)
    shards = [shard for step in steps for shard in step]
    samples_read = []
    for shard, start in zip(shards, rows.starts, strict=False):
        chosen = rows.order[start : start + shard.rows]
        samples_read.append(tuple(array[chosen].copy() for array in rows.arrays))
    return samples_read


def batches(feed: Feed, order: np.ndarray, shards: list[Shard]) -> list[tuple[np.ndarray, ...]]:
    steps = [[shard] for shard in shards]
    feed.start(order, steps)
    results = []
    while len(results) < len(steps):
        results += samples_of(feed, steps[len(results) :])
    return results


@given(st.data())
def test_chunks_hold_what_the_steps_ask_for(data):
    samples = data.draw(st.integers(1, 60), label="samples")
    batch = data.draw(st.integers(1, 25), label="batch size")
    world = data.draw(st.integers(1, min(3, batch)), label="ranks")
    rank = data.draw(st.integers(0, world - 1), label="rank")
    x = np.arange(samples * 3, dtype=np.uint8).reshape(samples, 3)
    y = np.arange(samples, dtype=np.int64)
    sampler = GlobalSampler(samples, batch, rank, world, seed=5)
    chunk = data.draw(st.integers(max(sampler.capacity, 1), samples + 5), label="rows of a chunk")
    with StreamedFeed(BACKEND, [x, y], chunk) as streamed, ResidentFeed(BACKEND, [x, y]) as resident:
        for epoch in range(2):
            steps = [sampler.shards(step) for step in range(sampler.steps)]
            stop = data.draw(st.integers(0, len(steps)), label="steps until the epoch ends")
            together = data.draw(st.integers(1, 4), label="steps asked for together")
            order = sampler.order(epoch)
            streamed.start(order, steps)
            resident.start(order, steps)
            rows_done = 0
            while rows_done < stop:
                actual = samples_of(streamed, steps[rows_done : rows_done + together])
                assert actual, "at least one step"
                for arrays, step in zip(actual, steps[rows_done:], strict=False):
                    (expected,) = samples_of(resident, [step])
                    for array, other in zip(arrays, expected, strict=True):
                        np.testing.assert_array_equal(array, other)
                rows_done += len(actual)


class Squares(RowSource):
    """Rows that are made when they are asked for; notes which."""

    sample_shape, dtype = (2, 3), np.dtype(np.uint8)

    def __init__(self):
        self.produced = []

    def read(self, rows, out):
        self.produced.append(rows.tolist())
        out[...] = (rows**2)[:, None, None] % 251


class Addressed(CpuBackend):
    """Knows samples by their address, as a backend of packs does."""

    def missing_samples(self, array):
        return array.ctypes.data and array.nbytes


def test_rows_are_made_a_chunk_at_a_time():
    source, order = Squares(), np.random.default_rng(2).permutation(30)
    lazy = LazyArray(source, np.arange(40))[5:35]
    full, y = np.asarray(lazy), np.arange(30)
    assert (full.shape, lazy.shape, lazy.nbytes) == ((30, 2, 3), (30, 2, 3), 180)
    np.testing.assert_array_equal(np.asarray(lazy.reshape(30, 6)[order]), full.reshape(30, 6)[order])
    source.produced.clear()
    shards = [Shard(start, start + 5, 0, 5) for start in range(0, 30, 5)]
    with make_feed(Addressed(np.float64), [lazy, y], 5, most_bytes=4 * 2 * 5 * 14) as feed:  # two steps a chunk
        assert isinstance(feed, StreamedFeed)
        assert source.produced == []
        for (x, labels), start in zip(batches(feed, order, shards), range(0, 30, 5), strict=True):
            np.testing.assert_array_equal(x, full[order[start : start + 5]])
            np.testing.assert_array_equal(labels, order[start : start + 5])
    assert [len(rows) for rows in source.produced] == [10, 10, 10]


def test_arrays_that_are_no_contiguous_memory(tmp_path):
    x = np.arange(60, dtype=np.uint8).reshape(10, 6)
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(10, 6))
    mapped[:] = x
    shards = [Shard(0, 4, 0, 4), Shard(4, 8, 0, 4), Shard(8, 10, 0, 2)]
    order = np.arange(10)[::-1].copy()
    for array in (x[:, ::2], mapped, np.asfortranarray(x)):
        with StreamedFeed(BACKEND, [array], 4) as feed:
            inputs = np.concatenate([part for (part,) in batches(feed, order, shards)])
        np.testing.assert_array_equal(inputs, np.asarray(array)[order])


def test_what_fits_stays_on_the_device():
    x, y = np.zeros((100, 8), np.float32), np.zeros(100, np.int64)
    assert isinstance(make_feed(BACKEND, [x, y], 10), ResidentFeed)
    assert isinstance(make_feed(BACKEND, [x, y], 10, x.nbytes + y.nbytes), ResidentFeed)
    with make_feed(BACKEND, [x, y], 10, x.nbytes + y.nbytes - 1) as feed:
        assert isinstance(feed, StreamedFeed)
    with make_feed(BACKEND, [x, y], 10, 1) as feed:  # a step needs what it needs
        assert len(batches(feed, np.arange(100), [Shard(0, 10, 0, 10), Shard(10, 20, 0, 10)])) == 2


def test_an_error_while_gathering_reaches_the_training():
    class Broken(np.ndarray):
        def __getitem__(self, key):
            raise OSError("the disk is gone")

    x = np.arange(12.0).reshape(4, 3)[:, ::2].view(Broken)
    feed = StreamedFeed(BACKEND, [x], 2)
    step = [Shard(0, 2, 0, 2)]
    feed.start(np.arange(4), [step])
    with pytest.raises(OSError, match="the disk is gone"):
        feed.rows([step])
    feed.close()


def trainer(data_bytes: int | None) -> Trainer:
    model = dp.Sequential([Dense(7, "tanh", input_shape=(5,)), Dropout(0.3), Dense(2)], seed=3)
    model.compile(dp.optimizers.Adam(0.01), "mse", dtype="float64")
    model.build()
    return Trainer(model, Programs(BACKEND, current()), data_bytes=data_bytes)


def cut(x: np.ndarray, y: np.ndarray | None, sampler: Sampler) -> ArrayBatches:
    return ArrayBatches(*Samples(x, y, dtype="float64").stored(), sampler)


@pytest.mark.parametrize("shards_per_batch", [None, 4])
def test_a_training_on_streamed_samples_has_the_same_bits(shards_per_batch):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((101, 5)), rng.standard_normal((101, 2))

    def train(data_bytes: int | None) -> tuple[bytes, dict]:
        model_trainer, history = trainer(data_bytes), History()
        samples = cut(x, y, GlobalSampler(101, 16, seed=4, shards_per_batch=shards_per_batch))
        validation = cut(x, y, LocalSampler(0, 101, 30))
        hooks = CallbackList([history], model_trainer.model)
        run_to_end(model_trainer.training(samples, hooks, epochs=3, validation=validation))
        outputs = model_trainer.model._as_outputs(model_trainer.predict(cut(x, None, LocalSampler(0, 101, 40)), hooks))
        return b"".join(
            weight.tobytes() for weight in model_trainer.model.get_weights()
        ) + outputs.tobytes(), history.history

    assert train(None) == train(2000)


def test_the_thread_ends_with_the_training():
    import threading

    class Fails(Callback):
        def on_train_batch_end(self, step, logs=None):
            raise KeyError("user's own")

    model_trainer = trainer(500)
    batches = cut(np.zeros((50, 5)), np.zeros((50, 2)), GlobalSampler(50, 5))
    with pytest.raises(KeyError):
        run_to_end(model_trainer.training(batches, CallbackList([Fails()], model_trainer.model), epochs=1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dptrain-feed")]


# Few samples


def test_few_samples_are_copied_to_the_same_memory_each_time():
    pool = FeedPool(BACKEND)
    first, other = (np.arange(15.0).reshape(5, 3) + n for n in (1, 100))
    results = []
    for x in (first, other[:4]):
        feed = make_feed(BACKEND, [x], len(x), pool=pool)
        with feed:
            feed.start(np.arange(len(x)), [[Shard(0, len(x), 0, len(x))]])
            results.append(feed.rows([[Shard(1, 4, 0, 3)]]))
            (array,) = results[-1].arrays
            np.testing.assert_array_equal(array[:3], x[1:4])
            assert (array[3:] == x[1]).all()  # values that a model takes
    sizes = [len(feed_batch.arrays[0]) for feed_batch in results]
    assert sizes == [8, 4]
    second_feed = make_feed(BACKEND, [first + 1], 7, pool=pool)
    second_feed.start(np.arange(5), [])
    assert second_feed.rows([[Shard(0, 5, 0, 5)]]).arrays[0] is results[0].arrays[0]


@pytest.mark.parametrize(("rows", "room", "kind"), [(1000, None, ResidentFeed), (9, 100, StreamedFeed)])
def test_many_samples_are_not_copied(rows, room, kind):
    x = np.zeros((rows, 1 << 10))
    assert isinstance(make_feed(BACKEND, [x], min(rows, 256), room, pool=FeedPool(BACKEND)), kind)


def test_few_kinds_of_samples_are_remembered():
    pool = FeedPool(BACKEND)
    feeds = [pool.feed([np.zeros((1, width))], 1, None) for width in range(1, 11)]
    assert len(set(feeds)) == 10
    for feed in feeds:
        feed.close()
    assert pool.feed([np.ones((1, 10))], 1, None) is feeds[-1]
    assert pool.feed([np.ones((1, 1))], 1, None) is not feeds[0]


def test_samples_that_are_read_at_once_have_memory_of_their_own():
    pool = FeedPool(BACKEND)
    feeds = [pool.feed([np.full((2, 3), n, float)], 2, None) for n in range(2)]
    for feed in feeds:
        feed.start(np.arange(2), [])
    arrays = [feed.rows([[Shard(0, 2, 0, 2)]]).arrays[0] for feed in feeds]
    for n, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.full((2, 3), n))
    feeds[1].close()
    assert pool.feed([np.zeros((2, 3))], 2, None) is feeds[1]


@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (2, 2), (3, 4), (255, 256), (256, 256), (257, 512)])
def test_rows_are_padded_to_powers_of_two(rows, padded):
    assert padded_rows(rows) == padded
