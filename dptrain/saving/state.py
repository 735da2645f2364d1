"""Where a training stands, in one piece of bytes: what a backup, or a run that waits, goes on from.

The format is safetensors: the model's variables by number; as metadata a JSON object of the caller's, and a checksum.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from dptrain.errors import DataError

if TYPE_CHECKING:  # above this package
    from dptrain.models import Model

Arrays = dict[str, np.ndarray[Any, Any]]

_FORMAT = "dptrain backup 1"


def encode(model: "Model", about: Mapping[str, Any]) -> bytes:
    """Return where a model and its optimizer stand, with what the caller knows of it."""
    arrays = _state(model)
    text = json.dumps(dict(about))
    return safetensors.numpy.save(arrays, {"format": _FORMAT, "about": text, "sha256": _digest(text, arrays)})


def decode(content: bytes, where: str) -> tuple[dict[str, Any], Arrays]:
    """Return what `encode` was told, and the buffers.

    Args:
        content: what `encode` returned.
        where: it comes from, for messages.

    Raises:
        DataError: it is damaged, or something else.
    """
    try:
        arrays = safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    except Exception as error:
        raise DataError(f"{where} is damaged ({error}); delete it to start afresh") from error
    if metadata.get("format") != _FORMAT:
        raise DataError(
            f"{where} is no backup of this version ({metadata.get('format')!r}, this one reads {_FORMAT!r})"
        )
    if metadata.get("sha256") != _digest(metadata.get("about", ""), arrays):
        raise DataError(f"{where} is damaged (its checksum differs); delete it to start afresh")
    return json.loads(metadata["about"]), arrays


def restore(model: "Model", about: Mapping[str, Any], arrays: Arrays) -> None:
    """Let the same model stand where the state was taken."""
    if model.built and model.compiled:
        model.optimizer.build(model.trainable_variables)
    for number, one in enumerate(model.variables_on_device()):
        one.assign(arrays[str(number)])


def _state(model: "Model") -> Arrays:
    return {str(number): one.numpy() for number, one in enumerate(model.variables_on_device())}


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
