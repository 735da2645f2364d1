"""The command line as users type it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml

from tests.conftest import ROOT
from tests.launching import dptrain, find_mpirun, on_terminal, run
from tests.sample import sample


def weights(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "model.safetensors")


@pytest.mark.parametrize("ranks", sample([0, 2, 4], 3, first=1))
def test_train_leaves_a_run_directory(small_npz, tmp_path, ranks):
    arguments = ["--data", str(small_npz), "--epochs", "2", "--batch-size", "64", "--name", "my run"]
    done = dptrain(ranks, *arguments, cwd=tmp_path, fresh=ranks in (0, 2))
    assert (done.code, done.err) == (0, "")
    (path,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-my-run", path.name)
    assert f"Results in runs/{path.name}: " in done.out

    # on rank 0 only, and once: the table, a line about the training, one line an epoch
    lines = done.out.splitlines()
    on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
    assert re.fullmatch(rf"dptrain [0-9.]+{on_ranks}: loading {re.escape(str(small_npz))}", lines[0])
    assert sum("loading" in line for line in lines) == 1
    rows = [line for line in lines if "CPU, " in line]
    assert len(rows) == max(ranks, 1)
    if ranks:
        assert [row.split()[0] for row in rows] == [str(rank) for rank in range(ranks)]
        assert len({row.split()[2] for row in rows}) == ranks, "a PID a rank"
    else:
        assert re.fullmatch(r"on \S+, PID \d+: CPU, .*", rows[0])
    assert sum("1,003 + 201 samples; 28x28 -> 128 -> 10, 101,770 parameters" in line for line in lines) == 1
    assert [line.split(" - ")[0] for line in lines if line.startswith("Epoch ")] == ["Epoch 1/2", "Epoch 2/2"]

    epochs = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    keys = ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "seconds", "samples_per_second"]
    assert [list(epoch) for epoch in epochs] == [keys, keys]
    assert epochs[1]["loss"] < epochs[0]["loss"]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["metrics"] == {key: epochs[-1][key] for key in keys[1:5]}
    assert summary["world_size"] == max(ranks, 1)
    assert summary["parameters"] == 101770
    matrix = np.array(summary["classes"]["confusion"])
    assert matrix.shape == (10, 10)
    assert matrix.trace() / matrix.sum() == pytest.approx(summary["metrics"]["val_accuracy"])
    assert summary["classes"]["recall"] == pytest.approx(matrix.diagonal() / matrix.sum(1))
    assert set(summary["versions"]) == {"dptrain", "python", "numpy", "communicator"}
    assert {name: w.shape for name, w in weights(path).items()} == {
        "dense/kernel": (784, 128),
        "dense/bias": (128,),
        "dense_1/kernel": (128, 10),
        "dense_1/bias": (10,),
    }
    assert yaml.safe_load((path / "config.yaml").read_text())["train"]["batch_size"] == 64
    assert not (path / "curves.png").exists()


@pytest.mark.long
def test_curves_are_drawn_where_matplotlib_is_installed(small_npz, tmp_path):
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    arguments = ["--data", str(small_npz), "--epochs", "1", "--verbose", "0", "--out", str(tmp_path / "run")]
    done = dptrain(2, *arguments, PYTHONPATH=str(ROOT / "tests" / "without_gpu"))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", sample([0, 2], 1))
def test_a_profile_is_printed_and_in_the_run_directory(small_npz, tmp_path, ranks):
    arguments = ["--data", str(small_npz), "--epochs", "1", "--batch-size", "64", "--out", "run", "--profile", "3"]
    done = dptrain(ranks, *arguments, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert re.search(rf"profile{', rank 0 of 2' if ranks else ''}: 3 steps of [\d.]+ ms", done.out)
    assert re.search(r"^layer +us +share$", done.out, re.M)
    assert re.search(r"Results in run: .*summary.json, trace.json", done.out)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(max(ranks, 1)))
    again = dptrain(0, "sweep", *arguments[:-4], "--profile", "3", cwd=tmp_path)
    assert (again.code, again.out.count("\n")) == (2, 1)
    assert "--profile: not supported in a sweep" in again.err


def test_the_saved_configuration_repeats_the_run(small_npz, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    arguments = ["--hidden", "32,16", "--activation", "tanh", "--dropout", "0.1", "--seed", "5", "--epochs", "2"]
    more = ["--optimizer", "rmsprop", "--learning-rate", "0.002", "--drop-last", "--train.steps_per_epoch=5"]
    more += ["--optimizer.centered", "--momentum", "0.5", "--weight-decay", "0.01", "--global-clipnorm", "0.5"]
    done = dptrain(0, "train", "--data", str(small_npz), *arguments, *more, "--out", str(first))
    assert (done.code, done.err) == (0, "")
    assert ", 5 steps an epoch" in done.out
    done = dptrain(0, "--config", str(first / "config.yaml"), "--out", str(again))
    assert (done.code, done.err) == (0, "")
    a, b = weights(first), weights(again)
    assert list(a) == list(b)
    assert a["dense_1/kernel"].shape == (32, 16)
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    for name in ("model.safetensors", "model.keras"):
        assert (first / name).read_bytes() == (again / name).read_bytes()


def test_print_config_shows_file_and_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {epochs: 9}\noptimizer: {name: sgd, momentum: 0.5}\n")
    for ranks in (0, 2):
        done = dptrain(ranks, "--config", str(file), "--epochs", "4", "--print-config")
        assert (done.code, done.err) == (0, "")
        tree = yaml.safe_load(done.out)
        assert tree["train"]["epochs"] == 4
        assert (tree["optimizer"]["name"], tree["optimizer"]["momentum"]) == ("sgd", 0.5)


@pytest.mark.parametrize("ranks", sample([0, 3], 2, first=1))
def test_help_and_version_are_printed_once(ranks):
    version = dptrain(ranks, "--version", fresh=True)
    assert (version.code, version.err) == (0, "")
    assert re.fullmatch(r"dptrain \d+\.\d+\.\d+\n", version.out)
    done = dptrain(ranks, "--help")
    assert (done.code, done.err) == (0, "")
    flags = """--data --data-dir --hidden --activation --optimizer --learning-rate --batch-size --epochs --seed --device
    --sharding --drop-last --steps-per-epoch --out --config --print-config --fast-dev-run --verbose --debug --version"""
    for flag in flags.split():
        assert len(re.findall(rf"^  {flag}( |$)", done.out, re.MULTILINE)) == 1, flag
    assert "mpirun -n 4 python -m dptrain" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_fast_dev_run_leaves_nothing(small_npz, tmp_path):
    done = dptrain(2, "--data", str(small_npz), "--fast-dev-run", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert ", 2 steps an epoch" in done.out
    assert "Fast dev run: everything works" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_fast_dev_run_does_not_end_a_run_that_was_stopped(small_npz, tmp_path):
    out = tmp_path / "run"
    base = ["--data", str(small_npz), "--hidden", "8", "--out", str(out)]
    stop = "import os, sys; from dptrain.cli.run_directory import RunDirectory; from dptrain.cli.main import main; "
    stop += "RunDirectory.finish = lambda *a, **k: os._exit(9); sys.exit(main(sys.argv[1:]))"
    assert run([sys.executable, "-c", stop, *base, "--epochs", "1"]).code == 9
    before = sorted(path.name for path in out.rglob("*"))
    done = dptrain(0, *base, "--epochs", "1", "--fast-dev-run")
    assert done.code == 74
    assert "holds a run already; choose another --out" in done.messages[0]
    assert sorted(path.name for path in out.rglob("*")) == before


@pytest.mark.long
def test_fast_dev_run_with_less_than_a_batch(small_npz, tmp_path):
    done = dptrain(0, "--data", str(small_npz), "--batch-size", "2000", "--fast-dev-run", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert ", 1 step an epoch" in done.out
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_of_one_step_is_explained(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, 2, (64, 3) if kind == "x" else 64)
        for kind in "xy"
        for part in ("train", "test")
    }
    np.savez(tmp_path / "small.npz", **arrays)
    done = dptrain(0, "--data", "small.npz", "--epochs", "1", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert (
        ", 1 step an epoch\nAn epoch is a single step over all samples; a smaller --batch-size gives more steps"
        in done.out
    )
    done = dptrain(0, "--data", "small.npz", "--epochs", "1", "--batch-size", "64", cwd=tmp_path)
    assert "An epoch is a single step" not in done.out


def test_verbose_0_prints_nothing(small_npz, tmp_path):
    done = dptrain(2, "--data", str(small_npz), "--epochs", "1", "--verbose", "0", "--out", str(tmp_path / "run"))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_is_never_overwritten(small_npz, tmp_path):
    arguments = ["--data", str(small_npz), "--hidden", "8", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert dptrain(0, *arguments).code == 0
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    for ranks in (0, 2):
        done = dptrain(ranks, *arguments, "--seed", "9")
        assert done.code == 74
        assert len(done.messages) == 1
        assert "holds a run already; choose another --out" in done.messages[0]
    # `launch` starts it again, because a rank has failed after the run's end.
    done = dptrain(2, *arguments, DPTRAIN_RESTART="1")
    assert (done.code, done.err) == (0, "")
    assert "had already finished when the job failed" in done.out
    done = dptrain(0, *arguments, "--seed", "9", DPTRAIN_RESTART="1")
    assert done.code == 74
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_going_on_elsewhere_and_what_is_refused(small_npz, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    base = ["--data", str(small_npz), "--hidden", "8"]
    assert (
        dptrain(0, *base, "--epochs", "1", "--checkpoint-every", "3,epoch", "--keep", "2", "--out", str(first)).code
        == 0
    )
    names = ["000002-step-6", "000003-step-8"]
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == names

    resumed_elsewhere = [
        *base,
        "--epochs",
        "2",
        "--resume",
        str(first),
        "--out",
        str(second),
        "--learning-rate",
        "0.01",
    ]
    done = dptrain(0, *resumed_elsewhere)
    assert done.code == 2
    assert done.messages[0].startswith(
        f"dptrain: {first}/checkpoints/000003-step-8 is the checkpoint of another training: "
        "optimizer.learning_rate: it has None, this one 0.01; start with the same settings, or name"
    )
    done = dptrain(0, *resumed_elsewhere, "--resume-anyway", "learning-rate")
    assert (done.code, done.err) == (0, "")
    assert f"\nResuming from step 8, in epoch 2/2 ({first}/checkpoints/000003-step-8)\n" in done.out
    lines = [(place / "metrics.jsonl").read_text().splitlines() for place in (first, second)]
    assert lines[1][:1] == lines[0], "the first epoch's metrics are there as well"
    assert [json.loads(line)["epoch"] for line in lines[1]] == [1, 2]

    for path in first.glob("checkpoints/*/training.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    done = dptrain(0, *base, "--resume", str(first), "--out", str(tmp_path / "third"))
    assert done.code == 65
    assert all(name in done.messages[0] for name in ("no checkpoint can be used: ", *names))


@pytest.mark.long
def test_static_sharding_trains(small_npz, tmp_path):
    scores = []
    for ranks, sharding in ((0, "global"), (3, "static")):
        out = tmp_path / sharding
        arguments = ["--sharding", sharding, "--epochs", "4", "--out", str(out), "--batch-size", "32"]
        done = dptrain(ranks, "--data", str(small_npz), *arguments)
        assert (done.code, done.err) == (0, "")
        scores.append(json.loads((out / "summary.json").read_text())["metrics"]["val_accuracy"])
    assert min(scores) > 0.5, "ten classes: chance is 0.1"
    assert abs(scores[0] - scores[1]) < 0.15


def test_one_process_imports_no_mpi(small_npz, tmp_path):
    code = (
        "import sys\nfrom dptrain.cli.main import main\n"
        f"code = main(['--data', {str(small_npz)!r}, '--fast-dev-run', '--verbose', '0'])\n"
        "print(code, [m for m in ('mpi4py', 'pycuda') if sys.modules.get(m)])"
    )
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert (done.out, done.err) == ("0 []\n", "")


def test_debug_shows_the_traceback_and_others_do_not(tmp_path):
    for more, expected in (([], 0), (["--debug"], 1)):
        done = dptrain(0, "--data", str(tmp_path / "none.npz"), *more)
        assert done.code == 65
        assert done.err.count("Traceback") >= expected
        assert bool(done.err.count("Traceback")) == bool(expected)


def test_reproducible_gives_the_same_bits_on_other_ranks_and_after_a_resume(small_npz, tmp_path):
    arguments = ["--data", str(small_npz), "--hidden", "8", "--reproducible", "--batch-size", "100"]
    ways = {"whole": (0, "2", "never"), "begun": (2, "1", "never"), "resumed": (3, "2", str(tmp_path / "begun"))}
    for out, (ranks, epochs, source) in ways.items():
        done = dptrain(ranks, *arguments, "--epochs", epochs, "--resume", source, "--out", str(tmp_path / out))
        assert (done.code, done.err) == (0, "")
    whole, resumed = (weights(tmp_path / out) for out in ("whole", "resumed"))
    assert {name: array.tobytes() for name, array in whole.items()} == {k: v.tobytes() for k, v in resumed.items()}
    summaries = [json.loads((tmp_path / out / "summary.json").read_text()) for out in ("whole", "resumed")]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


# So that an epoch takes longer than it takes a live line to change.
SLOWLY = ("--batch-size", "1", "--train.steps_per_epoch", "500", "--jit-compile", "off", "--steps_per_execution", "1")
LIVE = r"Epoch 1/2 +\d+/500 [^\r\n]*ETA[^\r\n]*samples/s - loss: [0-9.]+"


@pytest.mark.long
@pytest.mark.parametrize(("launched", "columns"), sample([(False, 60), (True, 80)], 2))
def test_a_live_line_on_a_terminal(small_npz, tmp_path, launched, columns):
    arguments = ["--data", str(small_npz), "--epochs", "2", *SLOWLY]
    command = [*([find_mpirun(), "-n", "1"] if launched else []), sys.executable, "-m", "dptrain", *arguments]
    done = on_terminal(command, columns=columns, cwd=tmp_path)
    assert done.code == 0, done.out
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    assert re.search(LIVE, plain), plain
    assert "Epoch 2/2 - 500 steps - " in plain
    # The terminal, which knows of no words, breaks no line.
    assert max(map(len, plain.replace("\r", "\n").splitlines())) <= columns


@pytest.mark.long
def test_no_escape_code_reaches_a_file(small_npz, tmp_path):
    done = dptrain(2, "--data", str(small_npz), "--epochs", "2", "--out", str(tmp_path / "run"), TERM="xterm")
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert "\r" not in done.out
    assert len(re.findall(r"^Epoch [12]/2 - .* - val_accuracy: [0-9.]+$", done.out, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "live", "lines"),
    sample(
        [
            (["--progress", "live"], {}, True, 2),
            ([], {"DPTRAIN_PROGRESS": "none"}, False, 0),
            (["--progress", "lines"], {"DPTRAIN_PROGRESS": "none"}, False, 2),
        ],
        3,
        first=2,
    ),
)
def test_progress_as_asked(small_npz, tmp_path, arguments, environment, live, lines):
    base = ["--data", str(small_npz), "--epochs", "2", "--out", str(tmp_path / "run")]
    slowly = SLOWLY if live else []
    done = dptrain(0, *base, *slowly, *arguments, **environment)
    assert (done.code, done.err) == (0, "")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    assert bool(re.search(LIVE, plain)) == live
    assert len(re.findall(r"Epoch [12]/2 - .* - val_accuracy: [0-9.]+$", plain, re.MULTILINE)) == lines
    assert "Results in " in plain


def test_console_script(small_npz, tmp_path):
    script = Path(sys.executable).with_name("dptrain")
    if not script.exists():
        pytest.skip("dptrain is not installed here, only on PYTHONPATH")
    done = run([str(script), "--data", str(small_npz), "--fast-dev-run"], cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "Fast dev run: everything works" in done.out


@pytest.mark.long
def test_local_launch_script(small_npz, tmp_path):
    script = Path(__file__).resolve().parents[2] / "launch" / "local.sh"
    done = run(
        ["bash", str(script), "--data", str(small_npz), "--fast-dev-run"],
        cwd=tmp_path,
        RANKS="2",
        PYTHON=sys.executable,
    )
    assert (done.code, done.err) == (0, "")
    assert sum("CPU, " in line for line in done.out.splitlines()) == 2


@pytest.mark.parametrize("held_out", sample(["--validation-split=0.25", "--fold=2/4"], 2, first=1))
def test_the_test_part_is_seen_once_where_samples_are_held_out(small_npz, tmp_path, held_out):
    """Any number of ranks holds out the same samples, of every class its share, and evaluates the same test part."""
    losses = []
    for ranks in (0, 2):
        out = tmp_path / str(ranks)
        arguments = ("--epochs", "1", "--hidden", "4", "--reproducible", "--out", str(out), held_out)
        done = dptrain(ranks, "--data", str(small_npz), *arguments)
        assert (done.code, done.err) == (0, "")
        summary = json.loads((out / "summary.json").read_text())
        with np.load(small_npz) as data:
            rows, tested = len(data["y_train"]), len(data["y_test"])
        held = summary["data"]["validation"]
        assert (summary["data"]["train"] + held, summary["data"]["test"]) == (rows, tested)
        assert abs(held - rows / 4) <= 1
        assert f"{rows - held:,} + {held:,} for validation + {tested:,} samples" in done.out
        assert f"test part, evaluated once: loss {summary['test']['loss']:.4g}, accuracy " in done.out
        losses.append([summary["metrics"], summary["test"]])
    assert losses[0] == losses[1]
    assert losses[0][0]["val_loss"] != losses[0][1]["loss"]


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_what_goes_to_a_file_has_time_and_rank_also_behind_mpirun(small_npz, tmp_path, ranks, log_format):
    launcher = [find_mpirun(), "-n", str(ranks)] if ranks else []
    command = [*launcher, sys.executable, "-m", "dptrain", "--data", str(small_npz), "--log-format", log_format]
    command += ["--hidden", "4", "--report", "off"]
    with open(tmp_path / "log", "w") as log:
        code = subprocess.run([*command, "--epochs", "1"], stdout=log, stderr=log, cwd=tmp_path, timeout=120).returncode
        wrong = subprocess.run(
            [*command, "--target", "y"], stdout=log, stderr=log, cwd=tmp_path, timeout=120
        ).returncode
    assert (code, wrong) == (0, 2)
    *lines, error = (tmp_path / "log").read_text().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    if log_format == "json":
        records = [json.loads(line) for line in lines]
        assert all(re.fullmatch(stamp, record["time"]) and record["rank"] == 0 for record in records)
        (epoch,) = [record for record in records if "epoch" in record]
        assert epoch["epoch"] == epoch["epochs"] == 1
        assert f"loss: {epoch['loss']:.4f}" in epoch["message"]
        assert json.loads(error)["stream"] == "stderr"
        error = json.loads(error)["message"]
    else:
        assert all(re.match(rf"{stamp} \[0\] ", line) for line in lines)
        match = re.fullmatch(rf"{stamp} \[[01]\] (.*)", error)
        assert match is not None, error
        error = match[1]
    assert "--target" in error
