"""`POST /predict`: samples as people have them, and answers with classes, probabilities and units."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.predictions import classes, labels
from dptrain.cli.server.bodies import parse_json
from dptrain.cli.server.inference_protocol import require_rows
from dptrain.cli.server.served_model import ServedModel
from dptrain.cli.server.tensors import TensorSpec, from_json, require_finite, shortest
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.readers.pictures import decode_picture
from dptrain.errors import DataError
from dptrain.runtime.text import short
from dptrain.runtime.types import is_floating

Array = npt.NDArray[Any]

_INSTANCES = "instances"  # the key that other servers expect around samples


def read_samples(
    content: bytes, content_type: str, served: ServedModel, unseen: Unseen | None, max_rows: int
) -> list[Array]:
    """Return the model's inputs, (rows, ...) each, of a body; DataError of anything that is none.

    A body is a list of samples in JSON, also as {"instances": [...]}: records of a table, texts, pictures as base64
    (also as {"b64": ...}), or arrays; with several inputs, objects by their names. One picture may be sent as it is,
    one record of a table without the list.
    """
    preprocessing = served.preprocessing
    are_pictures = preprocessing is not None and preprocessing.kind == "pictures"
    if content_type.startswith("image/") or content_type == "application/octet-stream":
        if preprocessing is None or not are_pictures:
            raise DataError(f"Content-Type {content_type!r}: the model was not trained on pictures; send JSON")
        return [decode_picture(content, preprocessing, "body")[None]]
    samples = parse_json(content)
    if isinstance(samples, dict) and [*samples] == [_INSTANCES]:
        samples = samples[_INSTANCES]
    elif isinstance(samples, dict) and preprocessing is not None and preprocessing.kind == "table":
        samples = [samples]
    if not isinstance(samples, list) or not samples:
        found = "an empty list" if samples == [] else short(samples)
        raise DataError(f'body: {found}; expected a list of samples, or {{"{_INSTANCES}": [...]}}')
    require_rows(len(samples), max_rows)
    if preprocessing is not None and preprocessing.kind == "table":
        return [_table(samples, preprocessing, unseen)]
    if preprocessing is not None and are_pictures and not isinstance(samples[0], list):
        return [np.stack([_picture(sample, row, preprocessing) for row, sample in enumerate(samples)])]
    if len(served.inputs) == 1 and not isinstance(samples[0], dict):
        return [_array(samples, served.inputs[0])]
    return [_array(_by_name(samples, spec.name), spec) for spec in served.inputs]


def _table(samples: list[Any], preprocessing: Preprocessing, unseen: Unseen | None) -> Array:
    columns = preprocessing.columns
    if len(columns) == 1 and columns[0].role == "words" and all(isinstance(sample, str) for sample in samples):
        samples = [{columns[0].name: sample} for sample in samples]
    if not isinstance(samples[0], dict):
        names = ", ".join(column.name for column in columns[:5]) + (", ..." if len(columns) > 5 else "")
        raise DataError(f"row 0 (counted from 0): {short(samples[0])}; expected a record, an object with {names}")
    return preprocessing.encode(samples, "body", unseen=unseen, advice="send a number or a text")


def _picture(sample: Any, row: int, preprocessing: Preprocessing) -> Array:
    if isinstance(sample, dict) and [*sample] == ["b64"]:
        sample = sample["b64"]
    if not isinstance(sample, str):
        raise DataError(f"picture {row} (counted from 0): {short(sample)}; expected its file in base64")
    try:
        content = base64.b64decode(sample, validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"picture {row} (counted from 0): not base64") from None
    return decode_picture(content, preprocessing, f"picture {row} (counted from 0)")


def _by_name(samples: list[Any], name: str) -> list[Any]:
    for row, sample in enumerate(samples):
        if not isinstance(sample, dict) or name not in sample:
            raise DataError(f"row {row} (counted from 0): {short(sample)}; expected an object with input {name!r}")
    return [sample[name] for sample in samples]


def _array(samples: list[Any], spec: TensorSpec) -> Array:
    shape, entry = [len(samples)], samples[0]
    while isinstance(entry, list) and len(shape) <= len(spec.shape):
        shape.append(len(entry))
        entry = entry[0] if entry else None
    found = tuple(shape)
    if spec.shape == (1,) and len(found) == 1:  # one number or text a row
        return from_json(samples, spec.datatype, found)[:, None]
    if not spec.takes(found) or isinstance(entry, list) or 0 in found:
        nested = " of lists" if isinstance(entry, list) else ""
        raise DataError(
            f"input {spec.name!r}: shape {shape}{nested}, expected {spec.metadata()['shape']} (-1: any length)"
        )
    try:
        return from_json(samples, spec.datatype, found)
    except DataError as error:
        raise DataError(f"input {spec.name!r}: {error}") from None


def describe_outputs(served: ServedModel, outputs: Sequence[Array]) -> list[Any]:
    """Return an object for each row: class and probabilities, or the values by the name of target or output.

    Raises:
        NotFiniteError: an output has NaN or infinity.
    """
    for spec, output in zip(served.outputs, outputs, strict=True):
        require_finite(output, spec.name)
    if len(outputs) == 1 and outputs[0].ndim <= 2:
        output = outputs[0].reshape(len(outputs[0]), -1)
        names = classes(served.meaning, output.shape[1])
        if names is not None:
            return _classes(output, names, has_names=len(served.meaning.names) == len(names))
        if output.shape[1] == 1:
            return [{served.meaning.target: value} for value in shortest(output[:, 0])]
    values = {spec.name: _nested(output) for spec, output in zip(served.outputs, outputs, strict=True)}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _classes(output: Array, names: Sequence[str], *, has_names: bool) -> list[dict[str, Any]]:
    probabilities = np.hstack([1 - output, output]) if output.shape[1] == 1 else output
    return [
        {
            "class": names[label] if has_names else label,
            "probabilities": dict(zip(names, shortest(row), strict=True)),
        }
        for label, row in zip(labels(output).tolist(), probabilities, strict=True)
    ]


def _nested(array: Array) -> Any:
    """Return an array as nested lists of the shortest numbers."""
    if not is_floating(array.dtype):
        return array.tolist()
    flat: list[Any] = shortest(array.ravel())
    for length in reversed(array.shape[1:]):
        flat = [flat[start : start + length] for start in range(0, len(flat), length)]
    return flat
