"""The wall clock may jump: it dates what is written, and no wait or duration reads it."""

import itertools
import json
import re
import time

import pytest

from dptrain.cli.main import main
from tests.conftest import ROOT


@pytest.mark.parametrize("jump", [-3600.0, 86400.0])
def test_a_clock_that_jumps_changes_no_duration(small_npz, tmp_path, monkeypatch, jump):
    now = itertools.count(1.8e9, jump)
    monkeypatch.setattr(time, "time", lambda: next(now))
    out = tmp_path / "run"
    assert main(["--data", str(small_npz), "--epochs", "1", "--out", str(out), "--verbose", "0"]) == 0
    assert 0 < json.loads((out / "summary.json").read_text())["seconds"] < 60
    assert all(0 <= json.loads(line)["seconds"] < 60 for line in (out / "metrics.jsonl").read_text().splitlines())


def test_only_what_is_dated_reads_the_wall_clock():
    readers = {
        str(path.relative_to(ROOT / "dptrain"))
        for path in (ROOT / "dptrain").rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|\bfrom time import .*\btime\b|\.now\(", path.read_text())
    }
    dated = {
        "callbacks/metrics_file.py",
        "callbacks/mlflow_callback.py",
        "callbacks/tensorboard.py",
        "cli/run_directory.py",
        "cli/commands/train.py",
        "cli/server/log.py",
        "runtime/launch/supervisor.py",
    }
    # Others' files have the wall clock's times, after which what a killed process left is removed.
    assert readers == {*dated, "runtime/storage/locks.py", "data/shards/cache.py"}
