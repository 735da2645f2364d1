"""The IDX format of MNIST: a magic number, the sizes, then the numbers in big-endian order; often inside gzip.

    offset  bytes  meaning
    0       2      zero
    2       1      code of the dtype (`_DTYPES`)
    3       1      number of dimensions D
    4       4 D    sizes, big-endian unsigned
    4+4D           the numbers, last index fastest

The format is described at http://yann.lecun.com/exdb/mnist/.
"""

import gzip
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from dptrain.data.sources import (
    DEFAULT_MAX_BYTES,
    GZIP_PADDING,
    ArraySource,
    ByteStream,
    StreamSource,
    check_declared,
    length_error,
    read_exactly,
    stream_errors,
)
from dptrain.errors import DataError
from dptrain.runtime.storage.files import open_regular

_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}

GZIP_MAGIC = b"\x1f\x8b"


def open_idx(path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> ArraySource:
    """Open an IDX file, reading its header; the first `read_into` verifies a compressed file's length and checksum."""
    path = Path(path)
    where = str(path)
    with stream_errors(where), open_regular(path) as raw:
        compressed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        with _decompressed(raw, compressed) as stream:
            header, dtype, shape = _read_header(where, stream)
        size = os.fstat(raw.fileno()).st_size - len(header)
    check_declared(where, shape, dtype.itemsize, max_bytes)
    declared = math.prod(shape) * dtype.itemsize
    if not compressed and size != declared:
        raise length_error(where, shape, declared, str(size))
    if compressed and size > declared + declared // 1000 + GZIP_PADDING:
        raise DataError(f"{where}: {size} bytes of gzip for {declared} of content; delete it and fetch it again")

    @contextmanager
    def open_payload() -> Iterator[ByteStream]:
        with open_regular(path) as raw, _decompressed(raw, compressed) as stream:
            if read_exactly(stream, len(header)) != header:
                raise DataError(f"{where}: changed since it was opened; start again when nothing writes to it")
            yield cast(ByteStream, stream)

    return StreamSource(where, shape, dtype, open_payload, sequential=compressed)


def _read_header(where: str, stream: BinaryIO) -> tuple[bytes, np.dtype[Any], tuple[int, ...]]:
    magic = read_exactly(stream, 4)
    if len(magic) < 4:
        raise DataError(f"{where}: not IDX: only {len(magic)} bytes; delete it and fetch it again")
    dtype = _DTYPES.get(magic[2])
    if magic[:2] != b"\0\0" or dtype is None or magic[3] == 0:
        expected = "00000801" if "idx1" in Path(where).name else "00000803"
        raise DataError(
            f"{where}: not IDX: first bytes {magic.hex()}{_guess(magic)}, expected {expected}; delete it and fetch it "
            "again"
        )
    sizes = read_exactly(stream, 4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(
            f"{where}: header of {magic[3]} dimensions declared = {4 + 4 * magic[3]} bytes, file has {4 + len(sizes)}; "
            "delete it and fetch it again"
        )
    return magic + sizes, dtype, tuple(int(size) for size in np.frombuffer(sizes, ">u4"))


def _guess(first: bytes) -> str:
    if first.lstrip()[:1] == b"<":
        return " (HTML?)"
    if first[:2] == GZIP_MAGIC:
        return " (gzip twice?)"
    if first[:2] == b"PK":
        return " (zip?)"
    if first[:1] == b"\x80":
        return " (pickle?)"
    return ""


@contextmanager
def _decompressed(raw: BinaryIO, compressed: bool) -> Iterator[BinaryIO]:
    if compressed:
        with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
            yield cast(BinaryIO, stream)
    else:
        yield raw
