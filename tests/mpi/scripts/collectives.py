"""Checks every collective of the MPI communicator on all ranks.

Argument: 1 for ranks that are all on one node; 2 for those that MPICH takes for ranks of two (MPIR_CVAR_NUM_CLIQUES).
"""

import sys

import ml_dtypes
import numpy as np

from dptrain import comm as comms
from dptrain.backend.cpu.node_sums import NodeSums
from dptrain.comm import Communicator, mpi
from dptrain.comm.mesh import MeshCommunicator
from dptrain.comm.node_sum import tree_sum
from dptrain.errors import ConfigError
from dptrain.runtime.types import TYPES

comm = comms.current()
rank, size = comm.rank, comm.size
NODES = int(sys.argv[1])
if NODES == 1:
    assert (comm.local_rank, comm.local_size) == (rank, size)
else:
    assert len(comm._nodes) == NODES < size


def summed(terms: np.ndarray, ranks: Communicator = comm) -> np.ndarray:
    """Return the sum of all ranks' terms, in the order that is promised: by nodes, where they share memory."""
    nodes = [range(ranks.size)] if ranks._shared is None else ranks._nodes
    return tree_sum([tree_sum([terms[rank] for rank in node]) for node in nodes])


assert comm.description

for dtype in (np.float32, np.float64):
    for count in (0, 1, 7, 1000, 300_001):
        buffer = np.arange(count, dtype=dtype) + rank
        comm.allreduce_sum(buffer)
        expected = np.arange(count) * size + size * (size - 1) / 2
        np.testing.assert_array_equal(buffer, expected.astype(dtype))

# Large sums go through shared memory, small ones through MPI; on one node all ranks have the same bits.
for count in (300_001, 4096, 7):
    terms = np.random.default_rng(count).normal(size=(size, count)).astype(np.float32)
    buffer = terms[rank].copy()
    comm.allreduce_sum(buffer)
    np.testing.assert_allclose(buffer, terms.astype(float).sum(axis=0), rtol=1e-5, atol=1e-5)
    assert (comm._shared is not None) == (size > 1)
    assert buffer.tobytes() == summed(terms).tobytes()

# Narrow types are added up in float32 and rounded once, on all ranks to the same bits; what is too large for them is
# infinite, or NaN.
NARROW = [known.storage for known in TYPES.values() if known.is_narrow]
for dtype in NARROW:
    for count in (0, 1, 7, 300_001):
        terms = (np.random.default_rng(count).normal(size=(size, count)) * 100).astype(dtype)
        terms[:, -1:] = greatest = min(float(ml_dtypes.finfo(dtype).max), float(np.finfo(np.float16).max))
        buffer = terms[rank].copy()
        comm.allreduce_sum(buffer)
        expected = summed(terms)
        with np.errstate(over="ignore"):
            assert buffer.tobytes() == expected.astype(dtype).tobytes()
        is_within = greatest < float(ml_dtypes.finfo(dtype).max)
        assert np.isfinite(buffer).all() == (is_within or count == 0 or size == 1)

KINDS = [np.bool_, np.uint8, *NARROW, np.float32, np.int64, np.float64]


def check_parts(ranks: Communicator, kinds: list, longest: int = 40_000) -> None:
    """Check what gathers and scatters, with parts of many lengths, small by MPI and large in shared memory."""
    size, rank = ranks.size, ranks.rank
    many = [[7] * size, [0] * size, [0, 5, 1, 0][:size], [3, 0, 0, longest][:size]]
    many.append([longest // 2, 9, longest - 7, 0][:size])
    for counts, dtype in ((counts, dtype) for counts in many for dtype in kinds):
        terms = (np.random.default_rng(sum(counts)).normal(size=(size, sum(counts))) * 9).astype(dtype)
        outs, starts = np.empty((2, counts[rank]), dtype), np.cumsum([0, *counts])
        ranks.reduce_scatter(terms[rank], outs[0], counts)
        ranks.reduce_scatter(terms[rank], outs[1], counts, "max")
        mine = terms[:, starts[rank] : starts[rank + 1]]
        assert outs[0].tobytes() == summed(mine, ranks).astype(dtype).tobytes()
        assert outs[1].tobytes() == mine.max(axis=0).tobytes()
        whole = np.empty(sum(counts), dtype)
        ranks.all_gather(outs[0], whole, counts)
        assert whole.tobytes() == summed(terms, ranks).astype(dtype).tobytes()
        sent_counts = [counts[(rank + peer) % size] for peer in range(size)]
        taken = np.empty(sum(sent_counts), dtype)
        sent = [np.full(count, rank + 10 * peer % 7, dtype) for peer, count in enumerate(sent_counts)]
        ranks.all_to_all(np.concatenate(sent), sent_counts, taken, sent_counts)  # which is symmetric
        expected = [np.full(count, peer + 10 * rank % 7, dtype) for peer, count in enumerate(sent_counts)]
        assert taken.tobytes() == np.concatenate(expected).tobytes()


def check_native(ranks: Communicator) -> None:
    """Check sums that compiled code makes, in memory that grows and that later sums use again."""
    shapes = [[0], [5, 7], [100_001, 3], [5, 7], [0]]
    for number, (sizes, dtype) in enumerate((sizes, kind) for sizes in shapes for kind in (np.float32, np.float16)):
        memory = ranks.node_messages([(count, np.dtype(dtype)) for count in sizes])
        assert memory is not None
        sums = NodeSums(memory)
        for message, count in enumerate(sizes):
            terms = np.random.default_rng(number).normal(size=(ranks.size, count)).astype(dtype)
            part, total = sums.memory(message)
            part[:] = terms[ranks.rank]
            sums.sum(message)
            assert total.tobytes() == tree_sum(terms).astype(dtype).tobytes()


check_parts(comm, KINDS)
if size > 1 and NODES == 1:
    check_native(comm)
else:
    assert comm.node_messages([(5, np.dtype(float))]) is None
if size == 4:
    mesh = MeshCommunicator(comm, {"batch": 2, "model": 2})
    for axis in mesh.lengths:
        check_parts(mesh.along(axis), KINDS)
        if len(mesh.along(axis)._nodes) == 1:
            check_native(mesh.along(axis))
    # Groups side by side may have other numbers of elements, on both sides of what goes through shared memory.
    model_ranks = mesh.along("model")
    for count in (10, 100_000):
        counts = [count // (1 + mesh.coordinates["batch"]), 3]
        received = np.empty(sum(counts))
        model_ranks.all_gather(np.full(counts[model_ranks.rank], model_ranks.rank, float), received, counts)
        np.testing.assert_array_equal(received, np.repeat([0.0, 1.0], counts))
for part, counts in ((np.zeros(3), [2] * size), (np.zeros(2, np.float32), [2] * size)):
    try:
        comm.all_gather(part, np.zeros(2 * size), counts)
        raise AssertionError("an array that is too short")
    except ConfigError as error:
        text = str(error)
    assert text.startswith("a collective of float")

two_d = np.full((3, 5), float(rank))
comm.allreduce_sum(two_d)
assert (two_d == size * (size - 1) / 2).all(), "a buffer with two dimensions is summed in place"

# Several messages where a buffer is longer than a message may be
mpi._MAX_COUNT = 10
long = np.arange(37, dtype=np.float32)
comm.allreduce_sum(long)
np.testing.assert_array_equal(long, np.arange(37) * size)
long = np.arange(37, dtype=np.float16)
comm.allreduce_sum(long)
np.testing.assert_array_equal(long, np.arange(37) * size)
for dtype in (np.int64, *NARROW):
    sent = (np.arange(37) if rank == 0 else np.zeros(37)).astype(dtype)
    comm.broadcast(sent)
    np.testing.assert_array_equal(sent, np.arange(37).astype(dtype))

check_parts(comm, [np.float16, np.int64], 40)

messages = comm.allgather_bytes(bytes([65 + rank]) * rank)
assert messages == [bytes([65 + r]) * r for r in range(size)], messages
assert comm.allgather({"rank": rank}) == [{"rank": r} for r in range(size)]
assert comm.broadcast_fact(f"from {rank}") == "from 0"

array, fill = comm.shared_array((1000, 7), np.uint8)
assert fill == (comm.local_rank == 0)
if fill:
    array[...] = 42
comm.node_barrier()
assert (array == 42).all()
comm.node_barrier()
if comm.local_rank == comm.local_size - 1:
    array[0, 0] = 7
comm.node_barrier()
assert array[0, 0] == 7, "all ranks of a node see one memory"

# Where /dev/shm is too small every rank fills memory of its own
comm._fits_in_shared_memory = lambda nbytes: False
array, fill = comm.shared_array((10,), np.uint8)
assert fill
comm._shared, comm._has_tried, mpi._MAX_COUNT = None, False, 1 << 28
buffer = np.full(300_001, rank, np.float32)
comm.allreduce_sum(buffer)
assert (buffer == size * (size - 1) / 2).all()
assert comm._shared is None
check_parts(comm, KINDS)
mpi._MAX_COUNT = 30_000
check_parts(comm, [np.bool_, np.float32])
mpi._MAX_COUNT = 1 << 28
terms = np.random.default_rng(0).normal(size=(size, 300_001)).astype(ml_dtypes.bfloat16)
buffer = terms[rank].copy()
comm.allreduce_sum(buffer)
assert (buffer == tree_sum(terms).astype(ml_dtypes.bfloat16)).all()
comm.barrier()

# Mail: every rank sends to every rank, itself as well, small and large, with collectives in between.
for number in range(5):
    for peer in range(size):
        comm.send(peer, {"from": rank, "number": number}, bytes([number]) * (300_000 if number == 3 else 1))
    comm.barrier()
letters = []
while len(letters) < 5 * size:
    letters += comm.received()
for source in range(size):
    mine = [letter for letter in letters if letter.source == source]
    assert [letter.fact for letter in mine] == [{"from": source, "number": n} for n in range(5)], mine
    assert [len(letter.content) for letter in mine] == [1, 1, 1, 300_000, 1]
comm.barrier()
assert comm.received() == []
with comms.independent():
    assert comms.current().size == 1
assert comms.current() is comm
comm.barrier()
if rank == 0:
    print(f"all {size} ranks agree")
