"""The run directory: what is written, and what happens when it cannot be."""

import errno
import json
import math
import os
import subprocess
import sys

import pytest

from dptrain.cli import run_directory as directory
from dptrain.cli.curves import draw_curves, make_figure
from dptrain.cli.run_directory import RunDirectory
from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage import files, locks
from dptrain.runtime.storage.files import append, write_atomically
from tests.faulty import each_fault

EPOCHS = [{"epoch": n, "loss": 1 / n, "accuracy": 0.9, "val_loss": 2 / n, "seconds": 1.0} for n in (1, 2)]


def test_everything_is_written(tmp_path):
    run = RunDirectory(tmp_path / "a" / "b", "seed: 1\n")
    for epoch in EPOCHS:
        run.add_epoch(epoch)
    names = run.finish({"model.keras": b"PK", "model.safetensors": b"{}"}, {"metrics": {"loss": 0.5}})
    expected = ["config.yaml", "metrics.jsonl", "model.keras", "model.safetensors", "summary.json"]
    assert [name for name in names if name != "curves.png"] == expected
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    assert [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()] == EPOCHS
    assert json.loads((run.path / "summary.json").read_text()) == {"metrics": {"loss": 0.5}}
    assert (run.path / "model.keras").read_bytes() == b"PK"
    assert (run.path / "model.safetensors").read_bytes() == b"{}"


def test_a_directory_that_holds_a_run_is_refused(tmp_path):
    with RunDirectory(tmp_path, "first\n") as run:
        run.add_epoch(EPOCHS[0])
        for resumes in (False, True):  # whatever it may, while the first works there
            with pytest.raises(OutputError, match=r"holds a run already; choose|another training is using it \(host "):
                RunDirectory(tmp_path, "second\n", resumes=resumes)
    with pytest.raises(OutputError, match="holds a run already; choose another --out"):
        RunDirectory(tmp_path, "second\n")
    assert (tmp_path / "config.yaml").read_text() == "first\n"


def test_a_run_that_has_left_nothing_is_none(tmp_path):
    with RunDirectory(tmp_path, "first\n"), pytest.raises(OutputError, match="another training is using it"):
        RunDirectory(tmp_path, "second\n")
    with RunDirectory(tmp_path, "second\n") as run:
        assert not run.continues
    assert (tmp_path / "config.yaml").read_text() == "second\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("mine\n")
    with pytest.raises(OutputError, match="holds a run already"):
        RunDirectory(tmp_path / "mine", "theirs\n", resumes=True)


def test_a_run_that_has_not_ended_goes_on(tmp_path):
    with RunDirectory(tmp_path, "first\n") as run:
        for epoch in EPOCHS:
            run.add_epoch(epoch)
    (tmp_path / ".summary.json.999999999.tmp").write_bytes(b"half")
    with RunDirectory(tmp_path, "second\n", resumes=True) as run:
        assert run.continues
        assert not list(tmp_path.glob(".*"))
        assert (tmp_path / "config.yaml").read_text() == "first\n"
        run.keep_epochs(EPOCHS[:1])
        assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(EPOCHS[0]) + "\n"
        assert "metrics.jsonl" in run.finish({}, {})
        assert (tmp_path / "config.yaml").read_text() == "second\n"
    with pytest.raises(OutputError, match="holds a run already; choose another --out"):
        RunDirectory(tmp_path, "third\n", resumes=True)
    assert not (tmp_path / "lock").exists()


def test_whichever_call_fails_the_run_can_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "draw_curves", lambda epochs, title, restored: b"PNG")  # which takes longest

    def work(number):
        with RunDirectory(tmp_path / str(number), "seed: 1\n") as run:
            for epoch in EPOCHS:
                run.add_epoch(epoch)
            run.keep_epochs(EPOCHS[:1])
            run.add_epoch(EPOCHS[1])
            run.finish({"model.keras": b"PK"}, {"metrics": {}})

    for number, raised in each_fault(work):
        path = tmp_path / str(number)
        assert raised is None or (isinstance(raised, OutputError) and "Read-only file system" in str(raised))
        if (path / "summary.json").exists():  # the last that is written
            assert (path / "model.keras").read_bytes() == b"PK"
            continue
        with RunDirectory(path, "seed: 1\n", resumes=True) as run:
            run.keep_epochs(EPOCHS)
            run.finish({"model.keras": b"PK"}, {"metrics": {}})
        assert (path / "metrics.jsonl").read_text().splitlines() == [json.dumps(epoch) for epoch in EPOCHS]
        assert not list(path.glob(".*"))
    assert number > 15, "calls were counted"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(OutputError, match="is not a directory"):
        RunDirectory(tmp_path / "x", "")
    with pytest.raises(OutputError, match="Not a directory"):
        RunDirectory(tmp_path / "x" / "y", "")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device \(needs 3 bytes, \d+ free\)"):
        write_atomically(path, b"new")
    with pytest.raises(OutputError, match="No space left"):
        append(tmp_path / "lines", b"{}\n")
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "lines"]


def test_runs_of_the_same_second_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    runs = [RunDirectory.in_free_place("a b/../c", f"{n}\n") for n in range(3)]
    paths = [run.path for run in runs]
    assert len(set(paths)) == 3
    assert all(path.parent.name == "runs" and "-a-b-..-c" in path.name for path in paths)
    assert [(path / "config.yaml").read_text() for path in paths] == ["0\n", "1\n", "2\n"]
    (tmp_path / "runs").rename(tmp_path / "old")
    (tmp_path / "runs").write_text("")
    with pytest.raises(OutputError, match=r"Not a directory|File exists"):
        RunDirectory.in_free_place("x", "")
    for run in runs:  # whose directories have moved
        run.__exit__(None, None, None)


def test_curves_are_a_picture():
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    picture = draw_curves(EPOCHS)
    assert picture is not None
    assert picture.startswith(b"\x89PNG\r\n")
    # two panels of 5 x 3.6 inches at 120 dots an inch; width and height are at bytes 16 to 24 of a PNG
    assert int.from_bytes(picture[16:20], "big") == 1200
    assert int.from_bytes(picture[20:24], "big") == 432
    assert draw_curves([]) is None


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 40])
def test_curves_have_whole_epochs_and_the_runs_name(epochs):
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    figure = make_figure([{"epoch": n, "loss": 1 / n} for n in range(1, epochs + 1)], "20261121-030717-strokes")
    figure.canvas.draw()
    (panel,) = figure.axes
    low, high = panel.get_xlim()
    ticks = [tick for tick in panel.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == int(tick) for tick in ticks)
    assert figure.get_suptitle() == "20261121-030717-strokes"


def test_a_name_is_no_formula():
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    assert draw_curves(EPOCHS, title="a$x_{b$c") is not None


BAD_BACKEND = """
from dptrain.cli.curves import can_draw, draw_comparison, draw_curves
from dptrain.sweeps.reporting.drawing import why_not
epochs = [{"epoch": 1, "loss": 0.5}]
assert draw_curves(epochs) is None
assert can_draw(), "a package that is installed is not to be installed"
assert draw_comparison({"a": epochs}).startswith("no picture: ValueError: Key backend: 'nonsense'")
assert why_not().startswith("matplotlib does not start: ValueError: Key backend: 'nonsense'")
"""


def test_no_curves_with_a_backend_that_is_none():
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    command, environment = [sys.executable, "-E", "-c", BAD_BACKEND], os.environ | {"MPLBACKEND": "nonsense"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr.startswith("dptrain: warning: no curves.png: ValueError: Key backend: 'nonsense'")
    assert process.stderr.endswith("; unset MPLBACKEND\n")
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("losses", "accuracies", "scales"),
    [
        ([900.0, 30.0, 1.5], [0.1, 0.5, 0.9], ["log", "linear"]),
        ([0.9, 0.5, 0.3], [0.0, 0.5, 0.9], ["linear", "linear"]),
        ([900.0, 0.0, 1.0], [math.nan, 0.5, 0.9], ["linear", "linear"]),
    ],
)
def test_an_axis_is_logarithmic_where_values_span_decades(losses, accuracies, scales):
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    columns = zip(losses, accuracies, strict=True)
    figure = make_figure([{"epoch": n, "loss": a, "accuracy": b} for n, (a, b) in enumerate(columns, 1)], "")
    assert [axes.get_yscale() for axes in figure.axes] == scales


def test_no_curves_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw_curves(EPOCHS) is None


def test_files_of_others_are_not_listed_as_results(tmp_path):
    for name in ("notes.txt", "curves.pdf"):
        (tmp_path / name).write_text("mine\n")
    assert RunDirectory(tmp_path, "").finish({}, {}) == ["config.yaml", "summary.json"]
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "curves.png", "model.keras", "summary.json", "checkpoints/mine"])
def test_a_file_that_the_run_would_write_is_found_at_the_start(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(OutputError, match=f"holds {name.partition('/')[0]}, but not the config.yaml of a run; choose"):
        RunDirectory(tmp_path, "")
    assert (tmp_path / name).read_text() == "mine\n"
    assert len(list(tmp_path.iterdir())) == 1


FOLDERS = ("checkpoints", "tensorboard", "wandb")
NAMES = (*FOLDERS, "config.yaml", "metrics.jsonl", "model.keras", "best.keras", "summary.json", "lock", "holder")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_of_a_run_is_refused_at_the_start_and_left_alone(tmp_path, name, kind):
    canary = tmp_path / "canary"
    (canary / "inside").mkdir(parents=True) if name in FOLDERS else canary.write_bytes(b"alive")
    run = tmp_path / "run"
    RunDirectory(run, "").__exit__(None, None, None)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(canary) if kind == "link" else os.mkfifo(run / name)
    with pytest.raises(DataError, match=f"{name}: it is a (link|named pipe), expected a .*; remove it"):
        RunDirectory(run, "", resumes=True)
    assert (canary / "inside").is_dir() if name in FOLDERS else canary.read_bytes() == b"alive"


def test_a_file_of_this_name_that_a_link_leads_to_is_neither_written_nor_swept(tmp_path):
    """The temporary names of earlier versions could be foreseen."""
    canary, run = tmp_path / "canary", tmp_path / "run"
    canary.write_bytes(b"alive")
    run.mkdir()
    for pid in (os.getpid(), 2**22 + 1):
        (run / f".config.yaml.{pid}.tmp").symlink_to(canary)
    with RunDirectory(run, "seed: 1\n"):
        assert (run / "config.yaml").read_text() == "seed: 1\n"
    assert canary.read_bytes() == b"alive"
    assert len(list(run.glob(".config*"))) == 2


def test_finish_without_epochs(tmp_path):
    assert RunDirectory(tmp_path, "").finish({}, {}) == ["config.yaml", "summary.json"]
    assert directory.__doc__
