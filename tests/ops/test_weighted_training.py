"""Every loss, with sample weights and all metrics that go with it, trained on CUDA as on NumPy in float64."""

import numpy as np
import pytest

from dptrain import losses
from dptrain.backend import Backend
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import Shard
from dptrain.layers import Dense
from dptrain.metrics import CLASSES
from dptrain.model import Architecture
from dptrain.optimizers import SGD
from dptrain.train.replica import Replica

CASES = [
    (losses.SparseCategoricalCrossentropy(ignore_class=1), "softmax"),
    (losses.SparseCategoricalCrossentropy(reduction="sum"), "sigmoid"),
    (losses.CategoricalCrossentropy(label_smoothing=0.1), "softmax"),
    (losses.BinaryCrossentropy(reduction="mean_with_sample_weight"), "sigmoid"),
    (losses.Huber(0.4), "sigmoid"),
]


def train(ops: Backend, loss: losses.Loss, last: str) -> tuple[dict[str, float], np.ndarray]:
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((21, 5)), rng.integers(0, 7, 21)
    y, weights = labels if loss.takes_labels else np.eye(7)[labels], rng.random(21) * 2
    measured = [one(name=one.__name__) for one in CLASSES if one.takes_labels == loss.takes_labels]
    replica = Replica(ops, Architecture([Dense(6, "tanh"), Dense(7, last)], (5,)), 3)
    replica.compile(loss, SGD(0.02), measured, measured)
    replica.reserve(11)
    feed = ResidentFeed(ops, replica.as_stored(x.astype(np.float32), y, weights))
    for _ in range(5):
        feed.start(rng.permutation(21), [])
        for shards in ([Shard(0, 11, 0)], [Shard(11, 16, 0), Shard(16, 16, 5), Shard(16, 21, 5)]):
            replica.forward_backward(feed, shards)
            replica.update()
    return replica.logs(), ops.download(replica.params)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__}-{case[1]}")
def test_the_same_training(ops, case):
    logs, params = train(ops, *case)
    expected, reference = train(NumpyBackend(np.float64), *case)
    assert list(logs) == list(expected)
    assert len(logs) > 6
    tolerance = 1e-10 if ops.dtype == np.float64 else 2e-5
    for key, value in expected.items():
        assert logs[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
    np.testing.assert_allclose(params, reference, rtol=0, atol=tolerance)
