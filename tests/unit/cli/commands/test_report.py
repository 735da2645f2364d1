"""The page of a run: written at its end and by `python -m dptrain report`, whatever the data; never a run's failure."""

import json
import os
import re
import sys

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="pages of runs need the extra 'report'")

import dptrain as dp
from dptrain.cli.commands import train as train_command
from dptrain.cli.main import main
from dptrain.cli.reporting import page, report
from tests.conftest import ROOT
from tests.launching import dptrain
from tests.unit.cli.reporting.pages import Page
from tests.unit.data.tabular.awkward import TABLES

RNG = np.random.default_rng(8)
WITHOUT_GPU = str(ROOT / "tests" / "without_gpu")  # and with pictures


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Draw nothing, which takes longer than these trainings: tests of pages and of pictures draw."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    x = RNG.random((60, 9, 9), dtype=np.float32)
    y = (x[:, 0, 0] * 3).astype(np.int64)
    np.savez(path / "data.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    np.savez(path / "empty.npz", x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
    area, city = RNG.uniform(20, 200, 300).round(1), RNG.choice(["Berlin", "<b>Paris"], 300)
    price = (area * 2500 + 90_000 * (city == "Berlin")).round()
    note = RNG.choice(["bright garden", "dark street"], 300)
    lines = [f"{a},{c},{n},{int(p)}" for a, c, n, p in zip(area, city, note, price, strict=True)]
    (path / "houses.csv").write_text("\n".join(["area,city,<i>note,price", *lines]))
    return path


def train(folder, name, *arguments, code=0):
    out = folder / name
    options = ["--hidden", "4", "--epochs", "2", "--batch-size", "32", "--out", str(out)]
    assert main([*options, *map(str, arguments)]) == code
    return out


def page_of(run):
    return Page((run / "report.html").read_text(encoding="utf-8"))


def test_a_run_writes_its_page_and_the_command_writes_it_again(folder, capfd):
    run = train(folder, "classes", "--data", folder / "data.npz")
    assert "model.safetensors, report.html, summary.json" in capfd.readouterr().out
    first = (run / "report.html").read_text(encoding="utf-8")
    shown = page_of(run)
    assert [row["class"] for row in shown.table("precision")] == ["0", "1", "2"]
    summary = json.loads((run / "summary.json").read_text())
    matrix = next(table for table in shown.tables if table[0] == ["", "0", "1", "2"])
    assert [[int(cell) for cell in row[1:]] for row in matrix[1:]] == summary["classes"]["confusion"]
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capfd.readouterr().out == f"{run / 'report.html'}: open it in a browser\n"
    assert (run / "report.html").read_text(encoding="utf-8") == first


def test_a_table_with_categories_and_texts(folder, capfd):
    run = train(folder, "houses", "--data", folder / "houses.csv", "--target", "price", "--numbers", "price")
    assert capfd.readouterr().err == ""
    shown = page_of(run)
    assert {row["column"] for row in shown.table("mean absolute error rises by")} == {"area", "city", "<i>note"}
    assert {row["city"] for row in shown.table("index")} <= {"Berlin", "<b>Paris"}
    assert {row["<i>note"] for row in shown.table("index")} <= {"bright garden", "dark street"}
    models = [row["model"] for row in shown.table("R²")]
    assert models[:2] == ["this network", "always the mean of the training targets, from 240 samples"]
    assert len(models) == 3 or "scikit-learn is not installed" in shown.text
    assert "How the data were read" in shown.text


def test_the_page_can_be_left_out(folder, capfd):
    run = train(folder, "off", "--data", folder / "data.npz", "--report", "off")
    assert not (run / "report.html").exists()
    assert "report.html" not in capfd.readouterr().out
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists()


def test_without_jinja2_a_run_says_how_to_get_its_page(folder, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    run = train(folder, "without", "--data", folder / "data.npz")
    assert (run / "summary.json").exists()
    assert not (run / "report.html").exists()
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.endswith("summary.json (no curves.png and report.html: pip install 'jinja2>=3.1' 'matplotlib>=3.8')")
    assert main(["report", str(run)]) == 2
    assert capfd.readouterr().err == "dptrain: report.html needs Jinja2: pip install 'jinja2>=3.1' 'matplotlib>=3.8'\n"
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    train(folder, "without-jinja2", "--data", folder / "data.npz")
    assert "(no report.html: pip install 'jinja2>=3.1' " in capfd.readouterr().out.splitlines()[-1]


def test_a_fault_of_the_page_is_none_of_the_runs(folder, capfd, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("of the page")

    monkeypatch.setattr(page, "run_page", fail)
    run = train(folder, "fault", "--data", folder / "data.npz")
    assert (run / "summary.json").exists()
    assert re.fullmatch(r"dptrain: warning: no report\.html: .*of the page\n", capfd.readouterr().err)
    assert not (run / "report.html").exists()


def test_a_signal_leaves_no_time_for_a_page(folder, capfd, monkeypatch):
    for module in (train_command, report):
        monkeypatch.setattr(module, "is_signalled", lambda: True)
    run = train(folder, "signalled", "--data", folder / "data.npz")
    assert (run / "summary.json").exists()
    assert not (run / "report.html").exists()
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.endswith(f" (no report.html, as a signal came: python -m dptrain report {run} writes it)")


def test_a_resumed_run_shows_all_its_epochs(folder):
    first = train(folder, "first", "--data", folder / "data.npz")
    second = train(folder, "second", "--data", folder / "data.npz", "--epochs", "4", "--resume", first)
    assert "It was trained for 4 epochs" in page_of(second).text


def test_a_run_of_no_epoch_and_one_without_held_out_samples(folder, capfd):
    run = train(folder, "none", "--data", folder / "data.npz", "--epochs", "0")
    assert "It was trained for 0 epochs" in page_of(run).text
    assert main(["report", str(run)]) == 0
    capfd.readouterr()
    code = main(["--data", str(folder / "empty.npz"), "--epochs", "1", "--out", str(folder / "empty")])
    if code == 0:
        assert "Not measured: there are no held-out samples" in page_of(folder / "empty").text
    else:
        assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "message", "code"),
    [
        (lambda path: None, "not found; expected the folder of a run", 65),
        (lambda path: path.mkdir(), "no run: it has no config.yaml", 65),
        (lambda path: (path.mkdir(), (path / "sweep.yaml").touch()), "a sweep, not a run; see its report.html", 65),
    ],
)
def test_what_is_no_finished_run_is_refused_in_a_line(tmp_path, capfd, make, message, code):
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == code
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_run_that_has_not_finished_has_no_page(folder, tmp_path, capfd):
    run = train(folder, "unfinished", "--data", folder / "data.npz", "--report", "off")
    (run / "summary.json").unlink()
    (run / "lock").touch()
    assert main(["report", str(run)]) == 65
    assert "the run has not finished" in capfd.readouterr().err


def test_a_link_in_the_folder_is_replaced_not_followed(folder, tmp_path):
    run = train(folder, "linked", "--data", folder / "data.npz", "--report", "off")
    (tmp_path / "mine").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine")
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert not os.path.islink(run / "report.html")


def test_logits_are_probabilities_too(folder):
    code = """
import dptrain as dp

def build_model(input_shape, num_classes):
    model = dp.Sequential([dp.layers.Input(input_shape), dp.layers.Flatten(), dp.layers.Dense(num_classes)])
    model.compile(loss=dp.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""
    (folder / "logits.py").write_text(code)
    out = folder / "logits"
    arguments = ["--data", folder / "data.npz", "--model", f"{folder / 'logits.py'}:build_model", "--out", out]
    assert main([*map(str, arguments), "--epochs", "1"]) == 0
    shown = page_of(out)
    model = dp.models.load_model(out)
    data = np.load(folder / "data.npz")
    accuracy = (model.predict(data["x_test"], verbose=0).argmax(1) == data["y_test"]).mean()
    assert shown.table("mean F1")[0]["accuracy"] == f"{100 * accuracy:.1f} %"


@pytest.mark.long
def test_two_ranks_write_one_page_with_pictures(folder):
    arguments = ["--data", str(folder / "houses.csv"), "--target", "price", "--numbers", "price", "--epochs", "2"]
    run = folder / "two-ranks"
    done = dptrain(2, *arguments, "--hidden", "4", "--out", str(run), PYTHONPATH=WITHOUT_GPU)
    assert (done.code, done.err) == (0, "")
    shown = page_of(run)
    assert [row[0] for table in shown.tables for row in table if row[0].startswith("rank ")] == ["rank 0", "rank 1"]
    again = dptrain(2, "report", str(run), "--out", str(folder / "again.html"), PYTHONPATH=WITHOUT_GPU)
    assert (again.code, again.err) == (0, "")
    assert Page((folder / "again.html").read_text(encoding="utf-8")).table("R²") == shown.table("R²")
    if "No pictures" not in shown.text:
        assert shown.tags.count("svg") == 4


@pytest.mark.long
def test_ranks_with_samples_of_their_own_measure_nothing(folder):
    run = folder / "static"
    arguments = ["--data", str(folder / "data.npz"), "--sharding", "static", "--epochs", "1"]
    done = dptrain(2, *arguments, "--out", str(run), PYTHONPATH=WITHOUT_GPU)
    assert (done.code, done.err) == (0, "")
    assert "Not measured: with --sharding static each rank has samples of its own" in page_of(run).text


@pytest.mark.long
def test_a_fault_on_one_rank_ends_no_job_and_hangs_none(folder):
    run = folder / "faulty"
    code = (
        "import sys\nfrom dptrain.cli.reporting import quality\n"
        "from dptrain.comm import current\n"
        "real = quality._outcome\n"
        "def fail(*arguments):\n"
        "    if current().rank == 1:\n        raise ValueError('on one rank')\n"
        "    return real(*arguments)\n"
        "quality._outcome = fail\n"
        "from dptrain.cli.main import main\n"
        f"sys.exit(main(['--data', {str(folder / 'data.npz')!r}, '--epochs', '1', '--out', {str(run)!r}]))\n"
    )
    from tests.launching import mpirun

    (folder / "faulty.py").write_text(code)
    done = mpirun(2, str(folder / "faulty.py"), PYTHONPATH=WITHOUT_GPU)
    assert done.code == 0, done.err
    assert "warning: no report.html: " in done.err
    assert "on one rank" in done.err
    assert (run / "summary.json").exists()


def test_a_page_shows_rows_of_a_table_that_was_settled(tmp_path):
    awkward = TABLES["decimal commas and semicolons"]
    path = awkward.write(tmp_path / "t.csv")
    options = ["--hidden", "4", "--epochs", "1", "--jit-compile", "off", "--verbose", "0"]
    run = tmp_path / "run"
    assert main(["--data", str(path), "--target", "Preis", "--auto", *options, "--out", str(run)]) == 0
    text = Page((run / "report.html").read_text()).text
    assert all(name in text for name in ("Fläche", "Grund", "Verkauft am"))
