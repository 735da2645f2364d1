"""Files of shards in a folder or, through fsspec, in an object store: listing, and reading with retries."""

import glob
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from dptrain.errors import ConfigError, DataError, DptrainError, printable
from dptrain.runtime.extras import pip_install
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line

T = TypeVar("T")

# Bytes of one request, each of which is tried again by itself.
_REQUEST_BYTES = 8 << 20
# Seconds before the second attempt; each further wait is twice as long, up to the longest.
FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
MOST_SHARDS = 10_000_000
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# What a store calls the version of an object, the most exact first.
_VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "uid", "generation", "mtime", "LastModified", "last_modified")


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed."""

    url: str  # path or address
    nbytes: int
    version: str  # changes with its content: ETag or time of the last change

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return is_local(self.url)

    @property
    def shown(self) -> str:
        """The name for messages."""
        return printable(self.url)


def is_local(url: str) -> bool:
    """Whether it is a path of this machine, not an address."""
    return _SCHEME.match(url) is None


def is_pattern(url: str) -> bool:
    """Whether it names several files: a glob, or a range in braces."""
    return glob.has_magic(url) or _BRACES.search(url) is not None


def expand(url: str) -> list[str]:
    """Return the names with ranges such as `{000..127}` written out, with the zeros of the first end."""
    ranges = [(match.span(), match[1], match[2]) for match in _BRACES.finditer(url)]
    count = 1
    for _, first, last in ranges:
        count *= max(int(last) - int(first) + 1, 0) if len(first) < 19 and len(last) < 19 else MOST_SHARDS + 1
    if not 0 < count <= MOST_SHARDS:
        raise ConfigError(f"{url}: expected a rising range of at most {MOST_SHARDS:,} names, such as {{000..127}}")
    choices = [[f"{index:0{len(first)}d}" for index in range(int(first), int(last) + 1)] for _, first, last in ranges]
    names = []
    for chosen in product(*choices):
        name, end = "", 0
        for ((start, stop), _, _), text in zip(ranges, chosen, strict=True):
            name, end = name + url[end:start] + text, stop
        names.append(name + url[end:])
    return names


class Store:
    """Reads files with retries: `attempts` in all, with growing waits between them."""

    def __init__(self, attempts: int = 6, first_wait: float = FIRST_WAIT) -> None:
        self._attempts, self._first_wait = attempts, first_wait

    def list_files(self, url: str, suffixes: Sequence[str]) -> list[StoredFile]:
        """Return the files of a path, an address, a glob or a folder (those that end in `suffixes`), sorted by name."""
        files = [file for name in expand(url) for file in self._listed(name, suffixes)]
        if not files:
            what = "matches no file" if glob.has_magic(url) else "has no shards"
            raise DataError(f"{url}: {what}; expected files that end in {', '.join(suffixes)}")
        return files

    def info(self, url: str) -> StoredFile:
        """Return the size and version of a file."""
        if is_local(url):
            try:
                with open_regular(Path(url)) as file:
                    status = os.fstat(file.fileno())
            except OSError as error:
                raise DataError(f"{url}: {error.strerror or error}") from None
            return StoredFile(url, status.st_size, str(status.st_mtime_ns))
        entry = self._retried(url, 0, lambda: _file_system(url).info(url))
        return _described(url, entry)

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of a file; fewer where it ends before."""
        if is_local(url):
            try:
                with open_regular(Path(url)) as file:
                    file.seek(start)
                    return file.read(stop - start)
            except OSError as error:
                raise DataError(f"{url}: {error.strerror or error}") from None

        def fetch() -> bytes:
            content = bytes(_file_system(url).cat_file(url, start=start, end=stop))
            if len(content) != stop - start:
                raise OSError(f"{len(content)} of {stop - start} bytes received")
            return content

        return self._retried(url, start, fetch)

    def copy(self, file: StoredFile, write: Callable[[bytes], Any]) -> None:
        """Read a listed file from beginning to end; refuse one that has changed since it was listed."""
        self._require_unchanged(file)
        for start in range(0, file.nbytes, _REQUEST_BYTES):
            write(self.read(file.url, start, min(start + _REQUEST_BYTES, file.nbytes)))
        self._require_unchanged(file)

    def write(self, url: str, content: bytes) -> None:
        """Write a small file to an object store."""
        self._retried(url, 0, lambda: _file_system(url).pipe_file(url, content))

    def exists(self, url: str) -> bool:
        """Whether there is such a file."""
        if is_local(url):
            return Path(url).is_file()
        return bool(self._retried(url, 0, lambda: _file_system(url).exists(url)))

    def _require_unchanged(self, file: StoredFile) -> None:
        current = self.info(file.url)
        if (current.nbytes, current.version) != (file.nbytes, file.version):
            raise changed(file, current)

    def _listed(self, url: str, suffixes: Sequence[str]) -> list[StoredFile]:
        if is_local(url):
            return [self.info(path) for path in _local_paths(os.path.expanduser(url), suffixes)]
        system = _file_system(url)
        if glob.has_magic(url):
            entries = self._retried(url, 0, lambda: system.glob(url, detail=True))
        elif url.lower().endswith(tuple(suffixes)):
            return [self.info(url)]
        else:
            entries = self._retried(url, 0, lambda: system.find(url, detail=True))
            entries = {name: entry for name, entry in entries.items() if _is_shard(name, suffixes)}
        found = sorted(entries.items())
        return [
            _described(system.unstrip_protocol(name), entry)
            for name, entry in found
            if entry.get("type") != "directory"
        ]

    def _retried(self, url: str, offset: int, action: Callable[[], T]) -> T:
        """Return the result of an action; try it again after errors of the connection or the server."""
        wait = self._first_wait
        for attempt in range(1, self._attempts + 1):
            try:
                return action()
            except (DptrainError, MemoryError):
                raise
            except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
                raise DataError(f"{url}: {_reason(error)}") from None
            except Exception as error:  # every store's library has errors of its own
                if attempt == self._attempts:
                    raise DataError(
                        f"{url}: not read at byte {offset:,} after {attempt} attempts ({_reason(error)})"
                    ) from error
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError("at least one attempt")


def changed(file: StoredFile, current: StoredFile) -> DataError:
    """Return the error for a file that is not as it was listed."""
    if current.nbytes != file.nbytes:
        what = f"{current.nbytes:,} bytes, {file.nbytes:,} when it was listed"
    else:
        what = f"version {current.version}, {file.version} when it was listed"
    return DataError(f"{file.url}: has changed ({what}); start again, from a checkpoint if the samples are the same")


def _local_paths(path: str, suffixes: Sequence[str]) -> list[str]:
    if glob.has_magic(path) and not os.path.exists(path):
        return sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
    if not os.path.isdir(path):
        return [path]
    paths: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(folder, name) for name in names if _is_shard(name, suffixes)]
        if len(paths) > MOST_SHARDS:
            raise DataError(f"{path}: more than {MOST_SHARDS:,} shards")
    return sorted(paths)


def _is_shard(name: str, suffixes: Sequence[str]) -> bool:
    base = name.rpartition("/")[2]
    return not base.startswith(".") and base.lower().endswith(tuple(suffixes))


def _described(url: str, entry: dict[str, Any]) -> StoredFile:
    size = entry.get("size")
    if not isinstance(size, int):
        raise DataError(f"{url}: the server does not say how large it is; use a store that does, or copy it")
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
    return StoredFile(url, size, version)


def _file_system(url: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{url}: object stores need fsspec: {pip_install('streams')}") from None
    try:
        # Without its cache of listings: a changed object must be seen.
        return fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        raise ConfigError(f"{url}: {one_line(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {one_line(error)}") from None


def _reason(error: BaseException) -> str:
    return one_line(getattr(error, "strerror", None) or error)[:200]
