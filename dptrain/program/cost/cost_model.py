"""Operations, bytes, messages and memory of a rank in a training step, for one kind of parallelism.

All follows from the placed program: a rank's part of a tensor is its size divided by the lengths of the mesh's axes
that shard it, and it computes its part of an op whose operands or output are sharded.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from dptrain.program.cost.hardware import Work
from dptrain.program.cost.parallelism import SENT, Parallelism
from dptrain.program.dims import Dim
from dptrain.program.explain import flops
from dptrain.program.lowering import Element, Gather, Insert, Join, Reduction, lowering_of
from dptrain.program.program import Program
from dptrain.program.shapes import row_axis, size
from dptrain.program.sharding.mesh import ALL_GATHER, BATCH, OWN_PART, REDUCE_SCATTER
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, Variable
from dptrain.runtime.types import is_narrow

# Ops that share a loop with their operands.
_FUSED = (Element, Gather, Insert, Join, Reduction)


@dataclass(frozen=True)
class CollectiveCall:
    """A collective ("all_reduce", "all_gather", "reduce_scatter") over a mesh axis, with the bytes of its buffer.

    `half`: its elements are in half precision.
    """

    name: str
    mesh: str
    nbytes: float
    half: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a rank."""

    weights: float
    gradients: float
    slots: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.weights + self.gradients + self.slots + self.activations


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step on so many ranks.

    Attributes:
        mode: name of the kind of parallelism.
        mesh: lengths of the mesh's axes, or replicas of a pipeline and its stages, such as "8 x 4".
        rows: of the global batch.
        compute: seconds of computing; in the rest of `seconds` a rank waits for messages or other stages.
        sent: bytes of the buffers of all `messages` of a rank.
        memory: of the rank that needs most.
    """

    mode: str
    ranks: int
    mesh: str
    rows: int
    seconds: float
    compute: float
    sent: float
    messages: int
    memory: MemoryUse

    @property
    def speed(self) -> float:
        """Samples/s of all ranks."""
        return self.rows / self.seconds

    def efficiency(self, alone: "StepPrediction") -> float:
        """Return the samples/s a rank, relative to a single rank."""
        return self.speed / self.ranks / alone.speed


class CostModel:
    """The cost of a step in one of `kinds_of_parallelism`, from the unplaced program of the global batch.

    `slots` are those of each trained variable; `bucket_bytes` limits messages that are sent together, None for no
    limit; `comm_dtype`: half precision in which gradients are sent, None for their own type.

    Attributes:
        placed: the program of a rank.
        tensors: its tensors, in topological order.
        stage: how many messages precede each tensor.
        order: ops as a rank computes them: between two messages by depth, gradients as the backward pass reaches them,
            updates at the end.
    """

    def __init__(
        self,
        program: Program,
        parallelism: Parallelism,
        slots: Mapping[Variable, Collection[Variable]],
        bucket_bytes: int | None = None,
        comm_dtype: str | None = None,
    ) -> None:
        self.parallelism, self.slots, self._bucket_bytes = parallelism, slots, bucket_bytes
        self.placed = placed = place(program, layouts=parallelism.layouts, slots=slots, comm_dtype=comm_dtype)
        self._weights = [tensor for tensor in placed.state if tensor in slots]
        self.tensors, self._results = placed.tensors, set(placed.results)
        self._views = {tensor: source_of(tensor) for tensor in self.tensors}
        self._readers: dict[Tensor, list[Tensor]] = {}
        depth: dict[Tensor, int] = {}
        self.stage: dict[Tensor, int] = {}
        for tensor in self.tensors:
            for read in tensor.inputs:
                self._readers.setdefault(self._views[read], []).append(tensor)
            depth[tensor] = 1 + max((depth[read] for read in tensor.inputs), default=0)
            behind = (self.stage[read] + (read.op in SENT) for read in tensor.inputs)
            self.stage[tensor] = max(behind, default=0)
        self.order = sorted(
            (tensor for tensor in self.tensors if tensor.op is not None),
            key=lambda tensor: (self.stage[tensor], depth[tensor]),
        )
        self._depth = depth
        self._reads = self._stored_operands()

    def works(self, lengths: Mapping[str, int], rows: int) -> dict[Tensor, Work]:
        """Return the work of each op but views and messages, given the mesh's lengths and the global batch."""
        works: dict[Tensor, Work] = {}
        read_before: set[Tensor] = set()  # read by earlier fused ops
        for tensor in self.order:
            assert tensor.op is not None
            if tensor.op in SENT or tensor.op.is_view:
                continue
            fused = _is_fused(tensor)
            nbytes = 0.0
            if self._is_stored(tensor):
                reads = self._reads[tensor] - read_before if fused else self._reads[tensor]
                read_before |= reads if fused else set()
                nbytes = sum(self.nbytes(read, lengths, rows) for read in (tensor, *reads))
            precision = str(tensor.attributes.get("precision", "float32"))
            operations = flops(tensor) * self._part(tensor, lengths, rows)
            works[tensor] = Work(operations, nbytes, not fused, precision)
        return works

    def buckets(self, lengths: Mapping[str, int], rows: int) -> list[tuple[list[Tensor], CollectiveCall]]:
        """Return the messages of a step in order, each with the tensors in it."""
        buckets: list[tuple[list[Tensor], CollectiveCall]] = []
        open_ones: dict[object, int] = {}
        for tensor in sorted((tensor for tensor in self.order if tensor.op in SENT), key=self._urgency):
            assert tensor.op is not None
            mesh = tensor.attributes["mesh"]
            # The buffer of all ranks along that axis: after a gather, or before a scatter.
            buffer = tensor.inputs[0] if tensor.op is REDUCE_SCATTER else tensor
            nbytes = self.nbytes(buffer, lengths, rows)
            kind = self.stage[tensor], tensor.op.name, mesh, tensor.attributes.get("over"), tensor.dtype
            at = open_ones.get(kind)
            if at is None or (self._bucket_bytes and buckets[at][1].nbytes + nbytes > self._bucket_bytes):
                open_ones[kind] = len(buckets)
                buckets.append(([tensor], CollectiveCall(tensor.op.name, mesh, nbytes, is_narrow(tensor.dtype))))
            else:
                tensors, message = buckets[at]
                buckets[at] = [*tensors, tensor], replace(message, nbytes=message.nbytes + nbytes)
        return buckets

    @cached_property
    def late(self) -> dict[Tensor, Tensor]:
        """Gathers of variables' new values that a step does not read, and the tensors of these variables.

        They travel while the next step computes, as between GPUs (`backend/cuda/transfers/schedule.py`).
        """
        placed = self.placed
        read = {operand for tensor in self.tensors for operand in tensor.inputs} | set(placed.outputs.values())
        return {
            tensor: placed.state[variable]
            for variable, tensor in placed.updates.items()
            if tensor.op is ALL_GATHER and tensor not in read and variable in placed.state
        }

    def nbytes(self, tensor: Tensor, lengths: Mapping[str, int], rows: int) -> float:
        """Return the bytes of a rank's largest part of a tensor."""
        axes = self.placed.placements[tensor].axes
        whole_one = (n.scale * rows if isinstance(n, Dim) else int(n) for n in tensor.shape)
        elements = math.prod(
            length if mesh is None else _largest(n, length, lengths.get(mesh, 1))
            for n, length, mesh in zip(tensor.shape, whole_one, axes, strict=True)
        )
        return float(elements * tensor.dtype.itemsize)

    def _part(self, tensor: Tensor, lengths: Mapping[str, int], rows: int) -> float:
        """Return a rank's share of an op, relative to the batch that the program was traced for."""
        part, divided = 1.0, set[str]()
        counts = False
        for operand in (tensor, *tensor.inputs):
            for n, mesh in zip(operand.shape, self.placed.placements[operand].axes, strict=True):
                counts = counts or isinstance(n, Dim)
                if mesh is not None and mesh not in divided and n:
                    divided.add(mesh)
                    whole_one = n.scale * rows if isinstance(n, Dim) else int(n)
                    part *= _largest(n, whole_one, lengths.get(mesh, 1)) / whole_one
        return part * (rows / self.placed.rows if counts and self.placed.rows else 1.0)

    def _urgency(self, tensor: Tensor) -> tuple[int, int]:
        readers = self._readers.get(tensor, [tensor])
        return self.stage[tensor], min(self._depth[read] for read in readers)

    def _stored_operands(self) -> dict[Tensor, frozenset[Tensor]]:
        read_by: dict[Tensor, frozenset[Tensor]] = {}
        for tensor in self.tensors:
            reads: set[Tensor] = set()
            for source in (self._views[read] for read in tensor.inputs):
                if source.op is None and source.value is not None:
                    continue  # a constant
                reads |= {source} if self._is_stored(source) else read_by[source]
            read_by[tensor] = frozenset(reads)
        return read_by

    def _is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is stored: a leaf, a result, or written or read by a kernel of its own."""
        if tensor.op is None or tensor in self._results or not _is_fused(tensor):
            return True
        return isinstance(tensor.op.lowering, Reduction) or not all(
            _is_fused(reader) or reader.op.is_view for reader in self._readers.get(tensor, []) if reader.op is not None
        )

    def memory(
        self, lengths: Mapping[str, int], rows: int, stage_tensors: Collection[Tensor] | None = None
    ) -> MemoryUse:
        """Return the bytes of a rank, or of a pipeline's stage with these tensors.

        Weights and gradients are those of the variables, in their layouts; a gradient that is not sharded is whole
        until it has been sent. Gathered weights and their gradients exist for two layers at a time, and count as
        activations.
        """
        nbytes_of = {
            v: self.nbytes(tensor, lengths, rows)
            for v, tensor in self.placed.state.items()
            if stage_tensors is None or tensor in stage_tensors
        }
        of_slots = {slot for slots in self.slots.values() for slot in slots}
        slots = sum(nbytes for variable, nbytes in nbytes_of.items() if variable in of_slots)
        gradients = sum(nbytes_of.get(weight, 0.0) for weight in self._weights)
        gathered = [0.0]
        for layer in self.layers if lengths[BATCH] > 1 else []:
            sharded = [weight for weight in layer if BATCH in self.parallelism.layouts.get(weight, ())]
            gathered.append(sum(size(weight.shape) * weight.dtype.itemsize for weight in sharded))
        live = 2 * max((layer_bytes + next_bytes for layer_bytes, next_bytes in pairwise(gathered)), default=0.0)
        activations = self._most_alive(lengths, rows, stage_tensors) + live
        return MemoryUse(sum(nbytes_of.values()) - slots, gradients, slots, activations)

    def _most_alive(self, lengths: Mapping[str, int], rows: int, stage_tensors: Collection[Tensor] | None) -> float:
        last: dict[Tensor, int] = {}
        for number, tensor in enumerate(self.order):
            for read in self._reads[tensor]:
                last[read] = number
        ends: dict[int, float] = {}
        most = alive = 0.0
        for number, tensor in enumerate(self.order):
            counts = row_axis(tensor.shape) is not None and tensor.op is not None and not tensor.op.is_view
            if (
                counts
                and tensor in last
                and self._is_stored(tensor)
                and (stage_tensors is None or tensor in stage_tensors)
            ):
                nbytes = self.nbytes(tensor, lengths, rows)
                alive += nbytes
                ends[last[tensor]] = ends.get(last[tensor], 0.0) + nbytes
            most = max(most, alive)
            alive -= ends.get(number, 0.0)
        return most

    @cached_property
    def layers(self) -> list[list[Variable]]:
        """Trained variables by layer, in program order."""
        layers: dict[str, list[Variable]] = {}
        for weight in self._weights:
            layers.setdefault(weight._path.rpartition("/")[0] or weight._path, []).append(weight)
        return list(layers.values())


def _largest(n: int | Dim, length: int, ranks: int) -> int:
    """Return the largest part of an axis over so many ranks; a row is not divided."""
    scale = n.scale if isinstance(n, Dim) else 1
    return -(-(length // scale) // ranks) * scale if scale else length


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor that owns a tensor's memory; a rank's own part counts as memory of its own."""
    while tensor.op is not None and tensor.op.is_view and tensor.op is not OWN_PART:
        tensor = tensor.inputs[0]
    return tensor


def _is_fused(tensor: Tensor) -> bool:
    return isinstance(lowering_of(tensor), _FUSED)
