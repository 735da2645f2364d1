"""Callbacks on several ranks: what they decide, write and say once, and what happens where rank 0 cannot write."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, mpirun

SCRIPT = str(ROOT / "tests/mpi/scripts/callbacks.py")


def start(way: str, folder, ranks: int = 2, **environment: str) -> Finished:
    return mpirun(ranks, SCRIPT, way, str(folder), timeout=30, **environment)


def facts(folder) -> dict:
    return json.loads((folder / "out.json").read_text())


def test_one_rank_stops_all_after_the_same_step(tmp_path):
    done = start("stop on rank 1", tmp_path, 3)
    assert (done.code, done.err) == (0, "")
    assert facts(tmp_path)["steps"][-1] == [1, 2]
    assert facts(tmp_path)["epochs"] == [0, 1]


def test_one_rank_stops_an_evaluation_and_a_prediction(tmp_path):
    done = start("evaluation stopped on rank 1", tmp_path, 3)
    assert (done.code, done.err) == (0, "")
    assert facts(tmp_path)["steps"][-12:] == [[kind, step] for kind in (9, 9, 8, 8) for step in range(3)]


@pytest.mark.parametrize("way", ["kill epoch", "kill step"])
def test_a_killed_training_goes_on_with_the_same_bits(tmp_path, way):
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
    assert start(way, whole).code == 0
    killed = start(way, again, KILL="1")
    assert killed.code == 70
    assert "RuntimeError: killed" in killed.err
    (checkpoint,) = (again / "backup").glob("0*")
    assert checkpoint.name == ("000001-step-7" if way == "kill epoch" else "000002-step-8")
    done = start(way, again)
    assert (done.code, done.err) == (0, "")
    expected, found = facts(whole), facts(again)
    assert found["steps"][0] == ([1, 0] if way == "kill epoch" else [1, 1])
    assert found["weights"] == expected["weights"]
    assert found["history"] == expected["history"]
    assert not (again / "backup").exists()


def test_files_and_lines_come_once(tmp_path):
    done = start("csv", tmp_path, 3)
    assert (done.code, done.err) == (0, "")
    found = facts(tmp_path)
    assert found["epochs"] == [0, 1, 2]
    assert found["history"]["learning_rate"] == [0.01, 0.01, 0.005]
    assert found["rate"] == 0.0025
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["1.keras", "2.keras", "3.keras"]
    for line in ("Epoch 2/4 - 7 steps - ", "Epoch 2: finished saving model to ", "Epoch 3: early stopping"):
        assert done.out.count(line) == 1


def test_a_schedule_that_differs_is_rank_0s(tmp_path):
    done = start("schedule that differs", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert facts(tmp_path)["history"]["learning_rate"] == [0.01] * 4


@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        ("csv that cannot be written", 74, "No such file or directory; choose another `filename` of CSVLogger (rank 0"),
        ("backup that cannot be written", 74, "choose another `backup_dir` of BackupAndRestore (rank 0, host "),
        ("disk fails later", 74, "No space left on device (needs "),
        (
            "only rank 0 has one",
            2,
            "the ranks have different callbacks: callbacks: rank 0 has [['CSVLogger']], rank 1 ",
        ),
        (
            "ranks save at other steps",
            2,
            "the ranks have different callbacks: callbacks: rank 0 has [['BackupAndRestore'",
        ),
        ("nan", 76, "NaN or Inf loss encountered at batch "),
        ("monitor nobody knows", 2, "EarlyStopping callback received monitor=learning_rate"),
        ("rate of a schedule set", 2, "created with a `LearningRateSchedule` object"),
        ("rate of a schedule lowered", 2, "created with a `LearningRateSchedule` object"),
    ],
)
def test_a_failure_ends_all_ranks_with_one_message(tmp_path, way, code, message):
    done = start(way, tmp_path, 3)
    assert done.code == code, done.err
    assert message in done.err
    assert done.err.count("dptrain.errors.AgreedError: ") == 1, "rank 0 speaks for all"


def test_a_live_line_on_rank_0_alone(tmp_path):
    done = start("live line on rank 0", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("Epoch 2/4 - 7 steps - ") == 1


def test_batches_of_a_validation_that_one_rank_watches_are_those_of_all(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder, way in ((alone, "plain"), (together, "evaluation watched on rank 1")):
        folder.mkdir()
        done = start(way, folder)
        assert (done.code, done.err) == (0, "")
    assert facts(together)["history"]["val_loss"] == pytest.approx(facts(alone)["history"]["val_loss"], rel=1e-5)
