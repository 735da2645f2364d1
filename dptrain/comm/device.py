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


class DeviceStream(Protocol):
    """A stream as PyCUDA has it, not the default one.

    Attributes:
        handle: the driver's.
    """

    handle: int

    def wait_for_event(self, event: Any) -> None:
        """Let what is queued from now on wait for an event."""


class DeviceCommunicator(ABC):
    """The GPUs of a fixed group of ranks.

    All ranks queue the same collectives in the same order. They happen when the devices reach them, on every launch of
    a graph that they were recorded into. Buffers are flat.

    Attributes:
        rank: this process, 0 to size - 1.
        size: the number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, part: DeviceBuffer, out: DeviceBuffer, counts: Sequence[int], stream: DeviceStream) -> None:
        """Put every rank's part into `out`, in rank order.

        Args:
            part: this rank's; it may lie where it goes to in `out`.
            out: of the same type.
            counts: elements of each rank's part.
            stream: on which it is queued.
        """

    @abstractmethod
    def all_to_all(
        self,
        parts: DeviceBuffer,
        counts: Sequence[int],
        out: DeviceBuffer,
        out_counts: Sequence[int],
        stream: DeviceStream,
    ) -> None:
        """Give each rank its part of `parts`, and put what the ranks have for this one into `out`, in rank order.

        Args:
            parts: one part behind the other.
            counts: elements of the part for each rank.
            out: of the same type.
            out_counts: elements of what each rank has for this one.
            stream: on which it is queued.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds, once all queued work has ended. Collective."""


class AddingCommunicator(DeviceCommunicator):
    """GPUs that add up by themselves what they send each other.

    They give all ranks the same bits, but not those of a `TreeSum`.
    """

    @abstractmethod
    def adds(self, dtype: np.dtype[Any], over: str) -> bool:
        """Whether they add up numbers of a type, "sum", or find the greatest, "max"."""

    @abstractmethod
    def all_reduce(self, buffer: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """Replace a buffer by its sum over the ranks, or by the greatest of each element.

        Args:
            buffer: of the same size and type on all ranks; not empty.
            over: "sum" or "max".
            stream: on which it is queued.
        """

    @abstractmethod
    def reduce_scatter(self, parts: DeviceBuffer, out: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """Put the sum over the ranks of their parts for this rank into `out`, or the greatest of each element.

        Args:
            parts: one part for each rank behind the other, of equal sizes; not empty.
            out: of the same type.
            over: "sum" or "max".
            stream: on which it is queued.
        """
