"""Collectives in memory that ranks share: right, the same on all ranks, in one fixed tree."""

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from dptrain.comm import node
from dptrain.comm.node_sum import tree_sum

KINDS = [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.float64]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node, "PIECE", 4096)


def on_threads(ranks, work):
    """Return what `work` returns on each of some threads, as ranks, given its rank and its collectives."""
    shared, barrier = np.empty(node.shape(ranks), np.uint8), threading.Barrier(ranks)
    nodes = [node.NodeCollectives(shared, rank, lambda: barrier.wait(20) and None) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), nodes))


def numbers(shape, dtype):
    return (np.random.default_rng(len(shape)).normal(size=shape) * 9).astype(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
def test_all_ranks_have_the_trees_bits_of_sums(ranks):
    sizes = [0, 1, 5, 1024, 1025, 2048 + 77]
    summands = [numbers((ranks, size), kind) for size in sizes for kind in KINDS]

    def work(rank, own):
        found = [one[rank].copy() for one in summands]
        for one in found:
            own.sum(one)
        return found

    for *ours, given in zip(*on_threads(ranks, work), summands, strict=True):
        for one in ours:
            assert one.tobytes() == tree_sum(given).astype(one.dtype).tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_scattered_has_the_bits_of_what_is_reduced_and_gathers_to_it(ranks):
    cases = [
        [7] * ranks,
        [0] * ranks,
        [0, 1025, *[3] * (ranks - 2)],
        [2048, *[0] * (ranks - 1)],
        [700, 900, 5, 0][:ranks],
    ]
    given = [(counts, numbers((ranks, sum(counts)), kind)) for counts in cases for kind in KINDS]

    def work(rank, own):
        found = []
        for counts, terms in given:
            outs = np.empty((2, counts[rank]), terms.dtype)
            own.reduce_scatter(terms[rank], outs[0], counts)
            own.reduce_scatter(terms[rank], outs[1], counts, "max")
            whole = np.empty((2, sum(counts)), terms.dtype)
            own.all_gather(outs[0], whole[0], counts)
            own.all_gather(outs[1], whole[1], counts)
            reduced = terms[rank].copy()
            own.sum(reduced)
            assert whole[0].tobytes() == reduced.tobytes()
            found.append(whole)
        return found

    for *ours, (_, terms) in zip(*on_threads(ranks, work), given, strict=True):
        for one in ours:
            assert one[1].tobytes() == terms.max(axis=0).tobytes()
