"""Samples in messages have the same numbers however data reach the device: at once, in chunks, or a batch at a time."""

import re

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches import base
from dptrain.batches.feed import StreamedFeed
from dptrain.errors import DataError, DivergenceError

RNG = np.random.default_rng(0)
X, IDS, Y = RNG.normal(size=(40, 3)), RNG.integers(0, 9, (40, 3)), RNG.integers(0, 4, 40)
ROWS = (0, 21, 38)


@pytest.fixture(params=["at once", "in chunks"])
def feed(request, monkeypatch):
    if request.param == "in chunks":
        monkeypatch.setattr(
            base, "make_feed", lambda backend, arrays, largest, *_: StreamedFeed(backend, arrays, 2 * largest)
        )


def model(*layers):
    model = dp.Sequential([*layers, dp.layers.Dense(4, "softmax")], seed=1)
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    return model


def embedding():
    return model(dp.Input((3,), dtype="int64"), dp.layers.Embedding(9, 2), dp.layers.Flatten())


def changed(values, row, value):
    values = values.copy()
    values[row, 1] = value
    return values


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("row", ROWS)
def test_a_sample_that_is_not_finite(row, shuffle):
    with pytest.raises(DivergenceError, match=rf"x is not finite in sample {row}$"):
        model(dp.Input((3,))).fit(changed(X, row, np.nan), Y, batch_size=8, shuffle=shuffle, verbose=0)


ABSENT = r"^layer 'embedding\w*': id 9 of sample {} \(1 in this batch\), expected 0 to 8"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("row", ROWS)
def test_a_sample_with_an_id_outside_its_table(feed, row, shuffle):
    with pytest.raises(DataError, match=ABSENT.format(row)):
        embedding().fit(changed(IDS, row, 9), Y, batch_size=8, shuffle=shuffle, verbose=0)


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("method", ["predict", "evaluate"])
@pytest.mark.parametrize("row", ROWS)
def test_a_sample_with_an_id_outside_its_table_without_training(feed, row, method, batch_size):
    data = (changed(IDS, row, 9),) if method == "predict" else (changed(IDS, row, 9), Y)
    with pytest.raises(DataError, match=ABSENT.format(row)):
        getattr(embedding(), method)(*data, batch_size=batch_size, verbose=0)


@pytest.mark.parametrize("row", ROWS)
def test_a_sample_of_a_generator_has_its_place_in_the_batch(row):
    data = changed(IDS, row, 9)
    batches = ((data[first : first + 8], Y[first : first + 8]) for first in range(0, 40, 8))
    with pytest.raises(DataError) as caught:
        embedding().fit(batches, steps_per_epoch=5, shuffle=False, verbose=0)
    assert re.match(ABSENT.format(row % 8), str(caught.value))
