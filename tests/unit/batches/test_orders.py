"""Orders follow from seed and pass alone: each seed and each pass has another, and repeats it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches.labelled_files import FileDataset
from dptrain.batches.sampling import GlobalSampler, StaticSampler
from dptrain.data.holdout import fold_rows
from dptrain.data.shards.order import PERIOD, BlockOrder, MixOrder
from tests.unit.data.shards.shard_files import write_tokens

COUNT = 60
Order = Callable[[int, int], Any]


def of_blocks(sizes: list[int], per_block: int) -> Order:
    return lambda seed, number: BlockOrder(sizes, seed, per_block).locate(number, np.arange(sum(sizes)))


def of_mix(seed: int, number: int) -> Any:
    """Return the sources of a period, which is what a mix has instead of passes."""
    return MixOrder([3, 1, 2], seed).locate(np.arange(PERIOD) + number * PERIOD)[0]


def of_series(seed: int, number: int) -> Any:
    series = np.arange(COUNT)
    data = dp.utils.timeseries_dataset_from_array(series, None, 1, shuffle=True, seed=seed, batch_size=None)
    data.on_pass_begin(number)
    return data[0]


def of_files(seed: int, number: int) -> Any:
    class Places(FileDataset):
        def shard(self, index, part, parts):
            return self._files_of_part(index, part, parts)

    data = Places(Path(), [str(place) for place in range(COUNT)], None, None, COUNT, seed, 1)
    data.on_pass_begin(number)
    return data[0]


ORDERS: dict[str, Order] = {
    "shards in one block": of_blocks([12] * 5, 5),
    "samples of single shards": of_blocks([30, 30], 1),
    "blocks of unequal shards": of_blocks([1, 20, 7, 0, 15, 17], 2),
    "a mix": of_mix,
    "windows of a series": of_series,
    "files": of_files,
    "rows": lambda seed, number: GlobalSampler(COUNT, 7, seed=seed).order(number),
    "rows within batches": lambda seed, number: GlobalSampler(COUNT, 20, seed=seed, shuffle="batch").order(number),
    "rows of a rank": lambda seed, number: StaticSampler(3 * COUNT, 9, 1, 3, seed=seed).order(number),
    "folds": lambda seed, number: fold_rows(np.arange(COUNT) * 0.5, number, 4, seed)[1],
}


@pytest.mark.parametrize("name", ORDERS)
def test_each_seed_and_pass_has_its_own_order_and_repeats_it(name):
    order = ORDERS[name]
    numbers = [(seed, number) for seed in (0, 1, 2**40) for number in range(4)]
    orders = [np.asarray(order(*each)).tolist() for each in numbers]
    assert [np.asarray(order(*each)).tolist() for each in reversed(numbers)] == orders[::-1]
    alike = [(a, b) for n, a in enumerate(numbers) for m, b in enumerate(numbers[:n]) if orders[n] == orders[m]]
    assert alike == []


def test_sharded_samples_of_each_pass_and_seed(tmp_path):
    write_tokens(tmp_path, [41, 21, 61])
    made = [
        dp.utils.ShardedDataset(str(tmp_path), 99, sequence_length=2, seed=seed, shards_per_block=2) for seed in (0, 1)
    ]
    mixes = [dp.utils.ShardedDataset.mix([made[0], made[1]], seed=seed) for seed in (0, 1)]
    for data in (made, mixes):
        passes = [np.concatenate([x for x, _ in each]).tolist() for each in data for _ in range(3)]
        assert all(first != second for n, first in enumerate(passes) for second in passes[:n])
