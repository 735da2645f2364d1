"""Will it scale? Predicts a training step on more ranks.

`parallelism.py` lays out the variables, `place` gives what a rank then computes and sends, `cost_model.py` adds up
operations, bytes, messages and memory, `hardware.py` knows the times of ops and collectives. Here these become a step:

- A rank computes its ops in order. Elementwise ops are fused: a tensor is written where a product, a message or the
  state needs it, and read once by all of them together.
- Messages that are ready together travel in buckets, one after the other along each axis of the mesh, beside the
  backward pass if the device can. Only ops that need a message wait for it.
- A pipeline is cut out of the data-parallel program (`program/pipeline/stages.py`).

Not modelled: stragglers, contention in the network, caches, checkpoints, reading data.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import replace

from dptrain.program.cost.cost_model import CollectiveCall, CostModel, StepPrediction
from dptrain.program.cost.hardware import Hardware
from dptrain.program.cost.parallelism import MODEL, SENT, Parallelism
from dptrain.program.pipeline.stages import predict_pipeline
from dptrain.program.program import Program
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.tensor import Tensor, Variable


class Scaling:
    """A training step in one kind of parallelism on any number of ranks; arguments as for `CostModel`."""

    def __init__(
        self,
        program: Program,
        parallelism: Parallelism,
        slots: Mapping[Variable, Collection[Variable]],
        bucket_bytes: int | None = None,
        comm_dtype: str | None = None,
    ) -> None:
        self.parallelism = parallelism
        self.cost_model = CostModel(program, parallelism, slots, bucket_bytes, comm_dtype)

    def predict(self, ranks: int, rows: int, hardware: Hardware) -> StepPrediction:
        """Predict a step; a node holds at most one group of tensor parallelism or one pipeline."""
        if self.parallelism.scheme == "pipeline":
            return predict_pipeline(self.cost_model, ranks, rows, hardware)
        sharded = any(MODEL in axes for axes in self.parallelism.layouts.values())
        model = math.gcd(ranks, hardware.node) if sharded else 1
        lengths = {BATCH: ranks // model, MODEL: model}
        works = self.cost_model.works(lengths, rows)
        times = {tensor: hardware.seconds(work) * hardware.busy(ranks) for tensor, work in works.items()}
        buckets = [bucket for bucket in self.cost_model.buckets(lengths, rows) if lengths[bucket[1].mesh] > 1]
        return StepPrediction(
            self.parallelism.name,
            ranks,
            f"{lengths[BATCH]} x {model}" if sharded else str(ranks),
            rows,
            self._scheduled(times, buckets, lengths, hardware) + hardware.step,
            sum(times.values()) + hardware.step,
            sum(message.nbytes for _, message in buckets),
            len(buckets),
            self.cost_model.memory(lengths, rows),
        )

    def idle(self, rows: int, hardware: Hardware) -> float:
        """Return the part of a single rank's step in which launches and small products leave the device idle."""
        works = self.cost_model.works({BATCH: 1, MODEL: 1}, rows).values()
        full = replace(hardware, launch=0.0, least=0.0)
        busy, total = (sum(map(machine.seconds, works)) for machine in (full, hardware))
        return 1 - busy / (total + hardware.step)

    def _scheduled(
        self,
        times: Mapping[Tensor, float],
        buckets: Collection[tuple[list[Tensor], CollectiveCall]],
        lengths: Mapping[str, int],
        hardware: Hardware,
    ) -> float:
        """Return when a step behind another ends: ops and messages each run in order, once their operands are ready."""
        timeline = _Timeline(hardware, lengths, self.parallelism.scheme == "hierarchical")
        late = self._late(buckets) if hardware.overlaps and hardware.late else []
        for tensors, message in late:
            timeline.send(tensors, message)
            timeline.ready_at |= {self.cost_model.late[tensor]: timeline.ready_at[tensor] for tensor in tensors}
        stage, sent = self.cost_model.stage, {tensors[0] for tensors, _ in late}
        for number in range(1 + max(stage.values(), default=0)):
            for tensor in self.cost_model.order:
                if stage[tensor] == number and tensor.op not in SENT:
                    timeline.compute(tensor, times.get(tensor, 0.0))
            for tensors, message in buckets:
                if stage[tensors[0]] == number and tensors[0] not in sent:
                    timeline.send(tensors, message)
        return timeline.end

    def _late(
        self, buckets: Collection[tuple[list[Tensor], CollectiveCall]]
    ) -> list[tuple[list[Tensor], CollectiveCall]]:
        """Return the messages of late gathers alone, in the order in which the next step reads what they write."""
        late = self.cost_model.late
        position = {tensor: number for number, tensor in enumerate(self.cost_model.placed.state.values())}
        messages = [bucket for bucket in buckets if all(tensor in late for tensor in bucket[0])]
        return sorted(messages, key=lambda bucket: min(position[late[tensor]] for tensor in bucket[0]))


class _Timeline:
    """When a rank's ops and messages end."""

    def __init__(self, hardware: Hardware, lengths: Mapping[str, int], hierarchical: bool) -> None:
        self._hardware, self._lengths, self._hierarchical = hardware, lengths, hierarchical
        self.ready_at: dict[Tensor, float] = {}
        self._sent_at: dict[str, float] = {}  # of messages along an axis of the mesh
        self._computed, self._ends = 0.0, [0.0]

    @property
    def end(self) -> float:
        """When all have ended."""
        return max(self._computed, *self._sent_at.values(), 0.0)

    def compute(self, tensor: Tensor, seconds: float) -> None:
        """Compute an op behind the others, once its operands are ready."""
        ready = max((self.ready_at.get(read, 0.0) for read in tensor.inputs), default=0.0)
        if tensor.op is not None and tensor.op.is_view and not seconds:  # its readers wait
            self.ready_at[tensor] = ready
            return
        self._computed = max(self._computed, ready) + seconds
        self.ready_at[tensor] = self._computed
        self._ends.append(self._computed)

    def send(self, tensors: Collection[Tensor], message: CollectiveCall) -> None:
        """Send a message behind others along its axis, once its tensors' operands are ready."""
        hardware, lengths = self._hardware, self._lengths
        ready = max((self.ready_at.get(read, 0.0) for tensor in tensors for read in tensor.inputs), default=0.0)
        stride = lengths[MODEL] if message.mesh == BATCH else 1
        took = hardware.collective(
            message.name, message.nbytes, lengths[message.mesh], stride, self._hierarchical, half=message.half
        )
        stream = message.mesh if hardware.axes_apart else ""
        start = max(self._sent_at.get(stream, 0.0), ready if hardware.overlaps else self._computed)
        if not hardware.urgent:
            start = next(iter(self._ends[bisect_right(self._ends, start) :]), start)
        self._sent_at[stream] = start + took
        self.ready_at |= dict.fromkeys(tensors, start + took)
        if not hardware.overlaps:
            self._computed = start + took
