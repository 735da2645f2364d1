"""Whoever works in a directory is alone there, and is told of in letters."""

import os
import subprocess
import sys

import pytest

from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage import locks
from dptrain.runtime.storage.locks import locked

TAKE = """
import sys
from pathlib import Path
from dptrain.errors import OutputError
from dptrain.runtime.storage.locks import locked
print("ready", flush=True)
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1]), "training", "x"):
        print("in", flush=True)
        sys.stdin.readline()
except OutputError as error:
    print("out", flush=True)
"""


def test_of_jobs_that_start_together_one_works(tmp_path):
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    assert sorted(job.stdout.readline() for job in jobs) == ["in\n", "out\n", "out\n"]
    for job in jobs:
        job.communicate("\n", timeout=90)


@pytest.mark.parametrize("name", ["lock", "holder"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_and_its_holder_are_files(tmp_path, name, kind):
    canary, folder = tmp_path / "canary", tmp_path / "folder"
    canary.write_bytes(b"alive")
    folder.mkdir()
    (folder / name).symlink_to(canary) if kind == "link" else os.mkfifo(folder / name)
    with pytest.raises(DataError, match=f"{name}: it is a .*, expected a regular file"), locked(folder, "sweep", "x"):
        pass
    assert canary.read_bytes() == b"alive"


@pytest.mark.parametrize("text", [b"\x1b]0;title\x07", b"\xff", b"x" * 5000])
def test_what_the_holder_says_is_no_code_for_the_terminal(tmp_path, monkeypatch, text):
    monkeypatch.setattr(locks, "_PATIENCE", 0.01)
    with locked(tmp_path, "sweep", "wait"):
        (tmp_path / "holder").write_bytes(text)
        with pytest.raises(OutputError, match="another sweep is using it") as caught, locked(tmp_path, "sweep", "wait"):
            pass
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
