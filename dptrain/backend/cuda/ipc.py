"""GPUs of one node that read each other's memory, through CUDA's handles for other processes (`--comm ipc`).

Each rank has a window that the others map. What it gives them it copies there. Once all ranks have said on the host
that they have queued that, each lets its stream wait for the others' events, and copies what is for it. So ranks meet
on the host, once for each piece that fits into a window, but nobody waits there for a device. A window has two halves:
one is filled again when the others have read it, which they have queued before they came for the other half.

Nothing is added up here: `links.Join` does that, in the tree of the host's sums, to the same bits.

**Run on the emulated driver only, on no hardware.** Source: CUDA C++ Programming Guide, "Interprocess Communication".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dptrain.backend.cuda.device import cuda
from dptrain.comm.base import Communicator
from dptrain.comm.device import DeviceBuffer, DeviceCommunicator, DeviceStream
from dptrain.comm.node import rounds
from dptrain.errors import DeviceError

T = TypeVar("T")

# Bytes of a half of a rank's window, and of a handle.
HALF, _HANDLE = 16 << 20, 64


class _Copy(NamedTuple):
    """Bytes that are copied to a window, or from there.

    Attributes:
        rank: whose window.
        offset: where they begin in the window's half.
        pointer: where they lie else.
        nbytes: how many.
    """

    rank: int
    offset: int
    pointer: int
    nbytes: int


class IpcCommunicator(DeviceCommunicator):
    """Ranks of one node, whose GPUs map each other's memory. Collective.

    Args:
        comm: the ranks.

    Raises:
        AgreedError: a GPU cannot map another's memory, on every rank.
    """

    meets_on_host = True

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size, self._half = comm, comm.rank, comm.size, 0
        own, events, told = comm.agree("communicator", lambda: mapping(_exported))
        self._windows: list[Any] = []
        self._filled: list[list[Any]] = []  # by rank and half
        self._read: list[list[Any]] = []
        found = comm.allgather_bytes(told)

        def map_all() -> None:
            for rank, handles in enumerate(found):
                window, *others = (bytearray(handles[at : at + _HANDLE]) for at in range(0, len(handles), _HANDLE))
                mine = rank == comm.rank
                self._windows.append(own if mine else cuda.IPCMemoryHandle(window))
                known = events if mine else [cuda.Event.from_ipc_handle(one) for one in others]
                self._filled.append(known[:2])
                self._read.append(known[2:])

        comm.agree("communicator", lambda: mapping(map_all))

    def all_gather(self, part: DeviceBuffer, out: DeviceBuffer, counts: Sequence[int], stream: DeviceStream) -> None:
        """Each rank's part lies in its window."""
        itemsize, starts = part.dtype.itemsize, np.cumsum([0, *counts]).tolist()
        sizes = [n * itemsize for n in counts]
        for begin, ends in rounds(sizes, HALF):
            lengths = np.diff(ends).tolist()
            given = [_Copy(self.rank, 0, _address(part) + begin, lengths[self.rank])]
            places = enumerate(zip(starts, lengths, strict=False))
            taken = [_Copy(rank, 0, _address(out) + at * itemsize + begin, length) for rank, (at, length) in places]
            self._meet(given, taken, stream)

    def all_to_all(
        self,
        parts: DeviceBuffer,
        counts: Sequence[int],
        out: DeviceBuffer,
        out_counts: Sequence[int],
        stream: DeviceStream,
    ) -> None:
        """Windows have a place for each rank."""
        itemsize, place = parts.dtype.itemsize, HALF // self.size
        longest = max(int.from_bytes(one, "little") for one in self._comm.allgather_bytes(_packed(max(counts))))
        both = [
            ([n * itemsize for n in each], (np.cumsum([0, *each]) * itemsize).tolist(), _address(buffer))
            for each, buffer in ((counts, parts), (out_counts, out))
        ]
        given, taken = (rounds(sizes, place, longest * itemsize) for sizes, _, _ in both)
        for (begin, mine), (_, theirs) in zip(given, taken, strict=True):
            gives, takes = (
                [(at + start + begin, length) for start, length in zip(starts, np.diff(ends).tolist(), strict=False)]
                for (_, starts, at), ends in zip(both, (mine, theirs), strict=True)
            )
            self._meet(
                [_Copy(self.rank, rank * place, *one) for rank, one in enumerate(gives)],
                [_Copy(rank, self.rank * place, *one) for rank, one in enumerate(takes)],
                stream,
            )

    def _meet(self, given: Sequence[_Copy], taken: Sequence[_Copy], stream: DeviceStream) -> None:
        """Fill a half of this rank's window, and read from those of all ranks."""
        half, self._half = self._half, 1 - self._half
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            stream.wait_for_event(self._read[rank][half])
        for one in given:
            if one.nbytes:
                cuda.memcpy_dtod_async(self._at(one, half), one.pointer, one.nbytes, stream)
        self._filled[self.rank][half].record(stream)
        self._comm.node_barrier()  # an event that is not recorded yet is not waited for
        for rank in others:
            stream.wait_for_event(self._filled[rank][half])
        for one in taken:
            if one.nbytes:
                cuda.memcpy_dtod_async(one.pointer, self._at(one, half), one.nbytes, stream)
        self._read[self.rank][half].record(stream)

    def _at(self, one: _Copy, half: int) -> int:
        return int(self._windows[one.rank]) + half * HALF + one.offset

    def close(self) -> None:
        """Let go of the others' windows, and then of the own."""
        self._filled.clear()
        self._read.clear()
        own = self._windows[self.rank]
        for one in self._windows:
            if one is not own:
                one.close()
        self._comm.node_barrier()
        own.free()


def _exported() -> tuple[Any, list[Any], bytes]:
    """Return a window, its events, and their handles, one behind the other."""
    flags = cuda.event_flags.DISABLE_TIMING | cuda.event_flags.INTERPROCESS
    window, events = cuda.mem_alloc(2 * HALF), [cuda.Event(flags) for _ in range(4)]
    handles = [cuda.mem_get_ipc_handle(window), *(one.ipc_handle() for one in events)]
    return window, events, b"".join(map(bytes, handles))


def mapping(action: Callable[[], T]) -> T:
    """Return what `action` returns, a refusal of the driver as an error that says what to do."""
    try:
        return action()
    except cuda.Error as error:
        raise DeviceError(f"--comm ipc: this GPU cannot map the others' memory ({error}); use --comm host") from error


def _address(buffer: DeviceBuffer) -> int:
    address: int = buffer.__cuda_array_interface__["data"][0]
    return address


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "little")
