"""Where dptrain keeps what it has generated, fetched or compiled.

Compiled code is loaded into the process, so nobody else may write it. It lies in a folder of mode 0700 that belongs to
this user, in regular files of this user's that no one else may write, each beside its SHA-256 (`NAME.sha256`), which is
checked before the file is loaded. A file that fails is compiled again. Where there is no such folder to be had, each
process compiles for itself.
"""

import errno
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dptrain.errors import DeviceError, OutputError
from dptrain.runtime import failure
from dptrain.runtime.files import replacing_locked, write_new
from dptrain.runtime.launcher import detect_launch
from dptrain.runtime.locks import held
from dptrain.runtime.ownership import open_own
from dptrain.runtime.streams import write_error
from dptrain.runtime.text import one_line

# Seconds to wait for another process that compiles the same file: several times what a compiler takes.
PATIENCE = 60.0
_CHECKSUM = ".sha256"
_MOST_CHECKSUM_BYTES = 512
# Here a process finds the folders that it has open, whoever moves them meanwhile.
_OPENED = Path("/proc/self/fd")

# What this process has compiled and could not keep, by name.
_not_kept: dict[str, bytes] = {}


class Compiled(NamedTuple):
    """A compiled file whose content has been checked.

    Attributes:
        path: what to load it by; good inside the `with` block.
        content: all of it.
    """

    path: Path
    content: bytes


class _DamagedError(Exception):
    """A file of the cache is not what was written there; the message says why."""


def cache_dir() -> Path:
    """The folder for fetched, generated and compiled files: `$DPTRAIN_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("DPTRAIN_CACHE")
    if chosen:  # not Path.expanduser, which raises where the user of `~user` does not exist
        return Path(os.path.expanduser(chosen))
    import platformdirs

    return Path(platformdirs.user_cache_dir("dptrain"))


@contextmanager
def own_folder(folder: Path, forbidden: int = 0o077) -> Iterator[Path]:
    """Open a folder that is this user's, and make it with mode 0700, like those above it, where it is missing.

    Args:
        folder: the folder; what others may do in it beyond what is allowed is taken from them.
        forbidden: mode bits that it must not have; 0o022 lets others read.

    Yields:
        A path to the folder that nobody can redirect while it is open.

    Raises:
        OSError: the system's, or it is a link or another user's.
    """
    for place in [place for place in (folder, *folder.parents) if not place.exists()][::-1]:
        _make_private(place)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user")
        if found.st_mode & forbidden:
            os.fchmod(handle, stat.S_IMODE(found.st_mode) & ~forbidden)
        opened = _OPENED / str(handle)
        yield opened if opened.exists() else folder
    finally:
        os.close(handle)


def _make_private(place: Path) -> None:
    try:
        place.mkdir(0o700)
    except FileExistsError:  # another process was faster
        if not place.is_dir():
            raise


@contextmanager
def compiled(
    folder: Path,
    name: str,
    make: Callable[[], bytes],
    check: Callable[[Path], None] = lambda path: None,
    patience: float | None = None,
) -> Iterator[Compiled]:
    """Open a compiled file of the cache, and compile it where it is missing or damaged.

    One process compiles, others that want the same file wait for it, and then compile for themselves.

    Args:
        folder: in the cache.
        name: of the file; says all that its content depends on.
        make: compiles it; returns the content.
        check: is given a path to what has been compiled, which other processes can open; it is kept only if that does
            not raise. A checksum says that bytes are as written, not that they are right.
        patience: seconds to wait for another process; None for `PATIENCE`.

    Raises:
        DptrainError: as `make` and `check` do.
        DeviceError: it cannot be compiled, because a temporary folder is full, say.
        OutputError: neither the cache nor a temporary folder can be written.
    """

    def made() -> bytes:
        try:
            return make()
        except OSError as error:  # which says nothing of the cache
            raise DeviceError(f"{name}: cannot be compiled: {one_line(error)}") from error

    with ExitStack() as stack:
        try:
            place = stack.enter_context(own_folder(folder))
            content = _found_or_made(place, name, made, check, PATIENCE if patience is None else patience)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            _warn(folder, getattr(error, "strerror", None) or one_line(error))
            content = _not_kept[name] if name in _not_kept else made()
            place = _temporary(name, content, stack)
            if name not in _not_kept:
                check(place / name)
                _not_kept[name] = content
        yield Compiled(place / name, content)


def _found_or_made(
    place: Path, name: str, make: Callable[[], bytes], check: Callable[[Path], None], patience: float
) -> bytes:
    """Return a file's content, and leave the file in the open folder `place`."""
    try:
        return _checked(place / name)
    except FileNotFoundError:
        pass
    except _DamagedError as error:
        if failure.show_traceback:
            write_error(f"dptrain: {os.path.realpath(place)}/{name}: {error}; compiled again\n")
    with held(place / f"{name}.lock", patience, f"compiles {name}"):
        with suppress(FileNotFoundError, _DamagedError):
            return _checked(place / name)  # another process was faster
        content = make()
        _put(place / name, content)
        check(_for_others(place) / name)
        _put(place / f"{name}{_CHECKSUM}", _checksum(name, content))
        return content


def _for_others(place: Path) -> Path:
    """Return a path of an open folder by which other processes of this user find it."""
    return Path(f"/proc/{os.getpid()}/fd", place.name) if place.parent == _OPENED else place


def _checked(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        FileNotFoundError: there is none.
        _DamagedError: it is not what was written, or somebody else may have written it.
    """
    with _open_own(path) as file:
        try:
            with _open_own(path.with_name(f"{path.name}{_CHECKSUM}")) as kept:
                expected = kept.read(_MOST_CHECKSUM_BYTES)
        except FileNotFoundError:
            raise _DamagedError("it has no checksum") from None
        size = os.fstat(file.fileno()).st_size
        # The size first: a file may be larger than memory.
        if expected.split()[1:2] != [b"%d" % size] or _checksum(path.name, content := file.read()) != expected:
            raise _DamagedError(f"its {size} bytes are not those that were written")
        return content


def _open_own(path: Path) -> BinaryIO:
    """Open a regular file that only this user can have written.

    Raises:
        FileNotFoundError: there is none.
        _DamagedError: it is something else.
    """
    try:
        return os.fdopen(open_own(path), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:  # such as a link
        raise _DamagedError(f"it cannot be opened ({error.strerror})") from None


def _checksum(name: str, content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} {name}\n".encode()


def _put(path: Path, content: bytes) -> None:
    """Write a file of a folder that is locked."""
    with replacing_locked(path, path.with_name(f".{path.name}.part"), 0o077) as part:
        write_new(part, [content])


def _temporary(name: str, content: bytes, stack: ExitStack) -> Path:
    """Write a file to a temporary folder, where it can be loaded until `stack` closes.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-")))
        write_new(place / name, [content])
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise OutputError(f"no place for compiled code in {tempfile.gettempdir()} either ({reason})") from error
    return place


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        text = f"{folder}: compiled code is not kept there ({reason}); each process compiles for itself"
        write_error(f"dptrain: warning: {text}; set DPTRAIN_CACHE to a folder of your own\n")
