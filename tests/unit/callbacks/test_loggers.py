"""MlflowCallback with MLflow itself, and WandbMetricsLogger with a module like wandb."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain.callbacks import MlflowCallback, WandbMetricsLogger
from dptrain.errors import ConfigError

X, Y = np.arange(8.0, dtype=np.float32).reshape(8, 1), np.arange(8.0, dtype=np.float32)


def fit(callback, epochs=2, **options):
    model = dp.Sequential([dp.layers.Input((1,)), dp.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(dp.optimizers.SGD(0.0078125), "mse")
    return model.fit(X, Y, epochs=epochs, batch_size=8, callbacks=[callback], verbose=0, **options).history


class FakeRun:
    """A run of W&B's as `wandb.init` returns it."""

    def __init__(self, **init):
        self.init, self.id, self.lines, self.ended = init, init.get("id") or "new", [], None

    def define_metric(self, name, step_metric=None):
        self.step_metric = step_metric

    def log(self, values):
        self.lines.append(values)

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = SimpleNamespace(run=None, runs=[])
    module.init = lambda **init: module.runs.append(FakeRun(**init)) or module.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_every_epoch_under_its_own_names(wandb):
    losses = fit(WandbMetricsLogger(init={"project": "p"}))["loss"]
    [run] = wandb.runs
    assert (run.init, run.step_metric, run.ended) == ({"project": "p"}, "epoch/epoch", 0)
    rate = {"epoch/learning_rate": 0.0078125}
    assert run.lines == [{"epoch/epoch": n, "epoch/loss": loss, **rate} for n, loss in enumerate(losses)]


def test_wandb_uses_the_scripts_run_and_leaves_its_end_to_the_script(wandb):
    wandb.run = FakeRun()
    fit(WandbMetricsLogger(initial_global_step=5))
    assert ([line["epoch/epoch"] for line in wandb.run.lines], wandb.run.ended) == ([5, 6], None)
    wandb.run = None
    with pytest.raises(ConfigError, match=r"call `wandb\.init\(\)` before"):
        fit(WandbMetricsLogger())


def test_wandb_goes_on_in_its_run_and_is_told_of_an_error(wandb, tmp_path):
    class Stops(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise ZeroDivisionError

    backup = dp.callbacks.BackupAndRestore(tmp_path / "b")
    with pytest.raises(ZeroDivisionError):
        fit([WandbMetricsLogger(init={}), backup, Stops()], 3)
    assert wandb.runs[0].ended == 1
    wandb.runs[0].id = "first"
    fit([WandbMetricsLogger(init={}), backup], 3)
    assert wandb.runs[1].init == {"id": "new", "resume": "allow"}
    assert [line["epoch/epoch"] for line in wandb.runs[1].lines] == [1, 2]


@pytest.mark.parametrize(
    ("callback", "name"), [(MlflowCallback, "mlflow"), (lambda: WandbMetricsLogger(init={}), "wandb")]
)
def test_without_the_package_a_line_says_what_to_install(monkeypatch, callback, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install '?{name}"):
        fit(callback())


def test_mlflow_keeps_settings_and_metrics(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = (tmp_path / "mlruns").as_uri()
    settings = {"units": 3, **{f"k{n}": n for n in range(150)}}  # more than MLflow takes at once
    callback = MlflowCallback(uri, "first", "a run", settings)
    losses = fit(callback)["loss"]
    client = mlflow.MlflowClient(uri)
    run = client.get_run(callback.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")
    assert run.data.params == {key: str(value) for key, value in settings.items()}
    records = client.get_metric_history(callback.run_id, "loss")
    assert [(record.step, record.value) for record in records] == list(enumerate(losses))
    assert run.data.metrics["learning_rate"] == 0.0078125

    resumed = MlflowCallback(uri, "first", params={"units": 4})
    resumed.load_state_dict(callback.state_dict())
    fit(resumed, 4, initial_epoch=2)
    assert [record.step for record in client.get_metric_history(callback.run_id, "loss")] == [0, 1, 2, 3]
    assert client.get_run(callback.run_id).info.status == "FINISHED"
