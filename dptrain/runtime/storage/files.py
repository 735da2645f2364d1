"""Safe file access: nobody else can redirect or block it, and files are replaced atomically.

A folder may hold links, named pipes that block and endless devices. A `Directory` follows no link, opens only regular
files and folders, never waits, and gives temporary files unguessable names.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Self

from dptrain.errors import DataError, OutputError

# A piece of a file's content: bytes, or memory that does not change until it is written.
Piece = bytes | memoryview

_ADVICE = "choose another --out"
# The most links in a path, as in Linux.
_MOST_LINKS = 40

FILE, FOLDER = "a regular file", "a folder"
_KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

# Flags of every open: do not wait for a pipe's other end, take a terminal, or pass the file to children.
_SAFELY = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Bytes that are compared at once.
_CHUNK = 1 << 20


class Directory:
    """An open folder; names inside it cannot be redirected elsewhere. See `open_directory`.

    Names have no slash. Methods raise OSError, and DataError where an entry is not of the expected kind. `fd` is -1
    once it is closed.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def names(self) -> list[str]:
        """Return the sorted names of all entries."""
        with self._naming():
            return sorted(os.listdir(self.fd))

    def stat(self, name: str) -> os.stat_result | None:
        """Return an entry's status, a link's own; None if it does not exist."""
        with self._naming(name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def kind(self, name: str) -> str | None:
        """Return FILE, FOLDER, "a link", "a named pipe", ...; None if it does not exist."""
        status = self.stat(name)
        return None if status is None else _kind(status.st_mode)

    def expect(self, name: str, expected: str) -> str | None:
        """Return an entry's kind, None if it does not exist; refuse anything but `expected`, FILE or FOLDER."""
        kind = self.kind(name)
        if kind not in (None, expected):
            raise self._unexpected(name, kind, expected)
        return kind

    def folder(self, name: str, *, make: bool = False) -> "Directory":
        """Open a subfolder; `make` creates it durably."""
        missing = self.expect(name, FOLDER) is None
        with self._naming(name):
            if make and missing:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.fd)
                self.sync()
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _SAFELY, dir_fd=self.fd)
        return Directory(self.path / name, fd)

    def open(self, name: str) -> BufferedReader:
        """Open a regular file for reading in binary."""
        return os.fdopen(self._open(name, os.O_RDONLY), "rb")

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a regular file of at most `most` bytes."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most + 1) if size <= most else b""
        if max(size, len(content)) > most:
            raise DataError(f"{self.path / name}: {max(size, len(content))} bytes, expected at most {most}")
        return content

    def holds(self, name: str, content: Iterable[Piece]) -> bool:
        """Whether a file consists of exactly these pieces."""
        with self.open(name) as file:
            for piece in content:
                view = memoryview(piece)
                while view:
                    # As bytes: memoryviews compare byte by byte.
                    if file.read(len(view[:_CHUNK])) != bytes(view[:_CHUNK]):
                        return False
                    view = view[_CHUNK:]
            return not file.read(1)

    def create(self, name: str, content: Iterable[Piece]) -> None:
        """Write a new file and flush it to the disk; after an error, a part may remain."""
        handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with self._naming(name), _closing(handle):
            _write(handle, content)

    def replace(self, name: str, content: Iterable[Piece]) -> None:
        """Write a temporary file, read it back, flush it and rename it: the file is as before or complete."""
        self.expect(name, FILE)
        self._replace(name, content)

    def _replace(self, name: str, content: Iterable[Piece]) -> None:
        pieces = list(content)
        temporary = temporary_name(name)
        with self._naming(name):
            try:
                self.create(temporary, pieces)
                if not self.holds(temporary, pieces):
                    raise OSError(errno.EIO, "it is not what was written there; is the disk failing?")
                os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except BaseException:
                with contextlib.suppress(OSError):  # such as a name that is too long
                    os.unlink(temporary, dir_fd=self.fd)
                raise
            self.sync()

    def appending(self, name: str) -> BinaryIO:
        """Open a file, new or existing, for unbuffered appending; refuse one with a second hard link."""
        handle = self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(handle).st_nlink > 1:
            os.close(handle)
            raise DataError(
                f"{self.path / name}: the file has a second name (a hard link), expected none; replace it by a copy"
            )
        return os.fdopen(handle, "ab", buffering=0)

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, new or existing, and flush it to the disk."""
        with self._naming(name), self.appending(name) as file:
            _write(file.fileno(), [content])

    def rename(self, name: str, new: str) -> None:
        """Rename an entry; call `sync` to make it durable."""
        _require_plain(self.path, new)
        with self._naming(name):
            os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a regular file if it exists."""
        if self.expect(name, FILE) is not None:
            with self._naming(name), contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self.expect(name, FOLDER)
        with self._naming(name):
            os.rmdir(name, dir_fd=self.fd)

    def remove_temporaries(self, name: str | None = None, *, locked: bool = False) -> None:
        """Remove temporary files that this user's killed writers left, for `name` or all.

        `locked`: nobody else can be writing, so files of living PIDs go too, as PIDs are reused.
        """
        for left in self.names():
            match = _TEMPORARY.fullmatch(left)
            if match is None or name not in (None, match["name"]) or not self.is_own_file(left):
                continue
            if locked or not _lives(int(match["pid"])):
                self.remove(left)

    def is_own_file(self, name: str) -> bool:
        """Whether an entry is a regular file owned by this user."""
        status = self.stat(name)
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()

    def probe(self, nbytes: int) -> None:
        """Reserve `nbytes` for a moment, to detect full, read-only and denied disks, and quotas."""
        place = temporary_name("probe")
        handle = self._open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with self._naming(place), _closing(handle):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, nbytes)
        finally:
            self.remove(place)

    def sync(self) -> None:
        """Flush the entries, so that renames and new files survive a power cut."""
        with self._naming():
            os.fsync(self.fd)

    def _open(self, name: str, flags: int) -> int:
        """Return the descriptor of a regular file."""
        self.expect(name, FILE)  # before it is opened, which a device might notice
        with self._naming(name):
            try:
                handle = os.open(name, flags | os.O_NOFOLLOW | _SAFELY, 0o666, dir_fd=self.fd)
            except OSError:
                self.expect(name, FILE)  # it may have appeared just now
                raise
            kind = _kind(os.fstat(handle).st_mode)
            if kind != FILE:
                os.close(handle)
                raise self._unexpected(name, kind, FILE)
            return handle

    def _unexpected(self, name: str, kind: str | None, expected: str) -> DataError:
        return DataError(f"{self.path / name}: it is {kind}, expected {expected}; remove it")

    @contextlib.contextmanager
    def _naming(self, name: str | None = None) -> Iterator[None]:
        """Validate an entry's name, and add the whole path to system errors."""
        if name is not None:
            _require_plain(self.path, name)
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path if name is None else self.path / name), None
            raise


def open_directory(path: Path, *, make: bool = False, follow: bool = True) -> Directory:
    """Open a folder that the user named, possibly through links; `follow=False` refuses a link as the last part."""
    if not follow:
        with open_directory(path.parent, make=make) as parent:
            return parent.folder(path.name, make=make)
    if make:
        make_folder(path)
    return Directory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY))


def is_plain_name(name: object) -> bool:
    """Whether a name is a single entry: no path, no "." or "..", no NUL."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & {*name}


def temporary_name(name: str) -> str:
    """Return a hidden, unguessable name for a file that will become `name`."""
    return f".{name}.{os.getpid()}-{os.urandom(8).hex()}.tmp"


# What `temporary_name` returns, and what earlier versions wrote.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]{1,9})(-[0-9a-f]{16})?\.tmp", re.DOTALL)


def to_become(name: str) -> str | None:
    """Return the target of a temporary name; None for other names."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else match["name"]


def open_regular(path: Path) -> BinaryIO:
    """Open a file that the user named for binary reading, following links; refuse pipes, devices and the like."""
    _refuse_irregular(os.stat(path).st_mode)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _SAFELY))  # noqa: SIM115
    try:
        _refuse_irregular(os.fstat(file.fileno()).st_mode)  # it may have been replaced meanwhile
    except OSError:
        file.close()
        raise
    return file


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Return a file's rest, one byte more than `most` if it is longer, in memory of the file's size, not of `most`."""
    return file.read(min(most, os.fstat(file.fileno()).st_size) + 1)


def _refuse_irregular(mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the system refuses directories itself
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, expected a regular file")


def write_atomically(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Write a file as `Directory.replace` does, replacing a link; OutputError where that fails."""
    with writing(path, len(content), advice=advice), open_directory(path.parent) as folder:
        folder._replace(path.name, [content])


def write_through_links(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Write a file that the user named as `write_atomically` does, following links of this user's or root's."""
    with writing(path, len(content), advice=advice):
        target = _behind_links(path)
    write_atomically(target, content, advice=advice)


def _behind_links(path: Path) -> Path:
    """Return where links of this user's or root's lead; refuse targets that are not regular files."""
    target = path
    for _ in range(_MOST_LINKS):
        if not target.is_symlink() or os.lstat(target).st_uid not in (os.geteuid(), 0):
            if target is not path and target.exists():
                _refuse_irregular(os.stat(target).st_mode)
            return target
        target = target.parent / os.readlink(target)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


@contextlib.contextmanager
def writing(path: Path, needed: int = 0, *, advice: str = _ADVICE) -> Iterator[None]:
    """Turn OSError into `OutputError`; `needed` is the size in bytes."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise output_error(path, error, needed, advice=advice) from error


@contextlib.contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[Path]:
    """Let the block write `temporary` in the same folder, then rename it to `path` durably."""
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long for either
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_locked(path: Path, temporary: Path, forbidden: int) -> Iterator[Path]:
    """As `replacing`, in a locked folder: `temporary` may have a fixed name that a killed process left.

    `forbidden`: mode bits that the file does not get; this user may read and write it.
    """
    temporary.unlink(missing_ok=True)
    with replacing(path, temporary):
        yield temporary
        temporary.chmod((stat.S_IMODE(temporary.stat().st_mode) | 0o600) & ~forbidden)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


def sweep_temporaries(folder: Path, name: str | None = None) -> None:
    """Remove temporary files in a folder, as `Directory.remove_temporaries` does."""
    with open_directory(folder) as opened:
        opened.remove_temporaries(name)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_new(path: Path, content: Iterable[Piece]) -> None:
    """Write a new file, as `Directory.create` does."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
    with _closing(handle):
        _write(handle, content)


def append(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Append to a file that the user named, following links, and flush it to the disk."""
    with writing(path, len(content), advice=advice), open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY | _SAFELY)
    with _closing(handle):
        os.fsync(handle)


def output_error(path: Path, error: OSError, needed: int = 0, *, advice: str = _ADVICE) -> OutputError:
    """Return an OSError as one line with path, cause and, on a full disk, bytes needed and free; keeps `errno`."""
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parent = next((place for place in path.parents if place.exists()), Path("/"))
        text += f" (needs {needed} bytes, {shutil.disk_usage(parent).free} free)"
    result = OutputError(f"{text}; {advice}")
    result.errno = error.errno
    return result


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _require_plain(folder: Path, name: str) -> None:
    if not is_plain_name(name):
        raise DataError(f"{folder}: {name[:80]!r} is not the name of a file in it")


def _write(handle: int, content: Iterable[Piece]) -> None:
    """Write all pieces to an open file, and flush it to the disk."""
    for piece in content:
        view = memoryview(piece)
        while view:
            view = view[os.write(handle, view) :]
    os.fsync(handle)


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[None]:
    """Close a descriptor after the block; closing may raise an error."""
    try:
        yield
    finally:
        os.close(handle)
