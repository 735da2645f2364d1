"""Keras' small helpers."""

from types import SimpleNamespace

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches import sampling
from dptrain.batches.stream import StreamBatches
from dptrain.comm import SoloCommunicator
from dptrain.errors import ConfigError


def test_labels_become_one_hot_vectors():
    found = dp.utils.to_categorical([0, 2, 1, -1])
    assert found.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert found.dtype == np.float64
    assert dp.utils.to_categorical(np.uint8([[1], [0]]), 4).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert dp.utils.to_categorical(np.zeros((2, 3, 1)), num_classes=2).shape == (2, 3, 2)
    assert dp.utils.to_categorical(1).tolist() == [0, 1]
    assert dp.utils.to_categorical([], 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [([3], 3, "labels 3 to 3, 3 classes"), ([-4, 0], 3, "labels -4 to 0"), ([], None, "num_classes must be given")],
)
def test_labels_without_a_class_are_refused(labels, classes, message):
    with pytest.raises(ConfigError, match=message):
        dp.utils.to_categorical(labels, classes)


def test_a_fixed_number_of_shards_is_chosen_by_code_or_by_the_environment(monkeypatch):
    monkeypatch.setattr(sampling, "_fixed", None)
    for text, shards in (("", None), ("0", None), ("1", 8), ("16", 16)):
        monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", text)
        assert sampling.fixed_shards() == shards
    monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", "yes")
    with pytest.raises(ConfigError, match="DPTRAIN_REPRODUCIBLE = 'yes': expected 0, 1, or a number of shards"):
        sampling.fixed_shards()
    with pytest.raises(ConfigError, match="shards_per_batch = 0: expected an integer >= 1"):
        dp.utils.enable_op_determinism(0)
    dp.utils.enable_op_determinism()
    assert sampling.fixed_shards() == 8


def test_what_each_rank_makes_for_itself_has_no_fixed_shards():
    source = SimpleNamespace(sharded=True, num_batches=None)
    with pytest.raises(ConfigError, match="not supported: a PyDataset with `shard` where the bits are those of any"):
        StreamBatches(source, None, SoloCommunicator(), shards=8)
