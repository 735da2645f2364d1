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

    def work(rank, node_sums):
        arrays = [summand[rank].copy() for summand in summands]
        for array in arrays:
            node_sums.sum(array)
        return arrays

    for *ours, term in zip(*on_threads(ranks, work), summands, strict=True):
        for our in ours:
            assert our.tobytes() == tree_sum(term).astype(our.dtype).tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_scattered_has_the_bits_of_what_is_reduced_and_gathers_to_it(ranks):
    cases = [
        [7] * ranks,
        [0] * ranks,
        [0, 1025, *[3] * (ranks - 2)],
        [2048, *[0] * (ranks - 1)],
        [700, 900, 5, 0][:ranks],
    ]
    inputs_of_cases = [(counts, numbers((ranks, sum(counts)), kind)) for counts in cases for kind in KINDS]

    def work(rank, node_sums):
        outputs = []
        for counts, terms in inputs_of_cases:
            outs = np.empty((2, counts[rank]), terms.dtype)
            node_sums.reduce_scatter(terms[rank], outs[0], counts)
            node_sums.reduce_scatter(terms[rank], outs[1], counts, "max")
            full = np.empty((2, sum(counts)), terms.dtype)
            node_sums.all_gather(outs[0], full[0], counts)
            node_sums.all_gather(outs[1], full[1], counts)
            reduced = terms[rank].copy()
            node_sums.sum(reduced)
            assert full[0].tobytes() == reduced.tobytes()
            outputs.append(full)
        return outputs

    for *ours, (_, terms) in zip(*on_threads(ranks, work), inputs_of_cases, strict=True):
        for our in ours:
            assert our[1].tobytes() == terms.max(axis=0).tobytes()
