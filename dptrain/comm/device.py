"""What joins the GPUs of ranks: collectives of memory on devices, which are queued and wait for nobody."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class DeviceBuffer(Protocol):
    """A dense array on a device; cut along its first dimension.

    Attributes:
        dtype: of its elements.
        size: number of elements.
    """

    dtype: np.dtype[Any]
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where it lies."""

    def __getitem__(self, rows: slice) -> "DeviceBuffer":
        """Return a part of it."""


class DeviceCommunicator(ABC):
    """The GPUs of a fixed group of ranks.

    All ranks queue the same collectives in the same order. A collective happens when the device reaches it, on every
    launch of a graph that it was recorded into. Buffers are flat.

    Attributes:
        rank: this process, 0 to size - 1.
        size: the number of ranks.
        is_aborted: collectives may have been cut short, and what they have made is garbage.
    """

    rank: int
    size: int
    is_aborted: bool = False

    @abstractmethod
    def joins(self, dtype: np.dtype[Any], over: str) -> bool:
        """Whether `all_reduce` and `reduce_scatter` are there for numbers of a type: "sum", or "max" for the greatest.

        They give all ranks the same bits, but not those of a `TreeSum`.
        """

    @abstractmethod
    def all_reduce(self, buffer: DeviceBuffer, over: str, stream: int) -> None:
        """Replace a buffer by its sum over the ranks, or by the greatest of each element.

        Args:
            buffer: of the same size and type on all ranks; not empty.
            over: "sum" or "max".
            stream: handle of the stream, not the default one.
        """

    @abstractmethod
    def reduce_scatter(self, parts: DeviceBuffer, out: DeviceBuffer, over: str, stream: int) -> None:
        """Put the sum over the ranks of their parts for this rank into `out`, or the greatest of each element.

        Args:
            parts: one part for each rank behind the other, of equal sizes; not empty.
            out: of the same type.
            over: "sum" or "max".
            stream: as above.
        """

    @abstractmethod
    def all_gather(self, part: DeviceBuffer, out: DeviceBuffer, counts: Sequence[int], stream: int) -> None:
        """Put every rank's part into `out`, in rank order.

        Args:
            part: this rank's; it may lie where it goes to in `out`.
            out: of the same type.
            counts: elements of each rank's part.
            stream: as above.
        """

    @abstractmethod
    def all_to_all(
        self,
        parts: DeviceBuffer,
        counts: Sequence[int],
        out: DeviceBuffer,
        out_counts: Sequence[int],
        stream: int,
    ) -> None:
        """Give each rank its part of `parts`, and put what the ranks have for this one into `out`, in rank order.

        Args:
            parts: one part behind the other.
            counts: elements of the part for each rank.
            out: of the same type.
            out_counts: elements of what each rank has for this one.
            stream: as above.
        """

    @abstractmethod
    def send(self, buffer: DeviceBuffer, rank: int, stream: int) -> None:
        """Give a buffer to a rank, which takes it by `receive`: not a collective; the two wait for each other."""

    @abstractmethod
    def receive(self, buffer: DeviceBuffer, rank: int, stream: int) -> None:
        """Fill a buffer with what a rank gives by `send`, of the same size and type."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> "DeviceCommunicator":
        """Return the communicator of some of these ranks. Collective over all of them, at once.

        Args:
            ranks: of the group that this rank is in, rising; every rank is in one.
        """

    @abstractmethod
    def trouble(self) -> str:
        """Return what has failed since, or an empty string; from any thread."""

    @abstractmethod
    def abort(self) -> None:
        """Let go of collectives that others do not come to; from any thread. Nothing can be queued afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds, once all queued work has ended. Collective."""
