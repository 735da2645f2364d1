"""Checkpoints of a training, in directories that exist as a whole or not at all.

NNNNNN-step-S/     the NNNNNNth save into this place, after S steps of the training
    ...            files of the caller's: arrays as safetensors, the rest as JSON
    manifest.json  what is where, and the SHA-256 of all of it, see `dptrain.saving.manifest`

A checkpoint is written under a temporary name, by one rank or several, every file flushed and read back; only when all
are safe rank 0 writes the manifest, flushes it, renames the directory, and flushes the renaming: whatever happens, a
directory of such a name is either whole or recognized as damaged. None is ever overwritten, and older ones go only
after a newer one proved good: the files that their manifests list, and nothing else.
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
from dptrain.runtime.storage.files import (
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
from dptrain.saving.manifest import MANIFEST, Entries, Manifest, PartOf, described, joined
from dptrain.saving.reading import reading

_NAME = re.compile(r"([0-9]{6,})-step-([0-9]+)")
_SHARED = "checkpoints of sharded variables need a file system that all ranks share"
# Room for the file system's own data beside a checkpoint.
_MARGIN = 1 << 16
# Most bytes of a manifest: enough for a terabyte of arrays.
_MAX_MANIFEST = 1 << 27


@dataclass(frozen=True)
class Content:
    """Content of a file of a checkpoint."""

    # Returns the file's pieces, in the writing thread; for arrays the header and each array's values
    pieces: Callable[[], Sequence[Piece]]
    parts: Mapping[str, PartOf] | None = None  # for arrays: the array and part of each, by name


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files exist; all is checked except arrays, which are checked when read."""

    path: Path  # its directory
    follow: bool  # whether that may be a link
    manifest: Manifest
    files: Mapping[str, bytes]  # contents of the files without arrays, by name

    def open(self) -> Directory:
        """Open the directory."""
        return open_directory(self.path, follow=self.follow)

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON for other ranks, without contents of files."""
        return {"path": str(self.path), "follow": self.follow, "manifest": self.manifest.as_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the checkpoint of `as_json`."""
        return cls(Path(fields["path"]), fields["follow"], Manifest.from_json(fields["manifest"]), {})


class CheckpointDirectory:
    """A directory of checkpoints, of which the last `keep` and the best stay.

    A thread writes; the next call raises its errors. Rank 0 leads, other ranks only write their own files; the caller
    excludes other trainings. `advice` ends messages on a failed write.
    """

    def __init__(self, path: Path, *, keep: int = 3, advice: str, follow: bool = True, leads: bool = True) -> None:
        self.path, self._keep, self._advice, self._follow = path, keep, advice, follow
        self._writing = Background()
        # Existing checkpoints in order, with the values they were saved with.
        self._values: dict[str, float | None] = {}
        self._last_good: str | None = None
        self._number = 0
        self._written: Entries | None = None
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
        """Name of the last checkpoint that is known to be good."""
        return self._last_good

    def probe(self, nbytes: int) -> None:
        """Reserve a checkpoint's room for a moment, to detect full, read-only and denied disks, and quotas."""
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
        """Begin to write a checkpoint that this rank holds alone; return its path. The lowest `value` is the best."""
        self.wait()
        name, temporary = self._next(step)

        def write() -> None:
            with self._reporting_errors(name):
                try:
                    entries = self._write(temporary, files, make=True)
                except OSError:
                    self.discard(temporary)
                    raise
                self._join(name, temporary, [entries], step, value, mesh or {})

        self._writing.start(write)
        return self.path / name

    def begin(self, step: int) -> tuple[str, str]:
        """Make the temporary folder of a checkpoint that several ranks write; return its name and the final one."""
        self.wait()
        name, temporary = self._next(step)
        with writing(self.path / name, advice=self._advice), self._open(make=True) as folder:
            folder.folder(temporary, make=True).close()
        return temporary, name

    def write(self, temporary: str, name: str, files: Mapping[str, Content]) -> None:
        """Begin to write this rank's files of a checkpoint."""

        def write() -> None:
            with self._reporting_errors(name):
                self._written = self._write(temporary, files)

        self.wait()
        with writing(self.path / name, advice=self._advice), self._open() as folder:
            if folder.kind(temporary) != FOLDER:
                raise OutputError(
                    f"{self.path}: rank 0 created {temporary} there, which this rank does not see; {_SHARED}"
                )
        self._writing.start(write)

    def written(self) -> Entries:
        """Wait for this rank's files, and return their entries for the manifest."""
        self.wait()
        entries, self._written = self._written, None
        assert entries is not None
        return entries

    def join(
        self,
        temporary: str,
        name: str,
        entries: Sequence[Entries],
        step: int,
        *,
        value: float | None,
        mesh: Mapping[str, int],
    ) -> None:
        """Begin to turn what all ranks wrote into a checkpoint. On rank 0."""

        def write() -> None:
            with self._reporting_errors(name):
                self._join(name, temporary, entries, step, value, mesh)

        self.wait()
        self._writing.start(write)

    def discard(self, temporary: str) -> None:
        """Remove files of an abandoned checkpoint; on failure the next start removes them."""
        with suppress(OSError, DataError), self._open() as folder:
            _remove_temporary(folder, temporary)

    def wait(self) -> None:
        """Wait until everything is on the disk and was read back."""
        self._writing.wait()

    def close(self) -> None:
        """Wait for the thread, and ignore its error."""
        self._writing.close()

    def candidates(self) -> list[Path]:
        """Return the existing checkpoints, the newest first."""
        return _candidates(self.path, follow=self._follow)

    def note(self, checkpoint: Checkpoint) -> None:
        """Record that a checkpoint is good."""
        self._last_good = checkpoint.path.name
        self._files |= checkpoint.manifest.files.keys()

    def delete(self) -> None:
        """Remove all checkpoints, and the directory if empty; folders with other files stay, with a warning."""
        self.wait()
        with writing(self.path, advice="delete it by hand"):
            if not os.path.lexists(self.path):
                return
            with self._open() as folder:
                for name in list(self._values):
                    if (other := self._drop(folder, name)) is not None:
                        warn(f"{self.path / name}: not deleted: {other} is not a file of a checkpoint")
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
    def _reporting_errors(self, name: str) -> Iterator[None]:
        """Turn the system's errors into an `OutputError` that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            last = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise output_error(self.path / name, error, self._needed, advice=f"{last}; {self._advice}") from error

    def _write(self, temporary: str, files: Mapping[str, Content], *, make: bool = False) -> Entries:
        """Write files and read them back; on failure they stay until rank 0 discards all. Return entries."""
        contents = {name: content.pieces() for name, content in files.items()}
        self._needed = sum(map(_size, contents.values()))
        entries = [described(name, pieces, files[name].parts) for name, pieces in contents.items()]
        with self._open(make=make) as folder, folder.folder(temporary, make=make) as target:
            for name, pieces in contents.items():
                target.create(name, pieces)
            target.sync()
            for name, pieces in contents.items():
                _require(target, name, pieces)
        return joined(entries)

    def _join(
        self,
        name: str,
        temporary: str,
        entries: Sequence[Entries],
        step: int,
        value: float | None,
        mesh: Mapping[str, int],
    ) -> None:
        """Write the manifest, publish the checkpoint, then remove those that it supersedes."""
        merged = joined(entries)
        content = Manifest(step, value, mesh, merged.files, merged.arrays).encoded()
        self._needed = len(content)
        self._files |= merged.files.keys()
        with self._open() as folder:
            try:
                with folder.folder(temporary) as target:
                    target.create(MANIFEST, [content])
                    _require(target, MANIFEST, [content])
                    target.sync()
                    folder.rename(temporary, name)
                    folder.sync()
            except OSError:
                self.discard(temporary)
                raise
            self._values[name], self._last_good = value, name
            for old in self._superseded():
                self._drop(folder, old)

    def _superseded(self) -> list[str]:
        """Return checkpoints that are neither among the last nor the best (the earliest of equals)."""
        compared = {name: value for name, value in self._values.items() if value is not None and value == value}
        best = min(compared, key=lambda name: compared[name]) if compared else None
        return [name for name in list(self._values)[: -self._keep] if name != best]

    def _drop(self, folder: Directory, name: str) -> str | None:
        """Remove a checkpoint unless it holds other files; return the name of one."""
        if folder.kind(name) != FOLDER:
            del self._values[name]
            return "it"
        with folder.folder(name) as checkpoint:
            files = checkpoint.names()
            listed = self._files | _listed(checkpoint)
            other = next((file for file in files if file not in listed or checkpoint.kind(file) != FILE), None)
            if other is None:
                away = temporary_name(name)
                folder.rename(name, away)  # so that a half-deleted checkpoint has no valid name
                _empty(folder, away, checkpoint, files)
        del self._values[name]
        return other


def _require(folder: Directory, name: str, content: Sequence[Piece]) -> None:
    if not folder.holds(name, content):
        raise DataError(f"{folder.path}: {name} differs from what was written; is the disk failing?")


def located(path: Path) -> tuple[list[Path], bool]:
    """Return a path's checkpoints, the newest first, and whether they may be links.

    The path is one checkpoint, a directory of them, or a folder with these in "checkpoints".
    """
    for place, follow in ((path, True), (path / "checkpoints", False)):
        if candidates := _candidates(place, follow=follow):
            return candidates, False
    if os.path.lexists(path / MANIFEST):
        return [path], True
    raise DataError(f"{path}: no such checkpoint")


def newest(candidates: Iterable[Path], rejected: list[str], *, follow: bool = False) -> Checkpoint | None:
    """Return the first good checkpoint, None without any; append errors of bad ones to `rejected`."""
    for path in candidates:
        try:
            return read(path, follow=follow)
        except DataError as error:
            rejected.append(str(error))
    if rejected:
        raise DataError(f"no checkpoint can be used: {'; '.join(rejected)}; delete them to start again")
    return None


def read(path: Path, *, follow: bool = True) -> Checkpoint:
    """Read a checkpoint, except its arrays."""
    with reading(str(path)), open_directory(path, follow=follow) as folder:
        manifest = Manifest.parsed(folder.read(MANIFEST, _MAX_MANIFEST))
        total = sum(file.checked for file in manifest.files.values())
        if total > memory():
            raise DataError(f"{total} bytes, more than the memory of this machine")
        files = {}
        for name, stored in manifest.files.items():
            with folder.open(name) as file:
                there = os.fstat(file.fileno()).st_size
                if there != stored.size:
                    raise DataError(f"damaged: {name} has {there} bytes, {stored.size} were written")
                content = file.read(stored.checked)
            if hashlib.sha256(content).hexdigest() != stored.sha256:
                raise DataError(f"damaged: the SHA-256 of {name} does not match what was written")
            if stored.checked == stored.size:
                files[name] = content
        return Checkpoint(path, follow, manifest, files)


def _candidates(path: Path, *, follow: bool) -> list[Path]:
    with reading(str(path)):
        try:
            folder = open_directory(path, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            return []
        with folder:
            return [path / name for name in reversed(_names(folder))]


def newest_name(path: Path) -> str | None:
    """Return the name of the newest checkpoint, good or not, in a run's directory; None without any."""
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
    with suppress(DataError), reading(str(checkpoint.path)):
        return set(Manifest.parsed(checkpoint.read(MANIFEST, _MAX_MANIFEST)).files)
    return set()


def _value(folder: Directory, name: str) -> float | None:
    with suppress(DataError), reading(str(folder.path / name)), folder.folder(name) as checkpoint:
        return Manifest.parsed(checkpoint.read(MANIFEST, _MAX_MANIFEST)).value
    return None


def _names(folder: Directory) -> list[str]:
    return sorted(filter(_NAME.fullmatch, folder.names()), key=_number)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _is_temporary(name: str) -> bool:
    final = to_become(name)
    return final is not None and (final == "probe" or _NAME.fullmatch(final) is not None)


def _remove_temporary(folder: Directory, name: str) -> None:
    """Remove a temporary file, or directory of files, of this user's; nothing else."""
    if folder.is_own_file(name):
        folder.remove(name)
    elif folder.kind(name) == FOLDER:
        with folder.folder(name) as left:
            files = left.names()
            if all(map(left.is_own_file, files)):
                _empty(folder, name, left, files)


def _empty(folder: Directory, name: str, opened: Directory, files: Sequence[str]) -> None:
    for file in files:
        opened.remove(file)
    folder.remove_folder(name)
