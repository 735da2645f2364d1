"""`get_file`: from this machine, from the cache, and with a clear word where it is in neither."""

import contextlib
import errno
import gzip
import hashlib
import io
import shutil
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.failure import describe, exit_code_of
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


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(*members: tarfile.TarInfo, mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)) if member.isfile() else None)
    return stream.getvalue()


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def zip_link() -> bytes:
    stream = io.BytesIO()
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(info, "/etc")
    return stream.getvalue()


def pax_header(size: int) -> bytes:
    """Return the start of a pax header that declares its own length."""
    return member("pax", size, tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT)


def patched(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new)


STORED = zipped(("a.txt", CONTENT), method=zipfile.ZIP_STORED)
TWO = tarred(member("a", 2000), member("b", 2000), mode="w:")
LONG = 40_000_000
HOSTILE: dict[str, Callable[[], bytes]] = {
    "zip: checksum": lambda: patched(STORED, CONTENT, b"1,2,4\n"),
    "zip: unknown compression": lambda: patched(
        patched(STORED, b"PK\3\4\x14\0\0\0\0\0", b"PK\3\4\x14\0\0\0\x61\0"),
        b"PK\1\2\x14\3\x14\0\0\0\0\0",
        b"PK\1\2\x14\3\x14\0\0\0\x61\0",
    ),
    "zip: encrypted": lambda: patched(
        patched(STORED, b"PK\3\4\x14\0\0\0", b"PK\3\4\x14\0\1\0"),
        b"PK\1\2\x14\3\x14\0\0\0",
        b"PK\1\2\x14\3\x14\0\1\0",
    ),
    "zip: ..": lambda: zipped(("a", b""), ("b/../../evil.txt", CONTENT)),
    "zip: link": zip_link,
    "zip: below a file": lambda: zipped(("a", CONTENT), ("a/b", CONTENT)),
    "zip: name": lambda: zipped(("n" * 300, CONTENT)),
    "zip: bomb": lambda: zipped(("a", bytes(LONG))),
    "zip: cut": lambda: zipped(("a", CONTENT))[:-30],
    "tar: cut in a member": lambda: TWO[:1500],
    "tar: cut in a header": lambda: TWO[: 512 + 2048 + 100],
    "tar: cut between members": lambda: TWO[: 512 + 2048],
    "tar: second header": lambda: TWO[: 512 + 2048] + b"x" + TWO[512 + 2049 :],
    "tar.gz: cut": lambda: tarred(member("a", 100_000))[:-30],
    "tar.gz: checksum": lambda: tarred(member("a", 5000))[:-8] + bytes(8),
    "tar.xz: cut": lambda: tarred(member("a", 5000), mode="w:xz")[:-20],
    "tar.bz2: cut": lambda: tarred(member("a", 5000), mode="w:bz2")[:-20],
    "tar: ..": lambda: tarred(member("a"), member("../evil.txt", 4)),
    "tar: link": lambda: tarred(member("link", kind=tarfile.SYMTYPE, link="/etc"), member("link/evil.txt")),
    "tar: hard link": lambda: tarred(member("link", kind=tarfile.LNKTYPE, link="../../there/pack")),
    "tar: device": lambda: tarred(member("null", kind=tarfile.CHRTYPE)),
    "tar: bomb": lambda: tarred(member("a", LONG // 2), member("b", LONG // 2)),
    "tar: bomb behind the end": lambda: gzip.compress(tarred(member("a"), mode="w:") + bytes(LONG)),
    "tar: header of many bytes": lambda: gzip.compress(pax_header(LONG) + bytes(LONG)),
    "neither": lambda: b"<html>",
    "empty": lambda: b"",
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_archive_is_one_line_and_leaves_nothing(tmp_path: Path, fault: str):
    archive, cache = tmp_path / "there" / "pack", tmp_path / "cache"
    archive.parent.mkdir()
    archive.write_bytes(HOSTILE[fault]())
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            get_file("pack", archive, extract=True, cache_dir=cache, max_bytes=LONG // 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert exit_code_of(caught.value) == 65
    line = describe(caught.value)
    assert "pack" in line
    assert "\n" not in line
    assert len(line) < 400
    assert ("max_bytes = 20.0 MB" in line) == ("bomb" in fault)
    assert peak < LONG // 4
    assert list((cache / "datasets").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"there", "cache"}
    archive.write_bytes(zipped(("good", CONTENT)))  # which is looked at, for nothing is kept of the other
    assert (Path(get_file("pack", archive, extract=True, cache_dir=cache)) / "good").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [zipped(("a/b", CONTENT)), tarred(member("a", 600)), TWO], ids=["zip", "gz", "tar"])
def test_any_changed_byte_is_a_clear_error_or_another_archive(tmp_path: Path, content: bytes):
    archive, cache = tmp_path / "pack", tmp_path / "cache"
    for at in range(0, len(content), 1 if len(content) < 1000 else 37):
        archive.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with contextlib.suppress(DataError):
            get_file("pack", archive, extract=True, cache_dir=cache, force_download=True)
        shutil.rmtree(cache, ignore_errors=True)
        assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_absolute_names_are_those_in_the_folder(tmp_path: Path):
    for kind, content in (("zip", zipped(("/etc/a", CONTENT))), ("tar", tarred(member("/etc/a", 3)))):
        (tmp_path / kind).write_bytes(content)
        folder = Path(get_file(origin=tmp_path / kind, extract=True, cache_dir=tmp_path / "cache"))
        assert (folder / "etc" / "a").is_file()


def test_what_has_the_place_of_a_file_or_folder_stays(tmp_path: Path, source: Path):
    cache = tmp_path / "datasets"
    (cache / "x.csv").mkdir(parents=True)
    (cache / "own").write_text("mine")
    source.with_name("pack").write_bytes(zipped(("a", CONTENT)))
    for work in (
        lambda: get_file("x.csv", source, cache_dir=tmp_path),
        lambda: get_file("own", source.with_name("pack"), extract=True, cache_dir=tmp_path),
    ):
        with pytest.raises(OutputError, match=r"datasets/(x\.csv|own): .* directory; set cache_dir") as caught:
            work()
        assert exit_code_of(caught.value) == 74
    assert (cache / "x.csv").is_dir()
    assert (cache / "own").read_text() == "mine"
    assert sorted(path.name for path in cache.iterdir()) == ["own", "own_archive", "x.csv"]


@pytest.mark.parametrize("call", ["copyfile", "extract"])
def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch, source: Path, call: str):
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    archive = source.with_name("pack")
    archive.write_bytes(tarred(member("a", 600)))
    monkeypatch.setattr(*(shutil, "copyfile") if call == "copyfile" else (tarfile.TarFile, "extract"), full)
    with pytest.raises(
        OutputError, match=r"No space left on device \(needs [1-9][0-9]* bytes, [0-9]+ free\); "
    ) as caught:
        get_file("pack", archive, extract=True, cache_dir=tmp_path / "cache")
    assert exit_code_of(caught.value) == 74
    assert {path.name for path in (tmp_path / "cache" / "datasets").iterdir()} <= {"pack_archive"}


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\0b", "n" * 300])
def test_a_name_that_cannot_be(tmp_path: Path, source: Path, name: str):
    with pytest.raises(OutputError if name[0] == "n" else ConfigError):
        get_file(name, source, cache_dir=tmp_path / "cache")
    with pytest.raises((ConfigError, DataError)):
        get_file("x", "http://[" if name == "." else tmp_path / name, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.csv"))


# What a call changes between two others, and whether the file there is then looked at again.
CHANGES = {
    "nothing": {},
    "checksum": {"file_hash": None},  # of the file that is there
    "anew": {"force_download": True},
    "name": {"fname": "another.zip"},
    "folder": {"cache_subdir": "elsewhere"},
}


@pytest.mark.parametrize("extract", [False, True])
@pytest.mark.parametrize("fname", ["data.zip", "data", None])
@pytest.mark.parametrize("changed", CHANGES)
def test_a_second_call_returns_what_it_would_of_an_empty_cache(tmp_path, changed, fname, extract):
    """But for a file that is kept as it was, where neither a checksum nor `force_download` asks for the new one."""
    source = tmp_path / "source" / "archive.zip"
    source.parent.mkdir()

    def contents(text: str, cache: str, **options) -> list[tuple[str, bytes]]:
        with zipfile.ZipFile(source, "w") as archive:
            for name in ("a.txt", f"{text}.txt"):
                archive.writestr(name, text)
        if "file_hash" in options:
            options["file_hash"] = hashlib.sha256(source.read_bytes()).hexdigest()
        path = Path(
            get_file(**{"fname": fname, "extract": extract, "cache_dir": tmp_path / cache, "origin": source} | options)
        )
        return sorted((file.name, file.read_bytes()) for file in ([path] if path.is_file() else path.iterdir()))

    first, second = contents("old", "used"), contents("new", "used", **CHANGES[changed])
    fresh = contents("new", "fresh", **CHANGES[changed])
    assert first != fresh
    assert second == (first if changed == "nothing" else fresh)
