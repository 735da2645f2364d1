"""Collectives of ranks' GPUs, queued and replayed from a graph, beside the host's results for the same arrays."""

import itertools
import sys

import numpy as np

from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.transfers.links import LinkedSum
from dptrain.backend.cuda.transfers.node_first import NodeFirstReduction
from dptrain.comm.nccl import NcclCommunicator
from dptrain.comm.node_sum import tree_sum
from dptrain.runtime.types import TYPES, is_floating, is_narrow, type_of

ranks = comm.current()
backend = CudaBackend()
backend.transport = "nccl"
links = backend.links(ranks)
axis_link = links.along("batch")
link, grid = axis_link.link, axis_link.grid
rank, size = ranks.rank, ranks.size
# Of two nodes with one and two ranks each rank is a node of its own.
two_nodes = [[0, 2], [1, 3]] if size == 4 else [[0], [1], [2]]
nodes = two_nodes if sys.argv[1:] == ["nodes"] else [list(range(size))]
assert grid.nodes == nodes, grid.nodes
here = next(members for members in nodes if rank in members)
sent_to_others = 0  # bytes


def count_sent():
    """Count the bytes that this rank sends to other nodes in sums of half precision."""
    to_each, gather = NcclCommunicator.all_to_all, NcclCommunicator.all_gather

    def all_to_all(self, sent, received, stream):
        global sent_to_others
        to_each(self, sent, received, stream)
        if grid.node is not None and self is grid.column:
            sent_to_others += sum(
                buffer.nbytes for to, buffers in enumerate(sent) if to != self.rank for buffer in buffers
            )
        assert self is not link or len(nodes) in (1, size), "all ranks in one exchange"

    def all_gather(self, part, out, counts, stream):
        global sent_to_others
        gather(self, part, out, counts, stream)
        sent_to_others += part.nbytes * (len(counts) - 1) if grid.node is not None and self is grid.column else 0

    NcclCommunicator.all_to_all, NcclCommunicator.all_gather = all_to_all, all_gather


def of(seed, count, dtype):
    values = np.random.default_rng(seed).normal(size=count)
    return (values * 100 if np.dtype(dtype).kind in "iu" else values).astype(dtype)


def by_nodes(arrays):
    """Return the sum in the order of `comm/hierarchy.py`, rounded once."""
    return tree_sum([tree_sum([arrays[member] for member in members]) for members in nodes]).astype(arrays[0].dtype)


def check(queue, out, expected, exact=True):
    """Queue it alone, and from a graph whose memory is filled anew."""
    with links.queueing():
        queue()
    backend.wait()
    results = [backend.download(out)]
    for result in results:
        if exact:  # of ml_dtypes, NumPy would not know NaN
            compute = type_of(result.dtype).compute
            np.testing.assert_array_equal(result.astype(compute), expected.astype(compute))
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    contents = ranks.allgather_bytes(results[0].tobytes())
    return contents


NARROW = [known.storage for known in TYPES.values() if known.is_narrow]
count_sent()
for dtype in ("float32", "float64", "int32", "uint64", *NARROW, "bool"):
    for count in (1, 7, 1000):
        for over in ("sum", "max"):
            if dtype == "bool" and over == "sum":
                continue
            arrays = [of(sender, count, dtype) for sender in range(size)]
            if over == "max" and is_floating(np.dtype(dtype)):
                arrays[0][count // 2] = np.nan
            if over == "max":
                expected = np.max(arrays, axis=0)
            else:
                expected = by_nodes(arrays)
            buffer = backend.empty(arrays[rank].shape, dtype)
            backend.write(buffer, arrays[rank])
            message = LinkedSum(backend, buffer, over, axis_link)
            message.scratch = backend.empty((message.scratch_bytes,), np.uint8)

            def queue(message=message):
                message.begin()
                message.finish()

            native = over == "sum" and dtype in ("float32", "float64")
            sent_to_others = 0
            contents = check(queue, buffer, expected, exact=not native)
            assert len(set(contents)) == 1
            if count == 1000 and over == "sum" and is_narrow(np.dtype(dtype)):
                # Half of a share of 500 in float32, and of its sums; all ranks at once would send 2,000 bytes.
                assert sent_to_others == (250 * (4 + np.dtype(dtype).itemsize) if size == 4 else 0), sent_to_others
            graph = backend.gpu_record.captured(backend.stream, queue)
            for _ in range(2):
                backend.write(buffer, arrays[rank])
                graph.launch(backend.stream)
                assert backend.download(buffer).tobytes() == contents[0], (dtype, count, over)
            graph.close()

# Uneven parts, one of them empty
counts = [3 * sender for sender in range(size)]
ends = np.cumsum([0, *counts])
whole = np.arange(ends[-1], dtype=np.float32)
part = backend.upload(whole[ends[rank] : ends[rank + 1]])
out = backend.zeros(whole.shape)
stream = backend.stream
link.all_gather(part, out, counts, stream)
np.testing.assert_array_equal(backend.download(out), whole)
places = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(ends)]
for dtype in ("float32", *NARROW):
    for over, expected_of in (("sum", by_nodes), ("max", lambda terms: np.max(terms, axis=0))):
        arrays = [of(sender, int(ends[-1]), dtype) for sender in range(size)]
        reduction = NodeFirstReduction(backend, np.dtype(dtype), over, grid, rank, places)
        mine = backend.zeros((counts[rank],), dtype)
        scratch = backend.empty((reduction.scratch_bytes,), np.uint8)
        parts = backend.empty(arrays[rank].shape, dtype)
        backend.write(parts, arrays[rank])
        reduction(parts, mine, scratch, stream)
        np.testing.assert_array_equal(backend.download(mine), expected_of([array[places[rank]] for array in arrays]))

# From one rank to the next
if rank:
    link.receive(out, rank - 1, stream)
    np.testing.assert_array_equal(backend.download(out), whole + rank - 1)
if rank < size - 1:
    link.send(backend.upload(whole + rank), rank + 1, stream)
    backend.wait()
print("joined\n", end="", flush=True)
