"""The loop of a recurrent layer over the steps of sequences, as in keras/src/backend/jax/rnn.py."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops, tree
from dptrain.program.dims import Dim, counts_rows
from dptrain.program.tensor import Tensor

# Maps a step's inputs and states to its output and new states.
Step = Callable[[Any, Any], tuple[Tensor, Any]]


def run(
    step: Step,
    sequences: Tensor,
    states: Sequence[Any],
    mask: Tensor | None,
    *,
    go_backwards: bool,
    unroll: bool,
    zero_output_for_mask: bool,
    returns_state: bool,
    stacks: bool,
    time_major: bool = False,
) -> tuple[Tensor, Tensor | None, list[Any]]:
    """Return the last output, all outputs and the last states.

    Args:
        step: takes a step's inputs and states, returns the output and the new states.
        sequences: (rows, time, ...).
        states: the initial states, nested lists of tensors (rows, ...).
        mask: (rows, time), False for steps that keep the states; or None.
        go_backwards: begin with the last step; outputs are in the order of computation.
        unroll: unroll the loop.
        zero_output_for_mask: the output of masked steps is 0, else the previous state.
        returns_state: a step's output is its first state, so that the last need not be kept.
        stacks: whether all outputs are needed; else they are None.
        time_major: the sequences are (time, rows, ...).
    """
    if not time_major and isinstance(sequences.shape[1], Dim) and not counts_rows(sequences.shape[1]):
        return _like_any_step(step, sequences, states, stacks)
    steps = sequences if time_major else swapped(sequences)
    counts = None if mask is None else swapped(ops.cast(mask, "bool"))

    def body(before: Any, inputs: Any) -> tuple[Any, Any]:
        output, after = step(inputs if counts is None else inputs[0], before)
        if counts is not None:
            counted = inputs[1]
            masked_output = ops.zeros_like(output) if zero_output_for_mask else _output_state(before)
            output = _chosen(counted, output, masked_output)
            after = tree.map_structure(lambda new, old: _chosen(counted, new, old), after, before)
        return after, output if stacks or not returns_state else None

    last, stacked = ops.scan(
        body, list(states), steps if counts is None else (steps, counts), reverse=go_backwards, unroll=unroll
    )
    if stacked is None:
        output = _output_state(last)
        if counts is not None and zero_output_for_mask:
            output = _chosen(counts[0 if go_backwards else -1], output, ops.zeros_like(output))
        return output, None, last
    output = stacked[0 if go_backwards else -1]
    if not stacks:
        return output, None, last
    outputs = swapped(stacked)
    return output, ops.flip(outputs, axis=1) if go_backwards else outputs, last


def _like_any_step(
    step: Step, sequences: Tensor, states: Sequence[Any], stacks: bool
) -> tuple[Tensor, Tensor | None, list[Any]]:
    """Return results of the loop's shapes, for an unknown number of steps."""
    output, last = step(sequences[:, 0], list(states))
    if not stacks:
        return output, None, last
    shape = (output.shape[0], sequences.shape[1], *output.shape[1:])
    return output, ops.broadcast_to(ops.expand_dims(output, 1), shape), last


def swapped(x: Tensor) -> Tensor:
    """Exchange the axes of rows and time."""
    return ops.transpose(x, (1, 0, *range(2, x.ndim)))


def _chosen(counts: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return new rows where the step counts, else old ones."""
    return ops.where(ops.reshape(counts, (*counts.shape, *(1,) * (new.ndim - 1))), new, old)


def _output_state(states: Any) -> Tensor:
    """Return the state that stands for a masked step's output: the first, of stacked cells the last cell's."""
    output_states = states[-1] if tree.is_nested(states[0]) else states
    state: Tensor = output_states[0] if tree.is_nested(output_states) else output_states
    return state
