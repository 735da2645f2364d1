"""The cache of generated, downloaded and compiled files.

Compiled code is loaded into the process, so nobody else may write it: it is in this user's folder of mode 0700, beside
its SHA-256 (`NAME.sha256`), which is checked before loading. Damaged files are compiled again; without such a folder
each process compiles for itself.
"""

import errno
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dptrain.errors import DeviceError, OutputError
from dptrain.runtime import failure
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.storage.files import replacing_locked, write_new
from dptrain.runtime.storage.locks import held
from dptrain.runtime.storage.ownership import open_own
from dptrain.runtime.text import one_line

# Seconds to wait for another process that compiles the same file: several times what a compiler takes.
PATIENCE = 60.0
_CHECKSUM = ".sha256"
_MOST_CHECKSUM_BYTES = 512
# Paths of open folders that stay valid when the folders are moved.
_OPENED = Path("/proc/self/fd")

# Content that this process compiled but could not store, by name.
_not_kept: dict[str, bytes] = {}
_PURPOSE: ContextVar[str] = ContextVar("purpose", default="")
# Files that this process has begun to compile, and those that it has ended to compile.
_begun: list[str] = []
_ended: list[str] = []


class CompiledFile(NamedTuple):
    """A verified compiled file: the path to load it by, valid inside the `with` block, and its content."""

    path: Path
    content: bytes


class _DamagedError(Exception):
    """A cached file is not what was written; the message says why."""


def cache_dir() -> Path:
    """Return the cache folder: `$DPTRAIN_CACHE`, else the platform's user cache."""
    chosen = os.environ.get("DPTRAIN_CACHE")
    if chosen:  # not Path.expanduser, which raises where the user of `~user` does not exist
        return Path(os.path.expanduser(chosen))
    import platformdirs

    return Path(platformdirs.user_cache_dir("dptrain"))


@contextmanager
def own_folder(folder: Path, forbidden: int = 0o077) -> Iterator[Path]:
    """Open a folder of this user's, created with mode 0700, and yield a path that nobody can redirect.

    Mode bits in `forbidden` are removed; 0o022 lets others read. Raises OSError for a link or another user's folder.
    """
    for place in [place for place in (folder, *folder.parents) if not place.exists()][::-1]:
        _make_private(place)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user")
        if status.st_mode & forbidden:
            os.fchmod(handle, stat.S_IMODE(status.st_mode) & ~forbidden)
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
def compiling(purpose: str) -> Iterator[None]:
    """Let messages say what is compiled for, such as "the train step", rather than the name of a file."""
    token = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(token)


def compilations() -> tuple[int, bool]:
    """Return how many files this process has begun to compile, and whether one is under way."""
    return len(_begun), len(_begun) > len(_ended)


@contextmanager
def compiled(
    folder: Path,
    name: str,
    make: Callable[[], bytes],
    check: Callable[[Path], None] = lambda path: None,
    patience: float | None = None,
) -> Iterator[CompiledFile]:
    """Open a compiled file of the cache; compile it if it is missing or damaged.

    `name` must encode everything that the content depends on. `check` gets the path of a fresh file, which is kept only
    if it does not raise: a checksum says that bytes are as written, not that they are right. Other processes wait up to
    `patience` seconds, then compile for themselves.
    """

    def make_content() -> bytes:
        _begun.append(name)
        try:
            return make()
        except OSError as error:  # such an error is not about the cache
            raise DeviceError(f"{name}: cannot be compiled: {one_line(error)}") from error
        finally:
            _ended.append(name)

    with ExitStack() as stack:
        try:
            place = stack.enter_context(own_folder(folder))
            content = _load_or_compile(place, name, make_content, check, PATIENCE if patience is None else patience)
        except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
            _warn(folder, getattr(error, "strerror", None) or one_line(error))
            content = _not_kept[name] if name in _not_kept else make_content()
            place = _temporary(name, content, stack)
            if name not in _not_kept:
                check(place / name)
                _not_kept[name] = content
        yield CompiledFile(place / name, content)


def _load_or_compile(
    place: Path, name: str, make: Callable[[], bytes], check: Callable[[Path], None], patience: float
) -> bytes:
    """Return the content of a file in the open folder `place`, compiled if necessary."""
    try:
        return _checked(place / name)
    except FileNotFoundError:
        pass
    except _DamagedError as error:
        if failure.show_traceback:
            write_error(f"dptrain: {os.path.realpath(place)}/{name}: {error}; compiled again\n")
    with held(place / f"{name}.lock", patience, f"compiles {_PURPOSE.get() or name}"):
        with suppress(FileNotFoundError, _DamagedError):
            return _checked(place / name)  # another process was faster
        content = make()
        _put(place / name, content)
        check(_for_others(place) / name)
        _put(place / f"{name}{_CHECKSUM}", _checksum(name, content))
        return content


def _for_others(place: Path) -> Path:
    """Return an open folder's path under which this user's other processes find it."""
    return Path(f"/proc/{os.getpid()}/fd", place.name) if place.parent == _OPENED else place


def _checked(path: Path) -> bytes:
    """Return a file's content after verifying its owner, mode and checksum."""
    with _open_own(path) as file:
        try:
            with _open_own(path.with_name(f"{path.name}{_CHECKSUM}")) as checksum_file:
                expected = checksum_file.read(_MOST_CHECKSUM_BYTES)
        except FileNotFoundError:
            raise _DamagedError("it has no checksum") from None
        size = os.fstat(file.fileno()).st_size
        # The size first: a file may be larger than memory.
        if expected.split()[1:2] != [b"%d" % size] or _checksum(path.name, content := file.read()) != expected:
            raise _DamagedError(f"its {size} bytes do not match their checksum")
        return content


def _open_own(path: Path) -> BinaryIO:
    """Open a regular file that only this user can have written."""
    try:
        return os.fdopen(open_own(path), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:  # such as a link
        raise _DamagedError(f"it cannot be opened ({error.strerror})") from None


def _checksum(name: str, content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} {name}\n".encode()


def _put(path: Path, content: bytes) -> None:
    with replacing_locked(path, path.with_name(f".{path.name}.part"), 0o077) as part:
        write_new(part, [content])


def _temporary(name: str, content: bytes, stack: ExitStack) -> Path:
    try:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-")))
        write_new(place / name, [content])
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise OutputError(f"compiled code cannot be written to {tempfile.gettempdir()} either ({reason})") from error
    return place


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    launch = detect_launch()
    if launch is None or launch.rank == 0:
        text = f"{folder}: cannot cache compiled code there ({reason}); each process compiles its own"
        write_error(f"dptrain: warning: {text}; set DPTRAIN_CACHE to a folder that you own\n")
