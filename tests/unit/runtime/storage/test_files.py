"""Reading only what has an end, writing nowhere but in a folder, and what killed writers leave."""

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage import files
from dptrain.runtime.storage.files import (
    FILE,
    FOLDER,
    is_plain_name,
    open_directory,
    open_regular,
    replacing_locked,
    sweep_temporaries,
    write_atomically,
    write_through_links,
)

DEAD = 2**22 + 1  # above the highest PID that Linux gives


@pytest.fixture
def canary(tmp_path) -> Path:
    """A file beside the folder, to which everything in it points."""
    path = tmp_path / "canary"
    path.write_bytes(b"alive")
    return path


@pytest.fixture
def folder(tmp_path, canary):
    """A folder with an entry of each kind."""
    place = tmp_path / "folder"
    (place / "real").mkdir(parents=True)
    (place / "file").write_bytes(b"abc")
    (place / "link").symlink_to(canary)
    (place / "link to a folder").symlink_to(tmp_path)
    os.mkfifo(place / "pipe")
    os.link(canary, place / "second name")
    with open_directory(place) as opened:
        yield opened


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
    kinds = {"pipe": "a named pipe", "link": "a named pipe", "socket": "a socket"}
    for name, kind in kinds.items():
        with pytest.raises(OSError, match=f"it is {kind}, expected a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="a character device"):
        open_regular("/dev/zero")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_pipe_that_takes_the_place_of_a_file_holds_nobody_up(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    file = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda *_, **__: file)  # what was there a moment before
    with pytest.raises(OSError, match="it is a named pipe"):
        open_regular(tmp_path / "pipe")
    with open_directory(tmp_path) as folder, pytest.raises(DataError, match="pipe: it is a named pipe"):
        folder.open("pipe")


def test_a_directory_knows_what_is_in_it(folder):
    assert {name: folder.kind(name) for name in folder.names()} == {
        "file": FILE,
        "link": "a link",
        "link to a folder": "a link",
        "pipe": "a named pipe",
        "real": FOLDER,
        "second name": FILE,
    }
    assert folder.kind("none") is None


@pytest.mark.parametrize("name", ["link", "pipe", "real", "link to a folder"])
def test_nothing_but_a_regular_file_is_read_written_or_removed(folder, name, canary):
    actions = [
        lambda: folder.read(name, 9),
        lambda: folder.append(name, b"x"),
        lambda: folder.replace(name, [b"x"]),
        lambda: folder.create(name, [b"x"]),
        lambda: folder.remove(name),
    ]
    before = folder.names()
    for act in actions:
        with pytest.raises(DataError, match=f"{name}: it is a .*, expected a regular file"):
            act()
    assert folder.names() == before
    assert canary.read_bytes() == b"alive"


@pytest.mark.parametrize("name", ["link", "pipe", "file", "link to a folder"])
def test_nothing_but_a_folder_is_one(folder, name):
    for act in (lambda: folder.folder(name, make=True), lambda: folder.remove_folder(name)):
        with pytest.raises(DataError, match=f"{name}: it is .*, expected a folder"):
            act()


def test_a_file_with_a_second_name_is_not_appended_to_but_may_be_replaced(folder, canary):
    with pytest.raises(DataError, match="second name: the file has a second name"):
        folder.append("second name", b"x")
    folder.replace("second name", [b"x"])
    assert folder.read("second name", 9) == b"x"
    assert canary.read_bytes() == b"alive"


def test_files_are_made_appended_to_replaced_and_removed(folder):
    with folder.folder("new", make=True) as new:
        new.create("a", [b"1", memoryview(b"23")])
        new.append("a", b"4")
        assert new.read("a", 4) == b"1234"
        new.replace("a", [b"5"])
        new.rename("a", "b")
        assert (new.names(), new.read("b", 1)) == (["b"], b"5")
        new.remove("b")
        new.remove("b")
    folder.remove_folder("new")
    assert folder.kind("new") is None


def test_no_more_is_read_than_was_asked_for(folder):
    assert folder.read("file", 3) == b"abc"
    with pytest.raises(DataError, match="file: 3 bytes, expected at most 2"):
        folder.read("file", 2)
    os.truncate(folder.path / "file", 1 << 40)  # sparse
    with pytest.raises(DataError, match=f"{1 << 40} bytes, expected at most 9"):
        folder.read("file", 9)


def test_a_folder_stays_what_it_was_when_its_path_becomes_another(folder, tmp_path):
    folder.path.rename(tmp_path / "moved")
    (tmp_path / "folder").symlink_to("/etc")
    folder.create("mine", [b"x"])
    assert (tmp_path / "moved" / "mine").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["", ".", "..", "../canary", "/etc/hostname", "a/b", "a\0b"])
def test_a_name_is_plain(folder, name):
    for act in (folder.open, folder.remove, folder.folder, lambda name: folder.rename("file", name)):
        with pytest.raises(DataError, match="is not the name of a file in it"):
            act(name)


@given(st.text(alphabet="a./\0", max_size=4))
def test_only_plain_names_stay_in_their_folder(name):
    # As pathlib takes them: one part, which is no step.
    assert is_plain_name(name) == (Path("x", name).parts == ("x", name) and name != ".." and "\0" not in name)


def test_errors_of_the_system_tell_the_whole_path(folder):
    with pytest.raises(FileNotFoundError) as caught:
        folder.read("none", 1)
    assert caught.value.filename == str(folder.path / "none")


def test_what_killed_writers_left_is_swept_and_the_files_of_living_ones_stay(tmp_path):
    pid, tail = os.getpid(), "-0123456789abcdef"
    remaining = {f".a[1].{pid}{tail}.tmp", f".a[1].{pid}.tmp", ".hidden.tmp", "a[1]", ".a[1].9-zz.tmp", ".notes.txt"}
    for name in {*remaining, f".a[1].{DEAD}.tmp", f".a[1].{DEAD}{tail}.tmp", f".b.{DEAD}.tmp"}:
        (tmp_path / name).write_bytes(b"")
    sweep_temporaries(tmp_path, "a[1]")
    assert {path.name for path in tmp_path.iterdir()} == {*remaining, f".b.{DEAD}.tmp"}
    sweep_temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == remaining


def test_what_only_looks_like_a_temporary_file_is_left_alone(tmp_path, canary, monkeypatch):
    place = tmp_path / "folder"
    (place / f".a.{DEAD}.tmp").mkdir(parents=True)
    (place / f".b.{DEAD}.tmp").symlink_to(canary)
    os.mkfifo(place / f".c.{DEAD}.tmp")
    (place / f".d.{'9' * 30}.tmp").write_bytes(b"")  # no number of a process
    before = sorted(place.iterdir())
    sweep_temporaries(place)
    assert sorted(place.iterdir()) == before
    (place / f".e.{DEAD}.tmp").write_bytes(b"")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # it is another user's
    sweep_temporaries(place)
    assert (place / f".e.{DEAD}.tmp").exists()


def test_a_temporary_name_cannot_be_guessed(tmp_path, monkeypatch):
    names = []
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new, **more: names.append(old) or real(old, new, **more))
    for _ in range(2):
        write_atomically(tmp_path / "file", b"x")
    assert names[0] != names[1]
    assert all(name.startswith(f".file.{os.getpid()}-") for name in names)


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path, canary):
    (tmp_path / "link").symlink_to(canary)
    write_atomically(tmp_path / "link", b"x")
    assert not (tmp_path / "link").is_symlink()
    assert canary.read_bytes() == b"alive"


@pytest.mark.parametrize(("forbidden", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_a_file_of_a_locked_folder_is_replaced_past_what_a_killed_writer_left(tmp_path, canary, forbidden, mode):
    path, part = tmp_path / "file", tmp_path / "part"
    part.symlink_to(canary)
    before = os.umask(0)
    try:
        with replacing_locked(path, part, forbidden) as given:
            given.write_bytes(b"new")
    finally:
        os.umask(before)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", mode)

    def write_half():
        with replacing_locked(path, part, forbidden) as given:
            given.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert (path.read_bytes(), canary.read_bytes(), part.exists()) == (b"new", b"alive", False)


def test_a_file_is_replaced_only_by_what_was_read_back(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"first")
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, bytes(len(content))))
    with pytest.raises(OutputError, match="file: it is not what was written there; is the disk failing"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_whichever_call_fails_the_old_file_stays(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"first")

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, fails)
    with pytest.raises(OutputError, match=r"file: No space left on device \(needs 6 bytes, \d+ free\); choose another"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_the_user_names_is_written_through_links(tmp_path, monkeypatch):
    for name, target in (("second", "folder/first"), ("folder/first", "real"), ("dangling", "folder/new")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    (tmp_path / "folder" / "real").write_bytes(b"old")
    write_through_links(tmp_path / "second", b"new")
    write_through_links(tmp_path / "dangling", b"made")
    write_through_links(tmp_path / "plain", b"plain")
    assert (tmp_path / "folder" / "real").read_bytes() == b"new"
    assert (tmp_path / "folder" / "new").read_bytes() == b"made"
    assert (tmp_path / "plain").read_bytes() == b"plain"
    assert all((tmp_path / name).is_symlink() for name in ("second", "folder/first", "dangling"))


def test_links_that_lead_to_no_file(tmp_path, canary, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "pipe").symlink_to("fifo")
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("loop", "Too many levels of symbolic links"), ("pipe", "it is a named pipe")):
        with pytest.raises(OutputError, match=f"{name}.*{message}"):
            write_through_links(tmp_path / name, b"x")
    (tmp_path / "foreign").symlink_to(canary)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=54321, st_mode=real(path).st_mode))
    write_through_links(tmp_path / "foreign", b"x")
    assert canary.read_bytes() == b"alive"
