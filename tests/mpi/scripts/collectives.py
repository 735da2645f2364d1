"""Checks every collective of the MPI communicator on all ranks."""

import ml_dtypes
import numpy as np

from dptrain import comm as comms
from dptrain.comm import mpi

comm = comms.current()
rank, size = comm.rank, comm.size
assert (comm.local_rank, comm.local_size) == (rank, size)
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
    assert (comm._node_sum is not None) == (size > 1)
    if buffer.nbytes >= mpi.node_sum.LEAST:
        assert len(set(comm.allgather_bytes(buffer.tobytes()))) == 1

# Half precision is added up in float32 and rounded once, on all ranks to the same bits; what is too large is infinite.
for dtype in (np.float16, ml_dtypes.bfloat16):
    for count in (0, 1, 7, 300_001):
        terms = (np.random.default_rng(count).normal(size=(size, count)) * 100).astype(dtype)
        terms[:, -1:] = np.finfo(np.float16).max
        buffer = terms[rank].copy()
        comm.allreduce_sum(buffer)
        expected = mpi.node_sum.tree_sum(terms)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(buffer.view(np.uint16), expected.astype(dtype).view(np.uint16))
        assert np.isinf(buffer).any() == (dtype == np.float16 and count > 0 and size > 1)

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
sent = np.arange(37) if rank == 0 else np.zeros(37, int)
comm.broadcast(sent)
np.testing.assert_array_equal(sent, np.arange(37))

messages = comm.allgather_bytes(bytes([65 + rank]) * rank)
assert messages == [bytes([65 + r]) * r for r in range(size)], messages
assert comm.allgather({"rank": rank}) == [{"rank": r} for r in range(size)]
assert comm.broadcast_fact(f"from {rank}") == "from 0"

array, fill = comm.shared_array((1000, 7), np.uint8)
assert fill == (rank == 0)
if fill:
    array[...] = 42
comm.node_barrier()
assert (array == 42).all()
comm.node_barrier()
if rank == size - 1:
    array[0, 0] = 7
comm.node_barrier()
assert array[0, 0] == 7, "all ranks see one memory"

# Where /dev/shm is too small every rank fills memory of its own
comm._fits_in_shared_memory = lambda nbytes: False
array, fill = comm.shared_array((10,), np.uint8)
assert fill
comm._node_sum, mpi._MAX_COUNT = None, 1 << 28
buffer = np.full(300_001, rank, np.float32)
comm.allreduce_sum(buffer)
assert (buffer == size * (size - 1) / 2).all()
assert comm._node_sum is None
terms = np.random.default_rng(0).normal(size=(size, 300_001)).astype(ml_dtypes.bfloat16)
buffer = terms[rank].copy()
comm.allreduce_sum(buffer)
assert (buffer == mpi.node_sum.tree_sum(terms).astype(ml_dtypes.bfloat16)).all()
comm.barrier()

# Mail: every rank sends to every rank, itself as well, small and large, with collectives in between.
for number in range(5):
    for other in range(size):
        comm.send(other, {"from": rank, "number": number}, bytes([number]) * (300_000 if number == 3 else 1))
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
