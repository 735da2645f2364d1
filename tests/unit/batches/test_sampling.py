"""Permutations, global batches and shards."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dptrain.batches.sampling import GlobalSampler, LocalSampler, StaticSampler
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError

worlds = st.integers(1, 9)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_cut_covers_evenly(start, length, parts):
    pieces = cut(start, start + length, parts)
    assert len(pieces) == parts
    assert pieces[0][0] == start
    assert pieces[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    sizes = [stop - begin for begin, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 200), st.integers(1, 64), worlds, st.booleans(), st.integers(0, 20))
def test_global_shards_of_all_ranks_are_the_global_batches(samples, batch_size, world, drop_last, more):
    assume(batch_size >= world and not (drop_last and samples < batch_size))
    count = max(world, min(world + more, batch_size, samples))
    samplers = [
        GlobalSampler(samples, batch_size, r, world, drop_last=drop_last, shards_per_batch=count) for r in range(world)
    ]
    steps = samples // batch_size if drop_last else -(-samples // batch_size)
    assert {sampler.steps for sampler in samplers} == {steps}
    for step in range(steps):
        shards = [shard for sampler in samplers for shard in sampler.shards(step)]
        assert [(shard.number, shard.of) for shard in shards] == [(number, count) for number in range(count)]
        assert all(sampler.shards(step) for sampler in samplers)
        first = step * batch_size
        places = [place for shard in shards for place in range(shard.start, shard.stop)]
        assert places == list(range(first, min(first + batch_size, samples)))
        assert all(shard.first_row == shard.start - first for shard in shards)
        assert all(shard.rows <= sampler.capacity for shard in shards for sampler in samplers)


@given(st.integers(1, 200), st.integers(1, 64), worlds)
def test_static_shards_use_every_row_of_every_rank_once(samples, batch_size, world):
    assume(batch_size >= world)
    samplers = [StaticSampler(samples, batch_size, r, world) for r in range(world)]
    sizes = [stop - start for start, stop in cut(0, samples, world)]
    for rank, sampler in enumerate(samplers):
        assert sampler.steps == -(-samples // batch_size)
        places = [
            p for s in range(sampler.steps) for shard in sampler.shards(s) for p in range(shard.start, shard.stop)
        ]
        assert places == list(range(sizes[rank]))
        assert sorted(sampler.order(0)) == list(range(sizes[rank]))
        assert all(shard.rows <= sampler.capacity for s in range(sampler.steps) for shard in sampler.shards(s))
    for step in range(samplers[0].steps):
        rows = [sampler.shards(step)[0] for sampler in samplers]
        total = sum(shard.rows for shard in rows)
        assert abs(total - min(batch_size, samples - step * batch_size)) <= world
        assert [shard.first_row for shard in rows] == [sum(s.rows for s in rows[:r]) for r in range(world)]


def test_order_is_a_function_of_seed_and_epoch_and_not_of_rank():
    orders = [GlobalSampler(100, 10, rank, 4, seed=5).order(2) for rank in range(4)]
    assert all(np.array_equal(order, orders[0]) for order in orders)
    assert sorted(orders[0]) == list(range(100))
    assert not np.array_equal(orders[0], GlobalSampler(100, 10, seed=5).order(3))
    assert not np.array_equal(orders[0], GlobalSampler(100, 10, seed=6).order(2))
    assert np.array_equal(GlobalSampler(100, 10, shuffle=False).order(7), np.arange(100))


def test_static_ranks_shuffle_differently():
    orders = [StaticSampler(200, 10, rank, 2).order(0) for rank in range(2)]
    assert not np.array_equal(*orders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 3, "world": 4}, "use at least 4, or mpirun -n 3"),
        ({"batch_size": 200, "drop_last": True}, "at most 100"),
        ({"samples": 0, "batch_size": 10}, "empty"),
        ({"batch_size": 10, "world": 4, "shards_per_batch": 3}, "some of the 4 ranks without work: use at least 4, or"),
        ({"batch_size": 10, "shards_per_batch": 100_000_000}, "shards_per_batch = 100000000: use at most 65536"),
    ],
)
def test_impossible_plans_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GlobalSampler(**{"samples": 100, **arguments})


def test_shuffled_within_batches():
    order = GlobalSampler(25, 10, seed=5, shuffle="batch").order(1)
    for begin in (0, 10, 20):
        part = order[begin : begin + 10]
        assert sorted(part) == list(range(begin, min(begin + 10, 25)))
        assert not np.array_equal(part, np.arange(begin, begin + len(part)))
    assert not np.array_equal(order, GlobalSampler(25, 10, seed=5, shuffle="batch").order(2))


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_every_batch_of_every_epoch_is_shuffled_in_an_order_of_its_own(seed, batches):
    sampler = GlobalSampler(20 * batches, 20, seed=seed, shuffle="batch")
    orders = [tuple(part % 20) for epoch in range(4) for part in np.split(sampler.order(epoch), batches)]
    assert len(set(orders)) == 4 * batches


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 15))
def test_local_pieces_cover_a_ranks_rows(start, rows, batch_size):
    sampler = LocalSampler(start, start + rows, batch_size)
    shards = [shard for step in range(sampler.steps) for shard in sampler.shards(step)]
    orders = [sampler.order(0)[shard.start : shard.stop] for shard in shards]
    assert np.array_equal(np.concatenate([*orders, np.empty(0, int)]), np.arange(start, start + rows))
    assert all(0 < shard.rows <= sampler.capacity for shard in shards)


def test_fewer_samples_than_ranks():
    samplers = [GlobalSampler(3, 8, rank, 5) for rank in range(5)]
    assert sum(sampler.shards(0)[0].rows for sampler in samplers) == 3
    assert min(sampler.shards(0)[0].rows for sampler in samplers) == 0
