"""Checkpoints: where a training stood, in directories that are there as a whole or not at all.

NNNNNN-step-S/     the NNNNNNth save into this place, after S steps of the training
    ...            files of the caller's: arrays as safetensors, the rest as JSON
    manifest.json  what lies where, and the SHA-256 of all of it, see `dptrain.saving.manifest`

A checkpoint is written under a temporary name, by one rank or by several, every file flushed and read back; only when
all of them are safe rank 0 writes the manifest, flushes it, renames the directory, and flushes the renaming: whatever
happens, a directory of such a name is either whole or recognized as damaged. None is ever overwritten, and older ones
go only after a newer one was found to be good: the files that their manifests list, and nothing else.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dptrain.errors import DataError, OutputError
from dptrain.runtime.failure import warn
from dptrain.runtime.files import (
    FILE,
    FOLDER,
    Directory,
    Piece,
    open_directory,
    output_error,
    temporary_name,
    to_become,
    writing,
)
from dptrain.saving.background import Background
from dptrain.saving.manifest import MANIFEST, Described, Manifest, PartOf, described, joined
from dptrain.saving.reading import reading

_NAME = re.compile(r"([0-9]{6,})-step-([0-9]+)")
_SHARED = "checkpoints of sharded variables need a file system that all ranks share"
# Room that the file system itself needs beside the bytes of a checkpoint.
_MARGIN = 1 << 16
# Bytes of a manifest: of a terabyte of arrays.
_MAX_MANIFEST = 1 << 27


@dataclass(frozen=True)
class Content:
    """What becomes a file of a checkpoint.

    Attributes:
        pieces: makes it, called in the thread that writes; of a file of arrays the header and the values of each.
        parts: of a file of arrays, by name in it of which array each is a part.
    """

    pieces: Callable[[], Sequence[Piece]]
    parts: Mapping[str, PartOf] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there, of which all was checked but arrays: these are when they are read.

    Attributes:
        path: its directory.
        follow: whether that may be a link.
        manifest: what it holds.
        files: contents of those that are no arrays, by name.
    """

    path: Path
    follow: bool
    manifest: Manifest
    files: Mapping[str, bytes]

    def open(self) -> Directory:
        """Open the directory."""
        return open_directory(self.path, follow=self.follow)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can carry it to other ranks, without contents of files."""
        return {"path": str(self.path), "follow": self.follow, "manifest": self.manifest.as_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what `as_json` returned."""
        return cls(Path(found["path"]), found["follow"], Manifest.from_json(found["manifest"]), {})


class CheckpointDirectory:
    """A directory of checkpoints. Rank 0 leads, and whoever makes it sees to it that nobody else does.

    Writing goes on in a thread; what it meets is raised by the next call.

    Args:
        path: the directory; made with the first checkpoint.
        keep: how many of the last ones stay. The best one does in any case.
        advice: what to do where it cannot be written, the end of messages.
        follow: whether the directory may be a link: not one in a folder of ours.
        leads: whether this is rank 0's. Others write files of theirs, no more.

    Raises:
        OutputError: it cannot be looked into, or leftovers of killed saves cannot be removed.
        DataError: it is a link that must not be followed, or no directory.
    """

    def __init__(self, path: Path, *, keep: int = 3, advice: str, follow: bool = True, leads: bool = True) -> None:
        self.path, self._keep, self._advice, self._follow = path, keep, advice, follow
        self._writing = Background()
        # Of those that are there, in order: what they were saved with.
        self._values: dict[str, float | None] = {}
        self._last_good: str | None = None
        self._number = 0
        self._written: Described | None = None
        self._needed = 0  # bytes, of what is being written
        # Names of files that checkpoints of this training have.
        self._files = {MANIFEST}
        if not leads:
            return
        with writing(path, advice=advice):
            if not os.path.lexists(path):
                return
            with self._open() as folder:
                for name in _names(folder):
                    self._values[name] = _value(folder, name)
                    self._number = _number(name)
                for name in filter(_is_temporary, folder.names()):
                    _remove_temporary(folder, name)

    @property
    def has_failed(self) -> bool:
        """Whether the next call will raise."""
        return self._writing.has_failed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return self._writing.is_idle

    @property
    def last_good(self) -> str | None:
        """The name of the last checkpoint that is known to be good."""
        return self._last_good

    def probe(self, nbytes: int) -> None:
        """Reserve the room of a checkpoint for a moment, which finds full, read-only and denied disks, and quotas.

        Raises:
            OutputError: there is not enough; says what is needed and free.
        """
        with writing(self.path, nbytes + _MARGIN, advice=self._advice), self._open(make=True) as folder:
            folder.probe(nbytes + _MARGIN)

    def save(
        self,
        step: int,
        files: Mapping[str, Content],
        *,
        value: float | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> Path:
        """Begin to write a checkpoint of which this rank has all; return what it will be called.

        Args:
            step: steps of the training until now.
            files: by name.
            value: says which is the best, the lowest; None for one that is not compared.
            mesh: on which it is saved.

        Raises:
            OutputError: the one before could not be written.
        """
        self.wait()
        name, temporary = self._next(step)

        def write() -> None:
            with self._telling(name):
                try:
                    own = self._write(temporary, files, make=True)
                except OSError:
                    self.discard(temporary)
                    raise
                self._join(name, temporary, [own], step, value, mesh or {})

        self._writing.start(write)
        return self.path / name

    def begin(self, step: int) -> tuple[str, str]:
        """Make the temporary folder of a checkpoint that several ranks write; return its name, and what it becomes.

        Args:
            step: steps of the training until now.

        Raises:
            OutputError: the one before could not be written, or this one cannot.
        """
        self.wait()
        name, temporary = self._next(step)
        with writing(self.path / name, advice=self._advice), self._open(make=True) as folder:
            folder.folder(temporary, make=True).close()
        return temporary, name

    def write(self, temporary: str, name: str, files: Mapping[str, Content]) -> None:
        """Begin to write this rank's files of a checkpoint.

        Args:
            temporary: the folder's name, as rank 0's `begin` returned it.
            name: likewise what it becomes.
            files: by name.

        Raises:
            OutputError: the one before could not be written.
        """

        def write() -> None:
            with self._telling(name):
                self._written = self._write(temporary, files)

        self.wait()
        with writing(self.path / name, advice=self._advice), self._open() as folder:
            if folder.kind(temporary) != FOLDER:
                raise OutputError(
                    f"{self.path}: rank 0 has made {temporary} there, which this rank does not see; {_SHARED}"
                )
        self._writing.start(write)

    def written(self) -> Described:
        """Return what the manifest is to say of this rank's files, once they are safe.

        Raises:
            OutputError: they could not be written.
        """
        self.wait()
        found, self._written = self._written, None
        assert found is not None
        return found

    def join(
        self,
        temporary: str,
        name: str,
        found: Sequence[Described],
        step: int,
        *,
        value: float | None,
        mesh: Mapping[str, int],
    ) -> None:
        """Begin to turn what all ranks have written into a checkpoint. On rank 0.

        Args:
            temporary: as `begin` returned it.
            name: likewise.
            found: what every rank's `written` returned.
            step: steps of the training until then.
            value: as of `save`.
            mesh: likewise.
        """

        def write() -> None:
            with self._telling(name):
                self._join(name, temporary, found, step, value, mesh)

        self.wait()
        self._writing.start(write)

    def discard(self, temporary: str) -> None:
        """Remove what ranks have written of a checkpoint that will not be one; else the next start removes it."""
        with suppress(OSError, DataError), self._open() as folder:
            _remove_temporary(folder, temporary)

    def wait(self) -> None:
        """Return when all that was begun is on the disk and was read back.

        Raises:
            OutputError: it could not be written.
        """
        self._writing.wait()

    def close(self) -> None:
        """Let the thread end, whatever it meets."""
        self._writing.close()

    def candidates(self) -> list[Path]:
        """Return the checkpoints that are there, the newest first."""
        return _candidates(self.path, follow=self._follow)

    def note(self, checkpoint: Checkpoint) -> None:
        """Take in that a checkpoint is good."""
        self._last_good = checkpoint.path.name
        self._files |= checkpoint.manifest.files.keys()

    def delete(self) -> None:
        """Remove all checkpoints, and the directory where nothing else is in it.

        One that holds anything but files of checkpoints stays, with a warning.

        Raises:
            OutputError: they cannot be removed.
        """
        self.wait()
        with writing(self.path, advice="delete it by hand"):
            if not os.path.lexists(self.path):
                return
            with self._open() as folder:
                for name in list(self._values):
                    if (other := self._drop(folder, name)) is not None:
                        warn(f"{self.path / name}: left alone, {other} is no file of a checkpoint")
                is_empty = not folder.names()
            if is_empty:
                self.path.rmdir()

    def _open(self, *, make: bool = False) -> Directory:
        return open_directory(self.path, make=make, follow=self._follow)

    def _next(self, step: int) -> tuple[str, str]:
        self._number += 1
        name = f"{self._number:06d}-step-{step}"
        return name, temporary_name(name)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Turn the system's errors into `OutputError`, which say what is left."""
        try:
            yield
        except OSError as error:
            last = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise output_error(self.path / name, error, self._needed, advice=f"{last}; {self._advice}") from error

    def _write(self, temporary: str, files: Mapping[str, Content], *, make: bool = False) -> Described:
        """Write files, flush them, and read them back; return what the manifest is to say of them.

        Where that fails they stay: other ranks may be writing beside them, until rank 0 discards all.
        """
        contents = {name: one.pieces() for name, one in files.items()}
        self._needed = sum(map(_size, contents.values()))
        found = [described(name, pieces, files[name].parts) for name, pieces in contents.items()]
        with self._open(make=make) as folder, folder.folder(temporary, make=make) as made:
            for name, pieces in contents.items():
                made.create(name, pieces)
            made.sync()
            for name, pieces in contents.items():
                _require(made, name, pieces)
        return joined(found)

    def _join(
        self,
        name: str,
        temporary: str,
        found: Sequence[Described],
        step: int,
        value: float | None,
        mesh: Mapping[str, int],
    ) -> None:
        """Write the manifest, and let the checkpoint be there; then remove those that it supersedes."""
        held = joined(found)
        content = Manifest(step, value, mesh, held.files, held.arrays).encoded()
        self._needed = len(content)
        self._files |= held.files.keys()
        with self._open() as folder:
            try:
                with folder.folder(temporary) as made:
                    made.create(MANIFEST, [content])
                    _require(made, MANIFEST, [content])
                    made.sync()
                    folder.rename(temporary, name)
                    folder.sync()
            except OSError:
                self.discard(temporary)
                raise
            self._values[name], self._last_good = value, name
            for old in self._superseded():
                self._drop(folder, old)

    def _superseded(self) -> list[str]:
        """Return what need not stay: neither one of the last nor the best, the earliest of equals."""
        compared = {name: value for name, value in self._values.items() if value is not None and value == value}
        best = min(compared, key=lambda name: compared[name]) if compared else None
        return [name for name in list(self._values)[: -self._keep] if name != best]

    def _drop(self, folder: Directory, name: str) -> str | None:
        """Remove a checkpoint, unless it holds anything else; return what that is called."""
        if folder.kind(name) != FOLDER:
            del self._values[name]
            return "it"
        with folder.folder(name) as checkpoint:
            files = checkpoint.names()
            known = self._files | _listed(checkpoint)
            other = next((one for one in files if one not in known or checkpoint.kind(one) != FILE), None)
            if other is None:
                away = temporary_name(name)
                folder.rename(name, away)  # so that one which is half gone is none
                _empty(folder, away, checkpoint, files)
        del self._values[name]
        return other


def _require(folder: Directory, name: str, content: Sequence[Piece]) -> None:
    """Check that a file is what was written: that counts, not what was meant.

    Raises:
        DataError: it is not.
    """
    if not folder.holds(name, content):
        raise DataError(f"{folder.path}: {name} is not what was written there; is the disk failing?")


def located(path: Path) -> tuple[list[Path], bool]:
    """Return the checkpoints that a path means, the newest first, and whether they may be links.

    Args:
        path: of a checkpoint, of a directory of them, or of one that holds these as "checkpoints".

    Raises:
        DataError: there is none.
    """
    for place, follow in ((path, True), (path / "checkpoints", False)):
        if found := _candidates(place, follow=follow):
            return found, False
    if os.path.lexists(path / MANIFEST):
        return [path], True
    raise DataError(f"{path}: no checkpoint is there")


def newest(candidates: Iterable[Path], rejected: list[str], *, follow: bool = False) -> Checkpoint | None:
    """Return the first good one of checkpoints, None where there is none at all.

    Args:
        candidates: the newest first.
        rejected: takes why others are not good; may hold lines already.
        follow: whether they may be links.

    Raises:
        DataError: none is good: names them all.
    """
    for path in candidates:
        try:
            return read(path, follow=follow)
        except DataError as error:
            rejected.append(str(error))
    if rejected:
        raise DataError(f"no checkpoint is good: {'; '.join(rejected)}; delete them to start afresh")
    return None


def read(path: Path, *, follow: bool = True) -> Checkpoint:
    """Read a checkpoint, all but its arrays.

    Args:
        path: its directory.
        follow: whether that may be a link.

    Raises:
        DataError: it is missing, damaged, or of another version.
    """
    with reading(str(path)), open_directory(path, follow=follow) as folder:
        manifest = Manifest.parsed(folder.read(MANIFEST, _MAX_MANIFEST))
        total = sum(one.checked for one in manifest.files.values())
        if total > memory():
            raise DataError(f"{total} bytes, more than the memory of this machine")
        files = {}
        for name, one in manifest.files.items():
            with folder.open(name) as file:
                there = os.fstat(file.fileno()).st_size
                if there != one.size:
                    raise DataError(f"damaged: {name} has {there} bytes, {one.size} were written")
                content = file.read(one.checked)
            if hashlib.sha256(content).hexdigest() != one.sha256:
                raise DataError(f"damaged: the SHA-256 of {name} is not that of what was written")
            if one.checked == one.size:
                files[name] = content
        return Checkpoint(path, follow, manifest, files)


def _candidates(path: Path, *, follow: bool) -> list[Path]:
    """Return the checkpoints in a directory, the newest first; none where there is no directory."""
    with reading(str(path)):
        try:
            folder = open_directory(path, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            return []
        with folder:
            return [path / name for name in reversed(_names(folder))]


def newest_name(path: Path) -> str | None:
    """Return the name of the newest checkpoint, good or not, in a directory of a run; None where there is none.

    Raises:
        DataError: it is no directory, or cannot be read.
    """
    with reading(str(path)):
        try:
            with open_directory(path, follow=False) as folder:
                return next(reversed(_names(folder)), None)
        except FileNotFoundError:
            return None


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(content: Sequence[Piece]) -> int:
    return sum(map(len, content))


def _listed(checkpoint: Directory) -> set[str]:
    """Return the names of files that a checkpoint's manifest lists; none where it is not as it was written."""
    with suppress(DataError), reading(str(checkpoint.path)):
        return set(Manifest.parsed(checkpoint.read(MANIFEST, _MAX_MANIFEST)).files)
    return set()


def _value(folder: Directory, name: str) -> float | None:
    """Return what a checkpoint was saved with; None where its manifest cannot be read."""
    with suppress(DataError), reading(str(folder.path / name)), folder.folder(name) as checkpoint:
        return Manifest.parsed(checkpoint.read(MANIFEST, _MAX_MANIFEST)).value
    return None


def _names(folder: Directory) -> list[str]:
    """Return the names of checkpoints in the order in which they were saved."""
    return sorted(filter(_NAME.fullmatch, folder.names()), key=_number)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _is_temporary(name: str) -> bool:
    """Whether a name is one of a save that was killed, or of room that was looked for."""
    meant = to_become(name)
    return meant is not None and (meant == "probe" or _NAME.fullmatch(meant) is not None)


def _remove_temporary(folder: Directory, name: str) -> None:
    """Remove a temporary file, or a temporary directory of files, of this user's; anything else is left alone."""
    if folder.is_own_file(name):
        folder.remove(name)
    elif folder.kind(name) == FOLDER:
        with folder.folder(name) as left:
            files = left.names()
            if all(map(left.is_own_file, files)):
                _empty(folder, name, left, files)


def _empty(folder: Directory, name: str, opened: Directory, files: Sequence[str]) -> None:
    """Remove a folder in another one with its files."""
    for file in files:
        opened.remove(file)
    folder.remove_folder(name)
