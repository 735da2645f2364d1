"""NumPy's `.npz`: a zip of `.npy` members, without pickles; their headers, which NumPy trusts, are parsed here."""

import ast
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from dptrain.data.sources import (
    DEFAULT_MAX_BYTES,
    ArraySource,
    ByteStream,
    DataSources,
    StreamSource,
    check_declared,
    length_error,
    read_exactly,
    stream_errors,
)
from dptrain.errors import DataError
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line

KEYS = ("x_train", "y_train", "x_test", "y_test")

_NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
_NUMBER = re.compile(r"[<>|=]?(i[1248]|u[1248]|f[248])")


def open_npz(path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> DataSources:
    """Open x_train, y_train, x_test and y_test of an archive; reads only headers, a member's CRC with its rows."""
    sources = open_arrays(path, lambda names: KEYS, max_bytes=max_bytes)
    return DataSources(name=Path(path).stem, **sources)


def open_arrays(
    path: str | os.PathLike[str],
    choose: Callable[[Collection[str]], Sequence[str]],
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> dict[str, ArraySource]:
    """Open the arrays of an archive that `choose` selects from its names."""
    path = Path(path)
    with stream_errors(str(path)), open_regular(path) as raw:
        first = raw.read(4)
    if first[:2] != b"PK":
        raise DataError(f"{path}: not an .npz archive: first bytes {first.hex() or 'none'}{_guess(first)}")
    with _archive(path) as archive:
        present = {name.removesuffix(".npy"): name for name in archive.namelist()}
        keys = choose(present)
        missing = [key for key in keys if key not in present]
        if missing:
            names = ", ".join(ascii(name)[1:-1] for name in sorted(present)[:10]) or "nothing"
            more = f" and {len(present) - 10} more" if len(present) > 10 else ""
            raise DataError(
                f"{path}: no {', '.join(missing)} in the archive; expected {', '.join(keys)}, found {names}{more}"
            )
        return {key: _open_member(path, archive, present[key], max_bytes) for key in keys}


def map_npy(path: Path) -> npt.NDArray[Any]:
    """Return an `.npy` file's array as a read-only memory map, in its stored byte order."""
    where = str(path)
    with stream_errors(where), open_regular(path) as file:
        header = _read_header(where, file)
        dtype, shape, fortran_order = _parse_header(where, header)
        check_declared(where, shape, dtype.itemsize, 1 << 62)
        declared, size = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
        if size != len(header) + declared:
            raise length_error(where, shape, declared, str(size - len(header)))
        if not declared:
            raise DataError(f"{where}: no samples (shape {shape}); expected at least one")
        order: Any = "F" if fortran_order else "C"
        return np.memmap(file, dtype, "r", len(header), shape, order)


def _open_member(path: Path, archive: zipfile.ZipFile, member: str, max_bytes: int) -> ArraySource:
    where = f"{path}:{member.removesuffix('.npy')}"
    info = archive.getinfo(member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(
            f"{where}: zip compression {info.compress_type}; save with numpy.savez or numpy.savez_compressed"
        )
    if info.flag_bits & 0x1:
        raise DataError(f"{where}: encrypted; save with numpy.savez or numpy.savez_compressed")
    with _archive_errors(where), archive.open(info) as stream:
        header = _read_header(where, stream)
    dtype, shape, fortran_order = _parse_header(where, header)
    check_declared(where, shape, dtype.itemsize, max_bytes)
    declared = math.prod(shape) * dtype.itemsize
    if info.file_size != len(header) + declared:
        raise length_error(where, shape, declared, str(info.file_size - len(header)))

    @contextmanager
    def open_payload() -> Iterator[ByteStream]:
        with _archive(path) as archive, _archive_errors(where):
            try:
                stream = archive.open(member)
            except KeyError:
                stream = None
            if stream is None or read_exactly(stream, len(header)) != header:
                raise DataError(f"{where}: changed since it was opened; start again when nothing writes to it")
            with stream:
                yield cast(ByteStream, stream)

    # Sequential even where the member is stored uncompressed: its checksum is worth one pass.
    return StreamSource(where, shape, dtype, open_payload, sequential=True, fortran_order=fortran_order)


def _read_header(where: str, stream: IO[bytes]) -> bytes:
    start = read_exactly(stream, 8)
    if start[:6] != _NPY_MAGIC:
        raise DataError(
            f"{where}: not .npy: first bytes {start[:6].hex() or 'none'}{_guess(start)}, expected {_NPY_MAGIC.hex()}"
        )
    # Version 3 differs from 2 only in the names of record fields, and records are refused anyway.
    length_format = {1: "<H", 2: "<I", 3: "<I"}.get(start[6] if len(start) == 8 else 0)
    if length_format is None:
        raise DataError(f"{where}: .npy version {start[6:].hex('.')}, this build reads 1 to 3")
    length_bytes = read_exactly(stream, struct.calcsize(length_format))
    if len(length_bytes) < struct.calcsize(length_format):
        raise DataError(f"{where}: the .npy header ends early; delete it and fetch it again")
    (length,) = struct.unpack(length_format, length_bytes)
    if length > _MAX_HEADER_BYTES:
        raise DataError(f"{where}: .npy header of {length} bytes declared, at most {_MAX_HEADER_BYTES} are read")
    text = read_exactly(stream, length)
    if len(text) < length:
        raise DataError(f"{where}: .npy header of {length} bytes declared, file has {len(text)}; fetch it again")
    return start + length_bytes + text


def _parse_header(where: str, header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return the stored dtype, the shape, and whether the first index changes fastest."""
    text = header[10 if header[6] == 1 else 12 :].decode("latin1")
    try:
        with warnings.catch_warnings():
            # The parser warns of odd escapes in a damaged header; the checks below answer it.
            warnings.simplefilter("ignore")
            fields = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise DataError(f"{where}: damaged .npy header {text.strip()[:80]!a}; delete it and fetch it again")
    descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if isinstance(descr, str) and re.fullmatch(r"[<>|=]?O[0-9]*", descr):
        raise DataError(f"{where}: holds pickled Python objects (dtype object), which are never loaded; save numbers")
    if not isinstance(descr, str) or not _NUMBER.fullmatch(descr):
        raise DataError(f"{where}: dtype {str(descr)[:40]!a}; expected integers or floats of at most 8 bytes")
    if not isinstance(fortran_order, bool) or not _is_shape(shape):
        raise DataError(f"{where}: damaged .npy header {text.strip()[:80]!a}; delete it and fetch it again")
    return np.dtype(descr), shape, fortran_order


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _guess(first: bytes) -> str:
    if first[:1] == b"\x80":
        return " (pickle? it is never loaded)"
    if first.lstrip()[:1] == b"<":
        return " (HTML?)"
    if first[:2] in (b"\0\0", b"\x1f\x8b"):
        return " (IDX? name the folder that holds the four files)"
    if first[:4] == _NPY_MAGIC[:4]:
        return " (a single .npy? save the four arrays with numpy.savez)"
    return ""


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with stream_errors(str(path)), open_regular(path) as raw:
        with _archive_errors(str(path)):
            archive = zipfile.ZipFile(raw)
        with archive:
            yield archive


@contextmanager
def _archive_errors(where: str) -> Iterator[None]:
    """Turn whatever `zipfile` raises on damaged archives, far more than BadZipFile, into a `DataError`."""
    with stream_errors(where):
        try:
            yield
        except (DataError, OSError, EOFError):
            raise
        except Exception as error:
            raise DataError(f"{where}: damaged ({one_line(error)}); delete it and fetch it again") from None
