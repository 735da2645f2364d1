"""Reading only what has an end, and what killed writers leave."""

import os
import socket
from pathlib import Path

import pytest

from dptrain.errors import OutputError
from dptrain.runtime.files import open_regular, sweep_temporaries, write_atomically


def test_a_regular_file_is_opened_through_links_too(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"abc"


def test_what_is_no_regular_file_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("pipe")
    found = {"pipe": "a named pipe", "link": "a named pipe", "socket": "a socket"}
    for name, kind in found.items():
        with pytest.raises(OSError, match=f"it is {kind}, expected a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="a character device"):
        open_regular("/dev/zero")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_what_killed_writers_left_is_swept_and_the_files_of_living_ones_stay(tmp_path):
    dead, own = 2**22 + 1, os.getpid()  # above the highest PID that Linux gives
    kept = {f".a[1].{own}.tmp", ".hidden.tmp", "a[1]", ".notes.txt"}
    for name in {*kept, f".a[1].{dead}.tmp", f".b.{dead}.tmp"}:
        (tmp_path / name).write_bytes(b"")
    sweep_temporaries(tmp_path, "a[1]")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, f".b.{dead}.tmp"}
    sweep_temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_file_is_replaced_only_by_what_was_read_back(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"first")
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda self, content: write(self, content[:-1]))
    with pytest.raises(OutputError, match="file: it is not what was written there; is the disk failing"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
