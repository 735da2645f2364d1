"""A checkpoint's manifest: its files, and in which of them each part of each array lies.

Each rank writes the parts that it owns; the manifest joins them. Whoever loads them, on whatever mesh, finds there
which bytes of which file hold what it needs, and the SHA-256 of these bytes: a block is as many rows of a part as fit
into `BLOCK` bytes, one at least. So nobody reads a whole file for a slice of it, and no damaged byte is loaded.

Anybody may have written a manifest: `Manifest.parsed` accepts only one whose parts tile their arrays and their files.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dptrain.errors import DataError
from dptrain.runtime.files import Piece, is_plain_name

MANIFEST = "manifest.json"
# Bytes of a part that have a digest of their own.
BLOCK = 1 << 20
_SCHEMA = 2
# The types that arrays have in files.
_DTYPES = (
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
# Elements of an array, axes, and bytes of a file: what is larger is none that anybody has written.
_MOST, _MOST_AXES = 1 << 62, 32

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        size: in bytes.
        checked: how many of the first bytes `sha256` is of: all, but of a file of arrays the header.
        sha256: as above.
    """

    size: int
    checked: int
    sha256: str


@dataclass(frozen=True)
class StoredPart:
    """A part of an array in a file, in C order, little-endian.

    Attributes:
        file: its name.
        offset: of the first byte.
        start: where the part begins in the array.
        shape: of the part.
        sha256: of each block, see `blocks`.
    """

    file: str
    offset: int
    start: Shape
    shape: Shape
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint, as a whole.

    Attributes:
        dtype: its name.
        shape: of all parts together.
        parts: a grid of them that tiles it.
    """

    dtype: str
    shape: Shape
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Described:
    """What a manifest says of some files, and of the parts of arrays in them.

    Attributes:
        files: by name.
        arrays: by name.
    """

    files: Mapping[str, StoredFile]
    arrays: Mapping[str, StoredArray]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can carry it."""
        files = {name: [one.size, one.checked, one.sha256] for name, one in self.files.items()}
        arrays = {}
        for name, one in self.arrays.items():
            parts = [[part.file, part.offset, part.start, part.shape, part.sha256] for part in one.parts]
            arrays[name] = [one.dtype, one.shape, parts]
        return {"files": files, "arrays": arrays}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what `as_json` returned; anything else raises what it raises."""
        files = {name: StoredFile(*one) for name, one in found["files"].items()}
        arrays = {}
        for name, (dtype, shape, listed) in found["arrays"].items():
            parts = [
                StoredPart(file, offset, tuple(start), tuple(own), tuple(digests))
                for file, offset, start, own, digests in listed
            ]
            arrays[name] = StoredArray(dtype, tuple(shape), tuple(parts))
        return cls(files, arrays)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: of the training, that it was saved after.
        value: says which checkpoint is the best, the lowest; None where it is not compared.
        mesh: length of each axis of the mesh on which it was saved.
        files: by name, all but the manifest.
        arrays: by name.
    """

    step: int
    value: float | None
    mesh: Mapping[str, int]
    files: Mapping[str, StoredFile]
    arrays: Mapping[str, StoredArray]

    def encoded(self) -> bytes:
        """Return the content of the file."""
        return sealed(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can carry it."""
        about = {"schema": _SCHEMA, "step": self.step, "value": self.value, "mesh": dict(self.mesh)}
        return about | Described(self.files, self.arrays).as_json()

    @classmethod
    def parsed(cls, content: bytes) -> Self:
        """Return what a manifest says.

        Raises:
            DataError: it is not as it was written, of another version, or does not say what a manifest has to.
        """
        found = _unsealed(content)
        if found is None:
            raise DataError(f"damaged: {MANIFEST} is not as it was written")
        schema = found.get("schema")
        if type(schema) is int and schema != _SCHEMA:
            raise DataError(f"schema {str(schema)[:20]}, this build reads {_SCHEMA}")
        try:
            made = cls.from_json(found)
            problem = made._problem() if schema == _SCHEMA else f"schema {_shown(schema)}"
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = "it has another shape"
        if problem:
            raise DataError(f"damaged: {MANIFEST} is none of a checkpoint: {problem}")
        return made

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what `as_json` returned; anything else raises what it raises."""
        held = Described.from_json(found)
        return cls(found["step"], found["value"], dict(found["mesh"]), held.files, held.arrays)

    def _problem(self) -> str:
        """Return what is wrong, or an empty string."""
        value = self.value
        if not _are_counts([self.step, *self.mesh.values()]):
            return f"step {_shown(self.step)} of mesh {_shown(dict(self.mesh))}"
        if value is not None and type(value) not in (int, float):
            return f"value {_shown(value)}"
        for name, file in self.files.items():
            if not is_plain_name(name) or name == MANIFEST:
                return f"{_shown(name)} is no name of a file in it"
            if not (_are_counts([file.size, file.checked]) and file.checked <= file.size and _is_digest(file.sha256)):
                return f"size or digest of {name}"
        for name, array in self.arrays.items():
            if problem := self._problem_of(array):
                return f"{_shown(name)}: {problem}"
        return self._untiled()

    def _problem_of(self, array: StoredArray) -> str:
        if array.dtype not in _DTYPES or not _are_lengths(array.shape):
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
        """Return which file is not its header and the parts in it, one behind the other; or an empty string."""
        held: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for array in self.arrays.values():
            for part in array.parts:
                nbytes = math.prod(part.shape) * np.dtype(array.dtype).itemsize
                if nbytes:
                    held[part.file].append((part.offset, nbytes))
        for name, file in self.files.items():
            end = file.checked
            for offset, nbytes in sorted(held[name]):
                if offset != end:
                    return f"slices overlap, or leave gaps, in {name}"
                end += nbytes
            if end != file.size:
                return f"{name} has {file.size} bytes, and its slices end at {end}"
        return ""


@dataclass(frozen=True)
class PartOf:
    """Of which array a part is.

    Attributes:
        array: its name.
        start: where the part begins in it.
        shape: of the whole array.
    """

    array: str
    start: Shape
    shape: Shape


def blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the row after the last, of each block of a part; a scalar is one row.

    Args:
        shape: of the part.
        itemsize: bytes of an element.
    """
    return _blocks(shape, itemsize, None)


def _blocks(shape: Sequence[int], itemsize: int, most: int | None) -> Iterator[tuple[int, int]]:
    if not math.prod(shape):
        return
    rows, width = (shape[0] if shape else 1), math.prod(shape[1:]) * itemsize
    step = max(BLOCK // width, 1)
    starts = range(0, rows, step)
    for start in starts if most is None else starts[:most]:
        yield start, min(start + step, rows)


def described(name: str, pieces: Sequence[Piece], parts: Mapping[str, PartOf] | None) -> Described:
    """Return what a manifest says of a file, and of the parts of arrays in it.

    Args:
        name: of the file.
        pieces: its content; of a file of arrays the header of safetensors and the values of each part.
        parts: of a file of arrays, by name in it.
    """
    size = sum(map(len, pieces))
    if parts is None:
        digest = hashlib.sha256()
        for one in pieces:
            digest.update(one)
        return Described({name: StoredFile(size, size, digest.hexdigest())}, {})
    header, *values = pieces
    listed = {key: one for key, one in json.loads(bytes(header[8:])).items() if key != "__metadata__"}
    arrays = {}
    for (key, about), value in zip(listed.items(), values, strict=True):
        of = parts[key]
        own, dtype = tuple(about["shape"]), _dtype_of(about["dtype"])
        width = math.prod(own[1:]) * dtype.itemsize
        digests = tuple(
            hashlib.sha256(value[first * width : last * width]).hexdigest()
            for first, last in blocks(own, dtype.itemsize)
        )
        offset = len(header) + about["data_offsets"][0]
        arrays[of.array] = StoredArray(dtype.name, of.shape, (StoredPart(name, offset, of.start, own, digests),))
    return Described({name: StoredFile(size, len(header), hashlib.sha256(header).hexdigest())}, arrays)


def joined(all_of: Sequence[Described]) -> Described:
    """Return what a manifest says of several files, of one rank or of all, from what it says of each."""
    files: dict[str, StoredFile] = {}
    arrays: dict[str, StoredArray] = {}
    for own in all_of:
        files |= own.files
        for name, one in own.arrays.items():
            before = arrays[name].parts if name in arrays else ()
            arrays[name] = StoredArray(one.dtype, one.shape, (*before, *one.parts))
    return Described(files, arrays)


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest with its own hash, which a manifest that was read must be equal to byte for byte."""
    text = {name: value for name, value in manifest.items() if name != "sha256"}
    text["sha256"] = hashlib.sha256(json.dumps(text).encode()).hexdigest()
    return json.dumps(text).encode()


def _unsealed(content: bytes) -> dict[str, Any] | None:
    """Return the manifest that `sealed` has made; None for anything else."""
    try:
        manifest = json.loads(content)
        return manifest if isinstance(manifest, dict) and sealed(manifest) == content else None
    except (ValueError, RecursionError):
        return None


def _is_grid(array: StoredArray) -> bool:
    """Whether the parts are all cells of a grid, each of them once: then they tile the array."""
    starts = [sorted({part.start[axis] for part in array.parts}) for axis in range(len(array.shape))]
    cells = {part.start for part in array.parts}
    if not cells or len(cells) != len(array.parts) or len(cells) != math.prod(map(len, starts)):
        return False
    ends = [
        dict(zip(own, [*own[1:], length], strict=True)) if own and own[0] == 0 else {}
        for own, length in zip(starts, array.shape, strict=True)
    ]
    return all(
        all(
            first + length == ends[axis].get(first)
            for axis, (first, length) in enumerate(zip(part.start, part.shape, strict=True))
        )
        for part in array.parts
    )


def _dtype_of(name: str) -> np.dtype[Any]:
    """Return the type that safetensors calls so, such as "F32"."""
    kinds = {"F": "f", "I": "i", "U": "u"}
    return np.dtype(bool) if name == "BOOL" else np.dtype(f"<{kinds[name[0]]}{int(name[1:]) // 8}")


def _are_counts(numbers: Sequence[Any]) -> bool:
    return all(type(one) is int and 0 <= one < _MOST for one in numbers)


def _are_lengths(shape: Shape) -> bool:
    return len(shape) <= _MOST_AXES and _are_counts(shape) and math.prod(shape) < _MOST


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64


def _shown(what: Any) -> str:
    return repr(what)[:80]
