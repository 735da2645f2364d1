"""Sums that compiled code makes in memory which ranks share: the bits of the tree, and waits that end."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.node_sums import NodeSums
from dptrain.comm.node import APART, NodeMessage, NodeMessages
from dptrain.comm.node_sum import tree_sum
from dptrain.runtime.signals import interrupting
from dptrain.runtime.watch.records import Collective, Record, numbers_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
KINDS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def on_threads(ranks, like, attend=lambda: None, spins=True):
    """Return the sums and records of ranks that are threads."""
    arrived, records = np.zeros((ranks, APART), np.int64), [Record() for _ in range(ranks)]
    messages = []
    for size, dtype in like:
        total = np.empty(size, dtype)
        numbers = numbers_of(Collective.ALL_REDUCE, size, total.dtype.char)
        messages.append(NodeMessage([np.empty(size, dtype) for _ in range(ranks)], total, numbers))
    sums = []
    for rank, record in enumerate(records):
        beside = [records[rank - 1].progress, records[(rank + 1) % ranks].progress][: ranks - 1]
        sums.append(NodeSums(NodeMessages(rank, messages, arrived, record.progress, beside, attend, spins)))
    return sums, records


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_all_kinds_have_the_trees_bits_time_and_again(ranks):
    sizes = [1, 7, 64, 1000, 5 * 512 * ranks + 3]
    like = [(size, kind) for size in sizes for kind in KINDS]
    rng = np.random.default_rng(ranks)
    terms = [(rng.normal(size=(2, ranks, size)) * 1000).astype(kind) for size, kind in like]
    sums, records = on_threads(ranks, like, spins=False)
    for record in records:
        record.phase_memory[1][0] = 17  # the epoch, which lies behind what sums write

    def work(rank):
        bits = []
        for run in range(2):
            for number, term in enumerate(terms):
                summand, total = sums[rank].memory(number)
                summand[:] = term[run, rank]
                sums[rank].sum(number)
                bits.append(total.tobytes())
        return bits

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(work, range(ranks)))
    expected = [tree_sum(term[run]).astype(term.dtype).tobytes() for run in range(2) for term in terms]
    assert results == [expected] * ranks
    assert {(record.position, record.phase[1]) for record in records} == {(2 * 2 * len(like), 17)}
    assert records[0].call == f"an all-reduce of {sizes[-1]} bfloat16"


def test_what_the_watch_raises_ends_the_wait():
    def attend():
        raise RuntimeError("rank 1 is gone")

    sums, records = on_threads(2, [(10, np.float32)], attend)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        sums[0].sum(0)
    assert time.monotonic() - begin < 30  # and not never: a busy machine took 10
    assert records[0].position == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(number):
    begin, called = time.monotonic(), threading.Event()

    def attend():
        called.set()
        if time.monotonic() - begin > 30:
            raise RuntimeError("the signal was lost")

    sums, _ = on_threads(2, [(10, np.float32)], attend)
    sender = threading.Thread(target=lambda: called.wait() and signal.raise_signal(number))
    sender.start()
    # A shell's background processes ignore SIGINT, and other tests may have left a handler.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with interrupting(), pytest.raises(KeyboardInterrupt):
            sums[0].sum(0)
    finally:
        sender.join()
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def test_a_neighbour_in_another_collective_is_seen_before_numbers_are_added():
    called = threading.Event()

    def attend():
        called.set()
        raise RuntimeError("other")

    sums, records = on_threads(2, [(10, np.float32)], attend)
    records[1].collective(Collective.ALL_REDUCE, 11, "f").__enter__()
    with pytest.raises(RuntimeError, match="other"):
        sums[0].sum(0)
    assert called.is_set()
