"""Reading only what has an end."""

import os
import socket

import pytest

from dptrain.runtime.files import open_regular


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
