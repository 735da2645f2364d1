"""The communicator of a process that runs alone: one rank, every collective the identity."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Array, Communicator, Mail, PointToPoint, pack, unpack
from dptrain.errors import ConfigError


class SoloCommunicator(Communicator):
    """One rank without MPI."""

    def __init__(self) -> None:
        self.rank = self.local_rank = self.node = 0
        self.size = self.local_size = 1
        self._mail: list[bytes] = []

    @property
    def description(self) -> str:
        """One process, no MPI."""
        return "single process"

    def allreduce_sum(self, buffer: Any) -> None:
        """Do nothing: it is the sum over one rank."""

    def broadcast(self, buffer: Array) -> None:
        """Do nothing: it is rank 0's."""

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """Copy the only part."""
        np.copyto(out, part)

    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        """Copy the only part."""
        np.copyto(out, parts)

    def point_to_point(self, ticks: int) -> PointToPoint:
        """Refuse: there is no other rank."""
        raise ConfigError("point-to-point messages: expected several ranks, but there is one")

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Return the one rank."""
        return self

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Return the one message."""
        return [message]

    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        """Queue it, packed, so that what MPI could not carry fails here as well."""
        self._mail.append(pack(fact, content))

    def received(self) -> list[Mail]:
        """Return the queued messages."""
        mail, self._mail = self._mail, []
        return [unpack(0, message) for message in mail]

    def why_not_cuda_aware(self) -> str:
        """No message leaves the process."""
        return ""

    def barrier(self) -> None:
        """Return at once."""

    def node_barrier(self) -> None:
        """Return at once."""

    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        """Return an ordinary array, to be filled by this rank."""
        return np.empty(shape, dtype), True
