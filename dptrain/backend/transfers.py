"""Transfers between host and device beside ops: of samples, and of gradients to MPI; on a CPU nothing is copied."""

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

# An array on the device; NumPy's own on a CPU.
Buffer = Any
HostArray = npt.NDArray[Any]


# The name of buffers of samples, which can be streamed if memory is short.
SAMPLES = "samples"


class Exchange(ABC):
    """Takes one buffer repeatedly to memory that MPI reads and writes, and back."""

    @abstractmethod
    def begin(self) -> None:
        """Start bringing the buffer out as ops queued so far leave it; later ops run meanwhile."""

    @abstractmethod
    def values(self) -> Any:
        """Wait until the buffer is out; return an array that MPI may read and overwrite."""

    @abstractmethod
    def end(self) -> None:
        """Make what MPI has written the buffer's content for ops queued from now on."""


class Staging(ABC):
    """Takes rows repeatedly from host memory to a buffer of the same shape.

    Attributes:
        host: memory to fill; of another dtype than requested if the device lacks that type.
        device: where the rows arrive.
    """

    host: HostArray
    device: Buffer

    @abstractmethod
    def reuse(self) -> None:
        """Wait until `host` may be filled again: the last `send` has read it."""

    @abstractmethod
    def release(self) -> None:
        """Note that no op queued from now on reads the present content of `device`."""

    @abstractmethod
    def send(self, rows: int) -> None:
        """Start to copy the first rows of `host`; ops queued before or after run meanwhile."""

    @abstractmethod
    def arrive(self) -> None:
        """Let ops queued from now on see what was sent."""


class HostExchange(Exchange):
    """A buffer that MPI reads in place."""

    def __init__(self, buffer: HostArray) -> None:
        self._buffer = buffer

    def begin(self) -> None:
        """Nothing to do: ops are done."""

    def values(self) -> HostArray:
        """Return the buffer."""
        return self._buffer

    def end(self) -> None:
        """Nothing to do: it is in place."""


class HostStaging(Staging):
    """Rows that ops read where they are filled in."""

    def __init__(self, memory: HostArray) -> None:
        self.host = self.device = memory

    def reuse(self) -> None:
        """Nothing to wait for: ops are synchronous."""

    def release(self) -> None:
        """Nothing to do: ops are synchronous."""

    def send(self, rows: int) -> None:
        """Nothing to do: rows are in place."""

    def arrive(self) -> None:
        """Nothing to do: rows are in place."""
