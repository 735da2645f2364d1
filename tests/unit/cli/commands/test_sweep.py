"""`sweep` writes what its options say, and goes on with sweeps of earlier versions."""

import numpy as np

from dptrain.cli.commands.sweep import _deciding
from dptrain.cli.main import main
from dptrain.cli.options.config import Config, DataConfig


def test_no_report_where_none_is_wanted(tmp_path, capfd):
    x, y = np.random.default_rng(0).random((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    command = ["sweep", "--data", str(tmp_path / "d.npz"), "--seeds", "0", "--epochs", "1", "--hidden", "2"]
    command += ["--jit-compile", "off", "--out", str(tmp_path / "s")]
    assert main([*command, "--report", "off"]) == 0
    assert f"Results in {tmp_path / 's'}: trials.csv, results.jsonl" in capfd.readouterr().out
    assert (tmp_path / "s" / "trials.csv").exists()
    assert not (tmp_path / "s" / "report.html").exists()
    assert main(command) == 0  # the same sweep, with a report
    assert f"Results in {tmp_path / 's'}: report.html, trials.csv, results.jsonl" in capfd.readouterr().out
    assert (tmp_path / "s" / "report.html").exists()


def test_options_of_tables_that_are_not_used_are_not_of_a_sweep():
    later = {"dates", "na", "decimal", "rare", "repair_header", "auto"}
    assert later.isdisjoint(_deciding(Config(), ())["data"])
    used = _deciding(Config(data=DataConfig(auto=True, na=("default", "?"))), ())["data"]
    assert (used["auto"], used["na"]) == (True, ["default", "?"])
