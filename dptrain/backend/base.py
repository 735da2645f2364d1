"""What a device is to the rest of dptrain: memory, ways in and out, and the execution of programs."""

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
from dptrain.program.tensor import Variable


class Executable(Protocol):
    """A program, prepared for one number of rows and for the memory of its inputs.

    Attributes:
        outputs: what the last step made, by name: on the host, this rank's rows of what is sharded.
        nbytes: the device's memory that it takes, state and inputs aside.
    """

    outputs: Mapping[str, HostArray]
    nbytes: int

    def run(self, starts: Sequence[int] = (0,)) -> None:
        """Execute it as often as there are starts. Collective where the program is a placed one of several ranks.

        Args:
            starts: where in the input `program.ROWS` each step's rows begin.
        """

    def close(self) -> None:
        """Give back what the device's driver holds of it."""


class Snapshot(Protocol):
    """Variables on a device, as they stand: their digests, and a copy of them."""

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return (variables, 2): the digest of each one's bytes, and 1 where it holds NaN or infinities, else 0."""

    def take(self) -> bool:
        """Copy the values, over those of the last copy; return whether there was room for that on the device."""

    def restore(self) -> None:
        """Let the variables have the values of the last copy again."""


class Backend(ABC):
    """One device.

    Attributes:
        name: "cpu" or "cuda".
        dtype: floating-point type that models compute in.
        description: the device in words, for the start-up table.
        numerics: what the bits of results depend on; must be the same on all ranks.
        gpu: identity of the GPU in use, which no two ranks should share; None on the CPU.
        transport: how messages between ranks travel: "host" for through the host's memory, "cuda-aware" for MPI that is
            given the device's own, "nccl" for from GPU to GPU; see `dptrain.train.transports`.
        shares_samples: samples that another backend of this process holds on the same device are not copied again;
            for who trains several models on arrays that nobody changes.
        measures: there is something for `settle` to decide; the same on all ranks.
        joins_packs: what is executed may wait, until the backend is asked for something else, for what other backends
            of this process execute on the same device, to be launched together with it; see `launch_waiting`.
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
        """Let variables live on the device from now on; those that do already stay as they are.

        Raises:
            DeviceMemoryError: too little memory.
        """

    @abstractmethod
    def release(self, variables: Iterable[Variable]) -> None:
        """Give the memory of variables back, whose values are lost unless they were moved before."""

    @abstractmethod
    def executable(
        self,
        program: Program,
        arrays: Mapping[str, Buffer],
        *,
        rows: int | None = None,
        first_row: int = 0,
        comm: Communicator | None = None,
    ) -> Executable:
        """Prepare a program; its variables live on the device from then on.

        Args:
            program: placed, if there are several ranks.
            arrays: on the device, what its inputs read at every step, by name: this rank's rows of what is sharded. Of
                the input `program.ROWS`, the numbers of stored rows, it is those of many steps.
            rows: of the global batch that this rank has; None for all.
            first_row: the global number of the first of them.
            comm: the ranks; None for one.
        """

    def settle(self, programs: Iterable[tuple[Program, int]], comm: Communicator) -> None:  # noqa: B027 - most have none
        """Decide what is to be measured before programs are executed, alike on all ranks. Collective.

        Args:
            programs: this rank's, each with its rows of a batch.
            comm: the ranks.

        Raises:
            AgreedError: a rank cannot measure.
        """

    @property
    def chosen(self) -> Mapping[str, Any]:
        """What was decided by measuring, on which bits depend, as JSON can carry it; empty where nothing was."""
        return {}

    def choose(self, chosen: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to choose
        """Decide as `chosen` says, of the training that goes on here.

        Raises:
            ConfigError: this cannot be done here.
        """

    def prepare(  # noqa: B027 - most have nothing to do ahead
        self, program: Program, rows: int, first_row: int = 0, *, alone: bool = True
    ) -> None:
        """Begin with what takes long before a program can be executed, beside what this thread does next.

        Args:
            program: as of `executable`, and so are those that follow.
            rows: of the global batch that this rank has.
            first_row: the global number of the first of them.
            alone: there is one rank, or it does not meet the others.
        """

    @abstractmethod
    def planned_bytes(self, program: Program, rows: int) -> int:
        """Return the bytes of a program's intermediate results on a rank with so many rows; prepares nothing."""

    @abstractmethod
    def launch_waiting(self) -> None:
        """Let the device begin with what waits to be executed together with other backends'."""

    @abstractmethod
    def part(self, comm: Communicator) -> None:
        """Give back what joins the devices of these ranks; nothing that meets them is executed any more. Collective."""

    def point_to_point(
        self, comm: Communicator, channels: Sequence[Channel], sizes: Sequence[int], ticks: int
    ) -> PointToPoint:
        """Return what hands tensors of one step from stage to stage. Collective over the ranks of all stages.

        Args:
            comm: the ranks.
            channels: between the stages.
            sizes: the most bytes of an item of each, alike on all ranks.
            ticks: as of `Communicator.point_to_point`.
        """
        return comm.along(STAGE).point_to_point(ticks)

    def made(self, executable: Executable) -> Mapping[str, Buffer]:
        """Return what the last step of an executable made, by name, where it lies on the device until the next one."""
        return executable.outputs

    @abstractmethod
    def snapshot(self, variables: Iterable[Variable]) -> Snapshot:
        """Return what looks at variables, which live on the device from now on, and copies them.

        Raises:
            DeviceMemoryError: too little memory for the variables themselves.
        """

    # Memory, whose names appear in messages where it is short

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> Buffer:
        """Return an uninitialised buffer of `dtype` (default: the backend's)."""

    @abstractmethod
    def upload(self, array: HostArray, name: str = "") -> Buffer:
        """Return the array on the device; no copy where the device is the host."""

    @abstractmethod
    def download(self, buffer: Buffer) -> HostArray:
        """Return a host copy of a buffer, after all work queued before it."""

    @abstractmethod
    def write(self, buffer: Buffer, array: HostArray) -> None:
        """Overwrite a buffer with a host array of the same shape."""

    @abstractmethod
    def copy(self, buffer: Buffer, source: Buffer) -> None:
        """Overwrite a buffer with another one of the same shape and type, after all work queued before."""

    @abstractmethod
    def exchange(self, buffer: Buffer, *, direct: bool = False) -> Exchange:
        """Return the way of a buffer to MPI and back.

        Args:
            buffer: on the device.
            direct: MPI is given the device's memory itself instead of a copy on the host.
        """

    @abstractmethod
    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        """Return a way for samples from the host to the device, with memory of that shape at both ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds; it cannot be used afterwards."""

    @abstractmethod
    def upload_samples(self, array: HostArray) -> Buffer:
        """Return samples on the device, as `upload`; the buffer is only read.

        With `shares_samples` some of the last are kept, so that they are there when the next model comes.
        """

    @abstractmethod
    def missing_samples(self, array: HostArray) -> int:
        """Return how many bytes of the device's memory `upload_samples` would take."""

    @abstractmethod
    def room_for_data(self) -> int | None:
        """Return how many bytes of samples the device could hold now; None where it reads the host's own memory."""


def amount(nbytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"
