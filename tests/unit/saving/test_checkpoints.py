"""Directories of checkpoints: whole or not there, whatever fails, is cut off or flips a bit."""

import errno
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage.files import Directory
from dptrain.saving import checkpoints, manifest
from dptrain.saving.checkpoints import CheckpointDirectory, Content, located, read
from dptrain.saving.manifest import sealed

ADVICE = "choose another --out"


def content(step: int) -> dict[str, bytes]:
    return {"a": f"arrays of {step}".encode() * 40, "b.json": f"{{{step}}}".encode()}


def halves(text: bytes) -> list[bytes | memoryview]:
    return [text[: len(text) // 2], memoryview(text)[len(text) // 2 :]]


def save(directory: CheckpointDirectory, step: int, value: float | None = None) -> Path:
    """Save and wait until it is there."""
    contents = {name: Content(functools.partial(halves, text)) for name, text in content(step).items()}
    path = directory.save(step, contents, value=value)
    directory.wait()
    return path


def save_together(path: Path, step: int) -> None:
    """Save as two ranks do, in turn: each writes a file, and rank 0 lets the checkpoint be there."""
    ranks = [opened(path, keep=1, leads=leads) for leads in (True, False)]
    temporary, name = ranks[0].begin(step)
    results, failures = [], []
    for rank, (file, text) in zip(ranks, content(step).items(), strict=True):
        try:
            rank.write(temporary, name, {file: Content(functools.partial(halves, text))})
            results.append(rank.written())
        except OutputError as error:
            failures.append(error)
    if failures:
        ranks[0].discard(temporary)
        raise failures[0]
    ranks[0].join(temporary, name, results, step, value=None, mesh={"batch": 2})
    ranks[0].wait()


def opened(path: Path, **options) -> CheckpointDirectory:
    return CheckpointDirectory(path, advice=ADVICE, **options)


def newest(path: Path) -> int | None:
    """Return the step of the newest good checkpoint, which is what was written, or None."""
    newest_step = checkpoints.newest(opened(path).candidates(), [])
    assert newest_step is None or dict(newest_step.files) == content(newest_step.manifest.step)
    return None if newest_step is None else newest_step.manifest.step


def names(path: Path) -> list[str]:
    return sorted(path.name for path in path.iterdir())


def test_the_last_ones_and_the_best_stay(tmp_path):
    directory = opened(tmp_path / "deep" / "er", keep=2)
    for step, value in enumerate([3.0, 1.0, float("nan"), 2.0, None], start=1):
        save(directory, 10 * step, value)
    assert names(directory.path) == ["000002-step-20", "000004-step-40", "000005-step-50"]
    assert newest(directory.path) == 50
    # The next process knows what is the best, and counts on.
    reopened = opened(directory.path, keep=1)
    save(reopened, 30, 1.5)
    assert names(directory.path) == ["000002-step-20", "000006-step-30"]
    assert newest(directory.path) == 30, "the last that was saved, not the highest step"
    reopened.delete()
    assert not directory.path.exists()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, 0.5, 1.0, 2.0, float("nan"), float("inf"), -float("inf")]), st.booleans()),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 3),
)
def test_of_any_values_the_last_ones_and_the_best_stay(tmp_path_factory, saves, keep):
    """Between some saves another process goes on."""
    path = tmp_path_factory.mktemp("checkpoints")
    directory, there = opened(path, keep=keep), {}
    for step, (value, is_another) in enumerate(saves, start=1):
        directory = opened(path, keep=keep) if is_another else directory
        save(directory, step, value)
        there[step] = value
        numbers = {old: each for old, each in there.items() if each is not None and not math.isnan(each)}
        best = min(numbers, key=lambda old: (numbers[old], old), default=None)
        there = {old: each for old, each in there.items() if old in [*list(there)[-keep:], best]}
        assert names(path) == [f"{old:06d}-step-{old}" for old in there], saves


def test_nothing_is_no_checkpoint(tmp_path):
    assert newest(tmp_path / "none") is None
    with pytest.raises(DataError, match="none: no such checkpoint"):
        located(tmp_path / "none")


def test_a_path_means_a_checkpoint_or_the_newest_of_a_directory_or_a_run(tmp_path):
    directory = opened(tmp_path / "run" / "checkpoints")
    first = save(directory, 1)
    second = save(directory, 2)
    assert located(first) == ([first], True)
    assert located(second) == ([second], True)
    for place in (directory.path, tmp_path / "run"):
        assert located(place) == ([second, first], False)
    (second / "a").write_bytes(b"")
    rejected = []
    assert checkpoints.newest([second, first], rejected).manifest.step == 1
    assert rejected == [f"{second}: damaged: a has 0 bytes, {len(content(2)['a'])} were written"]


@pytest.mark.parametrize("file", ["a", "b.json", "manifest.json"])
def test_no_flipped_bit_is_loaded(tmp_path, file):
    path = save(opened(tmp_path), 7)
    content = (path / file).read_bytes()
    for bit in range(0, 8 * len(content), 8 * len(content) // 200 or 1):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(damaged)
        with pytest.raises(DataError, match=r"step-7: "):
            read(path)
    for end in (0, 1, len(content) - 1):
        (path / file).write_bytes(content[:end])
        with pytest.raises(DataError):
            read(path)
    (path / file).unlink()
    with pytest.raises(DataError, match=rf"step-7: damaged: {re.escape(file)} is missing"):
        read(path)


def test_none_is_good(tmp_path):
    directory = opened(tmp_path)
    for step in (1, 2):
        (save(directory, step) / "a").unlink()
    message = (
        r"no checkpoint can be used: .*000002-step-2: damaged: a is missing; .*000001-step-1: damaged: a is missing"
    )
    with pytest.raises(DataError, match=message):
        newest(tmp_path)


def test_a_newer_schema_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_SCHEMA", 3)
        path = save(opened(tmp_path), 1)
    with pytest.raises(DataError, match=r"schema 3, this build reads 2$"):
        read(path)


def test_what_killed_saves_left_is_swept(tmp_path):
    save(opened(tmp_path), 1)
    left = tmp_path / ".000002-step-9.123.tmp"
    left.mkdir()
    (left / "a").write_bytes(b"half")
    (tmp_path / ".probe.7.tmp").write_bytes(b"")
    (tmp_path / "mine").write_bytes(b"")
    opened(tmp_path)
    assert names(tmp_path) == ["000001-step-1", "mine"]


def test_writing_does_not_hold_up_the_training(tmp_path):
    directory, go = opened(tmp_path), threading.Event()

    def slow() -> list[bytes]:
        assert go.wait(30)
        return [b"slow"]

    path = directory.save(1, {"a": Content(slow)})
    assert not path.exists()
    go.set()
    directory.wait()
    assert read(path).files == {"a": b"slow"}


def test_room_is_looked_for_before(tmp_path, monkeypatch):
    opened(tmp_path / "new").probe(1 << 20)
    assert names(tmp_path / "new") == []

    def full(handle, offset, length):
        assert length > 1 << 20
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"new: No space left on device \(needs 1114112 bytes, \d+ free\); choose"):
        opened(tmp_path / "new").probe(1 << 20)
    assert names(tmp_path / "new") == []


# Every call that changes something on the disk.
CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


class Disk:
    """Stands before the system's calls: counts, notes and fails them.

    Args:
        patch: puts it there.
        fails: the number of the call that fails, from 1; all after it fail as well if `for_good`.
    """

    def __init__(self, patch: pytest.MonkeyPatch, fails: int = 0, for_good: bool = False) -> None:
        self.count, self._fails, self._for_good = 0, fails, for_good
        # Of a trace: (call, path, content).
        self.trace: list[tuple[str, str, bytes]] = []
        self._paths: dict[int, str] = {}
        self._written: set[int] = set()
        for name in CALLS:
            patch.setattr(os, name, functools.partial(self._call, name, getattr(os, name)))

    def _path(self, name, folder: int | None) -> str:
        """Return the path of a file that may be named by its descriptor, or in an open folder."""
        if isinstance(name, int):
            return self._paths.get(name, "")
        return os.fspath(name) if folder is None else os.path.join(self._paths[folder], name)

    def _call(self, name, real, *arguments, **options):
        reads = name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY)
        counts = not reads and not (name == "close" and arguments[0] not in self._written)
        if counts:
            self.count += 1
            if self.count == self._fails or (self._for_good and self.count > self._fails > 0):
                if name == "close":
                    real(*arguments)
                raise OSError(errno.EIO if self.count % 2 else errno.ENOSPC, "a planted fault")
        if name == "write":  # as a disk may: not all at once
            arguments = (arguments[0], bytes(arguments[1][: max(1, len(arguments[1]) // 2)]))
        place = self._path(arguments[0], options.get("dir_fd", options.get("src_dir_fd")))
        detail = b""
        if name == "write":
            detail = arguments[1]
        elif name == "rename":
            detail = self._path(arguments[1], options.get("dst_dir_fd")).encode()
        result = None if name == "fsync" else real(*arguments, **options)  # which takes long, and nobody cuts the power
        if name == "open":
            self._paths[result] = place
            if not reads:
                self._written.add(result)
        if name == "rename":  # open folders go along
            self._paths = {
                descriptor: detail.decode() if path == place else path for descriptor, path in self._paths.items()
            }
        if name == "close":
            self._paths.pop(arguments[0], None)
            self._written.discard(arguments[0])
        if counts:
            self.trace.append((name, place, detail))
        return result


@pytest.mark.parametrize(("for_good", "alone"), [(False, True), (True, True), (False, False)])
def test_whichever_call_fails_nothing_that_was_saved_is_lost(tmp_path, for_good, alone):
    number = 0
    while True:
        number += 1
        path = tmp_path / str(number)
        directory = opened(path, keep=1)
        save(directory, 1)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, number, for_good)
            reported, message = 2, ""
            try:
                save(directory, 2) if alone else save_together(path, 2)
            except OutputError as error:
                reported, message = 1, str(error)
        last = r"the last good checkpoint is 00000\d-step-" if alone else ""
        assert reported == 2 or re.search(rf"planted.*; {last}", message), message
        assert newest(path) in ({1, 2} if reported == 1 else {2})
        assert not list(path.glob(".*")), "swept at the next start"
        if reported == 2 and disk.count < number:
            break
        shutil.rmtree(path)
    assert number > 15, "calls were counted"


def test_a_checkpoint_of_several_ranks_is_there_when_all_have_written(tmp_path):
    leader, other = opened(tmp_path), opened(tmp_path, leads=False)
    temporary, name = leader.begin(3)
    leader.write(temporary, name, {"a": Content(lambda: [b"of rank 0"])})
    written = leader.written()
    assert names(tmp_path) == [temporary]
    (tmp_path / temporary).rename(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"rank 0 created .* there, which this rank does not see; checkpoints of"):
        other.write(temporary, name, {})
    (tmp_path / "elsewhere").rename(tmp_path / temporary)
    other.write(temporary, name, {"b": Content(lambda: [b"of rank 1"])})
    leader.join(temporary, name, [written, other.written()], 3, value=None, mesh={"batch": 2})
    leader.wait()
    assert names(tmp_path) == [name] == ["000001-step-3"]
    assert read(tmp_path / name).files == {"a": b"of rank 0", "b": b"of rank 1"}


@pytest.mark.parametrize("code", [errno.EFBIG, errno.ENOSPC, errno.EIO])
def test_a_rank_that_cannot_write_leaves_what_the_others_write(tmp_path, monkeypatch, code):
    """Else they would fail as well, with an error that is none, and be blamed."""
    leader, other = opened(tmp_path), opened(tmp_path, leads=False)
    temporary, name = leader.begin(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        other.write(temporary, name, {"b": Content(lambda: [b"of rank 1"])})
        with pytest.raises(OutputError, match=os.strerror(code)):
            other.written()
    leader.write(temporary, name, {"a": Content(lambda: [b"of rank 0"])})
    leader.written()
    leader.discard(temporary)
    assert names(tmp_path) == []


class FailingDisk:
    """What was asked of a disk, and what of it would be there after its power has failed.

    Files are contents by an identity of their own, names are entries of directories. Content is only certain once its
    file was flushed, an entry once its directory was; entries of a directory that were not flushed go in any subset.

    Args:
        start: text of files by path, None of directories.
    """

    def __init__(self, start: dict) -> None:
        self.contents: dict[int, tuple[bytes, bytes]] = {}  # by identity: flushed, written
        self.tree: dict[str, object] = {}  # what was asked for: directory or identity, by path
        self.durable: dict[str, object] = {}
        self.pending: list[tuple[str, object]] = []  # changes of entries: path, what it becomes (or False: gone)
        for path, text in start.items():
            self.tree[path] = self.durable[path] = None if text is None else len(self.contents)
            if text is not None:
                self.contents[len(self.contents)] = (text, text)

    def apply(self, name: str, path: str, detail: bytes) -> None:
        """Do what a call of the operating system asks for."""
        if name == "mkdir":
            self._change(path, None)
        elif name == "open":
            self.contents[len(self.contents)] = (b"", b"")
            self._change(path, len(self.contents) - 1)
        elif name == "write":
            flushed, written = self.contents[self.tree[path]]
            self.contents[self.tree[path]] = flushed, written + detail
        elif name == "fsync" and self.tree.get(path) is not None:
            self.contents[self.tree[path]] = (self.contents[self.tree[path]][1],) * 2
        elif name == "fsync":
            self.flush([change for change in self.pending if os.path.dirname(change[0]) == path])
            self.pending = [change for change in self.pending if os.path.dirname(change[0]) != path]
        elif name == "rename":
            target = detail.decode()
            for moved in within(path, self.tree):
                self.tree[target + moved[len(path) :]] = self.tree.pop(moved)
            # One change of two entries: what the directory holds goes along, flushed or not.
            self.pending.append((path, target))
        elif name in ("unlink", "rmdir"):
            self._change(path, False)

    def _change(self, path: str, new_entry: object) -> None:
        self.pending.append((path, new_entry))
        if new_entry is False:
            self.tree.pop(path)
        else:
            self.tree[path] = new_entry

    def flush(self, changes: list[tuple[str, object]]) -> None:
        """Make changes of entries certain."""
        for path, new_entry in changes:
            if isinstance(new_entry, str):
                for moved in within(path, self.durable):
                    self.durable[new_entry + moved[len(path) :]] = self.durable.pop(moved)
            elif new_entry is False:
                self.durable.pop(path, None)
            else:
                self.durable[path] = new_entry

    def restart(self, root: Path, draw: random.Random) -> None:
        """Write to a folder what is there afterwards."""
        self.flush([change for change in self.pending if draw.random() < 0.5])
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for path in sorted(self.durable, key=len):
            place = Path(path)
            if not place.parent.is_dir():
                continue
            if self.durable[path] is None:
                place.mkdir(exist_ok=True)
                continue
            flushed, written = self.contents[self.durable[path]]
            end = draw.randrange(len(flushed), len(written) + 1)
            tail = written[len(flushed) : end]
            place.write_bytes(flushed + (bytes(len(tail)) if draw.random() < 0.3 else tail))


def within(path: str, paths: dict[str, object]) -> list[str]:
    """Return a path and those below it."""
    return [other for other in paths if other == path or other.startswith(f"{path}/")]


def crash_states(trace: list[tuple[str, str, bytes]], root: Path, start: dict, draw: random.Random, count: int):
    """Yield what may be on a disk whose power fails during a trace: what was not flushed may be there or not."""
    for number in range(count):
        cut = number % (len(trace) + 1)
        disk = FailingDisk(start)
        for call in trace[:cut]:
            disk.apply(*call)
        disk.restart(root, draw)
        yield cut


@pytest.mark.sample(4)
@pytest.mark.parametrize("alone", [True, False])
def test_whatever_a_power_cut_leaves_the_last_checkpoint_reported_as_saved_is_there(tmp_path, alone):
    root = tmp_path / "disk"
    directory = opened(root, keep=1)
    save(directory, 1) if alone else save_together(root, 1)
    start = {str(path): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
    reported = []
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        for step in (2, 3):
            save(directory, step) if alone else save_together(root, step)
            reported.append(len(disk.trace))
    states = set()
    moments = len(disk.trace) + 1
    for cut in crash_states(disk.trace, root, start, random.Random(1), 2 * moments):
        expected = 1 + sum(cut >= end for end in reported)
        loaded = newest(root)
        states.add((expected, loaded))
        assert loaded is not None
        assert loaded >= expected
    assert {(1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= states


def test_a_disk_that_does_not_keep_what_it_was_given_is_found_out(tmp_path, monkeypatch):
    directory = opened(tmp_path, keep=1)
    save(directory, 1)
    real = Directory.create
    spoiling = lambda self, name, text: real(self, name, [*text[:-1], b"?"] if name == "a" else text)  # noqa: E731
    monkeypatch.setattr(Directory, "create", spoiling)
    with pytest.raises(DataError, match="a differs from what was written; is the disk failing"):
        save(directory, 2)
    assert newest(tmp_path) == 1, "the one before stays"


# What others may have put into a directory of checkpoints.


@pytest.fixture
def canary(tmp_path) -> Path:
    """A folder beside the directory, to which links in it point."""
    folder = tmp_path / "canary"
    (folder / "inside").mkdir(parents=True)
    (folder / "a").write_bytes(b"alive")
    return folder


def alive(canary: Path) -> bool:
    return (canary / "inside").is_dir() and (canary / "a").read_bytes() == b"alive"


def seal(path: Path, **changes) -> None:
    """Change a checkpoint's manifest, and seal it again."""
    manifest = json.loads((path / "manifest.json").read_bytes()) | changes
    (path / "manifest.json").write_bytes(sealed(manifest))


@pytest.mark.parametrize("name", [".x.tmp", ".000009-step-9.1.tmp", ".probe.1.tmp", "000009-step-9"])
def test_a_link_is_neither_swept_nor_dropped_nor_read(tmp_path, canary, name):
    path = tmp_path / "checkpoints"
    save(opened(path), 1)
    (path / name).symlink_to(canary)
    directory = opened(path, keep=1)
    save(directory, 2)
    save(directory, 3)
    assert (path / name).is_symlink()
    assert newest(path) == 3
    directory.delete()
    assert (path / name).is_symlink()
    assert alive(canary)


def test_a_checkpoint_that_is_a_link_is_no_reason_to_begin_anew(tmp_path, canary):
    real = save(opened(tmp_path / "elsewhere"), 1)
    path = tmp_path / "checkpoints"
    path.mkdir()
    (path / real.name).symlink_to(real)
    with pytest.raises(DataError, match=r"no checkpoint can be used: .*000001-step-1: it is a link, expected a folder"):
        newest(path)


def test_a_directory_in_a_folder_of_ours_is_no_link(tmp_path, canary):
    (tmp_path / "checkpoints").symlink_to(canary)
    with pytest.raises(DataError, match="checkpoints: it is a link, expected a folder"):
        opened(tmp_path / "checkpoints", follow=False)
    save(opened(tmp_path / "checkpoints"), 1)  # which the user has named
    assert alive(canary)


@pytest.mark.parametrize("name", ["../canary/a", "/etc/hostname", "..", "", "manifest.json", "sub/a"])
def test_a_manifest_lists_plain_names(tmp_path, canary, name):
    path = save(opened(tmp_path / "checkpoints"), 1)
    seal(path, files={name: [5, 5, hashlib.sha256(b"alive").hexdigest()]})
    with pytest.raises(DataError, match=r"step-1: damaged: manifest.json does not describe a checkpoint"):
        read(path)
    save(opened(path.parent, keep=1), 2)
    assert alive(canary)


@pytest.mark.parametrize(
    "changes", [{"step": -1}, {"step": "1"}, {"files": []}, {"files": {"a": 1}}, {"schema": "1"}, {"mesh": [2]}]
)
def test_a_sealed_manifest_of_another_shape_is_damaged(tmp_path, changes):
    path = save(opened(tmp_path), 1)
    seal(path, **changes)
    with pytest.raises(DataError, match="step-1: damaged"):
        read(path)


def test_no_file_is_read_that_is_larger_than_the_memory(tmp_path):
    path = save(opened(tmp_path), 1)
    seal(path, files={"a": [1 << 50, 1 << 50, "0" * 64]})
    with pytest.raises(DataError, match=f"{1 << 50} bytes, more than the memory of this machine"):
        read(path)


@pytest.mark.parametrize("file", ["a", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path, file):
    path = save(opened(tmp_path), 1)
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(DataError, match=f"{file}: it is a named pipe, expected a regular file"):
        read(path)
    os.unlink(path / file)
    (path / file).write_text("[" * 100_000)
    with pytest.raises(DataError, match="damaged"):
        read(path)


def test_only_files_of_checkpoints_are_removed(tmp_path, canary):
    """What a manifest lists, or where it is damaged files of the same names."""
    directory = opened(tmp_path / "checkpoints", keep=1)
    noted, linked, damaged = (save(directory, step) for step in (1, 2, 3))
    for path in (noted, linked):  # which have gone
        shutil.copytree(damaged, path)
    (noted / "notes.txt").write_text("mine")
    (linked / "a").unlink()
    (linked / "a").symlink_to(canary / "a")
    (damaged / "manifest.json").write_bytes(b"")
    reopened = opened(tmp_path / "checkpoints", keep=1)
    save(reopened, 4)
    assert names(reopened.path) == [noted.name, linked.name, "000004-step-4"]
    assert (noted / "notes.txt").read_text() == "mine"
    assert alive(canary)


def test_what_cannot_be_deleted_is_told(tmp_path):
    directory = opened(tmp_path)
    path = save(directory, 1)
    (path / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"000001-step-1: not deleted: notes.txt is not a file of a checkpoint"):
        directory.delete()
    assert (path / "notes.txt").exists()
    assert read(path).manifest.step == 1
