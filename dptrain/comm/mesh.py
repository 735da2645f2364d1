"""Ranks as a grid with named axes."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Array, Communicator, Mail, PointToPoint
from dptrain.comm.node import NodeMessages
from dptrain.errors import ConfigError

# The axis along which rows of the batch are sharded.
BATCH = "batch"
# The axis along which layers are cut into stages.
STAGE = "stage"


class MeshCommunicator(Communicator):
    """The ranks of a communicator arranged in a mesh, the last axis fastest. Collective."""

    def __init__(self, comm: Communicator, lengths: Mapping[str, int]) -> None:
        check_lengths(lengths, comm.size)
        self._comm, self.lengths = comm, dict(lengths)
        self.rank, self.size, self.node = comm.rank, comm.size, comm.node
        self.local_rank, self.local_size = comm.local_rank, comm.local_size
        grid = np.arange(comm.size).reshape(tuple(lengths.values()))
        place = tuple(int(index[0]) for index in np.nonzero(grid == comm.rank))
        self.coordinates = dict(zip(lengths, place, strict=True))
        self._grid, self._groups = grid, dict[frozenset[str], Communicator]()
        for axis in lengths:  # now, as later not all ranks may ask for it
            self.along(axis)

    def along(self, axis: str) -> Communicator:
        """See `Communicator`."""
        return self.sharing([name for name in self.lengths if name != axis])

    def sharing(self, axes: Collection[str]) -> Communicator:
        """Return the ranks that hold the same part of a tensor sharded over these axes. Collective at first."""
        key = frozenset(axis for axis in axes if self.lengths[axis] > 1)
        if key not in self._groups:
            ranks = self._ranks(key)
            self._groups[key] = self._comm if len(ranks) == self.size else self._comm.group(ranks)
        return self._groups[key]

    def partition(self, axes: Collection[str]) -> list[list[int]]:
        """Return all groups of ranks whose coordinates along these axes are the same."""
        order = sorted(range(len(self.lengths)), key=lambda number: list(self.lengths)[number] not in axes)
        count = math.prod(self.lengths[axis] for axis in axes)
        groups: list[list[int]] = self._grid.transpose(order).reshape(count, -1).tolist()
        return groups

    def _ranks(self, axes: Collection[str]) -> list[int]:
        key = tuple(place if axis in axes else slice(None) for axis, place in self.coordinates.items())
        ranks: list[int] = self._grid[key].reshape(-1).tolist()
        return ranks

    @property
    def replica(self) -> int:
        """Index of this rank's part of every batch."""
        return self.coordinates[BATCH]

    @property
    def replicas(self) -> int:
        """Into how many parts batches are cut."""
        return self.lengths[BATCH]

    @property
    def peers(self) -> list[int]:
        """See `Communicator`."""
        return self._ranks([name for name in self.lengths if name != BATCH])

    @property
    def host(self) -> str:
        """See `Communicator`."""
        return self._comm.host

    @property
    def process(self) -> str:
        """See `Communicator`."""
        return self._comm.process

    @property
    def description(self) -> str:
        """The library that connects the ranks, and the mesh."""
        grid = " x ".join(f"{length} {axis}" for axis, length in self.lengths.items())
        return f"{self._comm.description}, mesh {grid}"

    # All ranks

    def allreduce_sum(self, buffer: Any) -> None:
        self._comm.allreduce_sum(buffer)

    def node_messages(self, like: Sequence[tuple[int, np.dtype[Any]]]) -> NodeMessages | None:
        return self._comm.node_messages(like)

    def sums_in_a_tree(self, nbytes: int) -> bool:
        return self._comm.sums_in_a_tree(nbytes)

    def broadcast(self, buffer: Array) -> None:
        self._comm.broadcast(buffer)

    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        self._comm.all_gather(part, out, counts)

    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        self._comm.all_to_all(parts, counts, out, out_counts)

    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        self._comm.reduce_scatter(parts, out, counts, over)

    def point_to_point(self, ticks: int) -> PointToPoint:
        return self._comm.point_to_point(ticks)

    def group(self, ranks: Sequence[int]) -> Communicator:
        return self._comm.group(ranks)

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        return self._comm.allgather_bytes(message)

    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        self._comm.send(rank, fact, content)

    def received(self) -> list[Mail]:
        return self._comm.received()

    def why_not_cuda_aware(self) -> str:
        return self._comm.why_not_cuda_aware()

    def barrier(self) -> None:
        self._comm.barrier()

    def node_barrier(self) -> None:
        self._comm.node_barrier()

    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        return self._comm.shared_array(shape, dtype)


def check_lengths(lengths: Mapping[str, int], ranks: int) -> None:
    """Refuse a mesh that these ranks do not fill, and lengths below 1."""
    if any(length < 1 for length in lengths.values()) or math.prod(lengths.values()) != ranks:
        grid = ", ".join(f"{axis}={length}" for axis, length in lengths.items())
        raise ConfigError(
            f"mesh {grid}: needs {math.prod(lengths.values())} ranks, but there are {ranks}; choose lengths whose "
            "product is the number of ranks"
        )
