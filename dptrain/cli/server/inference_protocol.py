"""The Open Inference Protocol, version 2: what a request for an inference holds, and its answer.

JSON, and beside it the extension for binary tensors: the header Inference-Header-Content-Length says how many bytes of
a body are JSON; the tensors' bytes follow, in their order.
Source: https://github.com/kserve/open-inference-protocol, and the HTTP extensions of NVIDIA's Triton.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.server.bodies import parse_json
from dptrain.cli.server.tensors import (
    BYTES,
    TensorSpec,
    datatype_of,
    dtype_of,
    from_bytes,
    from_json,
    read_shape,
    to_bytes,
    to_json,
)
from dptrain.errors import DataError
from dptrain.registry.names import suggestion
from dptrain.runtime.text import short

Array = npt.NDArray[Any]

JSON_LENGTH = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data"]


@dataclass(frozen=True)
class InferenceRequest:
    """A request: arrays in the order of the model's inputs, and how outputs are wanted."""

    id: str | None
    arrays: Sequence[Array]
    outputs: Mapping[str, bool]  # by name, whether as bytes; all as `all_binary` says if empty
    all_binary: bool

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(self.arrays[0])


def read_request(
    content: bytes, json_length: str | None, inputs: Sequence[TensorSpec], outputs: Sequence[str], max_rows: int
) -> InferenceRequest:
    """Return the request in a body; DataError of anything that is none for these inputs and outputs."""
    length = len(content)
    if json_length is not None:
        if not (json_length.isascii() and json_length.isdigit() and len(json_length) < 19):
            raise DataError(f"{JSON_LENGTH} {json_length[:40]!r}; expected a number of bytes")
        length = int(json_length)
        if length > len(content):
            raise DataError(f"{JSON_LENGTH} {length:,}, and the body has {len(content):,} bytes")
    tree = parse_json(memoryview(content)[:length])
    if not isinstance(tree, dict) or not isinstance(tree.get("inputs"), list):
        raise DataError('body: expected an object with "inputs", a list of tensors')
    request_id = tree.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise DataError(f"id {short(request_id)}; expected a text")
    arrays = _arrays(tree["inputs"], memoryview(content)[length:], inputs, max_rows)
    all_binary = _parameters(tree, "request").get("binary_data_output", False) is True
    return InferenceRequest(request_id, arrays, _wanted(tree.get("outputs"), outputs, all_binary), all_binary)


def _arrays(entries: list[Any], binary: memoryview, specs: Sequence[TensorSpec], max_rows: int) -> list[Array]:
    expected = {spec.name: spec for spec in specs}
    arrays: dict[str, Array] = {}
    start = 0
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in expected or name in arrays:
            hint = suggestion(name, expected) if isinstance(name, str) else ""
            problem = "given twice" if name in arrays else "not one of the model's"
            raise DataError(f"input {short(name)}: {problem}{hint or '; expected ' + ', '.join(expected)}")
        try:
            array, size = _tensor(entry, binary[start:], expected[name], max_rows)
        except DataError as error:
            raise DataError(f"input {name!r}: {error}") from None
        start += size
        arrays[name] = array
    if missing := [name for name in expected if name not in arrays]:
        raise DataError(f"input {missing[0]!r} is missing")
    if start != len(binary):
        raise DataError(f"body: {len(binary):,} bytes behind its JSON, its inputs claim {start:,}")
    if len(lengths := {len(array) for array in arrays.values()}) > 1:
        raise DataError(f"inputs have different numbers of rows: {', '.join(map(str, sorted(lengths)))}")
    return [arrays[name] for name in expected]


def _tensor(entry: dict[str, Any], binary: memoryview, spec: TensorSpec, max_rows: int) -> tuple[Array, int]:
    """Return an input's array, cast to the model's type where that loses nothing, and its number of bytes."""
    shape, datatype = read_shape(entry.get("shape")), entry.get("datatype")
    found, expected = dtype_of(datatype), dtype_of(spec.datatype)
    if found != expected and (BYTES in (datatype, spec.datatype) or not np.can_cast(found, expected)):
        raise DataError(f"datatype {datatype}, expected {spec.datatype}")
    if not spec.takes(shape):
        raise DataError(f"shape {list(shape)}, expected {spec.metadata()['shape']} (-1: any length)")
    require_rows(shape[0], max_rows)
    parameters = _parameters(entry, "input")
    if "shared_memory_region" in parameters:
        raise DataError("shared memory is not supported; send the data")
    size = parameters.get("binary_data_size")
    if size is None:
        array = from_json(entry.get("data"), str(datatype), shape)
        return array.astype(expected, copy=False), 0
    if type(size) is not int or not 0 <= size <= len(binary):
        raise DataError(f"binary_data_size {short(size)}, and {len(binary):,} bytes are left in the body")
    return from_bytes(binary[:size], str(datatype), shape).astype(expected, copy=False), size


def require_rows(rows: int, max_rows: int) -> None:
    """Refuse more rows than a request may have."""
    if rows > max_rows:
        raise DataError(f"{rows:,} rows, a request has at most {max_rows:,}; split it, or serve with --max-rows")


def _parameters(entry: dict[str, Any], what: str) -> dict[str, Any]:
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise DataError(f"parameters of the {what}: {short(parameters)}; expected an object")
    return parameters


def _wanted(entries: Any, names: Sequence[str], all_binary: bool) -> dict[str, bool]:
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise DataError(f"outputs {short(entries)}; expected a list")
    wanted: dict[str, bool] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in names:
            raise DataError(f"output {short(name)}: not one of the model's; expected {', '.join(names)}")
        parameters = _parameters(entry, "output")
        if parameters.get("classification"):
            raise DataError(f"output {name!r}: classification is not supported; POST /predict answers with classes")
        wanted[name] = parameters.get("binary_data", all_binary) is True
    return wanted


def answer(
    request: InferenceRequest, model: str, version: str, outputs: Mapping[str, Array]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and how many of its bytes are JSON if bytes follow.

    Raises:
        NotFiniteError: an output for JSON has NaN or infinity.
    """
    entries, contents = [], []
    for name, array in outputs.items():
        if request.outputs and name not in request.outputs:
            continue
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if request.outputs.get(name, request.all_binary):
            contents.append(to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            entry["data"] = to_json(array, name)
        entries.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if request.id is not None:
        head["id"] = request.id
    text = json.dumps(head, allow_nan=False).encode()
    return b"".join([text, *contents]), len(text) if contents else None
