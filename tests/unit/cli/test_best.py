"""Early stopping, schedules and the best model as the command line offers them."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

import dptrain as dp
from dptrain.cli.best import BestModel, final_metrics
from dptrain.cli.main import main
from dptrain.models import load_model


@pytest.fixture
def train(small_npz, tmp_path, capfd):
    """Return what trains into a folder, and returns the folder, or the error where it is refused."""

    def train(name, *arguments):
        fixed = ("--data", str(small_npz), "--batch-size", "256", "--hidden", "8", "--verbose", "0")
        code = main([*fixed, *arguments, "--out", str(tmp_path / name)])
        err = capfd.readouterr().err
        assert err.count("\n") == (1 if code else 0)
        return err if code else tmp_path / name

    return train


def epochs(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(run):
    return json.loads((run / "summary.json").read_text())


def weights(run):
    return safetensors.numpy.load_file(run / "model.safetensors")


STOPS = ("--early-stopping", "2", "--learning-rate", "0.5")


def test_a_training_stops_where_nothing_improves_and_ends_with_its_best_weights(train):
    run = train("run", *STOPS, "--epochs", "40", "--validation-split", "0.2")
    lines, report = epochs(run), summary(run)
    best = min(lines, key=lambda line: line["val_loss"])
    assert len(lines) == best["epoch"] + 2 < 40
    assert (report["best"]["epoch"], report["best"]["value"]) == (best["epoch"], best["val_loss"])
    assert report["metrics"] == report["best"]["metrics"] == {key: best[key] for key in report["metrics"]}
    assert report["epochs"] == len(lines)
    assert report["test"].keys() == {"loss", "accuracy"}
    best_weights = load_model(run / "best.keras").get_weights()
    for weight, other in zip(best_weights, load_model(run).get_weights(), strict=True):
        assert np.array_equal(weight, other)


def test_going_on_with_early_stopping_has_the_bits_of_one_training(train):
    complete = train("whole", *STOPS, "--epochs", "40")
    last = len(epochs(complete))
    interrupted = train("begun", *STOPS, "--epochs", str(last - 1))
    ended = train("ended", *STOPS, "--epochs", "40", "--resume", str(interrupted))
    assert len(epochs(ended)) == last
    assert summary(ended)["best"] == summary(complete)["best"]
    for name, weight in weights(complete).items():
        assert np.array_equal(weight, weights(ended)[name])
    assert (ended / "best.keras").exists(), "brought from where the training began"


def test_the_best_model_without_early_stopping(train):
    run = train("run", "--epochs", "3", "--monitor", "val_accuracy")
    report = summary(run)
    assert report["best"]["monitor"] == "val_accuracy"
    expected = {"loss": "down", "accuracy": "up", "val_loss": "down", "val_accuracy": "up"}
    assert report["directions"] == expected, "what `runs --sort` puts first"
    assert report["best"]["value"] == max(line["val_accuracy"] for line in epochs(run))
    assert report["metrics"]["loss"] == epochs(run)[-1]["loss"], "the last epoch's: nothing was restored"


def test_the_schedule_reaches_the_optimizer(train):
    run = train("run", "--epochs", "2", "--schedule", "cosine:warmup=2", "--learning-rate", "0.1")
    optimizer = load_model(run).optimizer
    assert optimizer._follows_schedule
    assert optimizer.get_config()["learning_rate"]["config"]["decay_steps"] == 2 * 4 - 2
    assert float(optimizer.learning_rate) == pytest.approx(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--monitor val_acc", "unknown train.monitor 'val_acc'; did you mean 'val_accuracy'"),
        ("--monitor val_loss:least", "expected val_loss:max or val_loss:min"),
        ("--early-stopping soon", "train.early_stopping = 'soon', set on the command line"),
        ("--schedule cosine:warmup=20", "the training has 20 steps, no more than its warmup"),
        ("--schedule cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
    ],
)
def test_what_is_refused(train, arguments, message):
    assert message in train("run", "--epochs", "5", *arguments.split())


@pytest.mark.long
def test_more_epochs_are_another_schedule(train):
    first_run = train("begun", "--epochs", "1", "--schedule", "linear")
    arguments = ("--epochs", "2", "--schedule", "linear", "--resume", str(first_run))
    assert "train.epochs: it has 1, this one 2" in train("more", *arguments)
    assert len(epochs(train("more", *arguments, "--resume-anyway", "epochs"))) == 2
    first_run = train("begun2", "--epochs", "1", "--schedule", "linear:steps=20")
    arguments = ("--epochs", "2", "--schedule", "linear:steps=20", "--resume", str(first_run))
    assert len(epochs(train("more2", *arguments))) == 2


@pytest.fixture
def model():
    model = dp.Sequential([dp.layers.Input((1,)), dp.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def watched(model, folder, *losses, source=None):
    """Return what keeps the best model, after epochs with these losses."""
    best = BestModel(str(folder), "loss", "auto", source)
    best.set_model(model)
    best._set_callbacks([best])
    for epoch, loss in enumerate(losses):
        best.on_epoch_end(epoch, {"loss": loss})
    return best


def test_nan_is_never_the_best(model, tmp_path):
    assert watched(model, tmp_path, math.nan, 2.0, math.nan, 3.0).best_epoch == 2


def test_braces_in_a_path_are_no_format(model, tmp_path):
    watched(model, tmp_path / "{epoch}", 1.0).on_train_end()
    assert (tmp_path / "{epoch}" / "best.keras").exists()


def test_going_on_takes_the_file_of_the_checkpoints_epoch_alone(model, tmp_path):
    state = watched(model, tmp_path / "a", 3.0, 2.0).state_dict()
    second = watched(model, tmp_path / "a")
    second.load_state_dict(state)
    assert (second.best, second.best_epoch, second.best_logs) == (2.0, 2, {"loss": 2.0})

    (tmp_path / "b").mkdir()
    elsewhere = watched(model, tmp_path / "b", source=tmp_path / "a" / "checkpoints" / "000001")
    elsewhere.load_state_dict(state)
    assert elsewhere.best_epoch == 2
    assert (tmp_path / "b" / "best.keras").read_bytes() == (tmp_path / "a" / "best.keras").read_bytes()

    (tmp_path / "a" / "best.keras").write_bytes(b"of a later epoch")
    for folder, state_of in (("a", state), ("b", {**state, "monitor": "val_loss"}), ("c", state)):
        anew = watched(model, tmp_path / folder)
        anew.load_state_dict(state_of)
        assert (anew.best, anew.best_epoch) == (None, None)


def test_the_metrics_of_the_weights_that_stay():
    history = {"loss": [3.0, 1.0, 2.0]}
    stopping = SimpleNamespace(best_weights=[1], best_epoch=1)
    assert final_metrics(history, [0, 1, 2], stopping) == {"loss": 1.0}
    assert final_metrics(history, [0, 1, 2], None) == {"loss": 2.0}
    assert final_metrics({}, [], None) == {}
