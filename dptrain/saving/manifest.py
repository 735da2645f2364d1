"""A checkpoint's manifest: its files, and where each part of each array lies.

Each rank writes the parts that it owns; the manifest joins them. A rank that loads them, on any mesh, finds there which
bytes of which file it needs, and their SHA-256: a block is as many rows of a part as fit into `BLOCK` bytes, at least
one. So nobody reads a whole file for a slice, and no damaged byte is loaded. Anybody may have written a manifest:
`Manifest.parsed` accepts only one whose parts tile their arrays and their files.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dptrain.errors import DataError
from dptrain.runtime.storage.files import Piece, is_plain_name
from dptrain.runtime.types import TYPES

MANIFEST = "manifest.json"
# Bytes of a part with a separate digest.
BLOCK = 1 << 20
_SCHEMA = 2
# Types of arrays in files: by the name in their headers.
_DTYPES = {known.safetensors: known.storage for known in TYPES.values() if known.is_numpy}
_NAMES = tuple(dtype.name for dtype in _DTYPES.values())
# Limits of elements of an array, axes, and bytes of a file: real ones are smaller.
_MOST, _MOST_AXES = 1 << 62, 32

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    size: int  # in bytes
    checked: int  # leading bytes that `sha256` covers: all, or the header of a file of arrays
    sha256: str


@dataclass(frozen=True)
class StoredPart:
    """A part of an array in a file, in C order, little-endian."""

    file: str
    offset: int  # of its first byte
    start: Shape  # where it begins in the array
    shape: Shape
    sha256: tuple[str, ...]  # of each block, see `blocks`


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint, as a whole."""

    dtype: str
    shape: Shape
    parts: tuple[StoredPart, ...]  # a grid that tiles the array


@dataclass(frozen=True)
class Entries:
    """A manifest's entries of some files, and of the parts of arrays in them, by name."""

    files: Mapping[str, StoredFile]
    arrays: Mapping[str, StoredArray]

    def as_json(self) -> dict[str, Any]:
        """Return the entries in JSON."""
        files = {name: [file.size, file.checked, file.sha256] for name, file in self.files.items()}
        arrays = {}
        for name, array in self.arrays.items():
            parts = [[part.file, part.offset, part.start, part.shape, part.sha256] for part in array.parts]
            arrays[name] = [array.dtype, array.shape, parts]
        return {"files": files, "arrays": arrays}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the entries of `as_json`; foreign data raise whatever they raise."""
        files = {name: StoredFile(*values) for name, values in fields["files"].items()}
        arrays = {}
        for name, (dtype, shape, listed) in fields["arrays"].items():
            parts = [
                StoredPart(file, offset, tuple(start), tuple(part_shape), tuple(digests))
                for file, offset, start, part_shape, digests in listed
            ]
            arrays[name] = StoredArray(dtype, tuple(shape), tuple(parts))
        return cls(files, arrays)


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint."""

    step: int  # of the training
    value: float | None  # the lowest is the best; None where it is not compared
    mesh: Mapping[str, int]  # length of each axis of the mesh that saved it
    files: Mapping[str, StoredFile]  # by name, without the manifest
    arrays: Mapping[str, StoredArray]  # by name

    def encoded(self) -> bytes:
        """Return the content of the file."""
        return sealed(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return the manifest in JSON."""
        header = {"schema": _SCHEMA, "step": self.step, "value": self.value, "mesh": dict(self.mesh)}
        return header | Entries(self.files, self.arrays).as_json()

    @classmethod
    def parsed(cls, content: bytes) -> Self:
        """Return the manifest in a file's content; refuse damaged ones and other schemas."""
        fields = _unsealed(content)
        if fields is None:
            raise DataError(f"damaged: {MANIFEST} differs from what was written")
        schema = fields.get("schema")
        if type(schema) is int and schema != _SCHEMA:
            raise DataError(f"schema {str(schema)[:20]}, this build reads {_SCHEMA}")
        try:
            manifest = cls.from_json(fields)
            problem = manifest._problem() if schema == _SCHEMA else f"schema {_shown(schema)}"
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = "it has another shape"
        if problem:
            raise DataError(f"damaged: {MANIFEST} does not describe a checkpoint: {problem}")
        return manifest

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the manifest of `as_json`; foreign data raise whatever they raise."""
        entries = Entries.from_json(fields)
        return cls(fields["step"], fields["value"], dict(fields["mesh"]), entries.files, entries.arrays)

    def _problem(self) -> str:
        value = self.value
        if not _are_counts([self.step, *self.mesh.values()]):
            return f"step {_shown(self.step)} of mesh {_shown(dict(self.mesh))}"
        if value is not None and type(value) not in (int, float):
            return f"value {_shown(value)}"
        for name, file in self.files.items():
            if not is_plain_name(name) or name == MANIFEST:
                return f"{_shown(name)} is not the name of a file in it"
            if not (_are_counts([file.size, file.checked]) and file.checked <= file.size and _is_digest(file.sha256)):
                return f"size or digest of {name}"
        for name, array in self.arrays.items():
            if problem := self._problem_of(array):
                return f"{_shown(name)}: {problem}"
        return self._untiled()

    def _problem_of(self, array: StoredArray) -> str:
        if array.dtype not in _NAMES or not _are_lengths(array.shape):
            return f"type {_shown(array.dtype)}, shape {_shown(array.shape)}"
        for part in array.parts:
            right = _are_lengths(part.shape) and _are_counts([part.offset, *part.start])
            if not right or not len(part.start) == len(part.shape) == len(array.shape):
                return "a slice of another shape"
            if part.file not in self.files:
                return f"a slice in {_shown(part.file)}, which is not listed"
            blocks = sum(1 for _ in _blocks(part.shape, np.dtype(array.dtype).itemsize, len(part.sha256) + 1))
            if blocks != len(part.sha256) or not all(map(_is_digest, part.sha256)):
                return "digests of a slice"
        return "" if _is_grid(array) else "slices overlap, or leave gaps"

    def _untiled(self) -> str:
        """Return which file is not exactly its header and its parts, one behind the other; or an empty string."""
        ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for array in self.arrays.values():
            for part in array.parts:
                nbytes = math.prod(part.shape) * np.dtype(array.dtype).itemsize
                if nbytes:
                    ranges[part.file].append((part.offset, nbytes))
        for name, file in self.files.items():
            end = file.checked
            for offset, nbytes in sorted(ranges[name]):
                if offset != end:
                    return f"slices overlap, or leave gaps, in {name}"
                end += nbytes
            if end != file.size:
                return f"{name} has {file.size} bytes, and its slices end at {end}"
        return ""


@dataclass(frozen=True)
class PartOf:
    """Which part of which array."""

    array: str  # its name
    start: Shape  # where the part begins in it
    shape: Shape  # of the whole array


def blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the row after the last, of each block of a part; a scalar is one row."""
    return _blocks(shape, itemsize, None)


def _blocks(shape: Sequence[int], itemsize: int, most: int | None) -> Iterator[tuple[int, int]]:
    if not math.prod(shape):
        return
    rows, width = (shape[0] if shape else 1), math.prod(shape[1:]) * itemsize
    step = max(BLOCK // width, 1)
    starts = range(0, rows, step)
    for start in starts if most is None else starts[:most]:
        yield start, min(start + step, rows)


def described(name: str, pieces: Sequence[Piece], parts: Mapping[str, PartOf] | None) -> Entries:
    """Return the entries of a file, and of the parts of arrays in it, for a manifest."""
    size = sum(map(len, pieces))
    if parts is None:
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        return Entries({name: StoredFile(size, size, digest.hexdigest())}, {})
    header, *values = pieces
    listed = {key: tensor for key, tensor in json.loads(bytes(header[8:])).items() if key != "__metadata__"}
    arrays = {}
    for (key, tensor), value in zip(listed.items(), values, strict=True):
        of = parts[key]
        part_shape, dtype = tuple(tensor["shape"]), _DTYPES[tensor["dtype"]]
        width = math.prod(part_shape[1:]) * dtype.itemsize
        digests = tuple(
            hashlib.sha256(value[first * width : last * width]).hexdigest()
            for first, last in blocks(part_shape, dtype.itemsize)
        )
        offset = len(header) + tensor["data_offsets"][0]
        arrays[of.array] = StoredArray(dtype.name, of.shape, (StoredPart(name, offset, of.start, part_shape, digests),))
    return Entries({name: StoredFile(size, len(header), hashlib.sha256(header).hexdigest())}, arrays)


def joined(all_of: Sequence[Entries]) -> Entries:
    """Return the union of entries, of one rank or of all."""
    files: dict[str, StoredFile] = {}
    arrays: dict[str, StoredArray] = {}
    for entries in all_of:
        files |= entries.files
        for name, array in entries.arrays.items():
            before = arrays[name].parts if name in arrays else ()
            arrays[name] = StoredArray(array.dtype, array.shape, (*before, *array.parts))
    return Entries(files, arrays)


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest with its own hash; reading compares it byte for byte."""
    text = {name: value for name, value in manifest.items() if name != "sha256"}
    text["sha256"] = hashlib.sha256(json.dumps(text).encode()).hexdigest()
    return json.dumps(text).encode()


def _unsealed(content: bytes) -> dict[str, Any] | None:
    try:
        manifest = json.loads(content)
        return manifest if isinstance(manifest, dict) and sealed(manifest) == content else None
    except (ValueError, RecursionError):
        return None


def _is_grid(array: StoredArray) -> bool:
    """Whether the parts are all cells of a grid, each once: then they tile the array."""
    starts = [sorted({part.start[axis] for part in array.parts}) for axis in range(len(array.shape))]
    cells = {part.start for part in array.parts}
    if not cells or len(cells) != len(array.parts) or len(cells) != math.prod(map(len, starts)):
        return False
    ends = [
        dict(zip(axis_starts, [*axis_starts[1:], length], strict=True)) if axis_starts and axis_starts[0] == 0 else {}
        for axis_starts, length in zip(starts, array.shape, strict=True)
    ]
    return all(
        all(
            first + length == ends[axis].get(first)
            for axis, (first, length) in enumerate(zip(part.start, part.shape, strict=True))
        )
        for part in array.parts
    )


def _are_counts(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and 0 <= number < _MOST for number in numbers)


def _are_lengths(shape: Shape) -> bool:
    return len(shape) <= _MOST_AXES and _are_counts(shape) and math.prod(shape) < _MOST


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64


def _shown(what: Any) -> str:
    return repr(what)[:80]
