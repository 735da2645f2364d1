"""A run that is trained in segments has the bits of one that is not."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.callbacks import LearningRateScheduler
from dptrain.optimizers import Adam, schedules
from dptrain.sweeps.records import Run, Segment, Status
from dptrain.sweeps.scheduling.training import Recipe, Slot, Training

EPOCHS = 4
RATES = {
    "number": lambda: 0.01,
    "CosineDecay": lambda: schedules.CosineDecay(0.02, 20, warmup_target=0.05, warmup_steps=5),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.02, 5, 0.7),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([8, 17], [0.02, 0.01, 0.001]),
}


class Small(Recipe):
    """Trains with a learning rate, which a callback may change before every epoch."""

    def __init__(self, rate: str, scheduled: bool) -> None:
        self.rate, self.scheduled = rate, scheduled

    def build(self, setting, seed, run=None):
        model = dp.Sequential([dp.layers.Dense(5, "tanh", input_shape=(3,)), dp.layers.Dense(2)], seed=seed)
        model.compile(Adam(RATES[self.rate]()), "mse", device="cpu", dtype="float64")
        return model

    def train(self, model, setting, callbacks, run):
        x = np.random.default_rng(0).standard_normal((30, 3))
        schedulers = [LearningRateScheduler(lambda epoch, rate: rate * 0.9)] if self.scheduled else []
        return model._fit_in_steps(
            x, x[:, :2], batch_size=5, epochs=EPOCHS, verbose=0, callbacks=[*schedulers, *callbacks]
        )


def trained(recipe: Recipe, *ends: int | None) -> tuple[list[np.ndarray], float]:
    """Return the weights and the learning rate after segments that end with these epochs."""
    begin, state, slot = 0, b"", Slot()
    for end in ends:
        training = Training(recipe, Segment(Run(0, 0, 7), begin, end), {}, slot, state, lambda *reports: None)
        while (ended := training.advance()) is None:
            pass
        ending, state = ended
        assert (ending.status, ending.epochs) == ((Status.DONE, EPOCHS) if end is None else (Status.PAUSED, end))
        result = training.model.get_weights(), training.model.optimizer.learning_rate
        training.close()
        begin = end or 0
    slot.close()
    return result


@pytest.mark.parametrize(("rate", "scheduled"), [*((rate, False) for rate in RATES), ("number", True)])
def test_the_learning_rate_of_a_run_that_waited(rate, scheduled):
    weights, learning_rate = trained(Small(rate, scheduled), None)
    resumed, other = trained(Small(rate, scheduled), 1, 3, None)
    assert learning_rate == other
    for mine, theirs in zip(resumed, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
