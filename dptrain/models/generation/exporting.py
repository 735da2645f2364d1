"""The program of `Model.generate` in a file, and a generation by it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.layers.low_rank import merging
from dptrain.models.generation.requests import STOPS, Exported, Request, Sampling
from dptrain.models.generation.steps import generated
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.tensor import Tensor
from dptrain.runtime.text import short
from dptrain.saving.program import packed

_PROMPT = Request([np.zeros(1, np.int32)], 1, Sampling())


def encode_generation(model: Any, length: int | None = None) -> bytes:
    """Return the program of `generate`, for any number of prompts.

    Args:
        model: that generates.
        length: of sequences, prompts and new tokens together; by default the model's, if that has one.

    Raises:
        ConfigError: no such length, or the model cannot generate.
    """
    context = model._context
    if length is None and context is None:
        raise ConfigError("export: a model of sequences of any length generates up to a length; pass length=")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise ConfigError(f"export: length={length!r}; expected an integer of at least 2")
    if length is not None and context not in (None, length):
        raise ConfigError(f"export: length={length}, but the model sees {context} positions")
    length = length or context
    assert length is not None
    exported = Exported(length, model._facts(length).tokens, STOPS)
    dtype = model._drawing_dtype
    arrays = _PROMPT.arrays(length, dtype, draws=True)
    rows = Dim.rows(2)
    inputs = {name: ((rows, *array.shape[1:]), array.dtype) for name, array in arrays.items()}

    def function(*tensors: Tensor) -> Mapping[str, Tensor]:
        outputs: dict[str, Tensor] = model._in_step(partial(generated, model))(dict(zip(inputs, tensors, strict=True)))
        return outputs

    with merging(model.weights):
        program = trace(function, inputs)
    names = {name: name for name in inputs}
    outputs = {name: name for name in program.outputs}
    return packed(program, model.dtype_policy.name, names, outputs, generation=exported._asdict())


def exported_of(description: Mapping[str, Any], where: str) -> Exported:
    """Return what a file says of its program; ConfigError if that does not generate."""
    facts = description.get("generation")
    if facts is None:
        raise ConfigError(f'{where}: its program predicts; export(..., format="generation") writes one that generates')
    fields = Exported._fields
    if not isinstance(facts, Mapping) or set(facts) != set(fields) or any(type(facts[n]) is not int for n in fields):
        raise DataError(f"{where}: damaged: generation {short(facts)}")
    return Exported(**facts)
