"""Named arrays in one piece of bytes, with what is known of them: where a training stands, or a program's weights.

The format is safetensors; as metadata a JSON object of the caller's, and a checksum of all.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import safetensors.numpy

from dptrain.errors import DataError
from dptrain.program.tensor import BFLOAT16, Variable
from dptrain.program.turns import TURNS
from dptrain.registry.names import numbered
from dptrain.registry.serialization import plain

Arrays = dict[str, np.ndarray[Any, Any]]

_BACKUP = "dptrain backup 2"
# The key of the names of arrays that hold bfloat16.
_HALVES = "bfloat16"
# The largest header that safetensors reads.
_MAX_HEADER = 100_000_000
# The one key of what stands for an array in JSON.
_ARRAY = "array of the checkpoint"


def pack(arrays: Mapping[str, np.ndarray[Any, Any]], about: Mapping[str, Any], kind: str) -> bytes:
    """Return arrays in one piece.

    Args:
        arrays: by name.
        about: anything that JSON can carry.
        kind: what this is, and the version of its format.
    """
    whole = {name: np.asarray(one, order="C") for name, one in arrays.items()}
    text = json.dumps(about)
    halves = [name for name, one in whole.items() if one.dtype == BFLOAT16]  # which safetensors has not for NumPy
    whole |= {name: whole[name].view(np.uint16) for name in halves}
    names = json.dumps(halves) if halves else ""
    metadata = {"format": kind, "about": text, "sha256": _digest(text + names, whole)}
    metadata |= {_HALVES: names} if halves else {}
    return safetensors.numpy.save(whole, metadata)


def read_packed(file: BinaryIO) -> bytes:
    """Return what `pack` returned; of a file that is longer than its header says, no more than a byte too many."""
    start = file.read(8)
    header = file.read(min(int.from_bytes(start, "little"), _MAX_HEADER))
    try:
        end = max(
            (one["data_offsets"][1] for name, one in json.loads(header).items() if name != "__metadata__"), default=0
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        end = 0  # `unpack` says what is wrong
    rest = os.fstat(file.fileno()).st_size - len(start) - len(header)
    return start + header + file.read(max(min(int(end) + 1, rest), 0))


def unpack(content: bytes, where: str, kind: str, advice: str) -> tuple[dict[str, Any], Arrays]:
    """Return what `pack` was told, and the arrays.

    Args:
        content: what `pack` returned.
        where: it comes from, for messages.
        kind: as `pack` was told.
        advice: what to do about a damaged one.

    Raises:
        DataError: it is damaged, or something else.
    """
    try:
        arrays = safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    except Exception as error:
        raise DataError(f"{where} is damaged ({error}); {advice}") from error
    if metadata.get("format") != kind:
        what = kind.split()[1]
        raise DataError(f"{where} is no {what} of this version ({metadata.get('format')!r}, this one reads {kind!r})")
    names = metadata.get(_HALVES, "")
    if metadata.get("sha256") != _digest(metadata.get("about", "") + names, arrays):
        raise DataError(f"{where} is damaged (its checksum differs); {advice}")
    arrays |= {name: arrays[name].view(BFLOAT16) for name in json.loads(names or "[]")}
    return json.loads(metadata["about"]), arrays


def variables(model: Any) -> dict[str, Variable]:
    """Return all that a training of a model changes: weights, random numbers, optimizers, metrics; by unique paths."""
    taken: dict[str, int] = {}
    return {numbered(variable.path, taken): variable for variable in model._variables_on_device()}


def apart(state: Any, prefix: str, arrays: Arrays) -> Any:
    """Return what callbacks hold as JSON can carry it, with names in the place of arrays.

    Args:
        state: nested in lists and dictionaries.
        prefix: of the names.
        arrays: takes copies of the arrays, by name.
    """
    if isinstance(state, np.ndarray):
        arrays[prefix] = np.array(state, order="C")
        return standing_for(prefix)
    if isinstance(state, Mapping):
        return {key: apart(one, f"{prefix}/{key}", arrays) for key, one in state.items()}
    if isinstance(state, list | tuple):
        return [apart(one, f"{prefix}/{number}", arrays) for number, one in enumerate(state)]
    return plain(state)


def standing_for(name: str) -> dict[str, str]:
    """Return what stands for an array of this name in what `together` is given."""
    return {_ARRAY: name}


def together(state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return what `apart` was given; tuples are lists."""
    if isinstance(state, dict):
        if state.keys() == {_ARRAY}:
            return arrays[state[_ARRAY]]
        return {key: together(one, arrays) for key, one in state.items()}
    return [together(one, arrays) for one in state] if isinstance(state, list) else state


def encode(model: Any, about: Mapping[str, Any]) -> bytes:
    """Return where the training of a model stands, with what the caller knows of it."""
    return pack({path: one.numpy() for path, one in variables(model).items()}, about, _BACKUP)


def decode(content: bytes, where: str) -> tuple[dict[str, Any], Arrays]:
    """Return what `encode` was told, and the values.

    Args:
        content: what `encode` returned.
        where: it comes from, for messages.

    Raises:
        DataError: it is damaged, or something else.
    """
    return unpack(content, where, _BACKUP, "delete it to start afresh")


def restore(model: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Let a model stand where the state of one like it was taken; the optimizer gets its slots, if it has none."""
    if model.compiled:
        model._compiled_optimizer.build(model.trainable_weights)
    found = variables(model)
    with TURNS.of(writes=frozenset(found.values())):
        for path, one in found.items():
            one.assign(arrays[path])


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
