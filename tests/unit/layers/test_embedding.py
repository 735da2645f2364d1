"""Embedding: ids that are no rows of its table are named."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import DataError

IDS = np.zeros((100, 3), int)
IDS[57, 1] = 7
EXPECTED = r"layer 'words': id 7 of sample 57 \(1 in this batch\), expected 0 to 4; correct the data"


def model(**options):
    words = dp.layers.Embedding(5, 2, name="words")
    net = dp.Sequential([dp.Input((3,), dtype="int32"), words, dp.layers.Flatten(), dp.layers.Dense(1)], seed=1)
    net.compile("sgd", "mse", **options)
    return net


@pytest.mark.parametrize("options", [{}, {"jit_compile": False}], ids=str)
@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.fit(IDS, np.zeros(100), batch_size=8, verbose=0),
        lambda model: model.evaluate(IDS, np.zeros(100), batch_size=16, verbose=0),
        lambda model: model.predict(IDS, verbose=0),
        lambda model: model.predict_on_batch(IDS),
    ],
)
def test_an_id_that_is_no_row_is_named_with_its_layer_and_its_sample(options, ask):
    with pytest.raises(DataError, match=EXPECTED):
        ask(model(**options))


def test_it_is_named_eagerly():
    with pytest.raises(DataError, match=EXPECTED):
        model()(IDS)
    with pytest.raises(DataError, match="layer 'words': id 7 of sample"):
        model(run_eagerly=True).fit(IDS, np.zeros(100), verbose=0)


def test_ids_that_count_rows_of_a_column_are_named_too():
    """As the models of tables take them: a column of numbers among others."""
    inputs = dp.Input((4,))
    net = dp.Model(inputs, dp.layers.Embedding(6, 2, name="code")(inputs[:, 3]))
    x = np.zeros((100, 4), np.float32)
    x[33, 3] = -7
    with pytest.raises(DataError, match=r"layer 'code': id -7 of sample 33 .*expected 0 to 5"):
        net.predict(x, verbose=0)


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_a_negative_id_is_no_row(options):
    embedded, ids = model(**options), np.where(np.arange(300).reshape(100, 3) == 100, -1, 2)
    message = r"layer 'words': id -1 of sample .* \(1 in this batch\), expected 0 to 4"
    for ask in (
        lambda: embedded.fit(ids, np.zeros(100), verbose=0),
        lambda: embedded.evaluate(ids, np.zeros(100), verbose=0),
        lambda: embedded.predict(ids, verbose=0),
        lambda: embedded(ids),
    ):
        with pytest.raises(DataError, match=message):
            ask()


def test_a_layer_without_a_name_is_called_by_its_kind():
    with pytest.raises(DataError, match=r"layer 'embedding': id 12 of sample 0 .*expected 0 to 9"):
        dp.layers.Embedding(10, 3)(np.array([[1, 12]]))
