"""Only a regular file of this user's that no one else may write is opened."""

import os

import pytest

from dptrain.runtime.storage.ownership import is_own, open_own


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"own")
    (tmp_path / "file").chmod(0o644)
    return tmp_path / "file"


def test_an_own_file_is_opened(path):
    handle = open_own(path)
    assert os.read(handle, 9) == b"own"
    os.close(handle)


def refused(path, before):
    with pytest.raises(OSError, match=r"only this user|symbolic links"):
        open_own(path)
    return set(os.listdir("/proc/self/fd")) == before  # nothing stays open


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_what_others_may_write_is_refused(path, mode):
    path.chmod(mode)
    assert refused(path, set(os.listdir("/proc/self/fd")))


def test_what_is_no_regular_file_is_refused(path):
    before = set(os.listdir("/proc/self/fd"))
    path.with_name("link").symlink_to(path)
    os.mkfifo(path.with_name("pipe"), 0o600)
    path.with_name("folder").mkdir(0o700)
    assert all(refused(path.with_name(name), before) for name in ("link", "pipe", "folder"))


def test_what_belongs_to_another_user_is_refused(path, monkeypatch):
    before, user = set(os.listdir("/proc/self/fd")), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not is_own(path.stat())
    assert refused(path, before)
