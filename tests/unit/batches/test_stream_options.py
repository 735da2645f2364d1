"""Streams of shards with options drawn together: beside bad and empty shards, and what ranks and resumes compare."""

import inspect
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain as dp
from dptrain.batches.sharded_dataset import MixedDataset
from dptrain.data.shards.order import PERIOD, MixOrder
from dptrain.errors import ConfigError, DataError
from tests.unit.data.shards.shard_files import write_tokens

ShardedDataset = dp.utils.ShardedDataset


def samples(data) -> list[int]:
    """Return the first id of each window of two passes."""
    return [int(x) for number in range(2) for batch in data for x in np.asarray(batch[0])[:, 0]]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=7),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(1, 5),
)
def test_samples_of_bad_shards_are_those_of_good_ones(tmp_path_factory, shards, per_block, seed, batch_size):
    folder = tmp_path_factory.mktemp("shards")
    sizes, are_bad = zip(*shards, strict=True)
    for index, size in enumerate(sizes):
        (100 * index + np.arange(size + 1, dtype=np.uint16)).tofile(folder / f"t{index}.bin")
    total = sum(sizes)
    if not total:
        return
    options = {"sequence_length": 1, "shards_per_block": per_block, "bad_shards": "skip"}
    data = ShardedDataset(str(folder), batch_size, seed is not None, seed or 0, **options)
    for index, is_bad in enumerate(are_bad):
        if is_bad and sizes[index]:
            os.truncate(folder / f"t{index}.bin", 2)
    good = {100 * index + row for index, size in enumerate(sizes) for row in range(size) if not are_bad[index]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "skipped")
        if not good:
            with pytest.raises(DataError, match=rf"none of {len(sizes)} shards can be read"):
                samples(data)
            return
        read = samples(data)
    assert len(read) == 2 * total
    assert set(read) <= good
    if not any(is_bad and size for size, is_bad in shards):
        assert sorted(read) == sorted([*good, *good])


# By parameter, another value than the default; what only says how samples are read has none.
SHARDED = {
    "urls": "[a-d].bin",
    "batch_size": 5,
    "shuffle": False,
    "seed": 8,
    "sequence_length": 3,
    "token_dtype": "uint32",
    "shards_per_block": 1,
    **dict.fromkeys(("target", "columns", "image_size", "vocabulary_size", "bad_shards", "retries")),
    **dict.fromkeys(("max_bytes", "cache_bytes", "cache_dir")),
}
MIXED = {"datasets": (1, 0), "weights": [1, 3], "batch_size": 5, "seed": 8, "num_samples": 21}


def differing(make, changes) -> dict[str, tuple[bool, bool]]:
    """Return for each changed argument whether samples differ, and whether what is compared does."""
    first = make({})
    seen = samples(first), [len(batch[0]) for batch in first]
    results = {}
    for name, value in changes.items():
        if value is not None:
            other = make({name: value})
            results[name] = (
                (samples(other), [len(batch[0]) for batch in other]) != seen,
                other.describe_order() != first.describe_order(),
            )
    return results


def write(folder: Path) -> None:
    for number, name in enumerate("abcde"):
        np.arange(100 * number, 100 * number + 24, dtype=np.uint16).tofile(folder / f"{name}.bin")


def test_whatever_decides_on_samples_is_compared_between_ranks_and_resumes(tmp_path):
    write(tmp_path)

    def sharded(changes):
        options = {"urls": "*.bin", "batch_size": 4, "seed": 3, "sequence_length": 2, "shards_per_block": 2} | changes
        return ShardedDataset(str(tmp_path / options.pop("urls")), **options)

    parts = [sharded({"urls": "[ab].bin", "seed": 1}), sharded({"urls": "[cde].bin", "seed": 2})]

    def mixed(changes):
        options = {"datasets": (0, 1), "weights": [1, 1], "batch_size": 4, "seed": 3, "num_samples": 40} | changes
        return MixedDataset([parts[index] for index in options.pop("datasets")], **options)

    for kind, make, changes in ((ShardedDataset, sharded, SHARDED), (MixedDataset, mixed, MIXED)):
        assert changes.keys() == inspect.signature(kind).parameters.keys()
        results = differing(make, changes)
        assert {name for name, (differ, _) in results.items() if not differ} == set()
        assert {name for name, (_, is_compared) in results.items() if not is_compared} == set()


def test_shards_are_split_before_samples_are_taken(tmp_path):
    write_tokens(tmp_path, [21, 21, 21])
    data = ShardedDataset(str(tmp_path), 4, sequence_length=2)
    assert [part.num_samples for part in data.split_off(0.3)] == [20, 10]
    with pytest.raises(ConfigError, match="split_off: 7 of 30 samples are taken; split before take"):
        data.take(7).split_off(0.3)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=9))
def test_every_source_of_a_mix_is_read(weights):
    quotas = MixOrder(weights, 0).quotas
    assert quotas.min() >= 1
    assert quotas.sum() == PERIOD
    np.testing.assert_allclose(quotas / PERIOD, np.array(weights) / sum(weights), atol=len(weights) / PERIOD)
