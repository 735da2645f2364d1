"""The interface of a device: memory, transfers and the execution of programs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dptrain.backend.transfers import Buffer as Buffer
from dptrain.backend.transfers import Exchange, Staging
from dptrain.backend.transfers import HostArray as HostArray
from dptrain.comm.base import Communicator, PointToPoint
from dptrain.comm.mesh import STAGE
from dptrain.program.pipeline.send_recv import Channel
from dptrain.program.program import Program
from dptrain.program.schedule.clock import Clock
from dptrain.program.tensor import Variable


class Executable(Protocol):
    """A program prepared for one number of rows and for the memory of its inputs.

    Attributes:
        outputs: results of the last step by name, on the host: this rank's rows of sharded ones.
        nbytes: device memory in use, without state and inputs.
        samples: the sample of each number in the input `program.ROWS`, for messages; None for these numbers.
    """

    outputs: Mapping[str, HostArray]
    nbytes: int
    samples: Sequence[int] | npt.NDArray[Any] | None

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute a step for each start of its rows in the input `program.ROWS`. Collective if placed."""

    def close(self) -> None:
        """Release the driver's resources."""


class Snapshot(Protocol):
    """Digests and a copy of variables on a device."""

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return (variables, 2): the digest of each variable's bytes, and 1 if it holds NaN or infinities, else 0."""

    def take(self) -> bool:
        """Copy the values, over those of the last copy; return whether the device had room for that."""

    def restore(self) -> None:
        """Set the variables to the values of the last copy."""


class Backend(ABC):
    """A device that executes programs.

    Attributes:
        name: "cpu" or "cuda".
        dtype: floating-point type that models compute in.
        description: the device in words, for the start-up table.
        numerics: what the bits of results depend on; must be equal on all ranks.
        gpu: identity of the GPU in use, which no two ranks should share; None on the CPU.
        transport: of messages between ranks: "host" (through host memory), "cuda-aware" (MPI gets device memory) or
            "nccl" (from GPU to GPU); see `dptrain.train.transports`.
        shares_samples: samples that another backend of this process holds on the same device are not copied again, for
            training several models on arrays that nobody changes.
        measures: `settle` has something to decide; the same on all ranks.
        joins_packs: execution may be delayed until the next request, so that work of other backends of this process on
            the same device is launched together with it; see `launch_waiting`.
    """

    name: str
    dtype: np.dtype[Any]
    description: str
    numerics: str
    gpu: str | None = None
    transport: str = "host"
    shares_samples: bool = False
    measures: bool = False
    joins_packs: bool = False

    # Programs

    @abstractmethod
    def adopt(self, variables: Iterable[Variable]) -> None:
        """Move variables to the device (those that live there stay); DeviceMemoryError if memory is short."""

    @abstractmethod
    def release(self, variables: Iterable[Variable]) -> None:
        """Free the memory of variables; values that were not moved before are lost."""

    @abstractmethod
    def executable(
        self,
        program: Program,
        arrays: Mapping[str, Buffer],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
        clock: Clock | None = None,
    ) -> Executable:
        """Prepare a program; its variables live on the device from then on.

        Args:
            program: placed, if there are several ranks.
            arrays: inputs of every step by name, on the device: this rank's rows of sharded ones. The input
                `program.ROWS` (numbers of stored rows) covers many steps.
            rows: of the global batch on this rank; None for all.
            first_row: global number of its first row.
            comm: the ranks; None for one.
            clock: measures the kernels of its steps.
        """

    def settle(self, programs: Iterable[tuple[Program, int]], comm: Communicator) -> None:  # noqa: B027 - most have none
        """Measure and decide what programs depend on, alike on all ranks; AgreedError if a rank cannot. Collective."""

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Return the decisions by measurement that bits depend on, as JSON; empty if there are none."""
        return {}

    def choose(self, chosen: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to choose
        """Decide as `chosen` says, the record of a training that continues here; ConfigError if impossible."""

    def prepare(  # noqa: B027 - most have nothing to do ahead
        self, program: Program, rows: int, first_row: int = 0, *, alone: bool = True
    ) -> None:
        """Start slow preparations of a program, such as compilation, in the background.

        `rows` of the global batch are on this rank, from `first_row` on. `alone`: there is one rank, or it does not
        communicate.
        """

    @abstractmethod
    def planned_bytes(self, program: Program, rows: int) -> int:
        """Return the bytes of a program's intermediate results for this many rows; prepares nothing."""

    @abstractmethod
    def launch_waiting(self) -> None:
        """Launch the execution that waits for other backends'."""

    @abstractmethod
    def part(self, comm: Communicator) -> None:
        """Close the connections between these ranks' devices, which exchange nothing from then on. Collective."""

    def point_to_point(
        self, comm: Communicator, channels: Sequence[Channel], sizes: Sequence[int], ticks: int
    ) -> PointToPoint:
        """Return the transfers between the stages of a step. Collective over the ranks of all stages.

        `sizes` are the most bytes of an item of each channel, equal on all ranks; `ticks` as for
        `Communicator.point_to_point`.
        """
        return comm.along(STAGE).point_to_point(ticks)

    def made(self, executable: Executable) -> Mapping[str, Buffer]:
        """Return an executable's results of the last step by name, on the device, valid until the next step."""
        return executable.outputs

    @abstractmethod
    def snapshot(self, variables: Iterable[Variable]) -> Snapshot:
        """Move variables to the device (or DeviceMemoryError) and return a snapshot of them."""

    # Memory: names appear in messages when it is short

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return an uninitialised buffer of `dtype` (default: the backend's)."""

    @abstractmethod
    def upload(self, array: HostArray, name: str = "") -> Buffer:
        """Return the array on the device; no copy if the device is the host."""

    @abstractmethod
    def download(self, buffer: Buffer) -> HostArray:
        """Return a host copy of a buffer, after all work queued before."""

    @abstractmethod
    def write(self, buffer: Buffer, array: HostArray) -> None:
        """Overwrite a buffer with a host array of the same shape."""

    @abstractmethod
    def copy(self, buffer: Buffer, source: Buffer) -> None:
        """Overwrite a buffer with another of the same shape and type, after all work queued before."""

    @abstractmethod
    def exchange(self, buffer: Buffer, *, direct: bool = False) -> Exchange:
        """Return a buffer's transfers to MPI and back; `direct`: MPI gets device memory, not a host copy."""

    @abstractmethod
    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        """Return transfers of samples from host to device, with memory of that shape at both ends."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the backend cannot be used afterwards."""

    @abstractmethod
    def upload_samples(self, array: HostArray) -> Buffer:
        """Return samples on the device, read-only; with `shares_samples` the latest are kept for the next model."""

    @abstractmethod
    def missing_samples(self, array: HostArray) -> int:
        """Return how many bytes of device memory `upload_samples` would take."""

    @abstractmethod
    def room_for_data(self) -> int | None:
        """Return how many bytes of samples the device could hold now; None if it reads host memory."""


def amount(nbytes: float) -> str:
    """Return a number of bytes in readable units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"
