import pytest

from dptrain.callbacks import ReduceLROnPlateau
from dptrain.errors import ConfigError
from tests.unit.callbacks import FakeModel, Rank1, drive


def rates(values, **options) -> list[float]:
    """Return the learning rates of the epochs, and the last."""
    model = FakeModel(1.0)
    rates = drive(ReduceLROnPlateau(factor=0.5, **options), [{"val_loss": value} for value in values], model)
    return [logs["learning_rate"] for logs in rates] + [model.optimizer.learning_rate]


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"patience": 1}, (3, 2, 1), [1, 1, 1, 1]),
        ({"patience": 1}, (3, 3, 3), [1, 1, 0.5, 0.25]),
        ({"patience": 2}, (3, 3, 3, 3, 3), [1, 1, 1, 0.5, 0.5, 0.25]),
        ({"patience": 1, "cooldown": 2}, (3, 3, 3, 3, 3), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"patience": 1, "min_lr": 0.4}, (3, 3, 3, 3), [1, 1, 0.5, 0.4, 0.4]),
        ({"patience": 1, "min_delta": 0.5}, (3, 2.6, 2), [1, 1, 0.5, 0.5]),
        ({"patience": 1, "mode": "max"}, (1, 2, 1), [1, 1, 1, 0.5]),
    ],
)
def test_learning_rates(options, values, expected):
    assert rates(values, **options) == expected


def test_it_speaks_as_keras_and_only_on_rank_0(capsys):
    epochs = [{"val_loss": 1.0}] * 2
    drive(ReduceLROnPlateau(patience=1, verbose=1), epochs, FakeModel(1.0))
    assert capsys.readouterr().out == "\nEpoch 2: ReduceLROnPlateau reducing learning rate to 0.1.\n"
    model = FakeModel(1.0)
    drive(ReduceLROnPlateau(patience=1, verbose=1), epochs, model, comm=Rank1())
    assert (capsys.readouterr().out, model.optimizer.learning_rate) == ("", 0.1)


def test_bad_factors_and_missing_logs():
    expected = r"ReduceLROnPlateau does not support a factor >= 1.0. Received factor=1.5"
    with pytest.raises(ConfigError, match=expected):
        ReduceLROnPlateau(factor=1.5)
    expected = r"metric `val_loss` which is not available. Available metrics are: loss,learning_rate."
    with pytest.warns(UserWarning, match=expected):
        drive(ReduceLROnPlateau(), [{"loss": 1.0}])
