"""Compiled code in the cache: private, checked before it is loaded, compiled again where it fails."""

import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dptrain.errors import DeviceError, OutputError
from dptrain.runtime import failure, signals
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.storage import cache, locks
from dptrain.runtime.storage.cache import compiled, own_folder

CODE = b"\x7fELF" + bytes(range(256)) * 4
NAME = "0123.so"


@pytest.fixture(autouse=True)
def _first_time(monkeypatch):
    monkeypatch.setattr(cache, "_not_kept", {})
    cache._warn.cache_clear()


class Maker:
    """Compiles by counting."""

    def __init__(self, content=CODE):
        self.content, self.calls = content, 0

    def __call__(self):
        self.calls += 1
        return self.content


def load(folder, make, name=NAME):
    """Return what would be loaded: what is at the path, which is what was checked."""
    with compiled(folder, name, make) as library:
        assert library.path.read_bytes() == library.content
        return library.content


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def folder(tmp_path):
    """A cache that holds one file."""
    load(tmp_path / "cache" / "native", Maker())
    return tmp_path / "cache" / "native"


def test_a_file_is_compiled_once(folder):
    second_maker = Maker()
    assert load(folder, second_maker) == CODE
    assert second_maker.calls == 0
    digest = (folder / f"{NAME}.sha256").read_text()
    assert digest == f"{hashlib.sha256(CODE).hexdigest()} {len(CODE)} {NAME}\n"
    assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.sha256", f"{NAME}.lock"}


def test_whatever_the_umask_the_cache_is_this_users_alone(tmp_path):
    before = os.umask(0)
    try:
        load(tmp_path / "a" / "native", Maker())
    finally:
        os.umask(before)
    assert {mode(tmp_path / "a"), mode(tmp_path / "a" / "native")} == {0o700}
    assert mode(tmp_path / "a" / "native" / NAME) == 0o600
    second_maker = Maker()
    load(tmp_path / "a" / "native", second_maker)
    assert second_maker.calls == 0


def flip(path):
    content = bytearray(path.read_bytes())
    content[700] ^= 4
    path.write_bytes(content)


def larger_than_memory(path):
    os.truncate(path, 1 << 42)


def link_to_another(path):
    path.rename(path.with_name("other.so"))
    path.symlink_to("other.so")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def of_another_name(path):
    """Two files that somebody has exchanged, with their checksums."""
    load(path.parent, Maker(b"other"), "other.so")
    for ending in ("", ".sha256"):
        os.replace(path.with_name(f"other.so{ending}"), f"{path}{ending}")


DAMAGES = {
    "truncated": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "one bit": flip,
    "larger than memory": larger_than_memory,
    "writable by others": lambda path: path.chmod(0o666),
    "unreadable": lambda path: path.chmod(0),
    "a link": link_to_another,
    "a named pipe": pipe,
    "another file's name": of_another_name,
    "no checksum": lambda path: Path(f"{path}.sha256").unlink(),
    "checksum of something else": lambda path: Path(f"{path}.sha256").write_text("0" * 64 + f" {len(CODE)} {NAME}\n"),
    "checksum that is no text": lambda path: Path(f"{path}.sha256").write_bytes(b"\xff" * 2000),
    "empty checksum": lambda path: os.truncate(f"{path}.sha256", 0),
    "endless checksum": lambda path: os.truncate(f"{path}.sha256", 1 << 42),
    "checksum through a pipe": lambda path: pipe(Path(f"{path}.sha256")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_damaged_or_may_be_forged_is_compiled_again_silently(folder, damage, capfd):
    damage(folder / NAME)
    second_maker = Maker()
    assert load(folder, second_maker) == CODE
    may_read = damage is DAMAGES["unreadable"] and os.geteuid() == 0  # root reads it, and it is what was written
    assert second_maker.calls == (0 if may_read else 1)
    assert load(folder, second_maker) == CODE
    assert second_maker.calls <= 1, "it is good again"
    assert capfd.readouterr().err == ""


def test_debug_says_what_was_wrong(folder, capfd, monkeypatch):
    monkeypatch.setattr(failure, "show_traceback", True)
    flip(folder / NAME)
    load(folder, Maker())
    expected = f"dptrain: {folder}/{NAME}: its {len(CODE)} bytes do not match their checksum; compiled again\n"
    assert capfd.readouterr().err == expected


def test_an_own_folder_that_others_may_write_to_is_closed_to_them(folder):
    folder.chmod(0o777)
    second_maker = Maker()
    load(folder, second_maker)
    assert (mode(folder), second_maker.calls) == (0o700, 0)


def test_another_users_folder_is_not_used(folder, monkeypatch, capfd):
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    second_maker = Maker()
    assert load(folder, second_maker) == CODE
    assert load(folder, second_maker) == CODE
    assert second_maker.calls == 1, "once a process"
    assert capfd.readouterr().err == (
        f"dptrain: warning: {folder}: cannot cache compiled code there (the folder belongs to another user); "
        "each process compiles its own; set DPTRAIN_CACHE to a folder that you own\n"
    )
    assert {path: path.read_bytes() for path in folder.iterdir()} == contents


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
@pytest.mark.parametrize("which", [".", NAME, f"{NAME}.sha256"])
def test_what_truly_is_another_users_is_not_loaded(folder, which):
    os.chown(folder / which, 12345, -1)
    second_maker = Maker(b"compiled anew")
    assert load(folder, second_maker) == b"compiled anew"
    assert second_maker.calls == 1


def test_a_folder_through_a_link_is_not_written_to(tmp_path, capfd):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "native").symlink_to("elsewhere")
    assert load(tmp_path / "native", Maker()) == CODE
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "cannot cache compiled code there (Not a directory)" in capfd.readouterr().err


def test_a_lock_that_is_a_pipe_or_a_link(folder, capfd):
    """A pipe can be locked; through a link nothing is opened."""
    (folder / NAME).unlink()
    pipe(folder / f"{NAME}.lock")
    assert load(folder, Maker()) == CODE
    assert capfd.readouterr().err == ""
    (folder / NAME).unlink()
    (folder / f"{NAME}.lock").unlink()
    (folder / f"{NAME}.lock").symlink_to("elsewhere")
    assert load(folder, Maker()) == CODE
    assert not (folder / "elsewhere").exists()
    assert "cannot cache compiled code there (Too many levels of symbolic links)" in capfd.readouterr().err


def test_what_is_moved_away_meanwhile_is_not_loaded_from_its_name(folder, tmp_path):
    """The folder stays the one that was checked."""
    with compiled(folder, NAME, Maker()) as library:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / NAME).write_bytes(b"forged")
        assert library.path.read_bytes() == CODE


@pytest.mark.parametrize("name", ["file", os.fsdecode(b"file \xff")])
def test_a_standard_error_that_was_closed_at_start(tmp_path, name):
    """Nor does a path that is no UTF-8 keep the warning from being written."""
    (tmp_path / name).write_text("")
    program = f"""
import pathlib
from dptrain.runtime import failure
from dptrain.runtime.storage.cache import compiled
failure.show_traceback = True
for folder in (pathlib.Path({str(tmp_path / name)!r}), pathlib.Path({str(tmp_path / "cache")!r})):
    for _ in range(2):
        with compiled(folder, "name", lambda: b"made") as found:
            print(found.content.decode())
        if folder.is_dir():
            (folder / "name").write_bytes(b"damaged")
"""
    for closed in ("2>&-", ""):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
        process = subprocess.run(command, check=False, capture_output=True)
        assert (process.returncode, process.stdout) == (0, b"made\n" * 4)
    assert b"cannot cache compiled code there" in process.stderr
    assert b"compiled again" in process.stderr


def test_a_full_disk(folder, monkeypatch, capfd):
    (folder / NAME).unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_put", full)
        assert load(folder, Maker()) == CODE
        assert "cannot cache compiled code there (No space left on device)" in capfd.readouterr().err
        patch.setattr(cache, "write_new", full)
        with pytest.raises(
            OutputError, match=r"compiled code cannot be written to .* either \(No space left on device\)"
        ):
            load(folder, Maker())
    with pytest.raises(DeviceError, match=r"0123\.so: cannot be compiled: .*No space left on device"):
        load(folder, full)


def test_a_killed_writers_rest_is_overwritten(folder):
    (folder / NAME).unlink()
    (folder / f".{NAME}.part").write_bytes(b"half")
    assert load(folder, Maker()) == CODE
    assert not (folder / f".{NAME}.part").exists()


def test_a_file_reaches_the_disk_before_its_name_does(folder, monkeypatch):
    (folder / NAME).unlink()
    calls, synced, replaced = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (calls.append(os.readlink(f"/proc/self/fd/{handle}")), synced(handle))
    )
    monkeypatch.setattr(os, "replace", lambda source, other: (calls.append(Path(other).name), replaced(source, other)))
    load(folder, Maker())
    for name in (NAME, f"{NAME}.sha256"):
        at = calls.index(name)
        assert calls[at - 1] == str(folder / f".{name}.part")
        assert calls[at + 1] == str(folder)


def test_of_several_that_find_damage_one_compiles(folder):
    flip(folder / NAME)
    started, slow = threading.Barrier(3), Maker()

    def make():
        time.sleep(0.05)
        return slow()

    def start(_):
        started.wait()
        return load(folder, make)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(start, range(3))) == [CODE] * 3
    assert slow.calls == 1


@pytest.mark.parametrize("purpose", ["", "the train step for batches of 128 rows"])
def test_a_process_that_compiles_for_too_long(folder, monkeypatch, capfd, purpose):
    from filelock import FileLock

    (folder / NAME).unlink()
    monkeypatch.setattr(cache, "PATIENCE", 0.01)
    with FileLock(folder / f"{NAME}.lock"), cache.compiling(purpose):
        assert load(folder, Maker()) == CODE
    errors = capfd.readouterr().err
    does = f"process {os.getpid()}, which compiles {purpose or NAME}, has not ended within 0.01 s"
    assert f"cannot cache compiled code there ({does})" in errors


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, signals.SignalledError), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_does_not_wait_for_another_process(folder, number, error):
    from filelock import FileLock

    (folder / NAME).unlink()
    began = time.monotonic()
    with FileLock(folder / f"{NAME}.lock"), signals.catching():
        threading.Timer(0.3, signal.raise_signal, [number]).start()
        with pytest.raises(error):
            load(folder, Maker())
    assert time.monotonic() - began < 5


HOLDS = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_process_that_is_stopped_while_it_compiles_holds_nobody_up(folder, monkeypatch, capfd):
    (folder / NAME).unlink()
    monkeypatch.setattr(locks, "NOTICE", 0.05)
    reported = threading.Event()
    monkeypatch.setattr(locks, "write_error", lambda text: (write_error(text), reported.set()))
    command = [sys.executable, "-c", HOLDS, str(folder / f"{NAME}.lock")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
        ThreadPoolExecutor() as pool,
    ):
        try:
            holder.stdout.readline()
            waiting = pool.submit(load, folder, Maker())
            assert reported.wait(20)
            assert not waiting.done()
            holder.send_signal(signal.SIGSTOP)
            assert waiting.result(20) == CODE
        finally:
            holder.kill()
    errors = capfd.readouterr().err
    assert errors.startswith(f"dptrain: waiting for process {holder.pid}, which compiles {NAME}\ndptrain: warning: ")
    assert (
        f"cannot cache compiled code there (process {holder.pid}, which compiles {NAME}, is stopped); each process"
        in errors
    )


def test_data_may_stay_readable(tmp_path):
    tmp_path.chmod(0o777)
    with own_folder(tmp_path, 0o022) as place:
        assert place.samefile(tmp_path)
    assert mode(tmp_path) == 0o755
