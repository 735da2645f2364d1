"""Ids that are no rows of a table end a step on a GPU in the words of a CPU."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import DataError
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
    good = np.where(IDS == 7, -5, IDS)  # the first row, from the end
    expected = embedded.predict(good, verbose=0)
    with pytest.raises(DataError, match=EXPECTED):
        ask(embedded)
    assert embedded.predict(good, verbose=0).shape == expected.shape  # nothing is left of it


def test_negative_ids_count_from_the_end():
    embedded, ids = model(device="cuda"), np.array([[-1, 4, -5]])
    np.testing.assert_array_equal(embedded.predict(ids, verbose=0), embedded.predict(ids % 5, verbose=0))
    with pytest.raises(DataError, match=r"id -6 of sample 0"):
        embedded.predict(ids - 1, verbose=0)


def test_programs_without_a_table_have_no_note():
    dense = dp.Sequential([dp.Input((3,)), dp.layers.Dense(1)])
    dense.compile("sgd", "mse", device="cuda")
    dense.fit(np.zeros((8, 3)), np.zeros(8), batch_size=4, verbose=0)
    assert "outside" not in vars(dense._backend)
