"""Weights in a `.safetensors` file, of run directories as of `save_weights`.

Tensors are named by their paths in the model ("dense/kernel"), in Keras' shapes (kernels as (inputs, outputs)), float32
or float64. The metadata, all strings:
    format               "dptrain"
    format_version       "2"; a higher one is refused
    architecture         JSON: class name and configuration of every layer
    sha256               of the whole file, with zeros in place of these digits; a mismatch means damage
Version 1 has instead of the last `architecture_digest`, the SHA-256 of that text. Files of other origin need no
metadata, only the names.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from dptrain.errors import DataError
from dptrain.program.tensor import Variable
from dptrain.runtime.storage.files import Piece, open_regular
from dptrain.runtime.types import TYPES, type_of
from dptrain.saving.reading import Array, Loaded, Stored, fill, guess, portable, portable_dtype, reading, size_of

_VERSION = 2
_ZEROS = "0" * 64
# A header names and places a tensor in about 100 bytes; the library would accept 100 MB.
_MAX_HEADER = 16 << 20
# NumPy's names of types by the format's.
_DTYPES = {known.safetensors: name for name, known in TYPES.items() if known.is_numpy}


def encode(weights: Mapping[str, Array], architecture: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the content of a file."""
    return b"".join(pieces_of_model(weights, architecture))


def pieces_of_model(weights: Mapping[str, Array], architecture: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """Return the content of a file in pieces, without copies of large weights."""
    metadata = {"architecture": json.dumps(architecture), "format": "dptrain", "format_version": str(_VERSION)}
    header, *values = pieces(weights, {**metadata, "sha256": _ZEROS})
    digest = hashlib.sha256(header)
    for value in values:
        digest.update(value)
    return [bytes(header).replace(_entry(_ZEROS), _entry(digest.hexdigest()), 1), *values]


def pieces(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> list[Piece]:
    """Return the content of a safetensors file: its header, and arrays' values in place.

    The library copies all values twice, and orders metadata at random: equal files would differ. Source:
    https://github.com/huggingface/safetensors#format.
    """
    # The widest first, as the library has them: so each begins at a multiple of its width.
    ordered = sorted(arrays, key=lambda name: (-portable_dtype(arrays[name].dtype).itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    values: list[Piece] = []
    end = 0
    for name in ordered:
        array = portable(arrays[name])
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": type_of(array.dtype).safetensors,
            "shape": list(arrays[name].shape),
            "data_offsets": [begin, end],
        }
        values.append(array.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8, as the library places them
    return [struct.pack("<Q", len(text)) + text, *values]


def _entry(digits: str) -> bytes:
    return f'"sha256":"{digits}"'.encode()


def load(path: Path, weights: Mapping[str, Variable], *, skip_mismatch: bool = False) -> Loaded:
    """Read the weights of a model."""
    where = str(path)
    _check_header(path)
    with reading(where), safetensors.safe_open(path, framework="numpy") as file:
        _check_metadata(path, file.metadata() or {})
        stored = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            stored[name] = Stored(tuple(part.get_shape()), _DTYPES.get(dtype, dtype), _reader(file, name), name)
        return Loaded(*fill(where, weights, stored, skip_mismatch=skip_mismatch))


def _reader(file: Any, name: str) -> Any:
    return lambda: file.get_tensor(name)


def _check_header(path: Path) -> None:
    """Check the length of the JSON header, in the first eight bytes, before anything parses it."""
    with reading(str(path)), open_regular(path) as file:
        first, size = file.read(9), size_of(file)
        (length,) = struct.unpack("<Q", first[:8]) if len(first) == 9 else (0,)
        if first[8:] != b"{" or not 2 <= length <= size - 8:
            start = first[:8].hex() or "none"
            raise DataError(f"{path}: not a safetensors file, or cut off: first bytes {start}{guess(first)}")
        if length > _MAX_HEADER:
            raise DataError(f"{path}: header of {length} bytes declared, at most {_MAX_HEADER} are read")


def _check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != "dptrain":
        if metadata.keys() & {"format_version", "architecture", "sha256"}:
            raise DataError(f"{path}: damaged: the metadata are dptrain's, the format is {metadata.get('format')!r}")
        return
    version = metadata.get("format_version", "")
    if version not in map(str, range(1, _VERSION + 1)):
        raise DataError(f"{path}: format_version {version[:20]!r}, this build reads 1 to {_VERSION}")
    if version == "1":
        if metadata.get("architecture_digest") != _digest(metadata.get("architecture", "")):
            raise DataError(f"{path}: damaged: the architecture in the metadata does not match its SHA-256")
    elif metadata.get("sha256") != _digest_of_file(path, metadata.get("sha256", "")):
        raise DataError(f"{path}: damaged: the content does not match its SHA-256")


def _digest_of_file(path: Path, digits: str) -> str:
    with open_regular(path) as file:
        first = file.read(8)
        header = first + file.read(int.from_bytes(first, "little"))
        digest = hashlib.sha256(header.replace(_entry(digits), _entry(_ZEROS), 1))
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
