"""Samples on the device and samples that are streamed to it give the same batches."""

from types import SimpleNamespace

import numpy as np
import pytest
from dptrain.model import Architecture
from dptrain.train.replica import Replica
from hypothesis import given
from hypothesis import strategies as st

from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.base import ArrayBatches
from dptrain.batches.feed import Feed, ResidentFeed, StreamedFeed, make_feed
from dptrain.batches.sampling import GlobalSampler, LocalSampler, Shard
from dptrain.callbacks import Callback, CallbackList, History
from dptrain.comm import SoloCommunicator
from dptrain.layers import Dense, Dropout
from dptrain.losses import MeanSquaredError
from dptrain.optimizers import Adam
from dptrain.train.trainer import Trainer, run_to_end

BACKEND = NumpyBackend(np.float64)


def batches(feed: Feed, order: np.ndarray, shards: list[Shard]) -> list[tuple[np.ndarray, ...]]:
    feed.start(order, shards)
    found = []
    for shard in shards:
        if shard.rows:
            rows = feed.rows(shard)
            found.append(tuple(array[rows.chosen].copy() for array in rows.arrays))
    return found


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
            shards = [shard for step in range(sampler.steps) for shard in sampler.shards(step)]
            stop = data.draw(st.integers(0, len(shards)), label="shards until the epoch ends")
            order = sampler.order(epoch)
            streamed.start(order, shards)
            resident.start(order, shards)
            for shard in [one for one in shards[:stop] if one.rows]:
                found, expected = streamed.rows(shard), resident.rows(shard)
                for one, other in zip(found.arrays, expected.arrays, strict=True):
                    np.testing.assert_array_equal(one[found.chosen], other[expected.chosen])


def test_arrays_that_are_no_contiguous_memory(tmp_path):
    x = np.arange(60, dtype=np.uint8).reshape(10, 6)
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(10, 6))
    mapped[:] = x
    shards = [Shard(0, 4, 0), Shard(4, 8, 0), Shard(8, 10, 0)]
    order = np.arange(10)[::-1].copy()
    for array in (x[:, ::2], mapped, np.asfortranarray(x)):
        with StreamedFeed(BACKEND, [array], 4) as feed:
            found = np.concatenate([one for (one,) in batches(feed, order, shards)])
        np.testing.assert_array_equal(found, np.asarray(array)[order])


def test_what_fits_stays_on_the_device():
    x, y = np.zeros((100, 8), np.float32), np.zeros(100, np.int64)
    assert isinstance(make_feed(BACKEND, [x, y], 10), ResidentFeed)
    assert isinstance(make_feed(BACKEND, [x, y], 10, x.nbytes + y.nbytes), ResidentFeed)
    with make_feed(BACKEND, [x, y], 10, x.nbytes + y.nbytes - 1) as feed:
        assert isinstance(feed, StreamedFeed)
    with make_feed(BACKEND, [x, y], 10, 1) as feed:  # a step needs what it needs
        assert len(batches(feed, np.arange(100), [Shard(0, 10, 0), Shard(10, 20, 0)])) == 2


def test_an_error_while_gathering_reaches_the_training():
    class Broken(np.ndarray):
        def __getitem__(self, key):
            raise OSError("the disk is gone")

    x = np.arange(12.0).reshape(4, 3)[:, ::2].view(Broken)
    feed = StreamedFeed(BACKEND, [x], 2)
    feed.start(np.arange(4), [Shard(0, 2, 0)])
    with pytest.raises(OSError, match="the disk is gone"):
        feed.rows(Shard(0, 2, 0))
    feed.close()


@pytest.mark.parametrize("shards_per_batch", [1, 4])
def test_a_training_on_streamed_samples_has_the_same_bits(shards_per_batch):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((101, 5)), rng.standard_normal((101, 2))

    def train(data_bytes: int | None) -> tuple[bytes, dict]:
        replica = Replica(BACKEND, Architecture([Dense(7, "tanh"), Dropout(0.3), Dense(2)], (5,)), 3)
        replica.compile(MeanSquaredError(), Adam(0.01), [])
        trainer = Trainer(replica, SoloCommunicator(), data_bytes=data_bytes)
        history = History()
        sampler = GlobalSampler(101, 16, seed=4, shards_per_batch=shards_per_batch)
        train = ArrayBatches(replica.as_stored(x, y), sampler)
        validation = ArrayBatches(replica.as_stored(x, y), LocalSampler(0, 101, 30))
        hooks = CallbackList([history], SimpleNamespace())
        run_to_end(trainer.training(train, hooks, epochs=3, validation=validation))
        outputs = trainer.predict(ArrayBatches([x], LocalSampler(0, 101, 40)), 101, hooks)
        return replica.params.tobytes() + outputs.tobytes(), history.history

    assert train(None) == train(2000)


def test_the_thread_ends_with_the_training():
    import threading

    class Fails(Callback):
        def on_train_batch_end(self, step, logs=None):
            raise KeyError("user's own")

    replica = Replica(BACKEND, Architecture([Dense(2)], (5,)), 3)
    replica.compile(MeanSquaredError(), Adam(0.01), [])
    trainer = Trainer(replica, SoloCommunicator(), data_bytes=500)
    batches = ArrayBatches([np.zeros((50, 5)), np.zeros((50, 2))], GlobalSampler(50, 5))
    with pytest.raises(KeyError):
        run_to_end(trainer.training(batches, CallbackList([Fails()], SimpleNamespace()), epochs=1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dptrain-feed")]
