"""A researcher's model file, with early stopping and a schedule, as they would type it."""

import csv
import json
import re
import shlex

import numpy as np
import pytest

from dptrain.models import load_model
from tests.launching import dptrain, mpirun
from tests.sample import sample

MODELS = """\
import os

import dptrain as dp

if os.environ.get("FAILS_ON") == os.environ.get("PMI_RANK", "0"):
    raise RuntimeError("no such\\ndisk")


def build_model(input_shape, num_classes, units: int = 16, rate: float = 0.0):
    inputs = dp.layers.Input(input_shape)
    x = dp.layers.Flatten()(dp.layers.Rescaling(1 / 255)(inputs))
    x = dp.layers.Dropout(rate)(dp.layers.LayerNormalization()(dp.layers.Dense(units, "relu")(x)))
    return dp.Model(inputs, dp.layers.Dense(num_classes, "softmax")(x))
"""


@pytest.fixture
def train(small_npz, tmp_path):
    """Return what runs the command line on the data, in a folder with the model file."""
    (tmp_path / "models.py").write_text(MODELS)

    def run(ranks, *arguments, **environment):
        fixed = ("--data", str(small_npz), "--model", "models.py:build_model", "--batch-size", "128")
        first, options = ((arguments[0],), arguments[1:]) if arguments[0] == "sweep" else ((), arguments)
        return dptrain(ranks, *first, *fixed, *options, cwd=tmp_path, **environment)

    return run


STOPS = ("--early-stopping", "1", "--schedule", "cosine:warmup=10%,alpha=0.5", "--learning-rate", "0.02")


@pytest.mark.long
def test_a_sweep_of_its_arguments_and_its_best_run_alone(train, tmp_path):
    swept = ("--grid", "units=4,12", "--model-arg", "rate=0.25", "--seeds", "0-1", "--epochs", "12", *STOPS)
    done = train(2, "sweep", *swept, "--validation-split", "0.2", "--metric", "val_loss", "--out", "s")
    assert (done.code, done.err) == (0, "")
    assert "2 trials x 2 seeds = 4 runs of 12 epochs" in done.out
    lines = [json.loads(line) for line in (tmp_path / "s" / "results.jsonl").read_text().splitlines()]
    losses = {}
    for line in lines:
        losses.setdefault((line["trial"], line["seed"]), []).append(line["val_loss"])
    assert len(losses) == 4
    assert min(map(len, losses.values())) < 12, "some stopped early"
    with open(tmp_path / "s" / "trials.csv", encoding="utf-8", newline="") as file:
        for trial, row in enumerate(csv.DictReader(file)):
            restored = [min(losses[trial, seed]) for seed in (0, 1)]
            assert float(row["mean"]) == pytest.approx(sum(restored) / 2), "the epochs whose weights were restored"
    _, _, *command = shlex.split(re.search("<pre>(.*)</pre>", (tmp_path / "s" / "report.html").read_text())[1])
    again = dptrain(0, *command[2:], "--out", "alone", "--verbose", "0", cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text())
    epochs = [json.loads(line)["val_loss"] for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert epochs in losses.values()
    assert summary["metrics"]["val_loss"] == summary["best"]["value"] == min(epochs)

    grown = train(
        2, "sweep", *swept, "--validation-split", "0.2", "--metric", "val_loss", "--out", "s", "--epochs", "20"
    )
    assert grown.code == 2
    assert "config.train.epochs: 12 there, 20 here" in grown.err


@pytest.mark.long
def test_the_same_bits_on_other_ranks_and_after_a_resume(train, tmp_path):
    fixed = (*STOPS, "--model-arg", "units=8", "--reproducible", "--epochs", "12", "--verbose", "0")
    whole = train(0, *fixed, "--out", "whole")
    assert (whole.code, whole.err) == (0, "")
    ended = json.loads((tmp_path / "whole" / "summary.json").read_text())
    half = ("--resume", "whole/checkpoints/" + names(tmp_path / "whole")[0])
    again = train(2, *fixed, *half, "--out", "again")
    assert (again.code, again.err) == (0, "")
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert {key: summary[key] for key in ("best", "metrics", "epochs")} == {
        key: ended[key] for key in ("best", "metrics", "epochs")
    }
    for name in ("model.keras", "best.keras"):
        ours, theirs = (load_model(tmp_path / run / name).get_weights() for run in ("again", "whole"))
        assert all(map(np.array_equal, ours, theirs))


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("rank", sample(["0", "1"], 2, first=1))
def test_a_file_that_fails_on_one_rank_ends_them_all(train, rank):
    done = train(2, "--epochs", "1", FAILS_ON=rank)
    assert done.code == 2
    assert len(done.messages) == 1
    assert "--model models.py:build_model: models.py, line 6: RuntimeError: no such disk" in done.messages[0]


def test_ranks_with_different_files_do_not_train(train, tmp_path):
    (tmp_path / "models.py").write_text("")
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "m.py").write_text(f"{MODELS}# {rank}\n")
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\n"
        "os.chdir(os.environ['PMI_RANK'])\n"
        "from dptrain.cli.main import main\n"
        "sys.exit(main(['--model', 'm.py:build_model', '--epochs', '1']))\n"
    )
    done = mpirun(2, str(script), cwd=tmp_path)
    assert done.code == 2
    assert "the ranks have different model files" in done.messages[0]
