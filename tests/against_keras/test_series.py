"""Windows of series: Keras' cut of data and targets, over a grid of all options."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError

STEPS = 23


class Pairs(list):
    """What Keras' code uses of Grain, which need not be installed: a list of samples that is cut into batches."""

    def to_iter_dataset(self):
        return self

    def batch(self, size, batch_fn):
        return [batch_fn(self[first : first + size]) for first in range(0, len(self), size)]


@pytest.fixture
def keras_series(keras, monkeypatch):
    from keras.src.utils import timeseries_dataset_utils

    grain = SimpleNamespace(
        MapDataset=SimpleNamespace(source=Pairs),
        experimental=SimpleNamespace(ZipMapDataset=lambda datasets: Pairs(zip(*datasets, strict=True))),
    )
    monkeypatch.setattr(timeseries_dataset_utils, "grain", grain)
    return timeseries_dataset_utils.timeseries_dataset_from_array


def arrays(batches):
    """Return the batches' arrays, without targets as pairs with None."""
    pairs = [batch if isinstance(batch, list | tuple) else (batch, None) for batch in batches]
    return [tuple(None if part is None else np.asarray(part) for part in pair) for pair in pairs]


@pytest.mark.parametrize("targets", [None, 0, -5, -15, 4], ids=str)
@pytest.mark.parametrize(
    ("start_index", "end_index"), [(start, end) for start in (None, 0, 1, 6) for end in (None, 15, 22)]
)
def test_windows(keras_series, start_index, end_index, targets):
    """`targets`: how many more than steps there are; None for none."""
    data = np.random.default_rng(1).standard_normal((STEPS, 2))
    labels = None if targets is None else np.arange(100, 100 + STEPS + targets)
    compared = 0
    for length, stride, rate, size in itertools.product([1, 3, 5], [1, 2, 4], [1, 3], [3, None, 128]):
        options = {"sequence_stride": stride, "sampling_rate": rate, "start_index": start_index, "end_index": end_index}
        try:
            expected = keras_series(data, labels, length, batch_size=size or 1000, format="grain", **options)
        except IndexError:  # a window without a target, which we leave out
            continue
        if not expected:
            with pytest.raises(ConfigError, match="no window"):
                dp.utils.timeseries_dataset_from_array(data, labels, length, batch_size=size, **options)
            continue
        actual = arrays(dp.utils.timeseries_dataset_from_array(data, labels, length, batch_size=size, **options))
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, arrays(expected), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None)
            assert (ours[1] is None) == (theirs[1] is None)
        compared += 1
    assert compared > 20 or (targets is not None and targets < 0)
