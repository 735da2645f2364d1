"""`compile(optimizer=None)`: a model that evaluates, or trains by a step of its own."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError

X, Y = np.ones((6, 3), np.float32), np.zeros((6, 2), np.float32)


def _model():
    return dp.Sequential([dp.Input((3,)), dp.layers.Dense(2)])


def test_evaluates_and_predicts():
    model = _model()
    model.compile(optimizer=None, loss="mse", metrics=["mae"])
    assert model.optimizer is None
    loss, mae = model.evaluate(X, Y, verbose=0)
    predicted = model.predict(X, verbose=0)
    assert loss == pytest.approx(np.mean(predicted**2), rel=1e-5)
    assert mae == pytest.approx(np.mean(np.abs(predicted)), rel=1e-5)


@pytest.mark.parametrize("train", ["fit", "train_on_batch"])
def test_training_is_refused_in_one_line(train):
    model = _model()
    model.compile(optimizer=None, loss="mse")
    before = model.get_weights()
    with pytest.raises(ConfigError, match="compiled with optimizer=None"):
        getattr(model, train)(X, Y)
    for array, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_own_steps_train_with_their_own_optimizer():
    class Own(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.sgd = dp.layers.Dense(2), dp.optimizers.SGD(0.1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            loss = dp.ops.mean((self(x, training=True) - y) ** 2)
            self.zero_grad()
            loss.backward()
            weights = self.trainable_weights
            self.sgd.apply([weight.value.grad for weight in weights], weights)
            return {"loss": loss}

    model = Own()
    model.compile(optimizer=None)
    losses = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_files_keep_the_rest(tmp_path, name):
    model = _model()
    model.compile(optimizer=None, loss="mse", metrics=["mae"])
    model.save(tmp_path / name)
    loaded = dp.models.load_model(tmp_path / name)
    assert loaded.optimizer is None
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))


def test_summary_clone_and_mixed_precision():
    model = _model()
    model.compile(optimizer=None, loss="mse", dtype="mixed_float16")
    assert model.optimizer is None
    model.summary(print_fn=lambda line: None)
    copy = dp.models.clone_model(model)
    copy.compile(optimizer=None, loss="mse")
    assert np.isfinite(copy.evaluate(X, Y, verbose=0))
