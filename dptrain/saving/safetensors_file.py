"""Weights in a `.safetensors` file: one place for the format, of run directories as of `save_weights`.

Tensors are named by their paths in the model ("dense/kernel"), in Keras' shapes (kernels as (inputs, outputs)), float32
or float64. The metadata, all strings:
    format               "dptrain"
    format_version       "1"; a higher one is refused
    architecture         JSON: class name and configuration of every layer
    architecture_digest  SHA-256 of that text; a file where it does not match is damaged
Files of other origin need no metadata, only the names.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from dptrain.errors import DataError
from dptrain.program.tensor import Variable
from dptrain.runtime.files import open_regular
from dptrain.saving.reading import Array, Loaded, Stored, fill, guess, reading, size_of

_VERSION = 1
# A header names and places a tensor in about 100 bytes; the library would accept 100 MB.
_MAX_HEADER = 16 << 20
_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64", "U8": "uint8"}


def encode(weights: Mapping[str, Array], architecture: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the content of a file.

    Args:
        weights: by name.
        architecture: class name and configuration of every layer.
    """
    contiguous = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
    text = json.dumps(architecture)
    metadata = {
        "format": "dptrain",
        "format_version": str(_VERSION),
        "architecture": text,
        "architecture_digest": _digest(text),
    }
    return _sorted_metadata(safetensors.numpy.save(contiguous, metadata))


def _sorted_metadata(content: bytes) -> bytes:
    """Return a file with its metadata in order: the library's changes from call to call, equal files would differ."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the library places them
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def load(path: Path, weights: Mapping[str, Variable], *, skip_mismatch: bool = False) -> Loaded:
    """Read the weights of a model.

    Args:
        path: the file.
        weights: by path.
        skip_mismatch: as `reading.fill`.

    Raises:
        DataError: missing, damaged or of a newer version, or names or shapes differ: lists every difference.
    """
    where = str(path)
    _check_header(path)
    with reading(where), safetensors.safe_open(path, framework="numpy") as file:
        _check_metadata(where, file.metadata() or {})
        stored = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            stored[name] = Stored(tuple(part.get_shape()), _DTYPES.get(dtype, dtype), _reader(file, name), name)
        return Loaded(*fill(where, weights, stored, skip_mismatch=skip_mismatch))


def _reader(file: Any, name: str) -> Any:
    return lambda: file.get_tensor(name)


def _check_header(path: Path) -> None:
    """Check the first eight bytes, the length of the JSON header that follows, before anything parses it."""
    with reading(str(path)), open_regular(path) as file:
        first, size = file.read(9), size_of(file)
        (length,) = struct.unpack("<Q", first[:8]) if len(first) == 9 else (0,)
        if first[8:] != b"{" or not 2 <= length <= size - 8:
            start = first[:8].hex() or "none"
            raise DataError(f"{path}: not a safetensors file, or cut off: first bytes {start}{guess(first)}")
        if length > _MAX_HEADER:
            raise DataError(f"{path}: header of {length} bytes declared, at most {_MAX_HEADER} are read")


def _check_metadata(where: str, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != "dptrain":
        return
    version = metadata.get("format_version", "1")
    if not version.isdecimal() or int(version) > _VERSION:
        raise DataError(f"{where}: format_version {version[:20]!r}, this build reads <= {_VERSION}")
    if "architecture_digest" in metadata and metadata["architecture_digest"] != _digest(
        metadata.get("architecture", "")
    ):
        raise DataError(f"{where}: damaged: the architecture in the metadata does not match its SHA-256")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
