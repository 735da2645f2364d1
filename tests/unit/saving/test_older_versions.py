"""Runs, checkpoints and models of an older version are read: tests/older has those of each, as it wrote them."""

import json
import shutil

import pytest

import dptrain as dp
from dptrain.cli.main import main
from tests.conftest import ROOT

OLDER = ROOT / "tests" / "older"


@pytest.fixture(params=sorted(path.name for path in OLDER.iterdir() if path.is_dir()))
def folder(request, tmp_path, monkeypatch):
    """A copy of a version's files, in which the commands run."""
    shutil.copytree(OLDER / request.param, tmp_path / "older")
    monkeypatch.chdir(tmp_path / "older")
    return tmp_path / "older"


def said(capfd, *arguments):
    assert main([*arguments]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


def numbers(text):
    return [float(line.split(",")[1]) for line in text.splitlines()[1:]]


def test_a_model_predicts_what_it_did(folder, capfd):
    expected = numbers((folder / "predictions.csv").read_text())
    assert numbers(said(capfd, "predict", "run", "--data", "table.csv")) == pytest.approx(expected, rel=1e-5)
    model = dp.models.load_model(folder / "run", device="cpu")
    assert (model.preprocessing.na, model.preprocessing.default_na) == ((), True)


def test_a_run_is_evaluated_and_listed(folder, capfd):
    metrics = json.loads((folder / "run" / "summary.json").read_text())["metrics"]
    evaluated = json.loads(said(capfd, "evaluate", "run", "--json"))["metrics"]
    assert evaluated["mae"] == pytest.approx(metrics["val_mae"], rel=1e-5)
    (run,) = json.loads(said(capfd, "runs", ".", "--json"))["runs"]
    assert (run["name"], run["epochs"], run["state"]) == ("run", 2, "finished")


def test_a_training_goes_on(folder, capfd):
    config = ("--config", "run/config.yaml", "--epochs", "3", "--resume", "run", "--out", "more")
    said(capfd, *config, "--verbose", "0", "--report", "off")
    epochs = [json.loads(line) for line in (folder / "more" / "metrics.jsonl").read_text().splitlines()]
    assert epochs[-1]["epoch"] == 3
