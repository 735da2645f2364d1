"""The ways between host and device that run beside the ops: samples on their way in, gradients out to MPI and back.

On a CPU the device's memory is the host's, and both ways are no way at all.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

# An array on the device; NumPy's own on a CPU.
Buffer = Any
HostArray = npt.NDArray[Any]


# The name of buffers that hold samples, which can be streamed where memory is short.
SAMPLES = "samples"


class Exchange(ABC):
    """Takes one buffer, over and over, to where MPI reads and writes it, and back."""

    @abstractmethod
    def begin(self) -> None:
        """Ops queued so far complete the buffer: bring it out, while ops that are queued later run."""

    @abstractmethod
    def values(self) -> Any:
        """Wait until the buffer is out; return what MPI may read and overwrite, an array of any kind that it takes."""

    @abstractmethod
    def end(self) -> None:
        """What MPI has written is the buffer's content for ops that are queued from now on."""


class Staging(ABC):
    """Takes rows from host memory to a buffer of the same shape, over and over.

    Attributes:
        host: memory to fill; of another dtype than was asked for where the device has no such type.
        device: where the rows arrive.
    """

    host: HostArray
    device: Buffer

    @abstractmethod
    def reuse(self) -> None:
        """Wait until `host` may be filled: the last `send` has read it."""

    @abstractmethod
    def release(self) -> None:
        """Ops queued so far are the last that read what `device` holds now."""

    @abstractmethod
    def send(self, rows: int) -> None:
        """Begin to copy the first rows of `host`, while ops that are already queued, or queued later, run."""

    @abstractmethod
    def arrive(self) -> None:
        """Ops queued from now on see what was sent."""


class HostExchange(Exchange):
    """A buffer that MPI reads where it lies.

    Args:
        buffer: the buffer.
    """

    def __init__(self, buffer: HostArray) -> None:
        self._buffer = buffer

    def begin(self) -> None:
        """The ops are done."""

    def values(self) -> HostArray:
        """Return the buffer."""
        return self._buffer

    def end(self) -> None:
        """It is there already."""


class HostStaging(Staging):
    """Rows that ops read where they are filled in.

    Args:
        memory: the rows.
    """

    def __init__(self, memory: HostArray) -> None:
        self.host = self.device = memory

    def reuse(self) -> None:
        """Ops are done when they return."""

    def release(self) -> None:
        """Ops are done when they return."""

    def send(self, rows: int) -> None:
        """They are there already."""

    def arrive(self) -> None:
        """They are there already."""
