"""`get_file`: from this machine, from the cache, and with a clear word where it is in neither."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from dptrain.errors import ConfigError, DataError
from dptrain.utils import get_file

CONTENT = b"1,2,3\n"
SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "there" / "a b.csv"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("checksum", [{}, {"file_hash": SHA256}, {"md5_hash": MD5}, {"file_hash": MD5.upper()}])
def test_a_file_of_this_machine_is_copied_once(source, tmp_path, checksum):
    for origin in (source, source.as_uri()):
        path = get_file(origin=origin, cache_dir=tmp_path, **checksum)
        assert path == str(tmp_path / "datasets" / "a b.csv")
    source.unlink()
    assert Path(get_file("a b.csv", "https://example.org/x", cache_dir=tmp_path, **checksum)).read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["a b.csv"]


def test_the_cache_is_keras(source, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    assert get_file("x.csv", source, cache_subdir="own") == str(tmp_path / "home" / "own" / "x.csv")


def test_what_is_nowhere_or_another_file(source, tmp_path):
    with pytest.raises(
        DataError, match=r"x\.csv does not exist, and dptrain does not download https://a\.org/x\.csv: put"
    ):
        get_file(origin="https://a.org/x.csv?raw=1".partition("?")[0], cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"the sha256 of .* is not 0000"):
        get_file(origin=source, file_hash="0" * 64, cache_dir=tmp_path)
    assert not (tmp_path / "datasets").exists()
    get_file("x.csv", source, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"the md5 of .*x\.csv is not 0000"):
        get_file(origin="https://a.org/x.csv", file_hash="0" * 32, cache_dir=tmp_path)
    with pytest.raises(DataError, match="is not a file on this machine"):
        get_file(origin=tmp_path / "none", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="Paths aren't accepted"):
        get_file("../x", source, cache_dir=tmp_path)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_are_unpacked_beside_themselves(tmp_path, kind):
    archive = tmp_path / f"pack.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("a/b.txt", CONTENT)
    else:
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo("a/b.txt")
            member.size = len(CONTENT)
            tar.addfile(member, io.BytesIO(CONTENT))
    for names, folder, kept in (
        ({}, f"pack.{kind}", f"pack.{kind}_archive"),
        ({"fname": f"own.{kind}.x"}, "own_extracted", f"own.{kind}.x"),
        ({"fname": "own"}, "own", "own_archive"),
    ):
        for how in (
            {"extract": True},
            {"extract": True, "archive_format": kind},
            *([{"untar": True}] * (kind == "tar")),
        ):
            assert get_file(origin=archive, cache_dir=tmp_path, **names, **how) == str(tmp_path / "datasets" / folder)
        assert (tmp_path / "datasets" / folder / "a" / "b.txt").read_bytes() == CONTENT
        assert (tmp_path / "datasets" / kept).read_bytes() == archive.read_bytes()
    if kind == "zip":
        with pytest.raises(DataError, match="is not an archive"):
            get_file("other", archive, untar=True, cache_dir=tmp_path)


def test_an_archive_that_leaves_its_folder_is_refused(tmp_path):
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("../../evil.txt")
        member.size = len(CONTENT)
        tar.addfile(member, io.BytesIO(CONTENT))
    for how in ("extract", "untar"):
        with pytest.raises(DataError, match="evil"):
            get_file(origin=archive, cache_dir=tmp_path / "cache", **{how: True})
    assert not list(tmp_path.rglob("evil.txt"))
