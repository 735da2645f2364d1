"""Buckets cover the flat buffer from its end, and travel as soon as backward has completed them."""

from itertools import pairwise

import numpy as np
import pytest
from dptrain.model import Architecture
from dptrain.params import ALIGNMENT
from dptrain.train.allreduce import AllReduce, bucket_bounds
from dptrain.train.replica import Replica
from hypothesis import given
from hypothesis import strategies as st

from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.backend.transfers import HostExchange
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import Shard
from dptrain.layers import Activation, Dense
from dptrain.losses import MeanSquaredError
from dptrain.optimizers import SGD


@given(st.integers(1, 5000), st.integers(0, 6000))
def test_buckets_cover_the_buffer_once_from_its_end(elements, most):
    bounds = bucket_bounds(elements, most)
    assert bounds[0][1] == elements
    assert bounds[-1][0] == 0
    for (start, stop), (_, below) in pairwise(bounds):
        assert below == start < stop
    assert all(stop - start <= max(most, ALIGNMENT) for start, stop in bounds)


class Recorder:
    """A backend and a communicator that note what is asked of them."""

    dtype = np.dtype(np.float32)

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def exchange(self, buffer, *, direct=False):
        recorder = self

        class Noting(HostExchange):
            def begin(self) -> None:
                recorder.events.append(("begin", int(buffer[0])))

            def end(self) -> None:
                recorder.events.append(("end", int(buffer[0])))

        return Noting(buffer)

    def allreduce_sum(self, buffer) -> None:
        self.events.append(("sum", int(buffer[0])))


def test_a_bucket_begins_when_its_first_element_is_complete():
    record = Recorder()
    reduce = AllReduce(record, record, np.arange(320, dtype=np.float32), 128 * 4 / 1e6)  # from 192, 64 and 0
    for element, begun in [(256, 0), (192, 1), (65, 1), (10, 2), (0, 3)]:
        reduce.on_gradients_ready(element)
        assert len(record.events) == begun
    reduce.finish()
    assert record.events == [("begin", n) for n in (192, 64, 0)] + [
        (what, n) for n in (192, 64, 0) for what in ("sum", "end")
    ]
    with pytest.raises(AssertionError, match="never completed"):
        reduce.finish()


def test_backward_tells_what_is_complete_when_it_is():
    """At each report, everything from that element on must have its final value already."""
    rng = np.random.default_rng(0)
    stack = [Dense(70, "tanh"), Activation("relu"), Dense(5, use_bias=False), Dense(3)]
    replica = Replica(NumpyBackend(np.float64), Architecture(stack, (9,)), 1)
    replica.compile(MeanSquaredError(), SGD(), [])
    replica.reserve(8)
    feed = ResidentFeed(replica.backend, [rng.standard_normal((20, 9)), rng.standard_normal((20, 3))])
    feed.start(np.arange(20), [])
    for shards in ([Shard(0, 8, 0)], [Shard(0, 0, 0)], [Shard(0, 5, 0), Shard(5, 9, 5), Shard(9, 12, 9)]):
        seen: list[tuple[int, bytes]] = []
        replica.reduction[:] = np.nan

        def note(element: int, seen=seen) -> None:
            seen.append((element, replica.reduction[element:].tobytes()))

        replica.forward_backward(feed, shards, note)
        assert seen[-1][0] == 0
        assert [element for element, _ in seen] == sorted((element for element, _ in seen), reverse=True)
        for element, before in seen:
            assert replica.reduction[element:].tobytes() == before
        if len(shards) == 1 and shards[0].rows:
            offsets = [entry.offset for entry in replica.architecture.layout.entries if entry.name.endswith("kernel")]
            assert [element for element, _ in seen[1:-1]] == offsets[::-1]
