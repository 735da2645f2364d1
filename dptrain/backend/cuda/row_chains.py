"""Rows that are added to a table, for a GPU: each row of the table follows the chain of the values that belong to it.

Without chains every element of the table looks at all places. With them a row looks once for the first place that names
it, a place once for the next that names the same row; an element then reads only its own values, in the same order.
"""

from typing import Any

import numpy as np

from dptrain.program.lowering import RowChain, Scatter, lowering_of
from dptrain.program.op import Op, not_placed
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Array, Tensor, tracing

# Fewer rows have long chains, each of whose links waits for memory: their elements look at all places instead.
MIN_ROWS = 32
# Ends a chain; the first place of a row that no place names.
END = -1


def _row_of(places: Array, length: int) -> Array:
    flat = places.reshape(-1).astype(np.int64)
    return np.clip(flat, 0, length - 1)


def _first_place(places: Array, *, length: int, out: Array) -> None:
    """The first place that names each row of a table."""
    out.fill(END)
    rows = _row_of(places, length)
    out[rows[::-1]] = np.arange(len(rows))[::-1]


def _next_place(places: Array, *, length: int, out: Array) -> None:
    """For each place the next that names the same row."""
    rows, flat = _row_of(places, length), np.full(places.size, END)
    order = np.argsort(rows, kind="stable")
    same = rows[order[1:]] == rows[order[:-1]]
    flat[order[:-1][same]] = order[1:][same]
    out[...] = flat.reshape(out.shape)


def _add_chained_rows(values: Array, first: Array, following: Array, *, length: int, out: Array) -> None:
    out.fill(0)
    flat, links = values.reshape(-1, *values.shape[following.ndim :]), following.reshape(-1)
    for row, place in enumerate(first):
        while place != END:
            out[row] += flat[place]
            place = links[place]


def _int32(*dtypes: Any, **attributes: Any) -> np.dtype[Any]:
    return np.dtype(np.int32)


def _chained_shape(values: Shape, first: Shape, following: Shape, *, length: int) -> Shape:
    return (length, *values[len(following) :])


FIRST_PLACE = Op(_first_place, lambda places, *, length: (length,), not_placed, _int32, lowering=RowChain("first"))
NEXT_PLACE = Op(_next_place, lambda places, *, length: places, not_placed, _int32, lowering=RowChain("next"))
ADD_CHAINED_ROWS = Op(
    _add_chained_rows,
    _chained_shape,
    not_placed,
    lambda values, first, following, *, length: values,
    lowering=RowChain("sum"),
)
for _op, _name in ((FIRST_PLACE, "first_place"), (NEXT_PLACE, "next_place"), (ADD_CHAINED_ROWS, "add_chained_rows")):
    _op.name = _name


def with_row_chains(program: Program) -> Program:
    """Let rows that are added to tables of at least `MIN_ROWS` rows follow chains."""

    def change(tensor: Tensor) -> Tensor:
        if not isinstance(lowering_of(tensor), Scatter) or tensor.attributes["length"] < MIN_ROWS:
            return tensor
        values, places = tensor.inputs
        length = {"length": tensor.attributes["length"]}
        (first,) = FIRST_PLACE.values_of([places], length)
        (following,) = NEXT_PLACE.values_of([places], length)
        return ADD_CHAINED_ROWS.values_of([values, first, following], length, tensor.name)[0]

    with tracing():
        return rewritten(program, change)
