"""Sums over ranks' GPUs of numbers that NCCL would round at each of them, or cannot divide: within nodes first.

Each GPU receives the others' summands of its share over NVLink, adds them in float32, and exchanges only that sum with
the GPUs of its number on the other nodes, its *column*. So of a reduce-scatter of n elements in half precision a GPU of
N nodes with g GPUs each sends 4 (N - 1) / N n / g bytes through its network adapter, and 2 (N - 1) / N n / g more of an
all-reduce, which is rounded before it is gathered.

Sums have the order, and the bits, of `comm/hierarchy.py`: the GPUs of a node in a `TreeSum`, then the nodes in another;
they are rounded once. NCCL's own bfloat16 would round at every GPU of a ring. Nodes with different numbers of GPUs
along an axis are not divided: their GPUs form a single column.

**Run only on the emulated driver, with a stand-in for NCCL.**
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backend.cuda.compile import compiled_text
from dptrain.backend.cuda.memory import DeviceArray
from dptrain.comm.device import DeviceCommunicator
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.program.codegen.memory import in_a_row
from dptrain.runtime.types import TYPES, is_narrow, type_of

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend

# The most blocks that reduce the ranks' elements, and the threads of each.
_BLOCKS, _THREADS = 1024, 256
# Types of their arguments: two addresses, elements and ranks.
_ARGUMENTS = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_longlong, ctypes.c_int)
# Alignment of scratch memory.
_ALIGNMENT = 256
# The kernels of all types that `kernels/ranks.h` reduces as themselves.
_KERNELS = "".join(
    f"JOIN({known.c}, {name})\n" + f"JOIN_HALVES({known.c}, {name})\n" * known.is_narrow
    for name, known in TYPES.items()
    if known.device_joins == name
)


@dataclass(frozen=True)
class NodeGrid:
    """Ranks of a communicator by node, each node with as many, and the communicators of this rank.

    Attributes:
        nodes: ranks of each node.
        node: GPUs of this rank's node; None if it has one.
        column: GPUs of this rank's number on all nodes; None on one node.
    """

    nodes: Sequence[Sequence[int]]
    node: DeviceCommunicator | None
    column: DeviceCommunicator | None

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return 0 if self.node is None else self.node.rank

    @property
    def columns(self) -> list[list[int]]:
        """Ranks of each number, in the nodes' order."""
        return [list(column) for column in zip(*self.nodes, strict=True)]

    def shares(self, elements: int) -> list[slice]:
        """Cut elements into a slice for each rank, so that those of a column are adjacent."""
        columns = self.columns
        shares = [slice(0)] * sum(map(len, columns))
        for column, bounds in zip(columns, cut(0, elements, len(columns)), strict=True):
            for rank, share in zip(column, cut(*bounds, len(column)), strict=True):
                shares[rank] = slice(*share)
        return shares


class NodeFirstReduction:
    """Sums, or takes the maximum of, the ranks' parts for each rank; `shares`: each rank's slice, in elements.

    It needs `scratch_bytes` of memory.
    """

    def __init__(
        self,
        backend: "CudaBackend",
        dtype: np.dtype[Any],
        over: str,
        grid: NodeGrid,
        rank: int,
        shares: Sequence[slice],
    ) -> None:
        self._grid, self._dtype = grid, dtype
        rounds_later = is_narrow(dtype) and over == "sum" and grid.node is not None and grid.column is not None
        self._wide = np.dtype(np.float32) if rounds_later else dtype  # of sums that travel between nodes
        self._columns = [[shares[member] for member in column] for column in grid.columns]
        self._counts = [_length(share) for share in self._columns[grid.local_rank]]
        self._own = _length(shares[rank])
        sizes = [0, 0, 0]  # summands of the node, their sum, and the nodes' sums
        if grid.node is not None:
            sizes[0] = grid.node.size * sum(self._counts) * dtype.itemsize
            self._in_node = RankReduction(backend, dtype, over, self._wide)
        if grid.column is not None:
            sizes[1] = sum(self._counts) * self._wide.itemsize if grid.node is not None else 0
            sizes[2] = grid.column.size * self._own * self._wide.itemsize
            self._in_column = RankReduction(backend, self._wide, over, dtype)
        starts = in_a_row(sizes, _ALIGNMENT)
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.scratch_bytes = starts[-1]

    def __call__(self, parts: DeviceArray, out: DeviceArray, scratch: DeviceArray, stream: Any) -> None:
        """Queue it on flat `parts` of all ranks, and flat `out`, which may be this rank's share of `parts`."""
        received, total, in_column = (scratch[place] for place in self._places)
        grid, summands = self._grid, [parts[share] for share in self._columns[self._grid.local_rank]]
        if grid.node is not None:
            sent = [[parts[share] for share in column] for column in self._columns]
            rows = received.view(self._dtype)
            _exchange(grid.node, sent, _cut_up(rows, grid.node.size * [self._counts]), stream)
            node_sum = out if grid.column is None else total.view(self._wide)
            self._in_node(stream, rows, node_sum, grid.node.size)
            summands = next(iter(_cut_up(node_sum, [self._counts])))
        if grid.column is not None:
            rows = in_column.view(self._wide)
            sent = [[summand] for summand in summands]
            _exchange(grid.column, sent, _cut_up(rows, grid.column.size * [[self._own]]), stream)
            self._in_column(stream, rows, out, grid.column.size)


def gather_shares(buffer: DeviceArray, grid: NodeGrid, shares: Sequence[slice], stream: Any) -> None:
    """Queue the gather of ranks' `NodeGrid.shares` of a flat buffer, in place: between nodes, then within."""
    flat, itemsize = buffer.view(np.uint8), buffer.dtype.itemsize
    columns = [[shares[rank] for rank in column] for column in grid.columns]
    spans = [slice(column[0].start * itemsize, column[-1].stop * itemsize) for column in columns]
    own = spans[grid.local_rank]
    if grid.column is not None:
        counts = [_length(share) * itemsize for share in columns[grid.local_rank]]
        start = own.start + sum(counts[: grid.column.rank])
        grid.column.all_gather(flat[start : start + counts[grid.column.rank]], flat[own], counts, stream)
    if grid.node is not None:
        grid.node.all_gather(flat[own], flat, [_length(span) for span in spans], stream)


class RankReduction:
    """The kernel that sums ranks' elements, or takes the maximum: `kernels/ranks.h`; ConfigError for other types."""

    def __init__(
        self, backend: "CudaBackend", dtype: np.dtype[Any], over: str, out_dtype: np.dtype[Any] | None = None
    ) -> None:
        name = type_of(dtype).device_joins
        if name is None:
            raise ConfigError(f"GPUs cannot reduce tensors of {dtype.name} over ranks ({over}); use --comm host")
        gpu = backend.gpu_record
        cubin = compiled_text("ranks", f'#include "ranks.h"\n{_KERNELS}', gpu.architecture)
        to = "" if out_dtype in (None, dtype) else f"_to_{out_dtype}"
        self._kernel = gpu.stream_kernel(cubin, f"{over}_{name}{to}", _ARGUMENTS)

    def __call__(self, stream: Any, inputs: DeviceArray, out: DeviceArray, ranks: int) -> None:
        """Queue it on `inputs`, the ranks' elements one rank after the other, and a flat `out`."""
        if out.size:
            blocks = min(-(-out.size // _THREADS), _BLOCKS)
            self._kernel(stream, blocks, _THREADS, inputs.pointer, out.pointer, out.size, ranks)


def _exchange(
    link: DeviceCommunicator,
    sent: Sequence[Sequence[DeviceArray]],
    received: Sequence[Sequence[DeviceArray]],
    stream: Any,
) -> None:
    """Send bytes, as NCCL does not know every type."""
    outward, inward = (
        [[buffer.view(np.uint8) for buffer in buffers] for buffers in of_ranks] for of_ranks in (sent, received)
    )
    link.all_to_all(outward, inward, stream)


def _cut_up(flat: DeviceArray, counts: Sequence[Sequence[int]]) -> list[list[DeviceArray]]:
    """Cut an array into rows of buffers with so many elements."""
    buffers = iter([flat[begin:end] for begin, end in pairwise(in_a_row(chain.from_iterable(counts)))])
    return [list(islice(buffers, len(row))) for row in counts]


def _length(share: slice) -> int:
    length: int = share.stop - share.start
    return length
