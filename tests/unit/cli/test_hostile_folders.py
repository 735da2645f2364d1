"""Folders given as --out in which somebody else has put something: one line, an exit code, and nothing trained."""

import os

import pytest

from dptrain.cli.main import main
from dptrain.models.fitting import Fitting


@pytest.fixture
def start(small_npz, tmp_path, capfd, monkeypatch):
    """Return what starts a training in a folder; it returns the exit code and the line that it ends with."""

    def never(*arguments, **options):
        pytest.fail("it trains")

    def start():
        fixed = ("--data", str(small_npz), "--batch-size", "256", "--hidden", "4", "--epochs", "1", "--verbose", "0")
        code = main([*fixed, "--out", str(tmp_path / "out")])
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("dptrain: ")
        return code, line

    monkeypatch.setattr(Fitting, "_fit_in_steps", never)
    (tmp_path / "out").mkdir()
    return start


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "holder", "checkpoints"])
def test_pipes_and_links_end_a_training_with_65(start, tmp_path, name):
    path, canary = tmp_path / "out" / name, tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_bytes(b"alive")
    for create in (os.mkfifo, lambda path: path.symlink_to(canary), lambda path: path.symlink_to(canary / "file")):
        create(path)
        code, line = start()
        assert code == 65
        assert "expected a" in line
        path.unlink()
    assert (canary / "file").read_bytes() == b"alive"


def test_a_stray_file_is_found_before_anything_is_trained(start, tmp_path):
    (tmp_path / "out" / "metrics.jsonl").write_text("mine\n")
    assert start()[0] == 74
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "mine\n"
