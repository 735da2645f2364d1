"""Ids that are no rows of a table end a step on a GPU in the words of a CPU."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cuda.row_chains import MIN_ROWS
from dptrain.errors import DataError
from dptrain.ops.indexing import add_rows
from dptrain.program.absent_rows import OUTSIDE
from dptrain.program.program import trace
from tests.unit.layers.test_embedding import EXPECTED, IDS, model

pytestmark = pytest.mark.usefixtures("cuda_backend")


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.fit(IDS, np.zeros(100), batch_size=8, epochs=2, verbose=0),
        lambda model: model.evaluate(IDS, np.zeros(100), batch_size=16, verbose=0),
        lambda model: model.predict(IDS, verbose=0),
        lambda model: model.predict_on_batch(IDS),
        lambda model: model.train_on_batch(IDS, np.zeros(100)),
    ],
)
def test_an_id_that_is_no_row_is_named_with_its_layer_and_its_sample(ask):
    embedded = model(device="cuda")
    good = np.where(IDS == 7, 0, IDS)
    expected = embedded.predict(good, verbose=0)
    with pytest.raises(DataError, match=EXPECTED):
        ask(embedded)
    assert embedded.predict(good, verbose=0).shape == expected.shape  # nothing is left of it


def test_negative_ids_are_no_rows():
    embedded = model(device="cuda")
    for ask in (embedded.predict, lambda x, verbose: embedded.fit(x, np.zeros(1), verbose=verbose)):
        with pytest.raises(DataError, match=r"id -1 of sample 0 \(2 in this batch\), expected 0 to 4"):
            ask(np.array([[4, -1, -5]]), verbose=0)


@pytest.mark.parametrize("length", [MIN_ROWS - 1, MIN_ROWS])
@pytest.mark.parametrize("place", [-1, 40])
def test_rows_are_not_added_outside(cuda_backend, length, place):
    program = trace(
        lambda values, places: {"table": add_rows(values, places, length=length)},
        {"values": ((3, 2), "float32"), "places": ((3,), "int32")},
    )
    data = {"values": np.ones((3, 2), np.float32), "places": np.array([1, place, 2], np.int32)}
    executable = cuda_backend.executable(program, data)
    executable.run()
    with pytest.raises(DataError, match=OUTSIDE):
        executable.outputs["table"]
    executable = cuda_backend.executable(program, data | {"places": np.array([1, 3, 3], np.int32)})
    executable.run()
    np.testing.assert_array_equal(executable.outputs["table"].sum(1)[:4], [0, 2, 0, 4])


def test_programs_without_a_table_have_no_note():
    dense = dp.Sequential([dp.Input((3,)), dp.layers.Dense(1)])
    dense.compile("sgd", "mse", device="cuda")
    dense.fit(np.zeros((8, 3)), np.zeros(8), batch_size=4, verbose=0)
    assert "outside" not in vars(dense._backend)
