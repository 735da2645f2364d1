"""Writing files so that a reader never sees half of one, and reading only what has an end."""

import contextlib
import errno
import glob
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dptrain.errors import OutputError

# Of a file's content: bytes, or memory that stays as it is until it is written.
Piece = bytes | memoryview

_ADVICE = "choose another --out"

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading in binary.

    Raises:
        OSError: it cannot be opened, or is no regular file: opening a named pipe waits for a writer, and a device may
            never end.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the system refuses directories itself
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file")
    return open(path, "rb")


def write_atomically(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Write a file under a temporary name, read it back, flush it to the disk, and rename it into place.

    Args:
        path: the file; an existing one is replaced.
        content: all of it.
        advice: what to do where it fails, the end of the message.

    Raises:
        OutputError: the disk is full, read-only, denied or failing; says what is needed and free.
    """
    try:
        with replacing(path, path.with_name(f".{path.name}.{os.getpid()}.tmp")) as temporary:
            temporary.write_bytes(content)
            if temporary.read_bytes() != content:
                raise OSError(errno.EIO, "it is not what was written there; is the disk failing?")
    except OSError as error:
        raise output_error(path, error, len(content), advice=advice) from error


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


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are not there, so that they survive a power cut.

    Raises:
        OSError: the system's.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


def write_new(path: Path, content: Iterable[Piece]) -> None:
    """Write a file that is not there yet, and flush it to the disk.

    Args:
        path: the file.
        content: what follows one another there.

    Raises:
        OSError: the system's; what was written until then stays.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in content:
            view = memoryview(piece)
            while view:
                view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep_temporaries(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files that killed writers of a file have left; those of living processes stay.

    Args:
        folder: where they are.
        name: of the file that they were to become; None for any.

    Raises:
        OSError: the system's.
    """
    for left in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdecimal() and not _lives(int(pid)):
            left.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    """Whether there is a process; also where it is another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def append_line(path: Path, line: str) -> None:
    """Append one line to a file and flush it to the disk.

    Raises:
        OutputError: as `write_atomically`.
    """
    append(path, f"{line}\n".encode())


def append(path: Path, content: bytes, *, advice: str = _ADVICE) -> None:
    """Append to a file and flush it to the disk.

    Raises:
        OutputError: as `write_atomically`.
    """
    try:
        with open(path, "ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise output_error(path, error, len(content), advice=advice) from error


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries so that a rename in it survives a power cut."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere a folder cannot be opened, and renaming is made durable by the system
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
