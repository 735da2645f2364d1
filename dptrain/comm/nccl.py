"""Ranks whose GPUs are connected by NVIDIA's NCCL through nccl4py (`--comm nccl`). The only module that imports it.

**Run only against a stand-in for `nccl.core` (tests/standins), never on hardware.** Names and arguments were compared
with nccl4py 0.6.

NCCL works in the current context, created by PyCUDA. It promises all ranks the same bits of a sum, and the same at
every run of the same version on the same GPUs and links; the order of its additions depends on all of these.

Source: NCCL User Guide, chapters "Collective Operations", "Group Calls", "Using NCCL with CUDA Graphs" and "Fault
Tolerance".
"""

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.comm.device import AddingCommunicator, DeviceBuffer, DeviceStream
from dptrain.errors import DeviceError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.types import type_of
from dptrain.runtime.watch import watchdog
from dptrain.runtime.watch.records import Collective

# Results that are no errors: ncclSuccess and ncclInProgress.
_FINE = (0, 7)
# Seconds that an abort may take before the job ends without it.
_PATIENCE = 2.0


def why_not() -> str:
    """Return why NCCL cannot be used in this process, or an empty string if no reason is known."""
    try:
        _library().get_version()
    except ImportError as error:
        return f"nccl4py is not installed ({error}); {pip_install('nccl')}"
    except Exception as error:  # nccl4py has an error class for each reason
        return f"the library does not load ({error})"
    return ""


@functools.cache
def _library() -> Any:
    # Only buckets are registered, by `RegisteredMemory`, not whatever memory a graph's collectives use.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    import nccl.core

    return nccl.core


class NcclCommunicator(AddingCommunicator):
    """Ranks that NCCL connects; owns nccl4py's communicator."""

    is_aborted = False  # collectives may have been cut short, and their results are garbage

    def __init__(self, nccl: Any, rank: int, size: int) -> None:
        self._nccl, self.rank, self.size = nccl, rank, size
        self._core = _library()
        self._ends = threading.Lock()
        watchdog.attend(self)

    @classmethod
    def joined(cls, comm: Communicator) -> "NcclCommunicator":
        """Return these ranks, each with the GPU whose context is current. Collective."""
        core = _library()
        unique_id = comm.broadcast_fact(core.get_unique_id().as_bytes.hex() if comm.rank == 0 else None)
        with _translated_errors("NCCL cannot be initialized"), watchdog.record().collective(Collective.DEVICES):
            nccl = core.Communicator.init(comm.size, comm.rank, core.UniqueId.from_bytes(bytes.fromhex(unique_id)))
        return cls(nccl, comm.rank, comm.size)

    def split(self, ranks: Sequence[int]) -> "NcclCommunicator":
        """Return the communicator of this rank's group (rising), `ncclCommSplit`. Collective over all ranks."""
        with _translated_errors("NCCL cannot split its communicator"), watchdog.record().collective(Collective.DEVICES):
            nccl = self._nccl.split(ranks[0], self.rank)
        return NcclCommunicator(nccl, list(ranks).index(self.rank), len(ranks))

    def registers(self) -> bool:
        """Return whether the library allocates and registers memory, `RegisteredMemory`, by trying it."""
        try:
            RegisteredMemory(1, [self]).free()
        except Exception:  # an older library or driver: nccl4py has an error class for each reason
            return False
        return True

    def register(self, memory: "RegisteredMemory") -> Any:
        """Return the registration of memory for this rank's collectives, `ncclCommRegister`. Not a collective."""
        return self._nccl.register_buffer(memory)

    def adds(self, dtype: np.dtype[Any], over: str) -> bool:
        """Whether NCCL reduces the type."""
        return over in type_of(dtype).nccl

    def all_reduce(self, buffer: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """`ncclAllReduce`, in place."""
        with _translated_errors("an all-reduce failed"):
            self._nccl.allreduce(buffer, buffer, self._op(over), stream=stream.handle)

    def reduce_scatter(self, parts: DeviceBuffer, out: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """`ncclReduceScatter`."""
        with _translated_errors("a reduce-scatter failed"):
            self._nccl.reduce_scatter(parts, out, self._op(over), stream=stream.handle)

    def all_gather(self, part: DeviceBuffer, out: DeviceBuffer, counts: Sequence[int], stream: DeviceStream) -> None:
        """`ncclAllGather` of parts of equal sizes; of others a broadcast from each rank, in one group."""
        with _translated_errors("an all-gather failed"):
            if len(set(counts)) == 1:
                if counts[0]:
                    self._nccl.allgather(part, out, stream=stream.handle)
                return
            with self._core.group():
                for rank, place in enumerate(_places(counts)):
                    if counts[rank]:
                        self._nccl.broadcast(part, out[place], rank, stream=stream.handle)

    def all_to_all(
        self, sent: Sequence[Sequence[DeviceBuffer]], received: Sequence[Sequence[DeviceBuffer]], stream: DeviceStream
    ) -> None:
        """`ncclSend` to each rank and `ncclRecv` from each, in one group."""
        with _translated_errors("an all-to-all failed"), self._core.group():
            for rank, (outward, inward) in enumerate(zip(sent, received, strict=True)):
                for buffer in outward:
                    if buffer.size:
                        self._nccl.send(buffer, rank, stream=stream.handle)
                for buffer in inward:
                    if buffer.size:
                        self._nccl.recv(buffer, rank, stream=stream.handle)

    def send(self, buffer: DeviceBuffer, rank: int, stream: DeviceStream) -> None:
        """Send a buffer to a rank, `ncclSend`; waits for its `receive`."""
        with _translated_errors("a send failed"):
            self._nccl.send(buffer, rank, stream=stream.handle)

    def receive(self, buffer: DeviceBuffer, rank: int, stream: DeviceStream) -> None:
        """Fill a buffer from a rank's `send` of the same size and type, `ncclRecv`."""
        with _translated_errors("a receive failed"):
            self._nccl.recv(buffer, rank, stream=stream.handle)

    def _op(self, over: str) -> Any:
        return self._core.NcclRedOp.SUM if over == "sum" else self._core.NcclRedOp.MAX

    def trouble(self) -> str:
        """Return the asynchronous error (of a network, not of shared memory), or an empty string; from any thread."""
        if not self._ends.acquire(blocking=False):  # it is ending, which may take for ever
            return ""
        try:
            error = self._nccl.get_async_error() if self._nccl.is_valid else None
            return "" if error is None or int(error) in _FINE else f"NCCL: {error.name} ({self._nccl.get_last_error()})"
        finally:
            self._ends.release()

    def abort(self) -> None:
        """Abandon collectives that others do not join, `ncclCommAbort`, within `_PATIENCE` seconds; from any thread."""
        self.is_aborted = True
        ending = threading.Thread(target=self._abort, name="dptrain nccl abort", daemon=True)
        ending.start()
        ending.join(_PATIENCE)

    def _abort(self) -> None:
        with contextlib.suppress(Exception), self._ends:
            self._nccl.abort()

    def close(self) -> None:
        """`ncclCommDestroy`."""
        watchdog.leave_alone(self)
        with self._ends, contextlib.suppress(Exception), watchdog.record().collective(Collective.DEVICES):
            self._nccl.destroy()  # an error is useless while the process ends


class RegisteredMemory:
    """Device memory of `ncclMemAlloc`, registered once with each communicator that uses it; MemoryError if short.

    Collectives, in graphs too, then read and write it without a copy through NCCL's own buffers. The first call of one
    on a registered buffer may wait on the host for the other ranks, so that ranks record graphs together.

    Source: NCCL User Guide, chapter "User Buffer Registration".
    """

    def __init__(self, nbytes: int, communicators: Sequence[NcclCommunicator]) -> None:
        self._core, self._registrations, self._nbytes = _library(), list[Any](), nbytes
        try:
            self._buffer: Any = self._core.mem_alloc(nbytes)
        except self._core.NCCLError as error:
            raise MemoryError(str(error)) from error
        self._registrations += [communicator.register(self) for communicator in communicators]

    def __int__(self) -> int:
        return int(self._buffer.handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (int(self), False), "version": 3}

    def free(self) -> None:
        """Deregister and free it, once no collective uses it."""
        while self._registrations:
            with contextlib.suppress(Exception):  # its communicator may have gone
                self._registrations.pop().close()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._core.mem_free(buffer)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a failed context, or of a constructor
            self.free()


@contextlib.contextmanager
def _translated_errors(what: str) -> Any:
    """Turn nccl4py's errors, which have a class for each reason, into a DeviceError."""
    try:
        yield
    except Exception as error:
        raise DeviceError(
            f"--comm nccl: {what} ({error}); NCCL_DEBUG=WARN shows details, --comm host works without NCCL"
        ) from error


def _places(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]
