"""SwapEMAWeights: evaluations with moving averages."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError

X = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)


def model(**options) -> dp.Model:
    inputs = dp.Sequential([dp.Input((1,)), dp.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    inputs.compile(dp.optimizers.SGD(0.01, **options), "mse", device="cpu")
    return inputs


class Sees(dp.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.in_test, self.at_end, self.in_epoch = [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.in_epoch.append(float(self.model.get_weights()[0][0, 0]))

    def on_test_begin(self, logs=None):
        self.in_test.append(float(self.model.get_weights()[0][0, 0]))

    def on_epoch_end(self, epoch, logs=None):
        self.at_end.append(float(self.model.get_weights()[0][0, 0]))


def train(swap_on_epoch: bool) -> tuple[dp.Model, Sees]:
    trained, sees = model(use_ema=True, ema_momentum=0.5), Sees()
    callbacks = [dp.callbacks.SwapEMAWeights(swap_on_epoch), sees]
    data = (X, 3 * X)
    trained.fit(*data, batch_size=2, epochs=2, shuffle=False, verbose=0, validation_data=data, callbacks=callbacks)
    return trained, sees


def averages() -> tuple[list[float], list[float]]:
    """Return the weight and its average after each epoch, by hand."""
    weight, average, averages_pair = 1.0, 0.0, ([], [])
    for step in range(4):
        x = X[2 * (step % 2) : 2 * (step % 2) + 2, 0]
        weight -= 0.01 * float(np.mean(2 * (weight - 3) * x * x))
        average = weight if step == 0 else 0.5 * average + 0.5 * weight
        if step % 2:
            averages_pair[0].append(weight)
            averages_pair[1].append(average)
    return averages_pair


def test_evaluations_see_the_averages_and_training_the_weights():
    weights, averaged = averages()
    _, sees = train(False)
    assert sees.in_test == pytest.approx(averaged, rel=1e-6)
    assert sees.at_end == pytest.approx(weights, rel=1e-6)


def test_the_averages_stay_at_the_end_of_epochs():
    weights, averaged = averages()
    model, sees = train(True)
    assert sees.at_end == pytest.approx(averaged, rel=1e-6)
    assert sees.in_epoch == pytest.approx([1, weights[0]], rel=1e-6)
    assert model.get_weights()[0][0, 0] == pytest.approx(averaged[-1], rel=1e-6)


def test_without_averages_it_is_refused():
    with pytest.raises(ConfigError, match="must be used when `use_ema=True` is set on the optimizer"):
        model().evaluate(X, X, verbose=0, callbacks=[dp.callbacks.SwapEMAWeights()])
