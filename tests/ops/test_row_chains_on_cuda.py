"""Rows added to a table on the CUDA backend: with chains and without, in the order of the places."""

import numpy as np
import pytest

from dptrain.backend.cuda.row_chains import MIN_ROWS, with_row_chains
from dptrain.ops.indexing import add_rows
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace

SHAPES = [((7,), ()), ((6, 5), (3,)), ((4, 3), (2, 3)), ((40,), (130,)), ((0,), (2,)), ((1, 200), (4,))]


def case(places, features, length, dtype="float32", index="int64"):
    """Return a program that adds rows to a table, and its data; many rows repeat."""
    rng = np.random.default_rng(len(features) + length)
    chosen = rng.integers(0, length, places).astype(index)
    chosen[..., : places[-1] // 2] %= 3
    data = {"values": rng.normal(size=(*places, *features)).astype(dtype), "places": chosen}
    rows = Dim.rows(places[0]) if places[0] else 0
    shapes = {name: ((rows, *value.shape[1:]), value.dtype.name) for name, value in data.items()}
    return trace(lambda values, places: {"table": add_rows(values, places, length=length)}, shapes), data


def in_order(data, length):
    """Return the table, each row's values added one after the other in their own type."""
    values, places = data["values"], data["places"]
    table = np.zeros((length, *values.shape[places.ndim :]), values.dtype)
    for place in np.ndindex(places.shape):
        table[places[place]] += values[place]
    return table


@pytest.mark.parametrize(("places", "features"), SHAPES)
@pytest.mark.parametrize("length", [MIN_ROWS - 1, MIN_ROWS, 300])
def test_the_pass_changes_no_bit(places, features, length):
    program, data = case(places, features, length)
    chained = with_row_chains(program)
    names = [tensor.op.name for tensor in chained.tensors if tensor.op is not None]
    assert ("add_rows" in names) == (length < MIN_ROWS) != ("add_chained_rows" in names)
    np.testing.assert_array_equal(evaluate(chained, data)[0]["table"], in_order(data, length))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("length", "dtype", "index"),
    [(MIN_ROWS - 1, "float64", "int64"), (MIN_ROWS, "float32", "int32"), (100, "float64", "uint8")],
)
@pytest.mark.parametrize(("places", "features"), SHAPES)
def test_rows_are_added_in_the_order_of_the_places(cuda_backend, places, features, length, dtype, index):
    program, data = case(places, features, length, dtype, index)
    executable = cuda_backend.executable(program, data)
    executable.run()
    np.testing.assert_array_equal(executable.outputs["table"], in_order(data, length))
