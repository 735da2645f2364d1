"""Files that nobody else can turn against us: opened in a folder that is held open, and replaced as a whole.

What lies in a folder may be anybody's: a link to a file elsewhere, a named pipe that waits for a writer, a device that
never ends. So a `Directory` follows no link, opens nothing but regular files and folders, and never waits; its
temporary files have names that nobody can guess.
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

# Of a file's content: bytes, or memory that stays as it is until it is written.
Piece = bytes | memoryview

_ADVICE = "choose another --out"
# That one path may lead through, as Linux counts.
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

# On every open: not to wait for the other end of a pipe, nor to take a terminal, nor to leave the file to children.
_SAFELY = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Bytes that are compared at once.
_CHUNK = 1 << 20


class Directory:
    """A folder that is held open: what is done in it by name stays in it. Make one with `open_directory`.

    Names are plain: of an entry, without a slash. All methods raise:

    - OSError: the system's.
    - DataError: an entry is a link, a named pipe or anything else but what is expected there, or a name is not plain.

    Args:
        path: for messages.
        fd: of the open folder, which the `Directory` closes.

    Attributes:
        path: as given.
        fd: of the open folder, -1 once it is closed.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def __enter__(self) -> Self:
        """Return the directory itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder; a second time does nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        with self._naming():
            return sorted(os.listdir(self.fd))

    def stat(self, name: str) -> os.stat_result | None:
        """Return what the system knows of an entry, a link's own where it is one; None where there is none."""
        with self._naming(name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def kind(self, name: str) -> str | None:
        """Return what an entry is: FILE, FOLDER, "a link", "a named pipe", ...; None where there is none."""
        found = self.stat(name)
        return None if found is None else _kind(found.st_mode)

    def expect(self, name: str, expected: str) -> str | None:
        """Return an entry's kind, None where there is none; anything but `expected`, FILE or FOLDER, is a DataError."""
        found = self.kind(name)
        if found not in (None, expected):
            raise self._unexpected(name, found, expected)
        return found

    def folder(self, name: str, *, make: bool = False) -> "Directory":
        """Return a folder in this one.

        Args:
            name: of the folder.
            make: make it where there is none, so that it survives a power cut.
        """
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
        """Return the content of a regular file.

        Args:
            name: of the file.
            most: bytes that it may have; a larger one is a DataError.
        """
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(most + 1) if size <= most else b""
        if max(size, len(content)) > most:
            raise DataError(f"{self.path / name}: {max(size, len(content))} bytes, expected at most {most}")
        return content

    def holds(self, name: str, content: Iterable[Piece]) -> bool:
        """Whether a file holds these pieces and nothing else."""
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
        """Write a file that is not there yet, and flush it to the disk.

        Args:
            name: of the file.
            content: what follows one another there; what was written until an error stays.
        """
        handle = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with self._naming(name), _closing(handle):
            _write(handle, content)

    def replace(self, name: str, content: Iterable[Piece]) -> None:
        """Write a file under a temporary name, read it back, flush it, and rename it into place, which is flushed too.

        Whatever happens, the file is as it was, or holds all of the content.
        """
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
        """Open a file to append to it, a new one where there is none; unbuffered.

        Raises:
            DataError: also where the file has a second name (a hard link), which would change with it.
        """
        handle = self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(handle).st_nlink > 1:
            os.close(handle)
            raise DataError(f"{self.path / name}: it has a second name (a hard link), expected a file of its own")
        return os.fdopen(handle, "ab", buffering=0)

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, a new one where there is none, and flush it to the disk."""
        with self._naming(name), self.appending(name) as file:
            _write(file.fileno(), [content])

    def rename(self, name: str, new: str) -> None:
        """Give an entry another name; `sync` lets it survive a power cut."""
        _require_plain(self.path, new)
        with self._naming(name):
            os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a regular file; does nothing where there is none."""
        if self.expect(name, FILE) is not None:
            with self._naming(name), contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self.expect(name, FOLDER)
        with self._naming(name):
            os.rmdir(name, dir_fd=self.fd)

    def remove_temporaries(self, name: str | None = None, *, locked: bool = False) -> None:
        """Remove temporary files that killed writers of this user have left.

        Args:
            name: of the file that they were to become; None for any.
            locked: whether nobody else can be writing, so that those of living processes go as well: a PID comes again.
        """
        for left in self.names():
            found = _TEMPORARY.fullmatch(left)
            if found is None or name not in (None, found["name"]) or not self.is_own_file(left):
                continue
            if locked or not _lives(int(found["pid"])):
                self.remove(left)

    def is_own_file(self, name: str) -> bool:
        """Whether an entry is a regular file of this user's."""
        found = self.stat(name)
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()

    def probe(self, nbytes: int) -> None:
        """Reserve so much room for a moment, which finds full, read-only and denied disks, and quotas."""
        place = temporary_name("probe")
        handle = self._open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with self._naming(place), _closing(handle):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, nbytes)
        finally:
            self.remove(place)

    def sync(self) -> None:
        """Flush the entries, so that renamings and new files survive a power cut."""
        with self._naming():
            os.fsync(self.fd)

    def _open(self, name: str, flags: int) -> int:
        """Return the descriptor of a regular file."""
        self.expect(name, FILE)  # before it is opened, which a device might notice
        with self._naming(name):
            try:
                handle = os.open(name, flags | os.O_NOFOLLOW | _SAFELY, 0o666, dir_fd=self.fd)
            except OSError:
                self.expect(name, FILE)  # somebody has just put it there
                raise
            found = _kind(os.fstat(handle).st_mode)
            if found != FILE:
                os.close(handle)
                raise self._unexpected(name, found, FILE)
            return handle

    def _unexpected(self, name: str, found: str | None, expected: str) -> DataError:
        return DataError(f"{self.path / name}: it is {found}, expected {expected}; remove it")

    @contextlib.contextmanager
    def _naming(self, name: str | None = None) -> Iterator[None]:
        """Check an entry's name, and let the system's errors tell the whole path."""
        if name is not None:
            _require_plain(self.path, name)
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path if name is None else self.path / name), None
            raise


def open_directory(path: Path, *, make: bool = False, follow: bool = True) -> Directory:
    """Open a folder that the user has named, and which may therefore be reached through links.

    Args:
        path: the folder.
        make: make it, and those above it, where there is none.
        follow: whether it may be a link itself; not where only the folder above it was named by the user.

    Raises:
        OSError: the system's.
        DataError: it is a link, and must not be followed.
    """
    if not follow:
        with open_directory(path.parent, make=make) as parent:
            return parent.folder(path.name, make=make)
    if make:
        make_folder(path)
    return Directory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY))


def is_plain_name(name: object) -> bool:
    """Whether a name, of a manifest say, is one of an entry in a folder: no path, no "." and "..", no NUL."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & {*name}


def temporary_name(name: str) -> str:
    """Return a hidden name for what is to become an entry; nobody can guess it."""
    return f".{name}.{os.getpid()}-{os.urandom(8).hex()}.tmp"


# What `temporary_name` returns, and what earlier versions wrote.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]{1,9})(-[0-9a-f]{16})?\.tmp", re.DOTALL)


def to_become(name: str) -> str | None:
    """Return what an entry with a temporary name was to become; None where it has another name."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found["name"]


def open_regular(path: Path) -> BinaryIO:
    """Open a file that the user has named, for reading in binary; links are followed.

    Raises:
        OSError: it cannot be opened, or is no regular file: opening a named pipe waits for a writer, and a device may
            never end.
    """
    _refuse_irregular(os.stat(path).st_mode)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _SAFELY))  # noqa: SIM115
    try:
        _refuse_irregular(os.fstat(file.fileno()).st_mode)  # what is there by now
    except OSError:
        file.close()
        raise
    return file


def _refuse_irregular(mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the system refuses directories itself
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, expected a regular file")


def write_atomically(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Write a file as `Directory.replace` does; a link is replaced, not followed.

    Args:
        path: the file; an existing one is replaced.
        content: all of it.
        advice: what to do where it fails, the end of the message.

    Raises:
        OutputError: the disk is full, read-only, denied or failing; says what is needed and free.
    """
    with writing(path, len(content), advice=advice), open_directory(path.parent) as folder:
        folder._replace(path.name, [content])


def write_through_links(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Write a file that the user has named, as `write_atomically`; a link leads to what is replaced, and stays.

    A link that is another user's is replaced itself, as `write_atomically` does: it could lead anywhere.

    Raises:
        OutputError: as `write_atomically`; or links lead nowhere, or to something that is no regular file.
    """
    with writing(path, len(content), advice=advice):
        target = _behind_links(path)
    write_atomically(target, content, advice=advice)


def _behind_links(path: Path) -> Path:
    """Return where links of this user's, or root's, lead from a path.

    Raises:
        OSError: nowhere, or to something that is no regular file.
    """
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
    """Turn the system's errors into `OutputError`.

    Args:
        path: what is written.
        needed: its bytes.
        advice: what to do where it fails, the end of the message.

    Raises:
        OutputError: instead of an OSError.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise output_error(path, error, needed, advice=advice) from error


@contextlib.contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[Path]:
    """Let what the context writes to `temporary`, in the same folder, become `path` in one step that survives a crash.

    Raises:
        OSError: the system's; `path` is as it was, and `temporary` is gone.
    """
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
    """Do as `replacing`, in a folder that is locked: `temporary` may have a fixed name, which a killed process left.

    Args:
        path: of the file.
        temporary: in the same folder; what is there is removed.
        forbidden: mode bits that the file does not get; this user may read and write it.

    Raises:
        OSError: as `replacing`.
    """
    temporary.unlink(missing_ok=True)
    with replacing(path, temporary):
        yield temporary
        temporary.chmod((stat.S_IMODE(temporary.stat().st_mode) | 0o600) & ~forbidden)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are not there, so that they survive a power cut.

    Raises:
        OSError: the system's.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


def sweep_temporaries(folder: Path, name: str | None = None) -> None:
    """Remove temporary files in a folder, as `Directory.remove_temporaries` does.

    Raises:
        OSError: the system's.
    """
    with open_directory(folder) as opened:
        opened.remove_temporaries(name)


def _lives(pid: int) -> bool:
    """Whether there is a process; also where it is another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_new(path: Path, content: Iterable[Piece]) -> None:
    """Write a file that is not there yet, as `Directory.create` does.

    Raises:
        OSError: the system's; what was written until then stays.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
    with _closing(handle):
        _write(handle, content)


def append(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Append to a file that the user has named, and flush it to the disk; links are followed.

    Raises:
        OutputError: as `write_atomically`.
    """
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
    """Return an operating system's error as one line with path, cause and, on a full disk, bytes needed and free.

    Its `errno` is the system's.
    """
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
        raise DataError(f"{folder}: {name[:80]!r} is no name of a file in it")


def _write(handle: int, content: Iterable[Piece]) -> None:
    """Write all of it to an open file, and flush it to the disk."""
    for piece in content:
        view = memoryview(piece)
        while view:
            view = view[os.write(handle, view) :]
    os.fsync(handle)


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[None]:
    """Close a descriptor, whose close may tell of an error."""
    try:
        yield
    finally:
        os.close(handle)
