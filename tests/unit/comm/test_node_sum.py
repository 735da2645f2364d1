"""Sums in memory that ranks share: right, the same on all ranks, in one fixed tree."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dptrain.comm.node_sum import PIECE, NodeSum, TreeSum, shape


def summed(ranks, summands):
    """Return what each of some threads, as ranks, has of several sums one after the other."""
    shared, barrier = np.empty(shape(ranks), np.uint8), threading.Barrier(ranks)

    def work(rank):
        node = NodeSum(shared, rank, lambda: barrier.wait(20) and None)
        found = [one[rank].copy() for one in summands]
        for one in found:
            node.sum(one)
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
def test_all_ranks_have_the_trees_bits(ranks):
    rng = np.random.default_rng(ranks)
    sizes = [1, 5, 4096, PIECE // 4, PIECE // 4 + 1, PIECE // 2 + 77]
    summands = [rng.normal(size=(ranks, size)).astype(dtype) for size in sizes for dtype in (np.float32, np.float64)]
    summands.append(rng.integers(-9, 9, (ranks, 1000)))
    for found in zip(*summed(ranks, summands), summands, strict=True):
        *ours, given = found
        tree = TreeSum()
        for one in given:
            tree.add([one])
        for one in ours:
            assert one.tobytes() == tree.total()[0].tobytes()


class Named(str):
    """What stands for a summand; a sum names both of its sides."""

    def __add__(self, other):
        return Named(f"({self!s}{other!s})")


def test_the_tree():
    def of(count):
        tree = TreeSum()
        for number in range(count):
            tree.add([np.array([Named(number)], object)])
        return tree.total()[0][0]

    assert [of(n) for n in (1, 2, 3, 4, 7)] == ["0", "(01)", "((01)2)", "((01)(23))", "(((01)(23))((45)6))"]
    assert of(8) == "(((01)(23))((45)(67)))"
