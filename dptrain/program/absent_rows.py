"""Finds an index outside its table, such as an id too large for an Embedding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import DataError
from dptrain.program.dims import Dim
from dptrain.program.lowering import Gather
from dptrain.program.program import ROWS, Program
from dptrain.program.sharding.mesh import constant_of
from dptrain.program.tensor import Array, Tensor

OUTSIDE = "a row number is outside the table"


def absent_row(layer: str, length: int, places: Array, samples: Array | None = None) -> DataError | None:
    """Return the error that names the first id outside the table of a layer, or None.

    Ids are (rows, ...) or (); `samples` (rows,) are numbers of the samples, None for their order.
    """
    is_absent = (places >= length) | (places < 0)
    if not is_absent.any():
        return None
    place = np.unravel_index(int(is_absent.argmax()), places.shape)
    where = f"layer {layer!r}: " if layer else ""
    sample = ""
    if place:
        rows_per_sample = 1 if samples is None or not len(samples) else max(1, len(places) // len(samples))
        row = int(place[0]) // rows_per_sample
        sample = f" of sample {row if samples is None or not len(samples) else int(samples[row])}"
    return DataError(
        f"{where}id {int(places[place])}{sample} ({int(is_absent.sum())} in this batch), expected 0 to {length - 1}; "
        "correct the data, or raise the length of the table (input_dim, num_tokens)"
    )


def find_absent_row(
    program: Program,
    values: Mapping[Tensor, Array],
    rows: int,
    first_row: int,
    samples: Sequence[int] | Array | None = None,
) -> DataError | None:
    """Return the error that names the first id outside a table; None if it depends on messages, or is in a loop.

    `samples` has the sample of each number in the input `ROWS`; None for these numbers.
    """
    order = program.inputs.get(ROWS)
    gathers = [tensor for tensor in program.tensors if tensor.op is not None and tensor.op.lowering == Gather()]
    id_gathers = [
        gather for gather in gathers if gather.inputs[1] is not order
    ]  # the samples' numbers are not a user's ids
    computed = dict(values)
    numbers, is_sample = None if order is None else values[order], None
    if numbers is not None and samples is not None:
        is_sample = numbers < len(samples)  # rows behind them only fill memory
        numbers = np.asarray(samples)[numbers[is_sample]]
    for gather in id_gathers:
        table, places = gather.inputs
        try:
            ids = _value(places, computed, program, rows, first_row)
            length = len(_value(table, computed, program, rows, first_row)) if _counts(table) else int(table.shape[0])
        except (LookupError, ValueError, TypeError, DataError):
            continue
        by_sample = places.shape != () and isinstance(places.shape[0], Dim)
        if by_sample and is_sample is not None:
            ids = ids[np.repeat(is_sample, len(ids) // max(len(is_sample), 1))]
        if (error := absent_row(gather.name or "", length, ids, numbers if by_sample else None)) is not None:
            return error
    return None


def _counts(table: Tensor) -> bool:
    return isinstance(table.shape[0], Dim)


def _value(tensor: Tensor, values: dict[Tensor, Array], program: Program, rows: int, first_row: int) -> Array:
    """Compute a tensor and its operands; LookupError if it depends on a message."""
    stack = [tensor]
    while stack:
        current = stack[-1]
        if current in values:
            stack.pop()
        elif current.op is None:
            values[current] = constant_of(current, rows, program.rows)
        elif missing := [read for read in current.inputs if read not in values]:
            stack += missing
        else:
            arrays: list[Any] = [values[read] for read in current.inputs]
            values[current] = current.op.execute(arrays, current, rows, first_row)
    return values[tensor]
