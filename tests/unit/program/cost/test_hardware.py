"""Times of ops and collectives, from a machine's numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.comm.hierarchy import CALL, PIECE
from dptrain.program.cost.hardware import Hardware, Link, Work

LINK, NETWORK = Link(1e9, 1e-6), Link(1e8, 1e-5)
MACHINE = Hardware({"float32": 1e9, "half": 4e9}, 1e8, 2e-6, 1e-5, 0.0, 4, LINK, NETWORK)
NAMES = ("all_reduce", "all_gather", "reduce_scatter")


def test_an_op_takes_the_longer_of_operations_and_bytes():
    assert MACHINE.seconds(Work(1e6, 10)) == pytest.approx(1e-3)
    assert MACHINE.seconds(Work(10, 1e6)) == pytest.approx(1e-2)
    assert MACHINE.seconds(Work(1e6, 10, launched=True, precision="half")) == pytest.approx(2.5e-4 + 2e-6)
    assert MACHINE.seconds(Work(10, 10, launched=True)) == pytest.approx(1e-5 + 2e-6), "a product, however small"


def test_ranks_share_cores():
    on_cpus = replace(MACHINE, cores=2.0)
    assert [on_cpus.busy(ranks) for ranks in (1, 2, 3, 4, 64)] == [1, 1, 1.5, 2, 2]
    assert MACHINE.busy(64) == 1


def test_collectives_within_a_node():
    """By hand: 1 MB on 4 ranks, 2 rounds of recursive doubling or halving."""
    n, a, b = 1e6, 1e-6, 1e-9
    for name in ("all_gather", "reduce_scatter"):
        assert MACHINE.collective(name, n, 4) == pytest.approx(2 * a + 3 / 4 * n * b)
    assert MACHINE.collective("all_reduce", n, 4) == pytest.approx(2 * (2 * a + 3 / 4 * n * b))
    assert MACHINE.collective("all_reduce", 8, 4) == pytest.approx(2 * (a + 8 * b)), "shorter in whole"
    assert MACHINE.collective("all_reduce", n, 1) == 0


def test_collectives_between_nodes():
    """By hand: on 16 ranks of 4 nodes a ring waits for the network, and hierarchically each rank has a part of it."""
    n = 1e9
    ring = 2 * (15 * NETWORK.latency + 15 / 16 * n / NETWORK.bandwidth)
    assert MACHINE.collective("all_reduce", n, 16) == pytest.approx(ring)
    inside = 2 * (2 * LINK.latency + 3 / 4 * n / LINK.bandwidth)
    turns = 1 + 2 * math.ceil(n / PIECE)  # the comparison, then a reduce-scatter and an all-gather of each piece
    between = turns * 2 * NETWORK.latency + (2 * 3 / 4 * n + 4 * 3 * CALL) / NETWORK.bandwidth
    assert MACHINE.collective("all_reduce", n, 16, hierarchical=True) == pytest.approx(inside + between)
    # Every fourth rank, while the others do the same: one of them a node, with a fourth of its network.
    ring = 2 * (3 * NETWORK.latency + 3 / 4 * n / (NETWORK.bandwidth / 4))
    assert MACHINE.collective("all_reduce", n, 4, stride=4) == pytest.approx(ring)
    # Short messages: two rounds within the node, two between.
    rounds = 2 * LINK.latency + 2 * NETWORK.latency
    assert MACHINE.collective("all_reduce", 8, 16) == pytest.approx(rounds, rel=0.2)


def test_halves_are_summed_within_nodes_first():
    """By hand: 4 GPUs a node send float32's sums of n / 4 halves each to other nodes, and rounded sums back."""
    n = 1e9
    inside = LINK.latency + 3 / 4 * n / LINK.bandwidth
    between = NETWORK.latency + 2 * 3 / 4 * n / NETWORK.bandwidth
    back = NETWORK.latency + 3 / 4 * n / NETWORK.bandwidth
    assert MACHINE.collective("reduce_scatter", n, 16, half=True) == pytest.approx(inside + between)
    assert MACHINE.collective("all_reduce", n, 16, half=True) == pytest.approx(2 * inside + between + back)
    assert MACHINE.collective("all_gather", n, 16, half=True) == MACHINE.collective("all_gather", n, 16)
    assert MACHINE.collective("all_reduce", n, 4, half=True) == pytest.approx(2 * inside), "one node"
    # One GPU of each node, with a fourth of its network, has no sum to round.
    alone = 2 * (NETWORK.latency + 3 / 4 * n / (NETWORK.bandwidth / 4))
    assert MACHINE.collective("all_reduce", n, 4, stride=4, half=True) == pytest.approx(alone)
    # An all-to-all of all ranks takes longer than float32 in a ring.
    flat = replace(MACHINE, sums_halves="all-to-all")
    every = 2 * (NETWORK.latency + 12 / 16 * n * 4 / NETWORK.bandwidth)
    assert flat.collective("all_reduce", n, 16, half=True) == pytest.approx(every)
    assert flat.collective("all_reduce", n, 16, half=True) > MACHINE.collective("all_reduce", 2 * n, 16)
    assert MACHINE.collective("all_reduce", n, 16, half=True) < MACHINE.collective("all_reduce", 2 * n, 16)


@given(
    name=st.sampled_from(NAMES),
    nbytes=st.integers(1, 10**12),
    extra_bytes=st.integers(0, 10**12),
    power=st.integers(0, 12),
    hierarchical=st.booleans(),
)
def test_collectives_are_monotone(name, nbytes, extra_bytes, power, hierarchical):
    ranks = 2**power
    took = MACHINE.collective(name, nbytes, ranks, hierarchical=hierarchical)
    assert took <= MACHINE.collective(name, nbytes + extra_bytes, ranks, hierarchical=hierarchical)
    assert took <= MACHINE.collective(name, nbytes, 2 * ranks, hierarchical=hierarchical)
    # No algorithm sends less, nor in fewer rounds: Thakur et al., section 4.
    times = 2 if name == "all_reduce" else 1
    assert took >= times * (ranks - 1) / ranks * nbytes / LINK.bandwidth * (1 - 1e-9)
    assert took >= math.log2(ranks) * LINK.latency * (1 - 1e-9)
    slower = replace(MACHINE, network=Link(NETWORK.bandwidth / 2, 2 * NETWORK.latency))
    assert took <= slower.collective(name, nbytes, ranks, hierarchical=hierarchical)
