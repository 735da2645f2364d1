"""Checkpoints: where a training stood, in directories that are there as a whole or not at all.

NNNNNN-step-S/     the NNNNNNth save into this place, after S steps of the training
    ...            files of the caller's: arrays as safetensors, the rest as JSON
    manifest.json  size and SHA-256 of each of them, and of itself

A checkpoint is written under a temporary name, every file flushed, then renamed, then the renaming flushed: whatever
happens, a directory of such a name is either whole or recognized as damaged. None is ever overwritten, and older ones
go only after a newer one was read back and found to be good: the files that their manifests list, and nothing else.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.errors import DataError
from dptrain.runtime.failure import warn
from dptrain.runtime.files import (
    FILE,
    FOLDER,
    Directory,
    Piece,
    is_plain_name,
    open_directory,
    output_error,
    temporary_name,
    to_become,
    writing,
)
from dptrain.saving.background import Background
from dptrain.saving.reading import reading

# What makes the content of a file.
Content = Callable[[], Sequence[Piece]]

_SCHEMA = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"([0-9]{6,})-step-([0-9]+)")
# Room that the file system itself needs beside the bytes of a checkpoint.
_MARGIN = 1 << 16
# Bytes of a manifest: of thousands of files.
_MAX_MANIFEST = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read, and is what was written.

    Attributes:
        path: its directory.
        step: steps of the training until then.
        files: contents by name.
    """

    path: Path
    step: int
    files: Mapping[str, bytes]


class CheckpointDirectory:
    """A directory of checkpoints. Only rank 0 has one, and whoever makes it sees to it that nobody else does.

    Writing goes on in a thread; what it meets is raised by the next `save` or `wait`.

    Args:
        path: the directory; made with the first checkpoint.
        keep: how many of the last ones stay. The best one does in any case.
        advice: what to do where it cannot be written, the end of messages.
        follow: whether the directory may be a link: not one in a folder of ours.

    Raises:
        OutputError: it cannot be looked into, or leftovers of killed saves cannot be removed.
        DataError: it is a link that must not be followed, or no directory.
    """

    def __init__(self, path: Path, *, keep: int = 3, advice: str, follow: bool = True) -> None:
        self.path, self._keep, self._advice, self._follow = path, keep, advice, follow
        self._writing = Background()
        # Of those that are there, in order: what they were saved with.
        self._values: dict[str, float | None] = {}
        self._last_good: str | None = None
        self._number = 0
        # Names of files that checkpoints of this training have.
        self._files = {_MANIFEST}
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
        """Whether the next `save` or `wait` will raise."""
        return self._writing.has_failed

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

    def save(self, step: int, files: Mapping[str, Content], *, value: float | None = None) -> Path:
        """Begin to write a checkpoint, once the one before is written; return what it will be called.

        Args:
            step: steps of the training until now.
            files: by name what makes the content, piece by piece, called in the thread that writes.
            value: says which is the best, the lowest; None for one that is not compared.

        Raises:
            OutputError: the one before could not be written.
        """
        self.wait()
        self._number += 1
        name = f"{self._number:06d}-step-{step}"
        self._writing.start(lambda: self._write(name, step, files, value))
        return self.path / name

    def wait(self) -> None:
        """Return when all that was saved is on the disk and was read back.

        Raises:
            OutputError: it could not be written.
        """
        self._writing.wait()

    def close(self) -> None:
        """Let the thread end, whatever it meets."""
        self._writing.close()

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is good, None where there is none at all, and why newer ones are not.

        Raises:
            DataError: there are some, but none is good: names them all.
        """
        found, rejected = _newest(self.path, follow=self._follow)
        if found is not None:
            self._last_good = found.path.name
            self._files |= found.files.keys()
        return found, rejected

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

    def _write(self, name: str, step: int, files: Mapping[str, Content], value: float | None) -> None:
        contents: dict[str, Sequence[Piece]] = {}
        try:
            contents = {file: encode() for file, encode in files.items()}
            contents[_MANIFEST] = [_manifest(step, value, contents)]
            self._files |= contents.keys()
            with self._open(make=True) as folder:
                _put(folder, name, contents)
                self._values[name], self._last_good = value, name
                for old in self._superseded():
                    self._drop(folder, old)
        except OSError as error:
            needed = sum(map(_size, contents.values()))
            last = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise output_error(self.path / name, error, needed, advice=f"{last}; {self._advice}") from error

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


def _put(folder: Directory, name: str, contents: Mapping[str, Sequence[Piece]]) -> None:
    """Let a checkpoint of that name be there, as a whole.

    Raises:
        DataError: what is there is not what was written: that counts, not what was meant.
    """
    temporary = temporary_name(name)
    try:
        with folder.folder(temporary, make=True) as made:
            for file, content in contents.items():
                made.create(file, content)
            made.sync()
            folder.rename(temporary, name)
            folder.sync()
            for file, content in contents.items():
                if not made.holds(file, content):
                    where = folder.path / name
                    raise DataError(f"{where}: {file} is not what was written there; is the disk failing?")
    except OSError:
        with suppress(OSError, DataError):
            _remove_temporary(folder, temporary)
        raise


def locate(path: Path) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint that a path means, and why newer ones beside it are not good.

    Args:
        path: of a checkpoint, of a directory of them, or of one that holds these as "checkpoints"; of several the
            newest good one is meant.

    Raises:
        DataError: there is none, or none is good.
    """
    for place, follow in ((path, True), (path / "checkpoints", False)):
        found, rejected = _newest(place, follow=follow)
        if found is not None:
            return found, rejected
    if os.path.lexists(path / _MANIFEST):
        return read(path), []
    raise DataError(f"{path}: no checkpoint is there")


def read(path: Path) -> Checkpoint:
    """Read a checkpoint, all of it.

    Raises:
        DataError: it is missing, damaged, or of a newer version.
    """
    with reading(str(path)), open_directory(path) as folder:
        return _read(folder)


def _read(folder: Directory) -> Checkpoint:
    where = str(folder.path)
    content = folder.read(_MANIFEST, _MAX_MANIFEST)
    manifest = _unsealed(content)
    if manifest is None:
        raise DataError(f"{where}: damaged: {_MANIFEST} is not as it was written")
    if manifest["schema"] > _SCHEMA:
        raise DataError(f"{where}: schema {manifest['schema']}, this build reads <= {_SCHEMA}")
    listed, step = manifest["files"], manifest["step"]
    total = sum(size for size, _ in listed.values())
    if not all(map(_is_content, listed)) or type(step) is not int or step < 0:
        raise DataError(f"{where}: damaged: {_MANIFEST} is none of a checkpoint")
    if total > _memory():
        raise DataError(f"{where}: {total} bytes, more than the memory of this machine")
    files = {}
    for name, (size, digest) in listed.items():
        with folder.open(name) as file:
            there = os.fstat(file.fileno()).st_size
            if there != size:
                raise DataError(f"{where}: damaged: {name} has {there} bytes, {size} were written")
            files[name] = file.read(size)
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise DataError(f"{where}: damaged: the SHA-256 of {name} is not that of what was written")
    return Checkpoint(folder.path, step, files)


def _newest(path: Path, *, follow: bool) -> tuple[Checkpoint | None, list[str]]:
    """As `CheckpointDirectory.newest`."""
    rejected: list[str] = []
    with reading(str(path)):
        try:
            folder = open_directory(path, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            return None, []
    with folder:
        for name in reversed(_names(folder)):
            try:
                with reading(str(path / name)), folder.folder(name) as checkpoint:
                    return _read(checkpoint), rejected
            except DataError as error:
                rejected.append(str(error))
    if rejected:
        raise DataError(f"no checkpoint is good: {'; '.join(rejected)}; delete them to start afresh")
    return None, []


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


def _memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(content: Sequence[Piece]) -> int:
    return sum(map(len, content))


def _digest(content: Sequence[Piece]) -> str:
    digest = hashlib.sha256()
    for one in content:
        digest.update(one)
    return digest.hexdigest()


def _manifest(step: int, value: float | None, contents: Mapping[str, Sequence[Piece]]) -> bytes:
    files = {name: [_size(content), _digest(content)] for name, content in contents.items()}
    return _sealed({"schema": _SCHEMA, "step": step, "value": value, "files": files})


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest with its own hash, which a manifest that was read must be equal to byte for byte."""
    text = {name: value for name, value in manifest.items() if name != "sha256"}
    text["sha256"] = hashlib.sha256(json.dumps(text).encode()).hexdigest()
    return json.dumps(text, indent=1).encode()


def _unsealed(content: bytes) -> dict[str, Any] | None:
    """Return the manifest that `_sealed` has made; None for anything else."""
    try:
        manifest = json.loads(content)
        return manifest if isinstance(manifest, dict) and _sealed(manifest) == content else None
    except (ValueError, RecursionError):
        return None


def _is_content(name: object) -> bool:
    """Whether a file of a checkpoint can be called so."""
    return is_plain_name(name) and name != _MANIFEST


def _listed(checkpoint: Directory) -> set[str]:
    """Return the names of files that a checkpoint's manifest lists; none where it is not as it was written."""
    with suppress(DataError), reading(str(checkpoint.path)):
        manifest = _unsealed(checkpoint.read(_MANIFEST, _MAX_MANIFEST))
        return set() if manifest is None else set(manifest["files"])
    return set()


def _value(folder: Directory, name: str) -> float | None:
    """Return what a checkpoint was saved with; None where its manifest cannot be read."""
    with suppress(DataError), reading(str(folder.path / name)), folder.folder(name) as checkpoint:
        found = json.loads(checkpoint.read(_MANIFEST, _MAX_MANIFEST))["value"]
        return None if found is None else float(found)
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
