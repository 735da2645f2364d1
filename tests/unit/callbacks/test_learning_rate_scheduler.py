import numpy as np
import pytest

from dptrain.callbacks import LearningRateScheduler
from dptrain.errors import ConfigError
from dptrain.optimizers import SGD
from tests.unit.callbacks import FakeModel, Rank1, build, drive, toy


@pytest.mark.parametrize(
    "schedule",
    [
        lambda epoch, rate: 1.0 / (epoch + 1),
        lambda epoch: 1.0 / (epoch + 1),
        lambda epoch, rate: np.float64(1.0 / (epoch + 1)),
    ],
)
def test_rates_of_epochs(schedule):
    rates = drive(LearningRateScheduler(schedule), [{"loss": 1.0}] * 3)
    assert [logs["learning_rate"] for logs in rates] == [1.0, 0.5, 1 / 3]


def test_the_function_is_given_the_rate_of_the_epoch_before():
    model = FakeModel(0.8)
    drive(LearningRateScheduler(lambda epoch, rate: rate / 2), [{"loss": 1.0}] * 3, model)
    assert model.optimizer.learning_rate == 0.1


def test_what_is_no_float_is_refused():
    with pytest.raises(ConfigError, match=r"The output of the `schedule` function should be a float. Got: 1"):
        drive(LearningRateScheduler(lambda epoch, rate: 1), [{"loss": 1.0}])


def test_it_speaks_as_keras_and_only_on_rank_0(capsys):
    drive(LearningRateScheduler(lambda epoch, rate: 0.5, verbose=1), [{"loss": 1.0}])
    assert capsys.readouterr().out == "\nEpoch 1: LearningRateScheduler setting learning rate to 0.5.\n"
    drive(LearningRateScheduler(lambda epoch, rate: 0.5, verbose=1), [{"loss": 1.0}], comm=Rank1())
    assert capsys.readouterr().out == ""


def test_the_model_is_trained_with_the_rate():
    x, y = toy(10)
    slow, fast = build(SGD(0.25)), build(SGD(1.0))
    start = fast.get_weights()[0]
    slow.fit(x, y, verbose=0)
    fast.fit(x, y, verbose=0, callbacks=LearningRateScheduler(lambda epoch, rate: rate / 4))
    assert fast.history.history["learning_rate"] == [0.25]
    assert (fast.get_weights()[0] != start).any()
    assert fast.get_weights()[0].tobytes() == slow.get_weights()[0].tobytes()
