"""The program of a generation: the prompts' positions in blocks, then position after position, each with its token."""

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.branches import cond
from dptrain.ops.decoding import Decoder, State, most_probable, sampled
from dptrain.ops.elementwise import cast, equal, greater, less, logical_and, logical_or, maximum, minimum, where
from dptrain.ops.indexing import take_at_axis
from dptrain.ops.loops import while_loop
from dptrain.ops.manipulation import expand_dims, transpose
from dptrain.ops.reduction import max, min
from dptrain.program.shapes import row_axis
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import type_of

# How many positions of a prompt are computed at once.
BLOCK = 32

Inputs = Mapping[str, Tensor]


def decoder_of(model: Any, tokens: Tensor) -> Decoder:
    """Return the steps of a model, traced on tokens (rows, length); ConfigError if it has no such steps."""
    outputs = model(tokens, training=False)
    if not isinstance(outputs, Tensor) or outputs.ndim not in (2, 3):
        found = outputs.shape if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            f"generate: the model returns {found}; expected one tensor of scores, (rows, length, tokens), or of the "
            "last position, (rows, tokens)"
        )
    scores = outputs.logits if outputs.squashed_by == "softmax" and outputs.logits is not None else outputs
    return Decoder(tokens, scores)


def generated(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Return the tokens (rows, length) and where each row ends, (rows,).

    Args:
        model: called on tokens.
        inputs: `tokens` (rows, length) with each row's prompt in front, `lengths` (rows,) of the prompts, `ends`
            (rows,) that rows reach at most, `stops` (rows, n) tokens after which a row ends; for drawn tokens `uniform`
            (rows, length) and `temperature`, `top_k` and `top_p`, (rows,) each. A generation in parts has the
            `position` where the last part ended and the end of this part, `until`, (rows,) each, and the last part's
            state, see `state_of`; it also returns position and state.
    """
    tokens, lengths, ends = (inputs[name] for name in ("tokens", "lengths", "ends"))
    decoder = decoder_of(model, tokens)
    length, places = decoder.length, np.arange(decoder.length, dtype=np.int32)
    first = minimum(min(lengths), length) - 1  # a rank without rows has no least length
    begin, state = first * 0, decoder.start()
    if "position" in inputs:
        begin = maximum(max(inputs["position"]), 0)
        first, state = maximum(first, begin), _state_at(decoder, begin, inputs)
    position, state = _prefilled(decoder, tokens, begin, first, state)

    def goes_on(position: Tensor, tokens: Tensor, ends: Tensor, *state: Tensor) -> Tensor:
        until = minimum(ends, inputs["until"]) if "until" in inputs else ends
        return less(position + 1, max(until))

    def step(position: Tensor, tokens: Tensor, ends: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        logits, following = decoder.step(_part(tokens, position, 1), position, decoder.unpacked(tensors))
        token = _chosen(logits[:, 0], inputs, minimum(position + 1, length - 1))
        writes = logical_and(less(position + 1, ends), less(lengths, position + 2))
        at_next = logical_and(equal(places, position + 1), expand_dims(writes, -1))
        tokens = where(at_next, expand_dims(token, -1), tokens)
        stopped = logical_and(writes, _is_any(token, inputs["stops"]))
        return (position + 1, tokens, where(stopped, position + 2, ends), *following)

    position, tokens, ends, *tensors = while_loop(goes_on, step, (position, tokens, ends, *state))
    outputs = {"tokens": tokens, "ends": ends}
    if "position" in inputs:
        outputs["position"] = lengths * 0 + position
        outputs |= {name: _rows_first(tensor) for name, tensor in zip(_names(tensors), tensors, strict=True)}
    return outputs


def state_of(decoder: Decoder) -> dict[str, tuple[tuple[int, ...], str]] | None:
    """Return shapes, without the rows in front, and types of what a part of a generation leaves, by name.

    Halves travel as float32. None if something does not belong to rows.
    """
    tensors = list(decoder.start())
    if any(row_axis(tensor.shape) is None for tensor in tensors):
        return None
    with_rows = [_rows_first(tensor) for tensor in tensors]
    return {
        name: (tuple(map(int, tensor.shape[1:])), tensor.dtype.name)
        for name, tensor in zip(_names(tensors), with_rows, strict=True)
    }


def _names(tensors: Sequence[Tensor]) -> list[str]:
    return [f"state_{number}" for number in range(len(tensors))]


def _rows_first(tensor: Tensor) -> Tensor:
    axis = row_axis(tensor.shape)
    assert axis is not None
    tensor = cast(tensor, type_of(tensor.dtype).compute)
    return transpose(tensor, [axis, *(other for other in range(tensor.ndim) if other != axis)]) if axis else tensor


def _state_at(decoder: Decoder, begin: Tensor, inputs: Inputs) -> State:
    """Return the state of an earlier part, or at position 0 that of the beginning."""

    def given(name: str, first: Tensor) -> Tensor:
        tensor, axis = cast(inputs[name], first.dtype), row_axis(first.shape)
        if axis:
            tensor = transpose(tensor, [*range(1, axis + 1), 0, *range(axis + 1, tensor.ndim)])
        return where(equal(begin, 0), first, tensor)

    tensors = list(decoder.start())
    return decoder.unpacked([given(name, first) for name, first in zip(_names(tensors), tensors, strict=True)])


def _prefilled(decoder: Decoder, tokens: Tensor, begin: Tensor, first: Tensor, state: State) -> tuple[Tensor, State]:
    """Compute positions that all prompts have, in blocks from `begin` to before the `first` whose logits are needed.

    Caches may be written too far, as later steps write there before they read. Loops may not go too far: where there
    are any, the last block is whole, and single steps follow it.
    """
    block = builtins.min(BLOCK, decoder.length)
    whole = block - 1 if state.carries else 0

    def goes_on(position: Tensor, *state: Tensor) -> Tensor:
        return less(position + whole, first)

    def step(position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        at = minimum(position, decoder.length - block)
        _, following = decoder.step(_part(tokens, at, block), at, decoder.unpacked(tensors))
        return (position + block, *following)

    position, *tensors = while_loop(goes_on, step, (begin, *state))
    return position if state.carries else first, decoder.unpacked(tensors)


def _part(tokens: Tensor, position: Tensor, count: int) -> Tensor:
    return take_at_axis(tokens, position + np.arange(count, dtype=np.int32), 1)


def _chosen(logits: Tensor, inputs: Inputs, position: Tensor) -> Tensor:
    """Return each row's token for a position."""
    if "uniform" not in inputs:
        return most_probable(logits)
    uniform = take_at_axis(inputs["uniform"], position, 1)
    temperature, top_k, top_p = (inputs[name] for name in ("temperature", "top_k", "top_p"))
    token: Tensor = cond(
        greater(max(temperature), 0),
        lambda: cond(
            max(logical_or(less(top_k, logits.shape[-1]), less(top_p, 1))),
            lambda: sampled(logits, uniform, temperature, top_k, top_p),
            lambda: sampled(logits, uniform, temperature),
        ),
        lambda: most_probable(logits),
    )
    return token


def _is_any(token: Tensor, stops: Tensor) -> Tensor:
    """Whether a row's token is one of those that end it; none is -1."""
    return max(equal(stops, expand_dims(token, -1)), -1)
