"""Will it scale? How long a step takes on more ranks, and what each of them holds, before anybody has them.

A mode of parallelism is a layout of a program's variables (`modes`). `place` says for each of them what a rank computes
and what travels; this module adds up FLOPs, bytes and messages of a rank's part, and turns them into seconds:

- **Compute**: an op takes the longer of operations / rate and bytes / bandwidth (S. Williams, A. Waterman, D. Patterson,
  "Roofline", CACM 52(4), 2009), and a product also a launch. Ops of single elements are fused: a tensor is written
  where a product, a message or the state needs it, and read once by all of them together.
- **Messages**: latency and bandwidth, see `Machine.collective` (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
  collective communication operations in MPICH", IJHPCA 19(1), 2005; rings: P. Patarasuk, X. Yuan, JPDC 69(2), 2009).
  Those that are ready together travel in buckets, beside the backward pass where the device allows it.
- **Pipelines**: stages with about the same memory, in the order 1F1B, whose bubble is (stages - 1) / (microbatches +
  stages - 1) of a step (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
  Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2).

Left out: stragglers, contention in the network, caches, checkpoints, reading data.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from dptrain.program.dims import Dim
from dptrain.program.explain import flops, grouped
from dptrain.program.lowering import Element, Gather, Insert, Join, Reduction, lowering_of
from dptrain.program.mesh import ALL_GATHER, ALL_REDUCE, BATCH, OWN_PART, REDUCE_SCATTER, Axes
from dptrain.program.passes import rewritten
from dptrain.program.placement import place
from dptrain.program.program import Program
from dptrain.program.shapes import row_axis, size
from dptrain.program.tensor import Tensor, Variable

# The axis of a mesh over which tensor parallelism shards kernels.
MODEL = "model"
# Ops that share a loop with what they read.
_FUSED = (Element, Gather, Insert, Join, Reduction)
_SENT = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
# Microbatches of a pipeline, for each of its stages.
_MICROBATCHES = 4

Way = Literal["sharded", "hierarchical", "pipeline"]


# Machines


@dataclass(frozen=True)
class Link:
    """What a message takes: `latency` seconds, and 1 / `bandwidth` for each of its bytes."""

    bandwidth: float
    latency: float

    def shared(self, by: int) -> "Link":
        """Return what each of so many has of it that send at once."""
        return Link(self.bandwidth / by, self.latency)


@dataclass(frozen=True)
class Machine:
    """Nodes with ranks.

    Attributes:
        rates: floating-point operations/s of a rank's products by precision: "float32", "tf32", "half".
        bandwidth: of a rank's memory, bytes/s.
        launch: seconds that a product takes beside its work.
        least: seconds of a product's work at least, however small: it fills a part of a device.
        step: seconds that a step takes beside its ops.
        node: ranks of a node.
        link: between two ranks of a node.
        network: of a node; its ranks share it.
        memory: bytes of a rank; None for any number.
        cores: of a node, as many ranks as compute at full speed at once; None where each has a device.
        overlaps: whether messages travel while a rank computes.
    """

    rates: Mapping[str, float]
    bandwidth: float
    launch: float
    least: float
    step: float
    node: int
    link: Link
    network: Link
    memory: float | None = None
    cores: float | None = None
    overlaps: bool = True

    def busy(self, ranks: int) -> float:
        """Return how many times longer a rank computes, as it shares cores with the others of its node."""
        return 1.0 if self.cores is None else max(1.0, min(ranks, self.node) / self.cores)

    def seconds(self, work: "Work") -> float:
        """Return the time of an op on a rank that has its device alone."""
        arithmetic = work.operations / self.rates.get(work.precision, self.rates["float32"])
        busy = max(arithmetic, work.nbytes / self.bandwidth)
        return max(busy, self.least) + self.launch if work.launched else busy

    def collective(self, name: str, nbytes: float, ranks: int, stride: int = 1, hierarchical: bool = False) -> float:
        """Return the seconds of a collective.

        P ranks, n bytes, latency a, seconds a byte b. Within a node an all-gather or a reduce-scatter takes
        log2(P) a + (P - 1) / P n b (recursive doubling or halving), and an all-reduce the shorter of both one after the
        other and log2(P) (a + n b) (recursive doubling). Between nodes rings take (P - 1) a + (P - 1) / P n b with
        the slowest link, twice that for an all-reduce; if that is shorter, they double too, over the network that all
        ranks of a node share.

        Args:
            name: "all_reduce", "all_gather" or "reduce_scatter".
            nbytes: of the whole buffer.
            ranks: that take part.
            stride: distance of two of them, as they are numbered; those between do the same at the same time.
            hierarchical: all-reduce within each node first, then between nodes, a part by each rank.
        """
        if ranks == 1:
            return 0.0
        here = max(min(ranks, self.node // stride), 1)  # of them on a node
        times = 2 if name == "all_reduce" else 1
        if here >= ranks:
            return _doubling(times, nbytes, ranks, self.link)
        beside, nodes = min(stride, self.node), -(-ranks // here)
        if hierarchical:
            inside = _doubling(times, nbytes, here, self.link)
            return inside + _doubling(times, nbytes / here, nodes, self.network.shared(here * beside))
        edge = self.network.shared(beside)
        slowest = min(edge.bandwidth, self.link.bandwidth)
        ring = times * ((ranks - 1) * edge.latency + (ranks - 1) / ranks * nbytes / slowest)
        between = edge.shared(here)
        latency = _rounds(here) * self.link.latency + _rounds(nodes) * between.latency
        if name == "all_reduce":
            moved = _rounds(here) * nbytes / self.link.bandwidth + _rounds(nodes) * nbytes / between.bandwidth
        else:
            moved = (ranks - 1) / ranks * nbytes / between.bandwidth
        return min(ring, latency + moved)


def _doubling(times: int, nbytes: float, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    rounds = _rounds(ranks)
    scattered = times * (rounds * link.latency + (ranks - 1) / ranks * nbytes / link.bandwidth)
    return min(scattered, rounds * (link.latency + nbytes / link.bandwidth)) if times == 2 else scattered


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


# Modes


@dataclass(frozen=True)
class Mode:
    """A kind of parallelism.

    Attributes:
        name: in the field's words.
        layouts: of variables that are not replicated, see `place`.
        way: "hierarchical" all-reduces, or a "pipeline" of the layers.
    """

    name: str
    layouts: Mapping[Variable, Axes] = field(default_factory=dict)
    way: Way = "sharded"


def modes(program: Program, slots: Mapping[Variable, Collection[Variable]]) -> list[Mode]:
    """Return the modes that are compared.

    Args:
        program: of a training step.
        slots: of each trained variable.
    """
    weights = [one for one in program.state if one in slots]
    sharded = {one: _longest(one) for weight in weights for one in slots[weight] if one.shape}
    all_sharded = sharded | {one: _longest(one) for one in weights if one.shape}
    kernels = _alternating(weights)
    kernels |= {slot: axes for weight, axes in kernels.items() for slot in slots[weight] if slot.shape == weight.shape}
    return [
        Mode("data parallel"),
        Mode("hierarchical all-reduce", way="hierarchical"),
        Mode("ZeRO-1", sharded),
        Mode("FSDP", all_sharded),
        Mode("tensor parallel", kernels),
        Mode("pipeline", way="pipeline"),
    ]


def _longest(variable: Variable) -> Axes:
    """Return the layout with the longest axis sharded over `BATCH`."""
    longest = max(range(len(variable.shape)), key=lambda axis: variable.shape[axis])
    return tuple(BATCH if axis == longest else None for axis in range(len(variable.shape)))


def _alternating(weights: Sequence[Variable]) -> dict[Variable, Axes]:
    """Return Megatron's pairs: a kernel sharded by its outputs, and the vectors behind it, then one by its inputs.

    Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. A last kernel without a partner is whole.
    """
    found: dict[Variable, Axes] = {}
    pending: list[Variable] = []  # by outputs, until the partner comes
    for one in weights:
        if len(one.shape) == 1 and pending and one.shape[0] == pending[0].shape[-1]:
            pending.append(one)
        elif len(one.shape) > 1 and not pending:
            pending = [one]
        elif len(one.shape) > 1:
            found |= {each: (*(None,) * (len(each.shape) - 1), MODEL) for each in pending}
            found[one] = (*(None,) * (len(one.shape) - 2), MODEL, None)
            pending = []
    return found


def whole(program: Program) -> Program:
    """Return the program of a global batch that was placed: without what `place` has added."""

    def change(one: Tensor) -> Tensor:
        if one.op in (*_SENT, OWN_PART):
            return one.inputs[0]
        if one.op is None and one.attributes.get("own"):
            told = {name: value for name, value in one.attributes.items() if name != "own"}
            return Tensor(None, (), told, one.shape, one.dtype, one.value)
        return one

    made = rewritten(program, change)
    return Program(made.inputs, made.state, made.outputs, made.updates, rows=made.rows)


# What a rank does


@dataclass(frozen=True)
class Work:
    """What an op asks of a rank.

    Attributes:
        operations: in floating point.
        nbytes: that it reads and writes.
        launched: whether it is a kernel of its own.
        precision: of a product.
    """

    operations: float
    nbytes: float
    launched: bool = False
    precision: str = "float32"


@dataclass(frozen=True)
class Message:
    """A collective.

    Attributes:
        name: "all_reduce", "all_gather" or "reduce_scatter".
        mesh: the axis of the mesh over which it goes.
        nbytes: of the whole buffer over that axis.
    """

    name: str
    mesh: str
    nbytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: float
    gradients: float
    slots: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.slots + self.activations


@dataclass(frozen=True)
class Prediction:
    """A step on so many ranks.

    Attributes:
        mode: its name.
        ranks: as above.
        mesh: lengths of the mesh's axes, or stages of a pipeline and its replicas, such as "8 x 4".
        rows: of the global batch.
        seconds: of a step.
        compute: seconds in which a rank computes; the rest it waits for messages, or in a pipeline's bubble.
        sent: bytes of messages.
        messages: that it takes part in.
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
    memory: Memory

    @property
    def speed(self) -> float:
        """Samples a second, of all ranks."""
        return self.rows / self.seconds

    def efficiency(self, alone: "Prediction") -> float:
        """Return the samples/s of a rank, as a part of those of one rank that is alone."""
        return self.speed / self.ranks / alone.speed


class Scaling:
    """A training step in one mode, on any number of ranks.

    Args:
        program: of the global batch, not placed.
        mode: one of `modes`.
        slots: of each trained variable.
        bucket_bytes: of messages that travel together at most; None for any number.
    """

    def __init__(
        self,
        program: Program,
        mode: Mode,
        slots: Mapping[Variable, Collection[Variable]],
        bucket_bytes: int | None = None,
    ) -> None:
        self.mode = mode
        self._placed = placed = place(program, layouts=mode.layouts)
        self._slots, self._bucket_bytes = slots, bucket_bytes
        self._weights = [one for one in placed.state if one in slots]
        self._tensors, self._results = placed.tensors, set(placed.results)
        self._views = {one: _source(one) for one in self._tensors}
        self._readers: dict[Tensor, list[Tensor]] = {}
        depth: dict[Tensor, int] = {}
        self._stage: dict[Tensor, int] = {}
        for one in self._tensors:
            for read in one.inputs:
                self._readers.setdefault(self._views[read], []).append(one)
            depth[one] = 1 + max((depth[read] for read in one.inputs), default=0)
            behind = (self._stage[read] + (read.op in _SENT) for read in one.inputs)
            self._stage[one] = max(behind, default=0)
        # Between two messages a rank computes what lies behind the fewest ops first: gradients as the backward pass
        # comes to them, updates at the end.
        self._order = sorted((one for one in self._tensors if one.op), key=lambda one: (self._stage[one], depth[one]))
        self._depth = depth
        self._reads = self._what_is_read()

    def predict(self, ranks: int, rows: int, machine: Machine) -> Prediction:
        """Return what a step takes.

        Args:
            ranks: of which as many as a node has are one group of tensor parallelism or one pipeline, at most.
            rows: of the global batch.
            machine: the nodes.
        """
        if self.mode.way == "pipeline":
            return self._pipeline(ranks, rows, machine)
        sharded = any(MODEL in axes for axes in self.mode.layouts.values())
        model = math.gcd(ranks, machine.node) if sharded else 1
        lengths = {BATCH: ranks // model, MODEL: model}
        works, buckets = self.works(lengths, rows), self.buckets(lengths, rows)
        times = {one: machine.seconds(work) * machine.busy(ranks) for one, work in works.items()}
        seconds = self._scheduled(times, buckets, lengths, machine)
        sent = [message for _, message in buckets if lengths[message.mesh] > 1]
        return Prediction(
            self.mode.name,
            ranks,
            f"{lengths[BATCH]} x {model}" if sharded else str(ranks),
            rows,
            seconds + machine.step,
            sum(times.values()) + machine.step,
            sum(one.nbytes for one in sent),
            len(sent),
            self.memory(lengths, rows),
        )

    def idle(self, rows: int, machine: Machine) -> float:
        """Return the part of a rank's step, alone, in which launches and small products leave the device idle."""
        works = self.works({BATCH: 1, MODEL: 1}, rows).values()
        all_full = replace(machine, launch=0.0, least=0.0)
        busy, total = (sum(map(one.seconds, works)) for one in (all_full, machine))
        return 1 - busy / (total + machine.step)

    # FLOPs, bytes and messages

    def works(self, lengths: Mapping[str, int], rows: int) -> dict[Tensor, Work]:
        """Return what each op asks of a rank; views, and messages, nothing.

        Args:
            lengths: of the mesh's axes.
            rows: of the global batch.
        """
        found: dict[Tensor, Work] = {}
        seen: set[Tensor] = set()  # that fused ops have read
        for one in self._order:
            assert one.op is not None
            if one.op in _SENT or one.op.is_view:
                continue
            fused = _is_fused(one)
            nbytes = 0.0
            if self._is_stored(one):
                reads = self._reads[one] - seen if fused else self._reads[one]
                seen |= reads if fused else set()
                nbytes = sum(self.nbytes(read, lengths, rows) for read in (one, *reads))
            precision = str(one.attributes.get("precision", "float32"))
            operations = flops(one) * self._part(one, lengths, rows)
            found[one] = Work(operations, nbytes, not fused, precision)
        return found

    def buckets(self, lengths: Mapping[str, int], rows: int) -> list[tuple[list[Tensor], Message]]:
        """Return the messages of a step, each of the tensors that travel in it, in the order in which they are sent."""
        found: list[tuple[list[Tensor], Message]] = []
        open_ones: dict[object, int] = {}
        for one in sorted((one for one in self._order if one.op in _SENT), key=self._urgency):
            assert one.op is not None
            mesh = one.attributes["mesh"]
            # The buffer of all ranks along that axis: what is gathered, or was there before it was scattered.
            buffer = one.inputs[0] if one.op is REDUCE_SCATTER else one
            nbytes = self.nbytes(buffer, lengths, rows)
            kind = self._stage[one], one.op.name, mesh, one.attributes.get("over"), one.dtype
            at = open_ones.get(kind)
            if at is None or (self._bucket_bytes and found[at][1].nbytes + nbytes > self._bucket_bytes):
                open_ones[kind] = len(found)
                found.append(([one], Message(one.op.name, mesh, nbytes)))
            else:
                tensors, message = found[at]
                found[at] = [*tensors, one], replace(message, nbytes=message.nbytes + nbytes)
        return found

    def nbytes(self, tensor: Tensor, lengths: Mapping[str, int], rows: int) -> float:
        """Return the bytes of the largest part of a tensor that a rank has."""
        axes = self._placed.placements[tensor].axes
        whole_one = (n.scale * rows if isinstance(n, Dim) else int(n) for n in tensor.shape)
        elements = math.prod(
            own if mesh is None else _largest(n, own, lengths.get(mesh, 1))
            for n, own, mesh in zip(tensor.shape, whole_one, axes, strict=True)
        )
        return float(elements * tensor.dtype.itemsize)

    def _part(self, tensor: Tensor, lengths: Mapping[str, int], rows: int) -> float:
        """Return how much of an op a rank computes: of what the whole batch takes that the program was traced for."""
        part, divided = 1.0, set[str]()
        counts = False
        for one in (tensor, *tensor.inputs):
            for n, mesh in zip(one.shape, self._placed.placements[one].axes, strict=True):
                counts = counts or isinstance(n, Dim)
                if mesh is not None and mesh not in divided and n:
                    divided.add(mesh)
                    whole_one = n.scale * rows if isinstance(n, Dim) else int(n)
                    part *= _largest(n, whole_one, lengths.get(mesh, 1)) / whole_one
        return part * (rows / self._placed.rows if counts and self._placed.rows else 1.0)

    def _urgency(self, one: Tensor) -> tuple[int, int]:
        readers = self._readers.get(one, [one])
        return self._stage[one], min(self._depth[read] for read in readers)

    def _what_is_read(self) -> dict[Tensor, frozenset[Tensor]]:
        """Return the tensors in memory of which each op is made."""
        found: dict[Tensor, frozenset[Tensor]] = {}
        for one in self._tensors:
            reads: set[Tensor] = set()
            for source in (self._views[read] for read in one.inputs):
                if source.op is None and source.value is not None:
                    continue  # a constant
                reads |= {source} if self._is_stored(source) else found[source]
            found[one] = frozenset(reads)
        return found

    def _is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory: it is given, a result, made by a kernel of its own, or read by one."""
        if tensor.op is None or tensor in self._results or not _is_fused(tensor):
            return True
        return isinstance(tensor.op.lowering, Reduction) or not all(
            one.op is OWN_PART or _is_fused(one) or one.op.is_view for one in self._readers.get(tensor, []) if one.op
        )

    # Time

    def _scheduled(
        self,
        times: Mapping[Tensor, float],
        buckets: Sequence[tuple[list[Tensor], Message]],
        lengths: Mapping[str, int],
        machine: Machine,
    ) -> float:
        """Return when a step ends: ops run in order, and messages in order, each when what it needs is there."""
        done: dict[Tensor, float] = {}
        computed = sent = 0.0
        hierarchical = self.mode.way == "hierarchical"
        for stage in range(1 + max(self._stage.values(), default=0)):
            for one in self._order:
                if self._stage[one] == stage and one.op not in _SENT:
                    computed = max([computed, *(done.get(read, 0.0) for read in one.inputs)]) + times.get(one, 0.0)
                    done[one] = computed
            for tensors, message in buckets:
                if self._stage[tensors[0]] != stage:
                    continue
                ready = max(done.get(read, 0.0) for one in tensors for read in one.inputs)
                stride = lengths[MODEL] if message.mesh == BATCH else 1
                ranks = lengths.get(message.mesh, 1)
                took = machine.collective(message.name, message.nbytes, ranks, stride, hierarchical)
                sent = max(sent, ready if machine.overlaps else computed) + took
                done |= dict.fromkeys(tensors, sent)
                computed = computed if machine.overlaps else sent
        return max(computed, sent)

    # Memory

    def memory(self, lengths: Mapping[str, int], rows: int, only: Collection[Tensor] | None = None) -> Memory:
        """Return the bytes of a rank.

        Weights and gradients are those of the variables, in their layouts; a gradient that is not sharded is whole
        until it has been sent. Of weights that are gathered where they are used, and of their gradients, those of two
        layers are there at a time, counted as activations.

        Args:
            lengths: of the mesh's axes.
            rows: of the global batch.
            only: tensors of a pipeline's stage; None for all.
        """
        held = {
            v: self.nbytes(one, lengths, rows) for v, one in self._placed.state.items() if only is None or one in only
        }
        of_slots = {one for slots in self._slots.values() for one in slots}
        slots = sum(nbytes for one, nbytes in held.items() if one in of_slots)
        gradients = sum(held.get(one, 0.0) for one in self._weights)
        gathered = [0.0]
        for layer in self._layers if lengths[BATCH] > 1 else []:
            sharded = [one for one in layer if BATCH in self.mode.layouts.get(one, ())]
            gathered.append(sum(size(one.shape) * one.dtype.itemsize for one in sharded))
        live = 2 * max((one + other for one, other in pairwise(gathered)), default=0.0)
        activations = self._most_alive(lengths, rows, only) + live
        return Memory(sum(held.values()) - slots, gradients, slots, activations)

    def _most_alive(self, lengths: Mapping[str, int], rows: int, only: Collection[Tensor] | None) -> float:
        """Return the bytes of rows that are in memory at once, between the op that makes them and the last reader."""
        last: dict[Tensor, int] = {}
        for number, one in enumerate(self._order):
            for read in self._reads[one]:
                last[read] = number
        ends: dict[int, float] = {}
        most = alive = 0.0
        for number, one in enumerate(self._order):
            counts = row_axis(one.shape) is not None and one.op is not None and not one.op.is_view
            if counts and one in last and self._is_stored(one) and (only is None or one in only):
                nbytes = self.nbytes(one, lengths, rows)
                alive += nbytes
                ends[last[one]] = ends.get(last[one], 0.0) + nbytes
            most = max(most, alive)
            alive -= ends.get(number, 0.0)
        return most

    @cached_property
    def _layers(self) -> list[list[Variable]]:
        """Trained variables by the layer that has them, in the order in which a step comes to them."""
        found: dict[str, list[Variable]] = {}
        for one in self._weights:
            found.setdefault(one.path.rpartition("/")[0] or one.path, []).append(one)
        return list(found.values())

    # Pipelines

    def _pipeline(self, ranks: int, rows: int, machine: Machine) -> Prediction:
        """Return a step of pipelines, each of stages that are ranks of a node, and replicas of them."""
        stages = math.gcd(ranks, machine.node)
        while stages > max(len(self._layers), 1):
            stages //= 2
        stages = max(stages, 1)
        replicas, stage = ranks // stages, self._cut(stages)
        own_rows = -(-rows // replicas)
        microbatches = max(min(_MICROBATCHES * stages, own_rows), 1) if stages > 1 else 1
        alone = {BATCH: 1, MODEL: 1}
        groups = grouped(self._placed)
        update = {one for name in ("update", "messages") for one in groups.get(name, [])}
        works = self.works(alone, -(-own_rows // microbatches))
        micro, rest = [0.0] * stages, [0.0] * stages
        for one, work in works.items():
            (rest if one in update else micro)[stage[one]] += machine.seconds(work) * machine.busy(ranks)
        handed = max((self._handed_on(stage, at, -(-own_rows // microbatches)) for at in range(1, stages)), default=0.0)
        sums: list[list[Message]] = [[] for _ in range(stages)]
        for tensors, _ in self.buckets({**alone, BATCH: replicas}, rows):
            for at in range(stages):
                nbytes = sum(self.nbytes(one, alone, own_rows) for one in tensors if stage[one] == at)
                if nbytes and replicas > 1:
                    sums[at].append(Message("all_reduce", BATCH, nbytes))
        at_end = [
            own + sum(machine.collective(one.name, one.nbytes, replicas, stages) for one in messages)
            for own, messages in zip(rest, sums, strict=True)
        ]
        hop = 2 * (machine.link.latency + handed / machine.link.bandwidth) if stages > 1 else 0.0
        seconds = (microbatches + stages - 1) * (max(micro) + hop) + max(at_end)
        members: list[set[Tensor]] = [{one for one, own in stage.items() if own == at} for at in range(stages)]
        held = []
        for at in range(stages):
            one_alive = self.memory(alone, -(-own_rows // microbatches), members[at])
            held.append(replace(one_alive, activations=one_alive.activations * min(stages - at, microbatches)))
        sent = max((sum(one.nbytes for one in messages) for messages in sums), default=0.0)
        return Prediction(
            self.mode.name,
            ranks,
            f"{replicas} x {stages}",
            rows,
            seconds + machine.step,
            microbatches * max(micro) + max(rest) + machine.step,
            sent + 2 * microbatches * handed,
            max(map(len, sums)) + (2 * microbatches if stages > 1 else 0),
            max(held, key=lambda one: one.total),
        )

    def _cut(self, stages: int) -> dict[Tensor, int]:
        """Return the stage of a pipeline to which each tensor belongs."""
        state = self._placed.state
        weighs = [
            sum(
                size(one.shape) * one.dtype.itemsize * (2 if one in self._slots else 1)
                for weight in layer
                for one in (weight, *self._slots[weight])
            )
            for layer in self._layers
        ]
        found: dict[Tensor, int] = {}
        for layer, at in zip(self._layers, _balanced(weighs, stages), strict=True):
            for weight in layer:
                found |= {state[one]: at for one in (weight, *self._slots[weight]) if one in state}
        forward = set(grouped(self._placed)["forward"])
        for one in self._tensors:  # what lies behind the weights of a stage is in that or a later one
            if one in forward:
                found[one] = max((found.get(read, 0) for read in one.inputs), default=0)
        made = {new: variable for variable, new in self._placed.updates.items()}
        for one in reversed(self._tensors):  # the backward pass comes to it before it comes to what needs it
            if one.op is not None and one not in forward:
                readers = [found[read] for read in self._users.get(one, []) if read not in forward]
                owned = [
                    found[source]
                    for source in map(_source, one.inputs)
                    if source.variable is not None and source in found
                ]
                variable = made.get(one)
                own = [found[state[variable]]] if variable in state and state[variable] in found else []
                found[one] = max([*readers, *owned], default=0) if not own else own[0]
        return found | {one: 0 for one in self._tensors if one not in found}

    @cached_property
    def _users(self) -> dict[Tensor, list[Tensor]]:
        found: dict[Tensor, list[Tensor]] = {}
        for one in self._tensors:
            for read in one.inputs:
                found.setdefault(read, []).append(one)
        return found

    def _handed_on(self, stage: Mapping[Tensor, int], at: int, rows: int) -> float:
        """Return the bytes of rows that a stage reads of the one before it."""
        crossing = {
            self._views[read]
            for one in self._tensors
            for read in one.inputs
            if stage[one] >= at > stage[self._views[read]] and row_axis(read.shape) is not None and read.op is not None
        }
        return sum(self.nbytes(one, {}, rows) for one in crossing)


def _largest(n: int | Dim, length: int, ranks: int) -> int:
    """Return the largest part of an axis over so many ranks; rows stay together with what is computed of them."""
    scale = n.scale if isinstance(n, Dim) else 1
    return -(-(length // scale) // ranks) * scale if scale else length


def _source(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory one shows."""
    while tensor.op is not None and tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor


def _is_fused(tensor: Tensor) -> bool:
    return isinstance(lowering_of(tensor), _FUSED)


def _balanced(weighs: Sequence[float], parts: int) -> list[int]:
    """Return the number of the part to which each belongs: runs, of which the heaviest weighs as little as possible."""

    def cut(most: float) -> list[int]:
        found, held, part = list[int](), 0.0, 0
        for number, one in enumerate(weighs):
            left = len(weighs) - number
            if found and (held + one > most or left < parts - part) and found[-1] == part:
                part, held = part + 1, 0.0
            found.append(part)
            held += one
        return found

    sums = sorted({sum(weighs[a:b]) for a in range(len(weighs)) for b in range(a + 1, len(weighs) + 1)})
    return next((made for most in sums if (made := cut(most))[-1] < parts), [0] * len(weighs))
