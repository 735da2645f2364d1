"""Orders are permutations of all samples, mixed within blocks of shards, and each position is known by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data.shards.order import PERIOD, BlockOrder, MixOrder
from dptrain.errors import ConfigError


def located(order, epoch, positions):
    return list(zip(*(part.tolist() for part in order.locate(epoch, np.asarray(positions))), strict=True))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(0, 2**63)),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_a_pass_has_each_sample_once_and_blocks_one_after_the_other(sizes, seed, per_block, epoch):
    order = BlockOrder(sizes, seed, per_block)
    samples = located(order, epoch, range(sum(sizes)))
    assert sorted(samples) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    blocks = [order.block_of(epoch, shard) for shard, _ in samples]
    assert blocks == sorted(blocks)
    for position, sample in enumerate(samples):
        assert located(order, epoch, [position]) == [sample]
        (block,) = order.blocks(epoch, np.array([position]))
        assert sample[0] in order.shards(epoch, block)


def test_without_a_seed_the_order_is_that_of_the_shards():
    assert located(BlockOrder([2, 0, 1], None, 8), 5, range(3)) == [(0, 0), (0, 1), (2, 0)]


def test_passes_and_seeds_differ_and_repeat():
    def samples(seed, epoch):
        return located(BlockOrder([7] * 9, seed, 3), epoch, range(63))

    assert samples(1, 0) == samples(1, 0)
    assert samples(1, 0) != samples(1, 1) != samples(2, 1)


@pytest.mark.parametrize("weights", [[3, 1], [0.5], [1e-9, 1.0, 1.0], [0.1, 0.2, 0.7], [1, 1, 1]])
def test_a_mix_has_exact_shares_and_takes_from_each_source_in_order(weights):
    order = MixOrder(weights, 4)
    assert order.quotas.sum() == PERIOD
    np.testing.assert_allclose(order.quotas / PERIOD, np.array(weights) / sum(weights), atol=2 / PERIOD)
    sources, indices = order.locate(np.arange(3 * PERIOD))
    for source, quota in enumerate(order.quotas.tolist()):
        assert indices[sources == source].tolist() == list(range(3 * quota))
    part = np.array([5, PERIOD + 1, 2 * PERIOD - 1])
    assert [array.tolist() for array in order.locate(part)] == [sources[part].tolist(), indices[part].tolist()]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1, 2], [float("nan")], [float("inf")], [1.0] * (PERIOD + 1)])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ConfigError, match=r"expected positive numbers|are mixed"):
        MixOrder(weights, 0)
