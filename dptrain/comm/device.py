"""Abstract collectives of device memory, queued on a stream without waiting."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class DeviceBuffer(Protocol):
    """A dense array on a device, sliced along its first axis."""

    dtype: np.dtype[Any]
    size: int  # number of elements

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and type."""

    def __getitem__(self, rows: slice) -> "DeviceBuffer":
        """Return a slice."""


class DeviceStream(Protocol):
    """A stream, not the default one."""

    @property
    def handle(self) -> int:
        """The driver's."""


class DeviceCommunicator(ABC):
    """The GPUs of a fixed group of ranks.

    All ranks queue the same collectives in the same order. They run when the devices reach them, at every launch of a
    graph that recorded them. Buffers are flat.
    """

    rank: int  # this process, 0 to size - 1
    size: int  # number of ranks

    @abstractmethod
    def all_gather(self, part: DeviceBuffer, out: DeviceBuffer, counts: Sequence[int], stream: DeviceStream) -> None:
        """Gather every rank's part into `out`, in rank order; a part may already lie in its place in `out`."""

    @abstractmethod
    def all_to_all(
        self, sent: Sequence[Sequence[DeviceBuffer]], received: Sequence[Sequence[DeviceBuffer]], stream: DeviceStream
    ) -> None:
        """Send each rank its buffers of `sent`, and fill those of `received` from each rank, both in rank order."""

    @abstractmethod
    def close(self) -> None:
        """Free resources once all queued work has ended. Collective."""


class AddingCommunicator(DeviceCommunicator):
    """GPUs that reduce what they exchange; the same bits on all ranks, but not those of a `TreeSum`."""

    @abstractmethod
    def adds(self, dtype: np.dtype[Any], over: str) -> bool:
        """Whether it reduces a type over "sum" or "max"."""

    @abstractmethod
    def all_reduce(self, buffer: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """Replace a buffer, of one size on all ranks and not empty, by its "sum" or "max" over the ranks."""

    @abstractmethod
    def reduce_scatter(self, parts: DeviceBuffer, out: DeviceBuffer, over: str, stream: DeviceStream) -> None:
        """Reduce ("sum" or "max") the ranks' parts for this rank, of equal sizes and not empty, into `out`."""
