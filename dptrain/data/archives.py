"""Unpacks tar and zip files that anybody may have written: within a folder, up to a number of bytes."""

import bz2
import errno
import gzip
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dptrain.data.sources import format_bytes
from dptrain.errors import DataError
from dptrain.runtime.storage.files import output_error
from dptrain.runtime.text import one_line, short

MOST_MEMBERS = 1_000_000
# Bytes that are read at once: more is a header that declares its own length.
_MOST_READ = 1 << 24
_BLOCK = 512  # bytes of a tar file's header
_AGAIN = "delete it and fetch it again"
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,  # an encrypted member, or an unknown compression (NotImplementedError)
    ValueError,
    OverflowError,
    struct.error,
)
# What the system says of a member's name that cannot be, such as one below a file.
_BAD_NAME = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.ENOTEMPTY)
_COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"]\0\0\x80": lzma.LZMAFile,
}


def unpack(path: Path, folder: Path, archive_format: str | None, max_bytes: int) -> None:
    """Unpack an archive into an empty folder: "tar", "zip", or "auto" for either.

    Raises:
        DataError: neither of them, damaged, encrypted, or larger than `max_bytes` unpacked; or a member lies outside
            of the folder, or is a link out of it, or a device.
        OutputError: the folder cannot be written.
    """
    size = _Size(path, max_bytes)
    try:
        if archive_format in ("auto", "tar") and _is_tar(path):
            _unpack_tar(path, folder, size)
        elif archive_format in ("auto", "zip") and zipfile.is_zipfile(path):
            _unpack_zip(path, folder, size)
        else:
            raise DataError(f"get_file: {path} is not an archive ({archive_format}): expected a tar or a zip file")
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"get_file: {path}: cannot be unpacked ({short(one_line(error))}); {_AGAIN}") from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage so
            raise DataError(f"get_file: {path}: damaged ({one_line(error)}); {_AGAIN}") from error
        if error.errno in _BAD_NAME:
            raise DataError(f"get_file: {path}: a member's name cannot be written ({error.strerror})") from error
        raise output_error(folder.parent, error, size.bytes, advice="make room, or set cache_dir") from error


class _Size:
    """Sums the sizes of members, and refuses more than `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._most, self.bytes, self._members = path, max_bytes, 0, 0

    def add(self, size: int) -> None:
        """Count a member of `size` bytes."""
        self.bytes, self._members = self.bytes + size, self._members + 1
        if self.bytes > self._most:
            raise DataError(
                f"get_file: {self._path}: unpacks to more than max_bytes = {format_bytes(self._most)}; raise max_bytes "
                "if the archive is what you mean to unpack"
            )
        if self._members > MOST_MEMBERS:
            raise DataError(f"get_file: {self._path}: more than {MOST_MEMBERS:,} members")


def _unpack_zip(path: Path, folder: Path, size: _Size) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            size.add(member.file_size)  # zipfile reads no more than that
            if ".." in member.filename.split("/") or stat.S_ISLNK(member.external_attr >> 16):
                raise zipfile.BadZipFile(f"{short(member.filename)} is a link, or leads out of the folder")
        archive.extractall(folder)  # takes the root off names


class _Reader:
    """A file that refuses to read much at once, which only a header asks for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        if not 0 <= size <= _MOST_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


@contextmanager
def _decompressed(path: Path) -> Iterator[_Reader]:
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        opened = next((opened for magic, opened in _COMPRESSIONS.items() if start.startswith(magic)), None)
        if opened is None:
            yield _Reader(file)
        else:
            with opened(file) as content:
                yield _Reader(content)


def _is_tar(path: Path) -> bool:
    """Whether a file starts as a tar file; one that is damaged later is found on unpacking it."""
    try:
        with _decompressed(path) as file:
            start = file.read(_BLOCK)
        if start != bytes(_BLOCK):  # the end, of a file without members
            tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except _DAMAGED:
        return False
    except OSError as error:
        if error.errno is None:
            return False
        raise
    return True


def _unpack_tar(path: Path, folder: Path, size: _Size) -> None:
    with _decompressed(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:  # type: ignore[call-overload]
        for member in archive:
            size.add(member.size)
            archive.extract(member, folder, filter="data")
        # tarfile takes a cut or damaged header for the end, which is a block of zeros.
        file.seek(archive.offset)
        if file.read(_BLOCK) != bytes(_BLOCK):
            raise tarfile.ReadError("it is cut, or a header is damaged")
        while rest := file.read(1 << 20):  # until the checksum of a compressed file
            size.add(len(rest))
