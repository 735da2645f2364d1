"""The program of a generation: the prompts' positions in blocks, then position after position, each with its token."""

import builtins
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.branches import cond
from dptrain.ops.decoding import Decoder, State, most_probable, sampled
from dptrain.ops.elementwise import equal, greater, less, logical_and, minimum, where
from dptrain.ops.indexing import take_at_axis
from dptrain.ops.loops import while_loop
from dptrain.ops.manipulation import expand_dims
from dptrain.ops.reduction import max, min
from dptrain.program.tensor import Tensor

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
            (rows, length) and `temperature`, perhaps `top_k` and `top_p`, (rows,) each.
    """
    tokens, lengths, ends = (inputs[name] for name in ("tokens", "lengths", "ends"))
    decoder = decoder_of(model, tokens)
    length, places = decoder.length, np.arange(decoder.length, dtype=np.int32)
    first = minimum(min(lengths), length) - 1  # a rank without rows has no least length
    position, state = _prefilled(decoder, tokens, first)

    def goes_on(position: Tensor, tokens: Tensor, ends: Tensor, *state: Tensor) -> Tensor:
        return less(position + 1, max(ends))

    def step(position: Tensor, tokens: Tensor, ends: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        logits, following = decoder.step(_part(tokens, position, 1), position, _unpacked(decoder, tensors))
        token = _chosen(logits[:, 0], inputs, minimum(position + 1, length - 1))
        writes = logical_and(less(position + 1, ends), less(lengths, position + 2))
        at_next = logical_and(equal(places, position + 1), expand_dims(writes, -1))
        tokens = where(at_next, expand_dims(token, -1), tokens)
        stopped = logical_and(writes, _is_any(token, inputs["stops"]))
        return (position + 1, tokens, where(stopped, position + 2, ends), *following.caches, *following.carries)

    _, tokens, ends, *_ = while_loop(goes_on, step, (position, tokens, ends, *state.caches, *state.carries))
    return {"tokens": tokens, "ends": ends}


def _prefilled(decoder: Decoder, tokens: Tensor, first: Tensor) -> tuple[Tensor, State]:
    """Compute positions that all prompts have, in blocks before the `first` one whose logits are needed.

    Caches may be written too far, as later steps write there before they read. Loops may not go too far: where there
    are any, the last block is whole, and single steps follow it.
    """
    state = decoder.start()
    block = builtins.min(BLOCK, decoder.length)
    whole = block - 1 if state.carries else 0

    def goes_on(position: Tensor, *state: Tensor) -> Tensor:
        return less(position + whole, first)

    def step(position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        begin = minimum(position, decoder.length - block)
        _, following = decoder.step(_part(tokens, begin, block), begin, _unpacked(decoder, tensors))
        return (position + block, *following.caches, *following.carries)

    position, *tensors = while_loop(goes_on, step, (first * 0, *state.caches, *state.carries))
    return position if state.carries else first, _unpacked(decoder, tensors)


def _unpacked(decoder: Decoder, tensors: Any) -> State:
    count = decoder.caches
    return State(tuple(tensors[:count]), tuple(tensors[count:]))


def _part(tokens: Tensor, position: Tensor, count: int) -> Tensor:
    return take_at_axis(tokens, position + np.arange(count, dtype=np.int32), 1)


def _chosen(logits: Tensor, inputs: Inputs, position: Tensor) -> Tensor:
    """Return each row's token for a position."""
    if "uniform" not in inputs:
        return most_probable(logits)
    uniform, temperature = take_at_axis(inputs["uniform"], position, 1), inputs["temperature"]
    return cond(
        greater(max(temperature), 0),
        lambda: sampled(logits, uniform, temperature, inputs.get("top_k"), inputs.get("top_p")),
        lambda: most_probable(logits),
    )


def _is_any(token: Tensor, stops: Tensor) -> Tensor:
    """Whether a row's token is one of those that end it; none is -1."""
    return max(equal(stops, expand_dims(token, -1)), -1)
