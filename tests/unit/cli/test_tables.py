"""Awkward tables on the command line: `--auto` trains at once, and the run reads tables as its training did."""

import csv
import io
import json
import shlex

import numpy as np
import pytest

import dptrain as dp
from dptrain.cli.main import main
from dptrain.errors import LIST
from tests.unit.data.tabular.awkward import ROWS, TABLES

QUICK = ("--jit-compile", "off", "--hidden", "4", "--epochs", "1", "--verbose", "0", "--report", "off")
NAMES = {
    "house": "a house price table",
    "german": "decimal commas and semicolons",
    "mixed": "mixed types and a bad header",
}


def ask(capfd, *arguments):
    assert main([*map(str, arguments)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("name", TABLES)
def test_a_table_trains_at_once_and_is_predicted(name, tmp_path, capfd):
    awkward = TABLES[name]
    path = awkward.write(tmp_path / "t.csv")
    ask(capfd, "--data", path, "--target", awkward.target, "--auto", *QUICK, "--out", tmp_path / "run")
    new = [row[:-1] for row in awkward.rows]
    text = io.StringIO()
    csv.writer(text, delimiter=awkward.separator).writerows([awkward.header[:-1], *new])
    (tmp_path / "new.csv").write_text(text.getvalue())
    predicted = ask(capfd, "predict", tmp_path / "run", "--data", tmp_path / "new.csv")
    rows = [*csv.reader(io.StringIO(predicted))]
    assert len(rows) == ROWS + 1
    assert np.isfinite([float(row[-1]) for row in rows[1:]]).all()


def test_what_the_message_advises_is_typed_and_trains(tmp_path, capfd):
    awkward = TABLES[NAMES["mixed"]]
    path = awkward.write(tmp_path / "t.csv")
    command = ("--data", path, "--target", awkward.target, *QUICK, "--out", tmp_path / "run")
    assert main([*map(str, command)]) == 65
    out, err = capfd.readouterr()
    first, *lines = err.rstrip("\n").split(LIST)
    assert (out, err.count("\n")) == ("", 1 + len(lines))
    assert len(lines) == 4
    ask(capfd, *command, *shlex.split(first.split("--auto settles them, or ")[1]))


def test_a_run_is_evaluated_and_resumed_with_the_same_numbers(tmp_path, capfd):
    awkward = TABLES[NAMES["house"]]
    path = awkward.write(tmp_path / "t.csv")
    command = ("--data", path, "--target", awkward.target, "--auto", *QUICK)
    ask(capfd, *command, "--epochs", 2, "--out", tmp_path / "whole")
    ask(capfd, *command, "--epochs", 1, "--out", tmp_path / "parts")
    ask(capfd, *command, "--epochs", 2, "--out", tmp_path / "more", "--resume", tmp_path / "parts")
    whole, more = (dp.models.load_model(tmp_path / name, device="cpu") for name in ("whole", "more"))
    assert whole.preprocessing == more.preprocessing
    for weight, other in zip(whole.get_weights(), more.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    metrics = json.loads((tmp_path / "whole" / "summary.json").read_text())["metrics"]
    evaluated = json.loads(ask(capfd, "evaluate", tmp_path / "whole", "--json"))["metrics"]
    assert evaluated["mae"] == pytest.approx(metrics["val_mae"])
