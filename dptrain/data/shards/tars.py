"""WebDataset's tar files: members of one name and several endings are a sample (`0001.jpg`, `0001.cls`).

Pictures (.png, .jpg, .jpeg, .webp, .bmp) become uint8 arrays, .cls and .id integers, .txt texts, .npy arrays, .json
what it holds, anything else bytes. Nothing is unpacked: members are read at their offsets. Source:
webdataset/webdataset, docs/ "The WebDataset Format".
"""

import io
import json
import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.data.readers.images import convert_to
from dptrain.data.readers.pictures import open_picture
from dptrain.data.shards.formats import (
    Array,
    Extent,
    Indices,
    LocalFile,
    ReadOptions,
    ShardFormat,
    ShardReader,
    stacked,
)
from dptrain.data.shards.stores import Store, StoredFile
from dptrain.data.sources import check_declared
from dptrain.data.texts import object_array, text_array
from dptrain.errors import DataError, printable
from dptrain.program.tensor import native

_BLOCK = 512
_PICTURES = ("png", "jpg", "jpeg", "webp", "bmp")
_NUMBERS = ("cls", "id", "index")
MOST_SAMPLES = 100_000_000
# Bytes of the offset and size of a member.
_MEMBER_BYTES = 16


class TarFormat(ShardFormat):
    """WebDataset's shards."""

    name = "WebDataset"
    suffixes = (".tar",)
    scans = True

    def extent(self, file: StoredFile, path: Path, store: Store, options: ReadOptions) -> Extent:
        """Return the number of samples, by a walk over the headers of all members."""
        reader = TarReader(LocalFile(path, file), options)
        return Extent(reader.length, reader.layout)

    def open(self, path: Path, file: StoredFile, layout: str, options: ReadOptions) -> ShardReader:
        """Open a shard."""
        reader = TarReader(LocalFile(path, file), options)
        if reader.length:
            self.require_layout(file.shown, reader.layout, layout)
        return reader


class _View(io.RawIOBase):
    """A file for `tarfile`, which reads only headers."""

    def __init__(self, file: LocalFile) -> None:
        self._file, self._position = file, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._file.nbytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._file.nbytes - self._position, 0)
        if size > (1 << 24):  # more is a header that declares its own length
            raise DataError(f"{self._file.where}: a header of {size:,} bytes at byte {self._position:,}; it is damaged")
        content = self._file.read(self._position, rest if size < 0 else min(size, rest))
        self._position += len(content)
        return content


class TarReader(ShardReader):
    """Reads the members of samples."""

    def __init__(self, file: LocalFile, options: ReadOptions) -> None:
        self._file, self._options = file, options
        fields, members, names = _samples(file)
        self.fields, self._members, self._names = fields, members, names
        self.length = len(members)
        self.nbytes = members.nbytes + sum(map(len, names))
        self.layout = f"members {', '.join(printable(field) for field in fields)}"

    def read(self, rows: Indices) -> dict[str, Array]:
        """See `ShardReader`."""
        batch: dict[str, Array] = {}
        for column, field in enumerate(self.fields):
            decode = _decoder(field)
            values = []
            for row in rows.tolist():
                offset, size = self._members[row, column].tolist()
                where = f"{self._file.where}, {self._names[row]}.{field}"
                if size > self._options.max_bytes:
                    check_declared(where, (size,), 1, self._options.max_bytes)
                values.append(decode(self._file.read(offset, size), where, self._options))
            batch[field] = _column(values, self._file.where, field)
        return batch


def _samples(file: LocalFile) -> tuple[list[str], Array, list[str]]:
    """Return the endings of a sample, offset and size of each sample's members (samples, endings, 2), and the names."""
    fields: list[str] = []
    rows: list[tuple[int, int]] = []
    names: list[str] = []
    sample: dict[str, tuple[int, int]] = {}
    key: str | None = None

    def finish() -> None:
        if key is None:
            return
        if not names:
            fields.extend(sorted(sample))
        missing = [field for field in fields if field not in sample]
        if missing or len(sample) != len(fields):
            what = f"no .{missing[0]}" if missing else f".{next(name for name in sample if name not in fields)}"
            raise DataError(
                f"{file.where}: sample {printable(key)} has {what}, the first has {', '.join('.' + f for f in fields)}"
            )
        names.append(key)
        rows.extend(sample[field] for field in fields)

    for name, offset, size in _members(file):
        folder, slash, base = name.rpartition("/")
        stem, dot, field = base.partition(".")
        if not dot or base.startswith("."):
            continue
        if folder + slash + stem != key:
            finish()
            key, sample = folder + slash + stem, {}
            if len(names) >= MOST_SAMPLES:
                raise DataError(f"{file.where}: more than {MOST_SAMPLES:,} samples")
        if field.lower() in sample:
            raise DataError(f"{file.where}: two members {printable(name)} in a row; expected one")
        sample[field.lower()] = offset, size
    finish()
    return fields, np.array(rows, np.int64).reshape(len(names), len(fields), 2), names


def _members(file: LocalFile) -> Any:
    """Yield name, offset and size of the regular files; refuse an archive that ends too early."""
    if not file.nbytes:
        raise DataError(f"{file.where}: empty (0 bytes), expected a tar file; remove it, or write it again")
    end = 0
    try:
        with tarfile.open(fileobj=_View(file), mode="r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                padded = -(-member.size // _BLOCK) * _BLOCK if member.isreg() else 0
                end = member.offset_data + padded
                if member.isreg() and member.offset_data + member.size > file.nbytes:
                    raise DataError(
                        f"{file.where}: truncated: {printable(member.name)} ends at byte "
                        f"{member.offset_data + member.size:,}, the file at {file.nbytes:,}; fetch it again"
                    )
                if member.isreg() and not member.issparse():
                    yield member.name, member.offset_data, member.size
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file.where}: not a tar file, or damaged behind byte {end:,} ({' '.join(str(error).split())[:100]})"
        ) from None
    if file.nbytes < end + _BLOCK or any(file.read(end, _BLOCK)):
        raise DataError(f"{file.where}: truncated behind byte {end:,}: it has no end mark; fetch it again")


def _picture(content: bytes, where: str, options: ReadOptions) -> Array:
    try:
        with open_picture(io.BytesIO(content)) as opened:
            check_declared(where, (opened.height, opened.width, 3), 4, options.max_bytes)
            mode = "grayscale" if opened.mode in ("1", "L", "LA", "I;16", "I") else "rgb"
            pixels = np.asarray(convert_to(opened, mode, where, keeps_depth=False), np.uint8)
            return pixels if pixels.ndim == 3 else pixels[..., None]
    except DataError as error:
        text = str(error).removeprefix("a picture: ")
        raise DataError(text if text.startswith(where) else f"{where}: {text}") from None


def _integer(content: bytes, where: str, options: ReadOptions) -> int:
    try:
        value = int(content[:32])
    except ValueError:
        value = 1 << 63
    if len(content) > 32 or not -(1 << 63) <= value < 1 << 63:
        raise DataError(f"{where}: {content[:20]!r}, expected an integer")
    return value


def _json(content: bytes, where: str, options: ReadOptions) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({' '.join(str(error).split())[:100]})") from None


def _array(content: bytes, where: str, options: ReadOptions) -> Array:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        array = np.frombuffer(content, dtype, math.prod(shape), file.tell())
        return native(array.reshape(shape, order="F" if is_fortran else "C"))
    except (ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{where}: not an array ({' '.join(str(error).split())[:100]})") from None


def _text(content: bytes, where: str, options: ReadOptions) -> str:
    return content.decode("utf-8", "replace")


def _bytes(content: bytes, where: str, options: ReadOptions) -> bytes:
    return content


def _decoder(field: str) -> Callable[[bytes, str, ReadOptions], Any]:
    """Return what turns a member of this ending into a value."""
    last = field.rpartition(".")[2]
    if last in _PICTURES:
        return _picture
    decoders: dict[str, Callable[[bytes, str, ReadOptions], Any]] = {"json": _json, "npy": _array, "txt": _text}
    return _integer if last in _NUMBERS else decoders.get(last, _bytes)


def _column(values: list[Any], where: str, field: str) -> Array:
    """Return a batch of values as an array."""
    if not values:
        return np.empty(0, object)
    if isinstance(values[0], np.ndarray):
        # Pictures of several sizes stay apart: `map` may resize them.
        same = len({value.shape for value in values}) == 1
        return stacked(values, where, field) if same else object_array(values)
    if isinstance(values[0], int) and not isinstance(values[0], bool):
        return np.array(values, np.int64) if all(type(value) is int for value in values) else object_array(values)
    if isinstance(values[0], float) and all(type(value) in (int, float) for value in values):
        return np.array(values, np.float64)
    return text_array(values) if isinstance(values[0], str) else object_array(values)
