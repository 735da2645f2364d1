"""Copies of shards on a node's disk, bounded in bytes: its ranks share them, and each is fetched once.

A folder of this user's. Copies appear by renaming, so that one is whole or not there; the least recently used ones make
room for others. An open copy stays readable when it is removed.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dptrain.data.sources import format_bytes
from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage.cache import cache_dir, own_folder
from dptrain.runtime.storage.files import output_error, replacing_locked
from dptrain.runtime.storage.locks import held
from dptrain.runtime.text import one_line

# Seconds to wait for another process that fetches the same shard.
_PATIENCE = 3600.0
_PART, _RESERVED, _LOCK = ".part", ".reserved.part", ".lock"
_ADVICE = "make room, lower cache_bytes, or choose another folder with cache_dir or DPTRAIN_CACHE"


class ShardCache:
    """The copies of a node; `folder` is by default within the cache folder of dptrain."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder = (cache_dir() / "shards") if folder is None else folder
        self.max_bytes = max_bytes
        self._is_own = False  # whether the folder is known to be this user's

    def fetch(self, key: str, nbytes: int, make: Callable[[Path], None]) -> Path:
        """Return the copy of this name; let `make` write it, of about `nbytes`, if it is not there."""
        path = self._folder / key
        try:
            if not self._is_own:
                with own_folder(self._folder, 0o022):
                    self._is_own = True
            if _touched(path):
                return path
            with held(self._lock(key), _PATIENCE, "fetches this shard", in_background=True):
                if not _touched(path):
                    reserved = self._reserved(path.with_name(path.name + _RESERVED), nbytes)
                    with reserved, replacing_locked(path, path.with_name(path.name + _PART), 0o077) as part:
                        make(part)
                        written = part.stat().st_size
                    if written > self.max_bytes:
                        path.unlink(missing_ok=True)
                        raise DataError(
                            f"a shard takes {format_bytes(written)} on disk > cache_bytes = "
                            f"{format_bytes(self.max_bytes)}; raise cache_bytes"
                        )
                    self._make_room(0, path)
        except TimeoutError as error:
            raise OutputError(f"{self._folder}: {error}; end it, or choose another cache_dir") from None
        except (DataError, OutputError):
            raise
        except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
            if isinstance(error, OSError):
                raise output_error(self._folder, error, nbytes, advice=_ADVICE) from error
            raise OutputError(f"{self._folder}: {one_line(error)}; {_ADVICE}") from None
        return path

    def used_bytes(self) -> int:
        """Return the bytes of all copies, unfinished ones included."""
        return sum(size for _, size, _ in self._entries())

    def _lock(self, key: str) -> Path:
        # A few locks rather than a file for each shard: some shards wait for others.
        return self._folder / f"{int(key[:4], 16) % 256:02x}{_LOCK}"

    @contextmanager
    def _reserved(self, path: Path, nbytes: int) -> Iterator[None]:
        """Make room for a copy, and keep it from others by a sparse file of its size."""
        try:
            self._make_room(nbytes, reservation=path)
            yield
        finally:
            path.unlink(missing_ok=True)

    def _make_room(self, needed: int, but: Path | None = None, reservation: Path | None = None) -> None:
        """Remove the least recently used copies until `needed` more bytes fit."""
        with held(self._folder / f"room{_LOCK}", _PATIENCE, "makes room", in_background=True):
            entries = sorted(self._entries())
            used = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if used + needed <= self.max_bytes:
                    break
                if path != but and path.suffix != _PART:
                    with suppress(OSError):
                        path.unlink()
                        used -= size
            if reservation is not None:
                with open(reservation, "wb") as file:
                    file.truncate(needed)

    def _entries(self) -> list[tuple[int, int, Path]]:
        """Return time of the last use, size and path of each copy."""
        entries = []
        with suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if path.suffix == _LOCK:
                    continue
                with suppress(OSError):
                    status = path.lstat()
                    if path.suffix == _PART and time.time() - status.st_mtime > _PATIENCE:
                        path.unlink()  # of a process that was killed
                        continue
                    if path.name.endswith(_RESERVED):
                        if path.with_name(path.name.removesuffix(_RESERVED)).exists():
                            continue  # the copy is there
                    elif path.suffix == _PART:
                        continue  # its reservation counts
                    entries.append((status.st_mtime_ns, status.st_size, path))
        return entries


def _touched(path: Path) -> bool:
    """Whether a copy is there; notes that it is used."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        return False
    return path.is_file() and not path.is_symlink()
