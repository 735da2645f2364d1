"""A loaded model as a server needs it: names and types of its tensors, its version, predictions of arrays."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.predictions import Meaning, meaning
from dptrain.cli.server.tensors import BYTES, TensorSpec, datatype_of
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.tabular.table_codes import pandas_module
from dptrain.errors import DataError, DptrainError
from dptrain.models import Model
from dptrain.program import tree
from dptrain.program.dims import is_number
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.types import is_floating

Array = npt.NDArray[Any]

_VERSION_DIGITS = 12
_CHUNK = 1 << 20
# Lengths tried for open axes to warm a model up: a convolution may need more than one.
_LENGTHS = 1, 32


@dataclass(frozen=True)
class ServedModel:
    """A model, with what requests and answers say of it.

    Attributes:
        name: in paths and answers.
        version: the first digits of its file's SHA-256, the same in every process that serves this file.
        inputs, outputs: in the model's order.
        joins_rows: whether rows of several requests may be predicted together, to the same bits as alone.
    """

    model: Model
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    joins_rows: bool

    @cached_property
    def meaning(self) -> Meaning:
        """What a single output means."""
        return meaning(self.model)

    @property
    def is_on_cpu(self) -> bool:
        """Whether any thread may use the model."""
        return self.model._open_device(self.model._ranks()).name == "cpu"

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How raw data becomes arrays."""
        return self.model._preprocessing

    def predict(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the outputs, (rows, ...) each, of inputs (rows, ...)."""
        return [output for _, output in _predicted(self.model, arrays)]

    def metadata(self) -> dict[str, Any]:
        """Return the protocol's description."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "dptrain",
            "inputs": [spec.metadata() for spec in self.inputs],
            "outputs": [spec.metadata() for spec in self.outputs],
        }


def version_of(path: Path) -> str:
    """Return a model file's version."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:_VERSION_DIGITS]


def signature_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or written; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def load_served_model(path: Path, name: str, load: Callable[[], Model]) -> ServedModel:
    """Return a model that `load` reads from a file, ready for its first request."""
    version = version_of(path)
    model = load()
    while (newer := version_of(path)) != version:  # replaced meanwhile
        version, model = newer, load()
    return describe(model, name, version)


def describe(model: Model, name: str, version: str) -> ServedModel:
    """Return a model with its tensors; it predicts once or twice, so that no request waits for a compiler."""
    inputs = tuple(_inputs(model))
    if not inputs:
        raise DataError(f"{name}: the model does not know the shape of its inputs; save it after it has been called")
    if model._preprocessing is not None and model._preprocessing.kind == "table":
        pandas_module()  # imported by the first row with an odd cell otherwise, which takes a second
    joins, outputs = True, tuple[TensorSpec, ...]()
    for length in _LENGTHS:
        samples = [_empty(spec, length) for spec in inputs]
        try:
            predicted = list(_predicted(model, samples))
            joins = _joins_rows(model, samples)
        except (DptrainError, ValueError):  # not of this length
            continue
        outputs = tuple(_outputs(model, predicted))
        break
    if not outputs:
        raise DataError(f"{name}: the model predicts nothing from zeros of any length tried ({_LENGTHS})")
    _generate(model)
    return ServedModel(model, name, version, inputs, outputs, joins)


def _generate(model: Model) -> None:
    """Prepare a model of tokens for requests that generate."""
    with suppress(Exception):  # it has no tokens; a user's layer may raise anything
        for temperature in (0.0, 1.0):
            list(model.generate([0], 1, temperature, seed=0, stream=True))


def _symbols(model: Model) -> Any:
    """Return the model's inputs as symbolic tensors, with texts before they become numbers."""
    return model._input_symbols if model._host_stage is None else model._host_stage.inputs


def _inputs(model: Model) -> Iterator[TensorSpec]:
    pairs = list(tree.flatten(_symbols(model)))
    names = model._expected_data.input_names
    is_picture = model._preprocessing is not None and model._preprocessing.kind == "pictures"
    for index, (path, symbol) in enumerate(pairs):
        name = names[index] if len(names) == len(pairs) else tensor_name(path, "input")
        dtype = model._data_dtype if is_floating(symbol.dtype) else symbol.dtype
        datatype = "UINT8" if is_picture else datatype_of(dtype)
        shape = tuple(length if is_number(length) else None for length in symbol.shape[1:])
        yield TensorSpec(name, datatype, shape)


def tensor_name(path: str, default: str) -> str:
    """Return the name of a leaf, as exported models have it."""
    return f"{default}_{path}" if path[:1].isdigit() else path or default


def _outputs(model: Model, predicted: Sequence[tuple[str, Array]]) -> Iterator[TensorSpec]:
    shapes: Mapping[str, Any] = dict(tree.flat_shapes(model._expected_data.outputs))
    for path, output in predicted:
        shape = shapes.get(path)
        known = shape if shape is not None and len(shape) == output.ndim - 1 else (None,) * (output.ndim - 1)
        lengths = tuple(length if isinstance(length, int) else None for length in known)
        yield TensorSpec(tensor_name(path, "output"), datatype_of(output.dtype), lengths)


def _empty(spec: TensorSpec, length: int) -> Array:
    shape = (2, *(axis or length for axis in spec.shape))
    return np.full(shape, "", object) if spec.datatype == BYTES else np.zeros(shape, np.float32)


def _nested(model: Model, arrays: Sequence[Array]) -> Any:
    """Return inputs nested as the model takes them."""
    each = iter(arrays)
    return tree.map_leaves(lambda *_: next(each), _symbols(model))


def _predicted(model: Model, arrays: Sequence[Array]) -> Iterator[tuple[str, Array]]:
    return tree.flatten(model.predict(_nested(model, arrays), verbose=0))


def _joins_rows(model: Model, samples: Sequence[Array]) -> bool:
    """Return whether a row's outputs depend neither on the rows beside it nor, by rounding, on how many these are."""
    backend = model._open_device(model._ranks())
    rounds_alike = getattr(backend, "compiles", True)  # NumPy's products round otherwise for other numbers of rows
    return rounds_alike and not model._predicts_rows_together(_nested(model, samples))
