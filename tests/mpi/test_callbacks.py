"""Callbacks on several ranks: what they decide, write and say once, and what happens where rank 0 cannot write."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun
from tests.sample import sample, taken

SCRIPT = str(ROOT / "tests/mpi/scripts/callbacks.py")


def start(way: str, folder, **environment: str) -> Finished:
    return mpirun(2, SCRIPT, way, str(folder), timeout=90, **environment)


def facts(folder) -> dict:
    return json.loads((folder / "out.json").read_text())


FAILURES = [
    ("csv that cannot be written", 74, "No such file or directory; choose another `filename` of CSVLogger (rank 0"),
    ("backup that cannot be written", 74, "choose another `backup_dir` of BackupAndRestore (rank 0, host "),
    *(
        (
            f"{expected} {name} and a log of its own",
            2,
            f"the ranks have different logs: {name}(monitor='own'): rank 0 has ",
        )
        for expected, name in [
            ("number", "EarlyStopping"),
            ("number", "ReduceLROnPlateau"),
            ("number", "ModelCheckpoint"),
            ("NaN", "EarlyStopping"),
            ("no log", "ModelCheckpoint"),
        ]
    ),
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
]

KILLS = ["kill epoch", "kill step"]


def started(ranks: int, ways: list[str], folder: Path) -> tuple[dict[str, Finished], Path]:
    """Start what goes on in a process where others have ended; return the outcomes, and where their folders are."""
    for way in ways:
        (folder / way).mkdir()
    return in_turn(ranks, {way: [SCRIPT, way, str(folder / way)] for way in ways}, folder / "in turn"), folder


@pytest.fixture(scope="module")
def on_two(once):
    ways = ["schedule that differs", "live line on rank 0", "plain", "evaluation watched on rank 1"]
    ways += taken(KILLS, 2, first=1)  # without being killed
    return once("callbacks on two", lambda folder: started(2, ways, folder))


@pytest.fixture(scope="module")
def on_three(once):
    ways = ["stop on rank 1", "evaluation stopped on rank 1", "csv", *(way for way, *_ in FAILURES)]
    return once("callbacks on three", lambda folder: started(3, ways, folder))


def test_one_rank_stops_all_after_the_same_step(on_three):
    done, folder = on_three[0]["stop on rank 1"], on_three[1] / "stop on rank 1"
    assert (done.code, done.err) == (0, "")
    assert facts(folder)["steps"][-1] == [1, 2]
    assert facts(folder)["epochs"] == [0, 1]


def test_one_rank_stops_an_evaluation_and_a_prediction(on_three):
    done, folder = on_three[0]["evaluation stopped on rank 1"], on_three[1] / "evaluation stopped on rank 1"
    assert (done.code, done.err) == (0, "")
    assert facts(folder)["steps"][-12:] == [[kind, step] for kind in (9, 9, 8, 8) for step in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("way", sample(KILLS, 2, first=1))
def test_a_killed_training_goes_on_with_the_same_bits(on_two, tmp_path, way):
    whole, again = on_two[1] / way, tmp_path
    assert on_two[0][way].code == 0
    killed = start(way, again, KILL="1")
    assert killed.code == 70
    assert "RuntimeError: killed" in killed.err
    (checkpoint,) = (again / "backup").glob("0*")
    assert checkpoint.name == ("000001-step-7" if way == "kill epoch" else "000002-step-8")
    done = start(way, again)
    assert (done.code, done.err) == (0, "")
    expected, resumed = facts(whole), facts(again)
    assert resumed["steps"][0] == ([1, 0] if way == "kill epoch" else [1, 1])
    assert resumed["weights"] == expected["weights"]
    assert resumed["history"] == expected["history"]
    assert not (again / "backup").exists()


def test_files_and_lines_come_once(on_three):
    done, folder = on_three[0]["csv"], on_three[1] / "csv"
    assert (done.code, done.err) == (0, "")
    resumed = facts(folder)
    assert resumed["epochs"] == [0, 1, 2]
    assert resumed["history"]["learning_rate"] == [0.01, 0.01, 0.005]
    assert resumed["rate"] == 0.0025
    assert len((folder / "log.csv").read_text().splitlines()) == 4
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["1.keras", "2.keras", "3.keras"]
    for line in ("Epoch 2/4 - 7 steps - ", "Epoch 2: finished saving model to ", "Epoch 3: early stopping"):
        assert done.out.count(line) == 1


def test_a_schedule_that_differs_is_rank_0s(on_two):
    done, folder = on_two[0]["schedule that differs"], on_two[1] / "schedule that differs"
    assert (done.code, done.err) == (0, "")
    assert facts(folder)["history"]["learning_rate"] == [0.01] * 4


@pytest.mark.parametrize(("way", "code", "message"), FAILURES)
def test_a_failure_ends_all_ranks_with_one_message(on_three, way, code, message):
    done = on_three[0][way]
    assert done.code == code, done.err
    assert message in done.err
    assert done.err.count("dptrain.errors.AgreedError: ") == 1, "rank 0 speaks for all"


def test_a_live_line_on_rank_0_alone(on_two):
    done = on_two[0]["live line on rank 0"]
    assert (done.code, done.err) == (0, "")
    assert done.out.count("Epoch 2/4 - 7 steps - ") == 1


def test_batches_of_a_validation_that_one_rank_watches_are_those_of_all(on_two):
    done, folder = on_two
    ways = ("plain", "evaluation watched on rank 1")
    for way in ways:
        assert (done[way].code, done[way].err) == (0, "")
    alone, together = (facts(folder / way)["history"]["val_loss"] for way in ways)
    assert together == pytest.approx(alone, rel=1e-5)
