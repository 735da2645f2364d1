"""Checkpoints: where a training stood, in directories that are there as a whole or not at all.

NNNNNN-step-S/     the NNNNNNth save into this place, after S steps of the training
    ...            files of the caller's: arrays as safetensors, the rest as JSON
    manifest.json  size and SHA-256 of each of them, and of itself

A checkpoint is written under a temporary name, every file flushed, then renamed, then the renaming flushed: whatever
happens, a directory of such a name is either whole or recognized as damaged. None is ever overwritten, and older ones
go only after a newer one was read back and found to be good.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.errors import DataError
from dptrain.runtime.files import Piece, make_folder, open_regular, output_error, sync, write_new
from dptrain.saving.background import Background
from dptrain.saving.reading import reading

# What makes the content of a file.
Content = Callable[[], Sequence[Piece]]

_SCHEMA = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_TEMPORARY = ".tmp"
# Room that the file system itself needs beside the bytes of a checkpoint.
_MARGIN = 1 << 16


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

    Raises:
        OutputError: it cannot be looked into, or leftovers of killed saves cannot be removed.
    """

    def __init__(self, path: Path, *, keep: int = 3, advice: str) -> None:
        self.path, self._keep, self._advice = path, keep, advice
        self._writing = Background()
        # Of those that are there, in order: what they were saved with.
        self._values: dict[str, float | None] = {}
        self._last_good: str | None = None
        self._number = 0
        try:
            for name in list(_names(path)):
                self._values[name] = _value(path / name)
                self._number = _number(name)
            if path.is_dir():
                for left in path.glob(f".*{_TEMPORARY}"):
                    _remove(left)
        except OSError as error:
            raise output_error(path, error, advice=advice) from error

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
        place = self.path / f".probe.{os.getpid()}{_TEMPORARY}"
        try:
            make_folder(self.path)
            try:
                handle = os.open(place, os.O_WRONLY | os.O_CREAT, 0o666)
                try:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(handle, 0, nbytes + _MARGIN)
                finally:
                    os.close(handle)
            finally:
                place.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(self.path, error, nbytes + _MARGIN, advice=self._advice) from error

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
        found, rejected = _newest(self.path)
        self._last_good = None if found is None else found.path.name
        return found, rejected

    def delete(self) -> None:
        """Remove all checkpoints, and the directory where nothing else is in it.

        Raises:
            OutputError: they cannot be removed.
        """
        self.wait()
        try:
            while self._values:
                self._drop(next(iter(self._values)))
            if self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()
        except OSError as error:
            raise output_error(self.path, error, advice="delete it by hand") from error

    def _write(self, name: str, step: int, files: Mapping[str, Content], value: float | None) -> None:
        contents: dict[str, Sequence[Piece]] = {}
        try:
            contents = {file: encode() for file, encode in files.items()}
            contents[_MANIFEST] = [_manifest(step, value, contents)]
            self._put(name, contents)
            self._compare(name, contents)
            self._values[name], self._last_good = value, name
            for old in self._superseded():
                self._drop(old)
        except OSError as error:
            needed = sum(map(_size, contents.values()))
            last = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise output_error(self.path / name, error, needed, advice=f"{last}; {self._advice}") from error

    def _compare(self, name: str, contents: Mapping[str, Sequence[Piece]]) -> None:
        """Read back what was written: what is there counts, not what was meant.

        Raises:
            DataError: it is not the same.
        """
        for file, content in contents.items():
            if not _holds(self.path / name / file, content):
                raise DataError(f"{self.path / name}: {file} is not what was written there; is the disk failing?")

    def _put(self, name: str, contents: Mapping[str, Sequence[Piece]]) -> None:
        """Let a directory of that name be there, as a whole."""
        temporary = self.path / f".{name}.{os.getpid()}{_TEMPORARY}"
        make_folder(self.path)
        try:
            temporary.mkdir()
            for file, content in contents.items():
                write_new(temporary / file, content)
            sync(temporary)
            os.rename(temporary, self.path / name)
        except OSError:
            with suppress(OSError):
                _remove(temporary)
            raise
        sync(self.path)

    def _superseded(self) -> list[str]:
        """Return what need not stay: neither one of the last nor the best, the earliest of equals."""
        compared = {name: value for name, value in self._values.items() if value is not None and value == value}
        best = min(compared, key=lambda name: compared[name]) if compared else None
        return [name for name in list(self._values)[: -self._keep] if name != best]

    def _drop(self, name: str) -> None:
        away = self.path / f".{name}.{os.getpid()}{_TEMPORARY}"
        os.rename(self.path / name, away)  # so that one which is half gone is none
        del self._values[name]
        _remove(away)


def locate(path: Path) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint that a path means, and why newer ones beside it are not good.

    Args:
        path: of a checkpoint, of a directory of them, or of one that holds these as "checkpoints"; of several the
            newest good one is meant.

    Raises:
        DataError: there is none, or none is good.
    """
    for place in (path, path / "checkpoints"):
        found, rejected = _newest(place)
        if found is not None:
            return found, rejected
    if (path / _MANIFEST).exists():
        return read(path), []
    raise DataError(f"{path}: no checkpoint is there")


def read(path: Path) -> Checkpoint:
    """Read a checkpoint, all of it.

    Raises:
        DataError: it is missing, damaged, or of a newer version.
    """
    where = str(path)
    with reading(where):
        content = _content(path / _MANIFEST)
        manifest = json.loads(content)
        if not isinstance(manifest, dict) or _sealed(manifest) != content:
            raise DataError(f"{where}: damaged: {_MANIFEST} is not as it was written")
        if manifest["schema"] > _SCHEMA:
            raise DataError(f"{where}: schema {manifest['schema']}, this build reads <= {_SCHEMA}")
        files = {}
        for name, (size, digest) in manifest["files"].items():
            files[name] = _content(path / name)
            if len(files[name]) != size:
                raise DataError(f"{where}: damaged: {name} has {len(files[name])} bytes, {size} were written")
            if hashlib.sha256(files[name]).hexdigest() != digest:
                raise DataError(f"{where}: damaged: the SHA-256 of {name} is not that of what was written")
        return Checkpoint(path, manifest["step"], files)


def _newest(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """As `CheckpointDirectory.newest`."""
    rejected: list[str] = []
    for name in reversed(list(_names(path))):
        try:
            return read(path / name), rejected
        except DataError as error:
            rejected.append(str(error))
    if rejected:
        raise DataError(f"no checkpoint is good: {'; '.join(rejected)}; delete them to start afresh")
    return None, []


def newest_name(path: Path) -> str | None:
    """Return the name of a directory's newest checkpoint, good or not; None where there is none."""
    return next(reversed(list(_names(path))), None)


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _holds(path: Path, content: Sequence[Piece]) -> bool:
    """Whether a file holds this and nothing else."""
    with open_regular(path) as file:
        # NumPy's comparison: memoryviews compare byte by byte.
        same = all(
            np.array_equal(np.frombuffer(file.read(len(one)), np.uint8), np.frombuffer(one, np.uint8))
            for one in content
            if len(one)
        )
        return same and not file.read(1)


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


def _value(path: Path) -> float | None:
    """Return what a checkpoint was saved with; None where its manifest cannot be read."""
    with suppress(DataError), reading(str(path)):
        found = json.loads(_content(path / _MANIFEST))["value"]
        return None if found is None else float(found)
    return None


def _names(path: Path) -> Iterator[str]:
    """Yield the names of checkpoints in the order in which they were saved."""
    if path.is_dir():
        found = filter(_NAME.fullmatch, os.listdir(path))
        yield from sorted(found, key=_number)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _remove(path: Path) -> None:
    """Remove a file, or a directory of files."""
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
