import pytest

from dptrain.callbacks import EarlyStopping
from dptrain.errors import ConfigError
from tests.unit.callbacks import FakeModel, Rank1, build, drive, toy


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": 1.0, "val_loss": value} for value in values]


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({}, (3, 2, 1), 3),
        ({}, (3, 2, 2.5, 1), 3),
        ({"patience": 2}, (3, 2, 2.5, 2.1, 1), 4),
        ({"patience": 2}, (3, 2, 2.5, 1.9, 1.8, 1.7), 6),
        ({"min_delta": 0.5}, (3, 2.6, 1), 2),
        ({"min_delta": -0.5}, (3, 2.6, 1), 2),  # its sign does not matter
        ({"mode": "max"}, (1, 2, 1.5, 3), 3),
        ({"baseline": 0.5}, (3, 2, 1), 3),  # an improvement that is not below the baseline neither stops nor restarts
        ({"baseline": 0.5, "patience": 3}, (3, 2, 2, 2, 2), 3),
        ({"baseline": 2.5, "patience": 2}, (3, 2, 2.2, 2.2, 1), 4),
        ({"start_from_epoch": 3}, (1, 2, 3, 4, 5, 6), 5),
        ({}, (float("nan"), 1, 0.5), 2),
        ({}, (1, 1, 1), 2),  # not at the very first epoch
    ],
)
def test_epochs_until_it_stops(options, values, epochs):
    model = FakeModel()
    assert len(drive(EarlyStopping(**options), losses(*values), model)) == epochs
    assert model.stop_training == (epochs < len(values))


def test_the_direction_follows_from_the_metric():
    rising = [{"val_accuracy": value} for value in (0.1, 0.2, 0.3)]
    assert len(drive(EarlyStopping("val_accuracy"), rising, metrics=("accuracy",))) == 3
    falling = [{"mae": value} for value in (0.3, 0.2, 0.1)]
    assert len(drive(EarlyStopping("mae"), falling, metrics=("mae",))) == 3
    with pytest.raises(ConfigError, match=r"EarlyStopping callback received monitor=val_speed, .*Pass `mode='max'`"):
        drive(EarlyStopping("val_speed"), [{"val_speed": 1.0}])


@pytest.mark.parametrize(("values", "best"), [((3, 1, 2, 2.5), 1), ((3, 2, 1, 0.5), 3)])
def test_weights_of_the_best_epoch_come_back_even_where_nothing_stopped(values, best):
    model = FakeModel()
    drive(EarlyStopping(patience=2, restore_best_weights=True), losses(*values), model)
    assert model.weights[0][0] == best


def test_it_speaks_as_keras_and_only_on_rank_0(capsys):
    drive(EarlyStopping(restore_best_weights=True, verbose=1), losses(3, 1, 2, 2.5))
    expected = "Epoch 3: early stopping\nRestoring model weights from the end of the best epoch: 2.\n"
    assert capsys.readouterr().out == expected
    drive(EarlyStopping(restore_best_weights=True, verbose=1), losses(3, 1, 2, 2.5), comm=Rank1())
    assert capsys.readouterr().out == ""


def test_a_log_that_is_not_there_is_warned_of():
    expected = "Early stopping conditioned on metric `val_loss` which is not available. Available metrics are: loss"
    with pytest.warns(UserWarning, match=expected):
        drive(EarlyStopping(), [{"loss": 1.0}])


def test_an_unknown_mode_is_auto():
    with pytest.warns(UserWarning, match="EarlyStopping mode 'best' is unknown, fallback to auto mode"):
        assert EarlyStopping(mode="best").mode == "auto"


def test_it_can_be_used_again():
    stopping = EarlyStopping(patience=1)
    assert len(drive(stopping, losses(1, 2, 3))) == 2
    assert len(drive(stopping, losses(6, 5, 4))) == 3


def test_a_model_gets_the_weights_of_its_best_epoch():
    x, y = toy()
    model = build()
    stopping = EarlyStopping("loss", mode="max", restore_best_weights=True)  # the first epoch is the best
    model.fit(x, y, epochs=4, verbose=0, callbacks=stopping, shuffle=False)
    assert len(model.history.epoch) == 2
    reference = build()
    reference.fit(x, y, epochs=1, verbose=0, shuffle=False)
    for mine, weight, expected in zip(model.get_weights(), stopping.best_weights, reference.get_weights(), strict=True):
        assert mine.tobytes() == weight.tobytes() == expected.tobytes()
    with pytest.raises(ConfigError, match="found values of 3 weights, expected 4"):
        model._set_local_weights(stopping.best_weights[1:])
