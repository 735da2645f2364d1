"""`python -m dptrain runs`: what is read of run folders, whoever wrote them, and how it is shown."""

import contextlib
import json
import os
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.cli import curves
from dptrain.cli.main import main
from dptrain.cli.options.config import Config, resolve, to_yaml
from dptrain.cli.run_directory import RunDirectory
from dptrain.cli.run_records import read_epochs, read_run, read_runs
from dptrain.errors import DataError, printable
from tests.sample import examples


def make(folder, name, *losses, finished=True, summary=None, **overrides):
    """Make a run's folder as a training does, with a validation loss an epoch."""
    path = folder / name
    settings = {"train.epochs": 5} | {key.replace("__", "."): value for key, value in overrides.items()}
    with RunDirectory(path, to_yaml(resolve({}, "", settings))) as run:
        for epoch, loss in enumerate(losses, 1):
            run.add_epoch({"epoch": epoch, "loss": loss / 2, "val_loss": loss, "val_accuracy": 1 - loss, "seconds": 1})
        if finished:
            best = min(losses)
            summary = {
                "metrics": {"val_loss": losses[-1], "val_accuracy": 1 - losses[-1]},
                "best": {"epoch": losses.index(best) + 1, "monitor": "val_loss", "value": best},
                "epochs": len(losses),
                "seconds": 7.5,
                "started": f"2020-11-2{len(losses)}T10:00:00+0000",
            }
            run.finish({}, summary)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets
    monkeypatch.setattr("dptrain.cli.run_directory.draw_curves", lambda epochs, title, restored: None)
    make(tmp_path, "b", 0.5, 0.25, 0.375, optimizer__learning_rate=0.1)
    make(tmp_path, "a", 0.75, 0.5, model__dropout=0.5, model__arguments={"units": 8})
    make(tmp_path, "c", 0.125, finished=False)
    return tmp_path


def shown(capfd, *arguments, code=0):
    assert main(["runs", *map(str, arguments)]) == code
    out, err = capfd.readouterr()
    assert err.count("\n") == (1 if code else 0)
    return err if code else out


def test_what_a_folder_says(folder):
    runs, others = read_runs(folder)
    a, b, c = runs
    assert others == []
    assert [run.name for run in runs] == ["a", "b", "c"]
    assert (b.state, b.epochs, b.planned, b.seconds, b.started) == ("finished", 3, 5, 7.5, "2020-11-23T10:00:00+0000")
    assert (b.value("val_loss"), b.value("val_accuracy")) == (0.25, 0.625)
    assert (b.settings["optimizer.learning_rate"], b.settings["seed"]) == (0.1, 0)
    assert (a.settings["model.arguments.units"], a.settings["model.hidden"]) == (8, [128])
    assert (c.state, c.epochs, c.metrics["val_loss"], c.seconds) == ("interrupted", 1, 0.125, None)
    assert read_runs(folder / "a") == ([a], [])


def test_a_run_that_goes_on_is_running(tmp_path):
    with RunDirectory(tmp_path / "a", to_yaml(Config())) as run:
        assert read_run(run.path).state == "running"
        assert RunDirectory.__exit__(run) is None
        assert read_run(run.path).state == "interrupted"


def table_of(out):
    """Return the cells of a table's lines; empty cells are left out."""
    return [re.split(r"  +", line.strip()) for line in out.splitlines()]


@pytest.mark.parametrize(
    ("columns", "hidden"), [(200, []), (80, ["best", "when"]), (60, ["best", "when", "val_accuracy"])]
)
def test_the_table_fits_the_window(folder, capfd, monkeypatch, columns, hidden):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = shown(capfd, folder, "--sort", "val_loss")
    assert max(map(len, out.splitlines()[:4])) <= columns
    assert {"best", "when", "val_accuracy"} - set(table_of(out)[0]) == set(hidden)
    assert (f"not shown, for {columns} columns: {', '.join(hidden)}; --json has all" in out) == bool(hidden)
    assert not set("│┃━") & set(out), "no box in a file"


def test_the_table_has_what_differs(folder, capfd):
    cells = table_of(shown(capfd, folder))[1:]
    assert [row[0] for row in cells[:2]] == ["a", "b"], "by time"
    assert cells[0][2:] == ["finished", "2/5", "dropout=0.5, units=8", "0.5", "0.5", "val_loss 0.5 in epoch 2"]
    assert cells[1][4] == "learning_rate=0.1"
    assert cells[2][2:4] == ["interrupted", "1/5"]


@pytest.mark.parametrize(
    ("key", "order"),
    [("val_loss", "cba"), ("val_accuracy", "cba"), ("name", "abc"), ("epochs", "cab"), ("seconds", "abc")],
)
def test_sorted_the_best_first(folder, capfd, key, order):
    listing = json.loads(shown(capfd, folder, "--json", "--sort", key))
    assert "".join(run["name"] for run in listing["runs"]) == order


def test_a_metric_of_the_users_is_sorted_as_the_run_has_recorded_it(tmp_path, capfd):
    """An earlier run, or one that was killed, has no record of it."""
    for name, values, directions in (("a", 0.5, {"val_mine": "up", "val_ours": 3}), ("b", 0.75, {}), ("c", -1.0, {})):
        with RunDirectory(tmp_path / name, to_yaml(Config())) as run:
            metrics = {"val_mine": values, "val_ours": values, "val_other": values}
            run.finish({}, {"metrics": metrics, "directions": directions, "epochs": 1, "started": "2020"})

    def order(key):
        return "".join(run["name"] for run in json.loads(shown(capfd, tmp_path, "--json", "--sort", key))["runs"])

    assert order("val_mine") == "bac"
    assert order("val_mine:min") == "cab"
    assert order("val_ours:max") == "bac"
    expected = "--sort 'val_ours': its direction is unknown: --sort val_ours:max or val_ours:min"
    assert expected in shown(capfd, tmp_path, "--sort", "val_ours", code=2)
    titles = table_of(shown(capfd, tmp_path, "--sort", "val_other:max"))[0]
    assert titles[5] == "val_other", "the column it is sorted by comes first"


def test_what_is_no_run_is_named_and_left_alone(folder, capfd):
    (folder / "z-empty").mkdir()
    (folder / "z-foreign").mkdir()
    (folder / "z-foreign" / "config.yaml").write_text("mine: 1\n")
    (folder / "z-sweep").mkdir()
    (folder / "z-sweep" / "sweep.yaml").write_text("")
    (make(folder, "z-summary", 0.5) / "summary.json").write_text("[" * 10**5)
    (make(folder, "z-config", 0.5) / "config.yaml").write_text("a: [1\n")
    (make(folder, "z-link", 0.5) / "summary.json").rename(folder / "elsewhere.json")
    (folder / "z-link" / "summary.json").symlink_to(folder / "elsewhere.json")
    (make(folder, "z-pipe", 0.5) / "summary.json").unlink()
    os.mkfifo(folder / "z-pipe" / "summary.json")
    out = shown(capfd, folder)
    for line in (
        "z-empty: no run: it has no config.yaml",
        "z-foreign: not a run: it has neither summary.json nor lock",
        "z-sweep: a sweep, not a run; see its report.html",
        "z-summary: damaged: summary.json is not JSON of names and values",
        "z-config: damaged: config.yaml, line 2: expected ',' or ']', but got '<stream end>'",
        "z-link: summary.json: it is a link, expected a regular file; remove it",
        "z-pipe: summary.json: it is a named pipe, expected a regular file; remove it",
    ):
        assert line in out.splitlines()
    assert len(json.loads(shown(capfd, folder, "--json"))["others"]) == 7


def test_no_escape_code_of_a_name_or_a_file_reaches_the_terminal(folder, capfd):
    make(folder, "d\x1b[31m[red]", 0.5)
    path = folder / "d\x1b[31m[red]" / "config.yaml"
    path.write_text(path.read_text().replace("activation: relu", 'activation: "\\e]0;title\\a"'))
    (folder / "no\x1b[2J").mkdir()
    out = shown(capfd, folder) + shown(capfd, folder, "--json")
    assert "\x1b" not in out
    assert "\a" not in out
    assert r"d\x1b[31m[red]" in out
    assert r"no\x1b[2J: no run" in out


@settings(max_examples=examples(50), deadline=None)
@given(st.text(st.characters(codec=None), max_size=8))
def test_printable_changes_nothing_that_is(text):
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["config.yaml", "summary.json", "metrics.jsonl"]),
    st.binary(max_size=40) | st.text("{}[]:-&*'\"\n 1aN,", max_size=40).map(str.encode),
)
def test_no_content_of_a_file_is_worse_than_damaged(tmp_path, name, content):
    path = tmp_path / "run"
    if not path.exists():
        make(tmp_path, "run", 0.5, finished=False)
        (tmp_path / "as-it-was").write_bytes((path / "config.yaml").read_bytes())
    for file in ("summary.json", "metrics.jsonl"):
        (path / file).unlink(missing_ok=True)
    (path / "config.yaml").write_bytes((tmp_path / "as-it-was").read_bytes())
    (path / name).write_bytes(content)
    for read in (read_run, read_epochs):
        with contextlib.suppress(DataError):
            read(path)


def test_one_bad_folder_is_one_line_and_the_rest_goes_on(folder, capfd):
    summaries = {"digits": {"seconds": 10**400, "metrics": {"val_loss": 10**400}}, "started": {"started": "300000-01"}}
    for name, summary in summaries.items():
        (make(folder, name, 0.5) / "summary.json").write_text(json.dumps(summary))
    os.utime(make(folder, "far", 0.5, finished=False) / "config.yaml", (1e13, 1e13))
    os.utime(make(folder, "farther", 0.5, finished=False) / "config.yaml", (2**61, 2**61))
    for name, line in (("number", "seed: 0x" + "f" * 4000), ("many", "\n".join(f"a{n}: {n}" for n in range(9000)))):
        config = make(folder, name, 0.5) / "config.yaml"
        config.write_text(config.read_text().replace("seed: 0\n", "") + line + "\n")
    long = make(folder, "long", 0.5) / "config.yaml"  # YAML takes seconds for it
    columns = ", ".join(f"c{n}" for n in range(100_000))
    long.write_text(long.read_text().replace("  columns: []", f"  columns: [{columns}]"))
    os.rename(make(folder, "name", 0.5), os.fsencode(folder) + b"/name\xff")
    (folder / "loop").symlink_to("loop")
    start = time.process_time()
    out = shown(capfd, folder, "--sort", "val_loss")
    assert time.process_time() - start < 5
    assert [name for name in ("a", "b", "digits", "started", "long", "name\\udcff") if f"\n{name} " not in out] == []
    assert max(out.count(f"c{n},") for n in (50_000, 99_000)) == 0, "a cell shows its beginning"
    assert out.count("\n") < 200
    assert "number: damaged: config.yaml" in out
    assert "many: damaged: config.yaml has more settings than any run" in out
    assert json.loads(shown(capfd, folder, "--json"))["others"]


def test_values_that_no_axis_has_are_not_drawn(folder, capfd, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "a" / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1e308}\n{"epoch": 2, "loss": -1e308}\n')
    os.rename(folder / "b", os.fsencode(folder) + b"/b\xff")
    assert "Curves in" in shown(capfd, folder, "--compare", folder / "a", os.fsdecode(os.fsencode(folder) + b"/b\xff"))


def test_curves_over_decades_have_a_logarithmic_axis():
    pytest.importorskip("matplotlib")
    epochs = [{"epoch": n, "loss": 10.0**-n, "accuracy": 0.1 * n} for n in range(1, 6)]
    assert [panel.get_yscale() for panel in curves.make_figure(epochs, "").axes] == ["log", "linear"]


def test_comparing_two_shows_and_draws_what_differs(folder, capfd, monkeypatch):
    drawings = {}
    monkeypatch.setattr(curves, "draw_comparison", lambda runs: drawings.update(runs) or b"picture")
    monkeypatch.chdir(folder)
    out = shown(capfd, ".", "--compare", "a", folder / "b")
    rows = table_of(out)
    for row in (
        ["learning_rate", "none", "0.1"],
        ["units", "8", "none"],
        ["val_loss", "0.5", "0.375"],
        ["best", "val_loss 0.5 in epoch 2", "val_loss 0.25 in epoch 2"],
    ):
        assert row in rows
    assert "hidden" not in out
    assert [epoch["val_loss"] for epoch in drawings["b"]] == [0.5, 0.25, 0.375]
    assert (folder / "compare-a-b.png").read_bytes() == b"picture"


def test_a_torn_last_line_is_no_epoch(folder):
    with open(folder / "c" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "val_lo')
    assert [epoch["epoch"] for epoch in read_epochs(folder / "c")] == [1]
    assert read_run(folder / "c").epochs == 1


def test_curves_of_runs_are_a_picture():
    pytest.importorskip("matplotlib", reason="curves need the extra 'plots'")
    epochs = [{"epoch": n, "loss": 1.0 / n, "val_loss": 2.0 / n} for n in (1, 2)]
    picture = curves.draw_comparison({"_a$": epochs, "b\u4e00": epochs[:1], "c": [{"epoch": 1, "accuracy": 0.5}]})
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20], "big") == 1200, "two panels"


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (65, "nowhere", "nowhere: No such file or directory; expected a folder of runs"),
        (2, "DIR --sort val_los", "unknown --sort 'val_los'; did you mean 'val_loss'"),
        (2, "DIR --sort val_loss:best", "--sort 'val_loss:best': expected val_loss:max or val_loss:min"),
        (2, "DIR --compare a", "--compare: expected two runs or more"),
        (65, "DIR --compare a bb", "no such folder here or in DIR; did you mean 'b'?"),
        (2, "DIR --compare a b --picture x.gif", "expected a file that ends in .png"),
        (2, "DIR --picture x.png", "add the runs: --compare A B"),
        (2, "DIR --hidden 3", "unknown '--hidden'"),
    ],
)
def test_what_is_refused(folder, capfd, monkeypatch, code, arguments, message):
    monkeypatch.chdir(folder)
    output = shown(capfd, *arguments.replace("DIR", str(folder)).split(), code=code)
    assert message.replace("DIR", str(folder)) in output


def test_a_folder_without_runs(tmp_path, capfd):
    assert shown(capfd, tmp_path) == f"no runs in {tmp_path}\n"
