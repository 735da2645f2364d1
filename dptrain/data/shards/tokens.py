"""Token shards: ids in a row, as nanoGPT (.bin), llm.c (.bin with a header) and NumPy (.npy) write them.

A sample is a window of ids and the ids after each, the next window's first included; windows do not overlap. Headers of
llm.c: karpathy/llm.c, dev/data/data_common.py (2024).
"""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dptrain.data.shards.formats import Array, Extent, Indices, LocalFile, ReadOptions, ShardFormat, ShardReader
from dptrain.data.shards.stores import Store, StoredFile
from dptrain.errors import ConfigError, DataError

# Bytes of llm.c's header: 256 numbers of 32 bits.
_HEADER = 1024
# llm.c's first number of a file, with its version and the type of the ids.
_MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# Bytes in which the header of an .npy file ends.
_NPY_HEADER = 4096
_NPY_MAGIC = b"\x93NUMPY"
_MOST_IDS = 1 << 31


class _Layout(NamedTuple):
    dtype: np.dtype[np.generic]
    offset: int  # of the first id, bytes
    length: int  # ids


class TokenFormat(ShardFormat):
    """Shards of token ids."""

    name = "tokens"
    suffixes = (".npy", ".bin")

    def extent(self, file: StoredFile, path: Path, store: Store, options: ReadOptions) -> Extent:
        """Return the number of ids, from the header."""
        head = store.read(file.url, 0, min(_NPY_HEADER, file.nbytes))
        layout = _layout(head, file.shown, file.nbytes, options)
        return Extent(layout.length, "ids")

    def samples(self, length: int, options: ReadOptions) -> int:
        """Return the windows, each with one id after it."""
        return max(length - 1, 0) // _sequence_length(options)

    def open(self, path: Path, file: StoredFile, layout: str, options: ReadOptions) -> ShardReader:
        """Open a shard; its ids may have other types than those of the first."""
        return TokenReader(LocalFile(path, file), options)


class TokenReader(ShardReader):
    """Reads windows of ids: (x, y), int32 (rows, sequence_length) each."""

    nbytes = 0

    def __init__(self, file: LocalFile, options: ReadOptions) -> None:
        head = file.read(0, min(_NPY_HEADER, file.nbytes))
        self._file, self._layout = file, _layout(head, file.where, file.nbytes, options)
        self._window, self._vocabulary = _sequence_length(options), options.vocabulary_size
        self.length = max(self._layout.length - 1, 0) // self._window

    def read(self, rows: Indices) -> tuple[Array, Array]:
        """See `ShardReader`."""
        ids = np.empty((len(rows), self._window + 1), self._layout.dtype)
        itemsize = self._layout.dtype.itemsize
        for index, row in enumerate(rows.tolist()):
            start = self._layout.offset + row * self._window * itemsize
            content = self._file.read(start, (self._window + 1) * itemsize)
            ids[index] = np.frombuffer(content, self._layout.dtype)
        self._check(ids, rows)
        ids = ids.astype(np.int32)
        return ids[:, :-1], ids[:, 1:]

    def _check(self, ids: Array, rows: Indices) -> None:
        wrong = (ids < 0) | (ids >= (_MOST_IDS if self._vocabulary is None else min(self._vocabulary, _MOST_IDS)))
        if wrong.any():
            row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
            token = int(rows[row]) * self._window + int(column)
            bound = "below 2^31" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
            raise DataError(
                f"{self._file.where}: id {ids[row, column]} at token {token:,} (byte "
                f"{self._layout.offset + token * self._layout.dtype.itemsize:,}); expected {bound}: are these shards "
                "of this vocabulary and type?"
            )


def _sequence_length(options: ReadOptions) -> int:
    if options.sequence_length is None:
        raise ConfigError("shards of token ids need sequence_length=, the ids of a window")
    return options.sequence_length


def _layout(head: bytes, where: str, nbytes: int, options: ReadOptions) -> _Layout:
    """Return type, offset and number of the ids, by a file's first bytes; refuse a header that its size contradicts."""
    if head[:6] == _NPY_MAGIC:
        layout = _npy_layout(head, where)
    elif len(head) >= _HEADER and int.from_bytes(head[:4], "little") in _MAGICS:
        magic, version, length = np.frombuffer(head[:12], "<i4").tolist()
        expected, type_name = _MAGICS[magic]
        if version != expected:
            raise DataError(f"{where}: version {version} of llm.c's shards, expected {expected}; write it again")
        layout = _Layout(np.dtype(type_name), _HEADER, length)
    elif where.endswith(".npy"):
        raise DataError(f"{where}: not an .npy file (first bytes {head[:6].hex()}), expected {_NPY_MAGIC.hex()}")
    else:
        dtype = np.dtype(options.token_dtype)
        if nbytes % dtype.itemsize:
            raise DataError(
                f"{where}: {nbytes:,} bytes are no multiple of the {dtype.itemsize} of an id of {dtype}; it is "
                "truncated, or of another type (token_dtype=)"
            )
        return _Layout(dtype, 0, nbytes // dtype.itemsize)
    needed = layout.offset + layout.length * layout.dtype.itemsize
    if layout.length < 0 or needed > nbytes:
        raise DataError(
            f"{where}: truncated: its header declares {layout.length:,} tokens = {needed:,} bytes, it has {nbytes:,}"
        )
    return layout


def _npy_layout(head: bytes, where: str) -> _Layout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
    except (ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{where}: its header cannot be read ({' '.join(str(error).split())[:100]})") from None
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize > 8:
        raise DataError(f"{where}: {dtype} of shape {shape}; expected integers in one row, the ids of tokens")
    return _Layout(dtype, file.tell(), shape[0])
