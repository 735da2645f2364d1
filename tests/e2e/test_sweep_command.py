"""`python -m dptrain sweep` as users type it."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import dptrain, find_mpirun, in_turn, on_terminal, shown
from tests.sample import sample

QUICK = ("--epochs", "1", "--hidden", "4", "--batch-size", "256")


def sweep(small_npz, *arguments, ranks=0, **options):
    return dptrain(ranks, "sweep", "--data", str(small_npz), *QUICK, *arguments, **options)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path / "trials.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_and_one_of_its_runs_alone(small_npz, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    out = tmp_path / "s"
    done = sweep(
        small_npz,
        *("--seeds", "3,5", "--grid", "learning_rate=1e-2,1e-3", "--grid", "optimizer=adam,sgd", "--dropout", "0.1"),
        *("--out", str(out), "--runs-per-device", "3"),
        PYTHONPATH=str(ROOT / "tests" / "without_gpu"),
    )
    assert (done.code, done.err) == (0, "")
    assert "4 trials x 2 seeds = 8 runs of 1 epoch; compared by val_accuracy" in done.out
    assert re.search(r"\d/8: trial 3 \(learning_rate=0\.001, optimizer=sgd\) seed 5: val_accuracy", done.out)
    assert "8/8: trial " in done.out  # three at a time: any of the last may be it
    assert f"Results in {out}: report.html, trials.csv, results.jsonl" in done.out
    table = rows(out)
    assert [(row["trial"], row["learning_rate"], row["optimizer"], row["n"]) for row in table] == [
        ("0", "0.01", "adam", "2"),
        ("1", "0.01", "sgd", "2"),
        ("2", "0.001", "adam", "2"),
        ("3", "0.001", "sgd", "2"),
    ]
    report = (out / "report.html").read_text(encoding="utf-8")
    HTMLParser().feed(report)
    assert report.count("<figure>") == 4  # the ranking, epochs, parallel coordinates, the metric against each field
    assert f"<title>Sweep {out.name}</title>" in report
    assert "0.01 and 0.001" in report
    caveat = "Trials were chosen by val_accuracy on the test part of the data set"
    assert caveat in done.out
    assert caveat in report
    # The report's command is that of the best run, as it is.
    alone = tmp_path / "alone"
    threads, python, *command = shlex.split(re.search("<pre>(.*)</pre>", report)[1])
    assert (threads.partition("=")[0], python, command[:2]) == ("OPENBLAS_NUM_THREADS", "python", ["-m", "dptrain"])
    again = dptrain(0, *command[2:], "--out", str(alone), "--verbose", "0")
    assert (again.code, again.err) == (0, "")
    [expected] = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: line["val_accuracy"])
    assert {key: expected[key] for key in ("loss", "accuracy", "val_loss", "val_accuracy")} == {
        key: best[key] for key in ("loss", "accuracy", "val_loss", "val_accuracy")
    }


def test_a_plan_file_and_what_overrides_it(small_npz, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seeds: 0-1\ngrid:\n  hidden: [4, [8, 4]]\nrandom:\n  learning_rate: log:1e-4..1e-2\nsamples: 2\n"
        "metric: [val_loss, parameters]\n"
    )
    out = tmp_path / "s"
    done = sweep(small_npz, "--plan", str(plan), "--seeds", "7", "--out", str(out), "--verbose", "2")
    assert (done.code, done.err) == (0, "")
    assert "4 trials x 1 seed = 4 runs of 1 epoch; compared by val_loss" in done.out
    table = rows(out)
    assert [row["hidden"] for row in table] == ["4", "[8, 4]"] * 2
    assert len({row["learning_rate"] for row in table}) == 2
    best = min(table, key=lambda row: float(row["mean"]))
    assert f"1. trial {best['trial']} " in done.out
    # 784-4-10 has fewer weights than 784-8-4-10, so the better of its two is on the front.
    assert [float(row["mean_parameters"]) for row in table] == [3190, 6366] * 2
    small = min(table[::2], key=lambda row: float(row["mean"]))
    assert small["pareto"] == best["pareto"] == "true"
    front = re.search(r"^Pareto front of val_loss \(less is better\) and parameters \(less .*$", done.out, re.MULTILINE)
    assert f"trial {small['trial']} (val_loss " in front[0]
    report = (out / "report.html").read_text(encoding="utf-8")
    assert front[0].split(". ")[0] in report


def test_the_dry_run_trains_nothing(small_npz, tmp_path):
    done = sweep(small_npz, "--grid", "hidden=4,8", "--dry-run", "--halving", "2", "--epochs", "4", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "2 trials x 5 seeds = 10 runs of 4 epochs" in done.out
    assert "one trial in 2 continues after 1 and 2 epochs, by the mean over its seeds" in done.out
    assert re.search(r"^rank 0: \d+ runs? at a time, ", done.out, re.MULTILINE)
    assert "  trial 1: hidden=8" in done.out
    assert re.search(r"^timing some steps of a run, 2 of 2: hidden=8\nabout ", done.out, re.MULTILINE)
    assert " in all on 1 rank, without evaluation: " in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_terminal_gets_a_live_table_and_breaks_no_line(small_npz, tmp_path):
    columns = 60
    command = [find_mpirun(), "-n", "1", sys.executable, "-m", "dptrain", "sweep", "--data", str(small_npz)]
    options = ["--seeds", "0,1", "--grid", "learning_rate=1e-3,3e-3", "--grid", "hidden=8", "--grid", "dropout=0,0.2"]
    done = on_terminal([*command, *options, "--epochs", "1"], columns=columns, cwd=tmp_path)
    assert done.code == 0, done.out
    assert "\x1b[?25l" in done.out, "a live table hides the cursor"
    assert "8/8 runs done" in done.out
    assert max(map(len, shown(done.out))) <= columns


def test_a_fast_dev_run_leaves_nothing_behind(small_npz, tmp_path):
    done = sweep(small_npz, "--grid", "hidden=4,8,16", "--grid", "dropout=0,0.1", "--fast-dev-run", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "2 trials x 2 seeds = 4 runs of 1 epoch" in done.out
    assert "everything works" in done.out
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_and_the_defaults(small_npz, tmp_path):
    done = sweep(small_npz, "--verbose", "0", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "", "")
    [folder] = (tmp_path / "sweeps").iterdir()
    assert [row["n"] for row in rows(folder)] == ["5"]


def test_a_run_that_diverges_gives_the_exit_code(small_npz, tmp_path):
    done = sweep(
        small_npz,
        "--seeds",
        "0",
        "--optimizer",
        "sgd",
        "--grid",
        "learning_rate=1e-2,1e38",
        "--activation",
        "linear",
        "--epochs",
        "3",
        "--out",
        str(tmp_path / "s"),
    )
    assert (done.code, done.err) == (76, "")
    assert "diverged after 0 epochs" in done.out
    table = rows(tmp_path / "s")
    assert [(row["n"], row["failed"]) for row in table] == [("1", "0"), ("0", "1")]
    assert "NaN" not in (tmp_path / "s" / "results.jsonl").read_text()


@pytest.mark.long
def test_killed_and_started_again(small_npz, tmp_path):
    """kill -9 in the middle, several times: every epoch of every run is there once, with the bits of a whole sweep."""
    arguments = ("--seeds", "0-3", "--grid", "hidden=4,8", "--epochs", "4", "--dropout", "0.2", "--batch-size", "32")
    whole, out = tmp_path / "whole", tmp_path / "s"
    assert sweep(small_npz, *arguments, "--out", str(whole), "--verbose", "0").code == 0
    command = [sys.executable, "-m", "dptrain", "sweep", "--data", str(small_npz), *QUICK, *arguments]
    for kill in range(2):
        process = subprocess.Popen(
            [*command, "--out", str(out), "--runs-per-device", "2"], stdout=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 60
        lines_wanted = 7 + 10 * kill
        results = out / "results.jsonl"
        while not results.exists() or results.read_bytes().count(b"\n") < lines_wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(results, "ab") as file:
        file.write(b'{"trial": 0, "run": 1, "se')  # torn
    done = sweep(small_npz, *arguments, "--out", str(out))
    assert (done.code, done.err) == (0, "")
    assert f"{out}: resuming; " in done.out
    assert sorted(results.read_text().splitlines()) == sorted((whole / "results.jsonl").read_text().splitlines())
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows(out)] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows(whole)
    ]


def test_other_data_under_the_same_name_are_another_sweep(tmp_path):
    import numpy as np

    from dptrain.data.strokes import generate

    def write(test_rows):
        arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), generate(100, test_rows), strict=True))
        np.savez(tmp_path / "mine.npz", **arrays)

    write(30)
    arguments = ("--seeds", "0", "--out", str(tmp_path / "s"), "--verbose", "0")
    assert sweep(tmp_path / "mine.npz", *arguments).code == 0
    write(31)
    done = sweep(tmp_path / "mine.npz", *arguments)
    assert done.code == 2
    [line] = done.messages
    assert "holds another sweep: data[1][0][0]: 30 there, 31 here" in line


@pytest.mark.long
def test_settings_that_all_diverge_at_once_are_recorded(small_npz, tmp_path):
    out = tmp_path / "s"
    values = ("--seeds", "0", "--optimizer", "sgd", "--activation", "linear", "--grid", "learning_rate=1e37,1e38")
    done = sweep(small_npz, *values, "--out", str(out), "--batch-size", "32")
    assert (done.code, done.err) == (76, "")
    assert [row["failed"] for row in rows(out)] == ["1", "1"]


WRONG = [
    (
        ("--grid", "dropout=0..0.5"),
        "a grid takes values, such as 0.1,0.2; --random 20 dropout=0..0.5 draws from a range",
    ),
    (("--grid", "lr=1,2"), "unknown field 'lr'; did you mean 'learning_rate'?"),
    (("--grid", "learing_rate=1,2"), "unknown field 'learing_rate'; did you mean 'learning_rate'?"),
    (("--grid", "learning_rate=0,1"), "optimizer.learning_rate = 0, set in the sweep: "),
    (("--grid", "seed=1,2"), "field 'seed' cannot be swept: use --seeds"),
    (("--grid", "data=mnist,strokes"), "field 'data' cannot be swept: a sweep has one data set"),
    (("--grid", "hidden"), "grid: 'hidden' has no '='; expected name=values"),
    (("--grid", "hidden=4", "--grid", "model.hidden=8"), "two of them name the same field"),
    (("--seeds", "5-1"), "5-1"),
    (("--random", "learning_rate=log:1e-5..1e-1"), "give the number of settings to draw"),
    (("--random", "9" * 5000, "dropout=0..0.5"), "samples = '9999"),
    (("--random", "3", "4", "learning_rate=1..2"), "expected one number and FIELD=FROM"),
    (("--adaptive", "3", "--grid", "hidden=4,8"), "expected a range to draw from for every field"),
    (("--adaptive", "3"), "--adaptive: name the fields to choose, such as --random dropout=0..0.5"),
    (("--adaptive", "x", "--random", "dropout=0..0.5"), "adaptive = 'x', set on the command line: "),
    (("--metric", "val_acuracy"), "metric = 'val_acuracy': expected one of loss, accuracy"),
    (("--halving", "1"), "halving = '1', set on the command line: "),
    (("--halving", "2", "--metric", "loss", "--metric", "parameters"), "halving: compares trials by one metric"),
    (("--halving", "2", "--grid", "epochs=1,2"), "not supported when epochs are swept"),
    (("--sharding", "static"), "where every run has all samples"),
    (("--folds", "1"), "folds = '1', set on the command line: "),
    (("--folds", "2000"), "2000 folds for 1003 samples"),
    (("--folds", "3", "--validation-split", "0.1"), "each selects the validation samples; leave one out"),
    (("--fold", "1/3"), "use --folds K, which trains every trial and seed on each of K folds"),
    (("--validation-split", "0.0001"), "holds out 0 of 1003 samples"),
    (("--grid", "validation_split=0.1,0.2"), "all runs are compared on the same samples"),
    (("--keep", "some"), "keep = 'some', set on the command line: must be 'best', 'all' or 'none'"),
    (("--max-time", "3"), "max_time = '3', set on the command line: expected a number with a unit, such as 90s"),
    (("--runs-per-device", "0"), "runs_per_device = '0', set on the command line: "),
    (("--plan", "nowhere.yaml"), "--plan nowhere.yaml: No such file or directory"),
]


@pytest.fixture(scope="module")
def wrong_alone(small_npz, once):
    """How one process takes wrong words, by what it is to say, and its working directory; all of them in turn."""
    command = ["-m", "dptrain", "sweep", "--data", str(small_npz), *QUICK]
    cases = {message: [*command, *arguments] for arguments, message in WRONG}

    def launch(folder):
        (folder / "here").mkdir()
        return in_turn(0, cases, folder / "in turn", cwd=folder / "here"), folder / "here"

    return once("wrong sweeps", launch)


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_words(wrong_alone, arguments, message):
    finished, cwd = wrong_alone
    refused(finished[message], message, cwd)


# Of each place that refuses one: the command line, a field, the metric that is compared, the data, a file.
@pytest.mark.parametrize(
    "start",
    sample(
        ["unknown field 'lr'", "optimizer.learning_rate", "metric = ", "2000 folds", "halving: ", "--plan nowhere"], 3
    ),
)
def test_wrong_words_on_two_ranks(small_npz, tmp_path, start):
    ((arguments, message),) = [case for case in WRONG if case[1].startswith(start)]
    refused(sweep(small_npz, *arguments, ranks=2, cwd=tmp_path), message, tmp_path)


def refused(done, message, cwd):
    """One line on standard error says it, and nothing is left behind."""
    assert done.code == 2
    assert [line for line in done.out.splitlines() if not line.startswith(("dptrain ", "measuring "))] == []
    [line] = done.messages
    assert message in line
    assert done.err.splitlines() == [line]
    assert list(cwd.iterdir()) == []


def test_help_names_the_options_of_a_sweep():
    done = dptrain(0, "sweep", "--help")
    assert done.code == 0
    for option in (
        "--seeds",
        "--grid FIELD=VALUES",
        "--random",
        "--adaptive N",
        "--halving ETA",
        "--dry-run",
        "--plan",
    ):
        assert option in done.out
    assert "--seeds" not in dptrain(0, "--help").out.split("data:")[1]


@pytest.mark.parametrize("held_out", sample([("--validation-split", "0.2"), ("--folds", "3")], 2, first=1, single=True))
def test_what_is_held_out_chooses_and_the_test_part_is_seen_once(small_npz, tmp_path, held_out):
    out = tmp_path / "s"
    arguments = ("--seeds", "0,1", "--grid", "learning_rate=1e-2,1e-4", "--out", str(out), *held_out)
    done = sweep(small_npz, *arguments)
    assert (done.code, done.err) == (0, "")
    assert " for validation + 201 samples" in done.out
    assert "Trials were chosen by" not in done.out
    said = re.search(
        r"On the test set, which was not used to choose anything, the accuracy of trial 0 is (\S+) \(95 %", done.out
    )
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    tested = [event["metrics"]["accuracy"] for event in journal if event["kind"] == "test"]
    assert float(said[1]) == pytest.approx(sum(tested) / len(tested), rel=1e-4)
    # The report's command trains the best run to the same values, on the test part too.
    report = (out / "report.html").read_text(encoding="utf-8")
    _, _, *command = shlex.split(re.search("<pre>(.*)</pre>", report)[1])
    again = dptrain(0, *command[2:], "--out", str(tmp_path / "alone"), "--verbose", "0")
    assert (again.code, again.err) == (0, "")
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: line["val_accuracy"])
    assert summary["metrics"] == {key: best[key] for key in summary["metrics"]}
    assert summary["test"]["accuracy"] in tested


@pytest.mark.long
def test_a_sweep_stops_by_its_time_and_by_ctrl_c_and_goes_on(small_npz, tmp_path):
    out = tmp_path / "s"
    arguments = ("--seeds", "0-5", "--grid", "hidden=4,8", "--epochs", "30", "--out", str(out))
    stopped = sweep(small_npz, *arguments, "--max-time", "0s")
    assert (stopped.code, stopped.err) == (75, "")
    assert f"stopped (the time limit is reached): start again with --out {out} to continue" in stopped.out
    assert rows(out) == []
    command = [sys.executable, "-m", "dptrain", "sweep", "--data", str(small_npz), *QUICK, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while (out / "journal.jsonl").read_text().count('"done"') < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "No pictures: a signal has stopped the sweep" in (out / "report.html").read_text(encoding="utf-8")
    assert "The sweep is incomplete (interrupted)" in said
    assert "The sweep is incomplete (interrupted)" in (out / "report.html").read_text(encoding="utf-8")
    assert 2 <= sum(int(row["n"]) for row in rows(out)) < 12
    done = sweep(small_npz, *arguments)
    assert (done.code, done.err) == (0, "")
    assert [row["n"] for row in rows(out)] == ["6", "6"]
