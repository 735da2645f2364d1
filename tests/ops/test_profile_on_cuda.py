"""A profile on a GPU or the emulator: every launch by events, and the bits of a training that is not measured."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.callbacks import Profiler

X = np.random.default_rng(0).normal(size=(48, 6, 5)).astype("f4")
Y = np.arange(48) % 3


def trained(layers, callbacks):
    dp.utils.set_random_seed(1)
    model = dp.Sequential([dp.Input((6, 5)), *layers()])
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, device="cuda", share_gpu=True)
    losses = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    return losses, model.get_weights()


def recurrent():
    return [dp.layers.LSTM(4, name="lstm"), dp.layers.Dense(3, name="dense")]


def dense():
    return [dp.layers.Flatten(), dp.layers.Dense(70, "relu", name="first"), dp.layers.Dense(3, name="dense")]


def on_host():
    add = 9 * np.eye(5, dtype="f4")
    inverse = dp.layers.Lambda(lambda x: dp.ops.linalg.inv(x[:, :5] + add), name="inverse")
    return [inverse, dp.layers.Flatten(), dp.layers.Dense(3, name="dense")]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("cuda_backend")
@pytest.mark.parametrize(
    ("layers", "names"), [(dense, {"first", "dense"}), (recurrent, {"lstm", "dense"}), (on_host, {"inverse", "dense"})]
)
def test_every_launch_is_measured(layers, names):
    profiler = Profiler(2, None)
    measured, expected = trained(layers, [profiler]), trained(layers, [])
    assert measured[0] == expected[0]
    for weight, other in zip(measured[1], expected[1], strict=True):
        np.testing.assert_array_equal(weight, other)
    profile = profiler.profile
    assert names | {"loss", "update", "data"} <= set(profile.layers)
    assert len(profile.seconds) == 2
    assert all(each.seconds > 0 and each.times >= 1 for each in profile.kernels)
    assert sum(each.seconds for each in profile.kernels) + profile.between == pytest.approx(profile.mean, rel=0.01)
