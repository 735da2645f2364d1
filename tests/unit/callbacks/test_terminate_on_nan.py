import math

import numpy as np
import pytest

from dptrain.callbacks import TerminateOnNaN
from dptrain.errors import DivergenceError
from tests.unit.callbacks import FakeModel, build, drive, toy


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_stops_at_the_step(value, capsys):
    model = FakeModel()
    steps = [[{"loss": 1.0}, {"loss": value}, {"loss": 1.0}]] * 2
    assert len(drive(TerminateOnNaN(), [{"loss": 1.0}] * 2, model, steps)) == 1
    assert model.stop_training
    assert capsys.readouterr().out == "Batch 1: Invalid loss, terminating training\n"


def test_it_can_raise_as_keras():
    steps = [[{"loss": math.inf}]]
    with pytest.raises(RuntimeError, match=r"NaN or Inf loss encountered at batch 0. Loss value: inf. ") as caught:
        drive(TerminateOnNaN(raise_error=True), [{"loss": 1.0}], steps=steps)
    assert isinstance(caught.value, DivergenceError)


def test_finite_losses_and_steps_without_a_loss_go_on():
    steps = [[{"loss": 1e300}, {}, {"accuracy": math.nan}]]
    model = FakeModel()
    drive(TerminateOnNaN(), [{"loss": 1.0}], model, steps)
    assert not model.stop_training


def test_a_training_that_diverges_ends_after_the_step(capsys):
    x, y = toy()
    model = build()
    epochs_seen = []
    stop = TerminateOnNaN()
    with np.errstate(all="ignore"):
        x[17] = np.nan
        model.fit(x, y, batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=stop)
        epochs_seen = model.history.epoch
    assert epochs_seen == [0]
    assert capsys.readouterr().out == "Batch 1: Invalid loss, terminating training\n"
