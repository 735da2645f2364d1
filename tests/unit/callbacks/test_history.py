from dptrain.callbacks import History
from tests.unit.callbacks import build, drive, toy


def test_logs_by_epoch():
    history = History()
    drive(history, [{"loss": 2.0}, {"loss": 1.0, "val_loss": 3.0}])
    assert (history.epoch, history.history) == ([0, 1], {"loss": [2.0, 1.0], "val_loss": [3.0]})


def test_a_second_training_adds_to_it_as_in_keras():
    history = History()
    drive(history, [{"loss": 2.0}])
    drive(history, [{"loss": 1.0}])
    assert (history.epoch, history.history) == ([0], {"loss": [2.0, 1.0]})


def test_a_users_own_is_the_models():
    x, y = toy()
    history, model = History(), build()
    assert model.fit(x, y, verbose=0, callbacks=history) is history
    assert model.history is history
