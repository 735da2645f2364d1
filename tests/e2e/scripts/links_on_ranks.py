"""Collectives of ranks' GPUs, queued and replayed from a graph, beside what the host makes of the same numbers."""

import ml_dtypes
import numpy as np

from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.transfers.links import LinkedSum, RankReduction
from dptrain.comm.node_sum import tree_sum

ranks = comm.current()
backend = CudaBackend()
backend.transport = "nccl"
links = backend.links(ranks)
link = links.along("batch")
rank, size = ranks.rank, ranks.size


def of(seed, count, dtype):
    values = np.random.default_rng(seed).normal(size=count)
    return (values * 100 if np.dtype(dtype).kind in "iu" else values).astype(dtype)


def check(queue, out, expected, exact=True):
    """Queue it alone, and from a graph whose memory is filled anew."""
    with links.queueing():
        queue()
    backend.wait()
    results = [backend.download(out)]
    for result in results:
        if exact:
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    contents = ranks.allgather_bytes(results[0].tobytes())
    return contents


for dtype in ("float32", "float64", "int32", "uint64", ml_dtypes.bfloat16, "float16", "bool"):
    for count in (1, 7, 1000):
        for over in ("sum", "max"):
            if dtype == "bool" and over == "sum":
                continue
            arrays = [of(sender, count, dtype) for sender in range(size)]
            if over == "max" and np.dtype(dtype).kind == "f":
                arrays[0][count // 2] = np.nan
            if over == "max":
                expected = np.max(arrays, axis=0)
            else:
                expected = tree_sum(arrays).astype(dtype)
            buffer = backend.empty(arrays[rank].shape, dtype)
            backend.write(buffer, arrays[rank])
            message = LinkedSum(backend, buffer, over, link)
            message.scratch = backend.empty((message.scratch_bytes,), np.uint8)

            def queue(message=message):
                message.begin()
                message.finish()

            native = over == "sum" and dtype in ("float32", "float64")
            contents = check(queue, buffer, expected, exact=not native)
            assert len(set(contents)) == 1
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
arrays = [of(sender, int(ends[-1]), "float32") for sender in range(size)]
mine = backend.zeros((size * counts[rank],))
link.all_to_all(backend.upload(arrays[rank]), counts, mine, [counts[rank]] * size, stream)
expected = [array[ends[rank] : ends[rank + 1]] for array in arrays]
np.testing.assert_array_equal(backend.download(mine), np.concatenate(expected))
buffer = backend.zeros((counts[rank],))
RankReduction(backend, np.dtype(np.float32), "sum")(backend.stream, mine, buffer, size)
np.testing.assert_array_equal(backend.download(buffer), tree_sum(expected))

# From one rank to the next
if rank:
    link.receive(out, rank - 1, stream)
    np.testing.assert_array_equal(backend.download(out), whole + rank - 1)
if rank < size - 1:
    link.send(backend.upload(whole + rank), rank + 1, stream)
    backend.wait()
print("joined\n", end="", flush=True)
