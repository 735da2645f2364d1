"""The sum of gradients over the ranks, bucket by bucket, beside the rest of the backward pass.

Backward completes a replica's flat buffer from its end (the last layer, and the tail with weights and loss) to its
beginning. As soon as a bucket is complete its way to the host is queued; a GPU goes on with the backward pass while
the host, which by then has queued all of it, waits for one bucket after the other and hands it to MPI. So copies, MPI
and kernels overlap without a thread, and MPI is never called from two.
"""

from dataclasses import dataclass

from dptrain.backend.base import Backend, Buffer
from dptrain.backend.transfers import Exchange
from dptrain.comm.base import Communicator
from dptrain.params import ALIGNMENT
from dptrain.runtime.defaults import DEFAULT_BUCKET_MB as DEFAULT_BUCKET_MB


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat buffer that travels as one message.

    Attributes:
        start: its first element.
        exchange: its way to MPI and back.
    """

    start: int
    exchange: Exchange


class AllReduce:
    """Sums one flat buffer over the ranks in place, step after step.

    Args:
        backend: the device.
        comm: the ranks, all with the same buckets.
        buffer: (elements,) on the device.
        bucket_mb: size of a bucket in units of 10^6 bytes; the last to be sent may be smaller.
        direct: MPI is given the device's memory.
    """

    def __init__(
        self, backend: Backend, comm: Communicator, buffer: Buffer, bucket_mb: float, *, direct: bool = False
    ) -> None:
        self._comm = comm
        bounds = bucket_bounds(len(buffer), int(bucket_mb * 1e6) // backend.dtype.itemsize)
        self._buckets = [Bucket(start, backend.exchange(buffer[start:stop], direct=direct)) for start, stop in bounds]
        self._begun = 0

    def on_gradients_ready(self, element: int) -> None:
        """Ops queued so far have completed the elements from `element` to the end."""
        while self._begun < len(self._buckets) and self._buckets[self._begun].start >= element:
            self._buckets[self._begun].exchange.begin()
            self._begun += 1

    def finish(self) -> None:
        """Sum; ops that are queued from now on see the sum. Collective; the whole buffer must have been completed."""
        assert self._begun == len(self._buckets), "a part of the gradient was never completed"
        for bucket in self._buckets:
            self._comm.allreduce_sum(bucket.exchange.values())
            bucket.exchange.end()
        self._begun = 0


class SmallSums:
    """Sums small buffers over the ranks in place, in the middle of a pass.

    The host waits for the device at each; on a GPU its way there and back is kept for every buffer.

    Args:
        backend: the device.
        comm: the ranks, which all sum the same buffers in the same order.
        direct: MPI is given the device's memory.
    """

    def __init__(self, backend: Backend, comm: Communicator, *, direct: bool = False) -> None:
        self._backend, self._comm, self._direct = backend, comm, direct
        # The buffer is kept beside its exchange, so that no other can have its address.
        self._exchanges: dict[int, tuple[Buffer, Exchange]] = {}

    def __call__(self, buffer: Buffer) -> None:
        """Replace a buffer by its sum; ops that are queued from now on see it. Collective."""
        known = self._exchanges.get(id(buffer))
        if known is None:
            known = self._exchanges[id(buffer)] = buffer, self._backend.exchange(buffer, direct=self._direct)
        _, exchange = known
        exchange.begin()
        self._comm.allreduce_sum(exchange.values())
        exchange.end()


def bucket_bounds(elements: int, most: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the buckets of a buffer, from its end to its beginning.

    Args:
        elements: of the buffer.
        most: elements of a bucket; rounded down to a multiple of `ALIGNMENT`, and at least that.
    """
    step = max(most // ALIGNMENT, 1) * ALIGNMENT
    return [(max(stop - step, 0), stop) for stop in range(elements, 0, -step)]
