"""`--tensorboard`, `--mlflow`, `--wandb`: what they get, and that a training survives them."""

import json
import sys

import pytest

from dptrain.callbacks import Callback
from dptrain.cli.main import main
from dptrain.cli.options import loggers
from tests.launching import dptrain


@pytest.fixture
def train(small_npz, tmp_path, capfd):
    def train(*arguments):
        fixed = ("--data", str(small_npz), "--batch-size", "256", "--hidden", "4", "--epochs", "2", "--verbose", "0")
        code = main([*fixed, *arguments, "--out", str(tmp_path / "run")])
        return code, capfd.readouterr().err

    return train


def test_tensorboard_writes_into_the_run(train, tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra 'tensorboard'")
    assert train("--tensorboard") == (0, "")
    places = [tmp_path / "run" / "tensorboard" / part for part in ("train", "validation")]
    assert all(b"epoch_loss" in next(place.iterdir()).read_bytes() for place in places)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 2


def test_mlflow_gets_the_configuration(train, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    uri = (tmp_path / "mlruns").as_uri()
    assert train("--mlflow", uri, "--schedule", "cosine") == (0, "")
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("dptrain").experiment_id])
    assert run.info.run_name == "run"
    assert (run.data.params["optimizer.schedule"], run.data.params["model.hidden"]) == ("cosine", "(4,)")
    assert run.data.metrics["val_loss"] > 0


class Failing(Callback):
    """Fails in one of its hooks, and counts its epochs."""

    def __init__(self, hook):
        super().__init__()
        self.hook, self.epochs = hook, 0

    def _try(self, hook):
        if hook == self.hook:
            raise ConnectionError("the server\nis away")

    def on_train_begin(self, logs=None):
        self._try("on_train_begin")

    def on_epoch_end(self, epoch, logs=None):
        self._try("on_epoch_end")
        self.epochs += 1

    def on_train_end(self, logs=None):
        self._try("on_train_end")

    def _release(self):
        self._try("release")


@pytest.mark.parametrize(
    ("hook", "epochs"), [("on_train_begin", 0), ("on_epoch_end", 0), ("on_train_end", 2), ("release", 2)]
)
def test_a_logger_that_fails_is_named_once_and_the_training_ends_well(train, tmp_path, monkeypatch, hook, epochs):
    failing = Failing(hook)
    monkeypatch.setattr(loggers, "TensorBoard", lambda place: failing)
    code, err = train("--tensorboard")
    assert code == 0
    assert err.count("\n") == 1
    message = "dptrain: warning: TensorBoard is disabled, and training continues: ConnectionError: the server "
    assert err.startswith(message)
    assert failing.epochs == epochs
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_folder_of_several_runs(train, tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra 'tensorboard'")
    assert train("--tensorboard", str(tmp_path / "tb"))[0] == 0
    assert {path.name for path in (tmp_path / "tb" / "run").iterdir()} == {"train", "validation"}


def test_a_logger_takes_up_its_own_state_alone():
    class Remembers(Failing):
        def load_state_dict(self, state):
            self.state = state

    first, other = (loggers.BestEffort(name, Remembers("")) for name in ("MLflow", "TensorBoard"))
    first.inner.state_dict = lambda: {"run_id": "a"}
    for callback in (first, other):
        callback.load_state_dict(first.state_dict())
    assert first.inner.state == {"run_id": "a"}
    assert not hasattr(other.inner, "state")


@pytest.mark.long
def test_wandb_itself_without_a_network(small_npz, tmp_path):
    pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    arguments = ("--data", str(small_npz), "--epochs", "1", "--wandb", "digits", "--out", str(tmp_path / "run"))
    process = dptrain(0, *arguments, "--verbose", "0", WANDB_MODE="offline", PYTHONWARNINGS="default")
    assert (process.code, process.out, process.err) == (0, "", "")
    [offline] = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = offline.read_bytes()
    assert all(word in content for word in (b"epoch/val_loss", b"digits", b"optimizer.name"))


@pytest.mark.parametrize(("option", "name"), [("--mlflow", "mlflow"), ("--wandb", "wandb")])
def test_what_is_not_installed_is_said_before_anything_is_trained(train, tmp_path, monkeypatch, option, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, err = train(option)
    assert code == 2
    assert f"pip install '{name}" in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_sweep_refuses_loggers(capfd):
    assert main(["sweep", "--mlflow"]) == 2
    assert "--mlflow: not supported in a sweep" in capfd.readouterr().err
