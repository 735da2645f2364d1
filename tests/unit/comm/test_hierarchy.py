"""Collectives of several nodes: right, in one fixed order, and with no more bytes between nodes than there must be."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import ml_dtypes
import numpy as np
import pytest

from dptrain.comm import hierarchy, node
from dptrain.comm.hierarchy import HierarchicalCollectives
from dptrain.comm.node_sum import tree_sum
from dptrain.errors import MismatchError
from dptrain.program.cost.hardware import inter_node_traffic
from dptrain.runtime.types import is_narrow

KINDS = [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64]
NODES = [[[0, 1], [2, 3]], [[0, 2, 4], [1, 3]], [[0, 1, 2], [3], [4, 5]], [[0], [1, 2, 3, 4]]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(hierarchy, "PIECE", 4096)
    monkeypatch.setattr(hierarchy, "GATHERED", 512)


class Column:
    """Threads that are a column; counts the messages and bytes that this one has for the others."""

    def __init__(self, board, number):
        self.board, self.number = board, number
        self.messages = self.nbytes = 0
        self.call = np.arange(hierarchy.CALL, dtype=np.uint8)

    def gathered(self, what):
        board, barrier = self.board
        board[self.number] = what
        barrier.wait(20)
        values = list(board)
        barrier.wait(20)
        return values

    def count(self, lengths):
        others = [n for other, n in enumerate(lengths) if other != self.number]
        self.messages += len(others)
        self.nbytes += sum(others)

    def all_gather(self, memory, places):
        first, last = places[self.number]
        self.count([last - first] * len(places))
        for (begin, end), theirs in zip(places, self.gathered(memory[first:last].copy()), strict=True):
            memory[begin:end] = theirs

    def all_to_all(self, memory, places, out):
        self.count([last - first for first, last in places])
        parts = self.gathered([memory[first:last].copy() for first, last in places])
        for row, theirs in zip(out, parts, strict=True):
            row[:] = theirs[self.number]


def on_nodes(nodes, work):
    """Return what `work` returns on each rank, a thread, given it and its collectives; and the ranks' columns."""
    ranks, talking = sum(map(len, nodes)), min(map(len, nodes))
    boards = [([None] * len(nodes), threading.Barrier(len(nodes))) for _ in range(talking)]
    created, columns = {}, {}
    for number, here in enumerate(nodes):
        shared, barrier = np.zeros(node.shape(len(here), hierarchy.PIECE), np.uint8), threading.Barrier(len(here))
        for place, rank in enumerate(here):
            column = columns[rank] = Column(boards[place], number) if place < talking else None
            wait = lambda barrier=barrier: barrier.wait(20) and None  # noqa: E731
            created[rank] = HierarchicalCollectives(shared, nodes, rank, wait, column)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), [created[rank] for rank in range(ranks)])), columns


def numbers(shape, dtype):
    return (np.random.default_rng(len(shape)).normal(size=shape) * 9).astype(dtype)


def by_nodes(terms, nodes):
    """Return the sum in the order that is promised; half precision is rounded once."""
    return tree_sum([tree_sum([terms[rank] for rank in ranks]) for ranks in nodes]).astype(terms.dtype)


@pytest.mark.parametrize("nodes", NODES)
def test_collectives_have_the_bits_of_the_nodes_sums(nodes):
    ranks = sum(map(len, nodes))
    cases = [[7] * ranks, [0] * ranks, [0, 1025, *[3] * (ranks - 2)], [700, 900, 5, *[0] * (ranks - 3)]]
    cases_given = [(counts, numbers((ranks, sum(counts)), kind)) for counts in cases for kind in KINDS]

    def work(rank, collectives):
        outputs = []
        for counts, terms in cases_given:
            outs = np.empty((2, counts[rank]), terms.dtype)
            collectives.reduce_scatter(terms[rank], outs[0], counts)
            collectives.reduce_scatter(terms[rank], outs[1], counts, "max")
            full = np.empty((3, sum(counts)), terms.dtype)
            collectives.all_gather(outs[0], full[0], counts)
            collectives.all_gather(outs[1], full[1], counts)
            full[2] = terms[rank]
            collectives.sum(full[2])
            outputs.append(full)
        return outputs

    results, _ = on_nodes(nodes, work)
    for *ours, (_, terms) in zip(*results, cases_given, strict=True):
        right = by_nodes(terms, nodes).tobytes()
        for our in ours:
            assert (our[0].tobytes(), our[2].tobytes()) == (right, right)
            assert our[1].tobytes() == terms.max(axis=0).tobytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("nodes", "is_tree"),
    [
        *[(NODES[0], True), (NODES[1], False), (NODES[2], False), ([[0, 2], [1, 3]], False)],
        *[([[0, 1, 2], [3, 4, 5]], False), ([[0, 1], [2, 3], [4, 5]], True), ([[0], [1], [2]], True)],
        *[([[0, 1, 2, 3], [4, 5, 6, 7]], True), ([[0, 1], [2, 3, 4]], False)],
    ],
)
def test_equal_nodes_of_a_power_of_two_add_as_one_tree(nodes, is_tree):
    terms = numbers((sum(map(len, nodes)), 999), np.float32)

    def work(rank, collectives):
        mine = terms[rank].copy()
        collectives.sum(mine)
        return collectives.in_a_tree, mine.tobytes() == tree_sum(terms).tobytes()

    results, _ = on_nodes(nodes, work)
    assert set(results) == {(is_tree, is_tree)}


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("elements", [72, 1008, 5040])
def test_what_travels_between_nodes_is_what_is_predicted(monkeypatch, nodes, dtype, name, elements):
    """A node's columns together; on both sides of what is gathered whole, and in one piece or more."""
    monkeypatch.setattr(hierarchy, "PIECE", 1 << 13)
    ranks, nbytes = sum(map(len, nodes)), elements * np.dtype(dtype).itemsize
    counts = [0] * ranks  # as many elements of each node, so that all send as many
    for ranks_of_node in nodes:
        for rank in ranks_of_node:
            counts[rank] = elements // len(nodes) // len(ranks_of_node)

    def work(rank, collectives):
        flat, out = np.ones(elements, dtype), np.empty(elements, dtype)
        if name == "all_reduce":
            collectives.sum(flat)
        elif name == "reduce_scatter":
            collectives.reduce_scatter(flat, out[: counts[rank]], counts)
        else:
            collectives.all_gather(flat[: counts[rank]].copy(), out, counts)

    _, columns = on_nodes(nodes, work)
    talking = min(map(len, nodes))
    for ranks_of_node in nodes:
        mine = [columns[rank] for rank in ranks_of_node[:talking]]
        assert all(columns[rank] is None for rank in ranks_of_node[talking:])
        traffic = (sum(message.messages for message in mine), sum(message.nbytes for message in mine))
        expected = inter_node_traffic(name, nbytes, len(nodes), talking, half=is_narrow(np.dtype(dtype)))
        assert traffic[1] == pytest.approx(expected.nbytes, rel=1e-3)  # slices of pieces are of whole elements
        if name == "all_reduce" or nodes is NODES[0]:  # the longest part decides in how many rounds parts travel
            assert traffic[0] == expected.messages


def test_nodes_that_are_in_different_collectives_are_told():
    def work(rank, collectives):
        collectives._column.call = np.full(hierarchy.CALL, rank // 2, np.uint8)
        messages = []
        for size in (5, 1000):
            try:
                collectives.sum(np.ones(size))
            except MismatchError as error:
                messages.append(str(error))
            try:
                collectives.all_gather(np.ones(size), np.ones(4 * size), [size] * 4)
            except MismatchError as error:
                messages.append(str(error))
        return messages

    results, _ = on_nodes(NODES[0], work)
    assert [len(message) for message in results] == [4] * 4
    assert "the nodes are in different collectives" in results[0][0]


def test_pieces_of_ranks_are_laid_out_by_nodes():
    shared = np.zeros(node.shape(3, 4096), np.uint8)
    collectives = HierarchicalCollectives(shared, [[0, 2, 4], [1, 3]], 2, lambda: None, None)
    places, blocks = collectives._laid_out([1, 2, 3, 4, 5])
    assert blocks == [(0, 9), (9, 15)]
    assert list(accumulate([1, 3, 5, 2, 4])) == [places[rank][1] for rank in (0, 2, 4, 1, 3)]
