"""Named arrays and JSON as bytes, in safetensors with a checksum: a training's state, or a program's weights."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import safetensors.numpy

from dptrain.errors import DataError
from dptrain.program.tensor import Variable
from dptrain.program.turns import TURNS
from dptrain.registry.names import numbered
from dptrain.registry.serialization import plain
from dptrain.runtime.types import TYPES

Arrays = dict[str, np.ndarray[Any, Any]]

_BACKUP = "dptrain backup 2"
# Types that safetensors lacks for NumPy. Each is a key of the names of arrays that hold it, as integers of its size.
_NOT_OF_NUMPY = {name: known.storage for name, known in TYPES.items() if not known.is_numpy}
# The largest header that safetensors reads.
_MAX_HEADER = 100_000_000
# The only key of a reference to an array in JSON.
_ARRAY = "array of the checkpoint"


def pack(arrays: Mapping[str, np.ndarray[Any, Any]], description: Mapping[str, Any], kind: str) -> bytes:
    """Return arrays and a JSON description as bytes; `kind` names the content and its format's version."""
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps(description)
    by_type = {
        key: [name for name, array in whole.items() if array.dtype == dtype] for key, dtype in _NOT_OF_NUMPY.items()
    }
    whole |= {name: whole[name].view(f"u{whole[name].itemsize}") for names in by_type.values() for name in names}
    listed = {key: json.dumps(names) for key, names in by_type.items() if names}
    metadata = {"format": kind, "about": text, "sha256": _digest("".join([text, *listed.values()]), whole)}
    return safetensors.numpy.save(whole, metadata | listed)


def read_packed(file: BinaryIO) -> bytes:
    """Return the bytes of `pack`; of a longer file no more than one extra byte."""
    start = file.read(8)
    header = file.read(min(int.from_bytes(start, "little"), _MAX_HEADER))
    try:
        end = max(
            (tensor["data_offsets"][1] for name, tensor in json.loads(header).items() if name != "__metadata__"),
            default=0,
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        end = 0  # `unpack` says what is wrong
    rest = os.fstat(file.fileno()).st_size - len(start) - len(header)
    return start + header + file.read(max(min(int(end) + 1, rest), 0))


def unpack(content: bytes, where: str, kind: str, advice: str) -> tuple[dict[str, Any], Arrays]:
    """Return the description and the arrays of `pack`; refuse damaged content with `advice`, and other kinds."""
    try:
        arrays = safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    except Exception as error:
        raise DataError(f"{where} is damaged ({error}); {advice}") from error
    if metadata.get("format") != kind:
        what = kind.split()[1]
        raise DataError(
            f"{where} is not a {what} of this version ({metadata.get('format')!r}, this one reads {kind!r})"
        )
    listed = {key: metadata.get(key, "") for key in _NOT_OF_NUMPY}
    if metadata.get("sha256") != _digest("".join([metadata.get("about", ""), *listed.values()]), arrays):
        raise DataError(f"{where} is damaged (its checksum differs); {advice}")
    for key, names in listed.items():
        arrays |= {name: arrays[name].view(_NOT_OF_NUMPY[key]) for name in json.loads(names or "[]")}
    return json.loads(metadata["about"]), arrays


def variables(model: Any) -> dict[str, Variable]:
    """Return everything that training changes, by unique paths: weights, random numbers, optimizers, metrics."""
    paths: dict[str, int] = {}
    return {numbered(variable._path, paths): variable for variable in model._variables_on_device()}


def extract_arrays(state: Any, prefix: str, arrays: Arrays) -> Any:
    """Return callbacks' nested state in JSON, with references to arrays, which are copied into `arrays`."""
    if isinstance(state, np.ndarray):
        arrays[prefix] = np.array(state, order="C")
        return array_reference(prefix)
    if isinstance(state, Mapping):
        return {key: extract_arrays(value, f"{prefix}/{key}", arrays) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [extract_arrays(value, f"{prefix}/{number}", arrays) for number, value in enumerate(state)]
    return plain(state)


def array_reference(name: str) -> dict[str, str]:
    """Return the reference to an array, for `insert_arrays`."""
    return {_ARRAY: name}


def insert_arrays(state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return the state that `extract_arrays` was given, with lists for tuples."""
    if isinstance(state, dict):
        if state.keys() == {_ARRAY}:
            return arrays[state[_ARRAY]]
        return {key: insert_arrays(value, arrays) for key, value in state.items()}
    return [insert_arrays(value, arrays) for value in state] if isinstance(state, list) else state


def encode(model: Any, metadata: Mapping[str, Any]) -> bytes:
    """Return the state of a model's training, and a description."""
    by_path = variables(model)
    with TURNS.of(reads=frozenset(by_path.values())):
        arrays = {path: variable.numpy() for path, variable in by_path.items()}
    return pack(arrays, metadata, _BACKUP)


def decode(content: bytes, where: str) -> tuple[dict[str, Any], Arrays]:
    """Return the description and the values of `encode`."""
    return unpack(content, where, _BACKUP, "delete it to start afresh")


def restore(model: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Restore a model from the state of one like it; the optimizer is built if needed."""
    if model.compiled:
        model._compiled_optimizer.build(model.trainable_weights)
    by_path = variables(model)
    with TURNS.of(writes=frozenset(by_path.values())):
        for path, variable in by_path.items():
            variable.assign(arrays[path])


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
