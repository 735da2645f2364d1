"""Will it scale? How long a training step takes on more ranks, before anybody has them.

`parallelism.py` says where variables lie, `place` what a rank then computes and sends, `cost_model.py` adds up its
operations, bytes, messages and memory, and `hardware.py` has the times of ops and collectives. Here these become a
step:

- A rank computes its ops in order. Ops of single elements are fused: a tensor is written where a product, a message or
  the state needs it, and read once by all of them together.
- Messages that are ready together travel in buckets, one bucket after the other, beside the backward pass where the
  device can do that. An op that needs a message waits for it, and nothing else does.
- A pipeline is cut out of the data parallel program (`pipeline.py`).

Left out: stragglers, contention in the network, caches, checkpoints, reading data.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from dptrain.program.cost.cost_model import Demands, Message, Prediction
from dptrain.program.cost.hardware import Machine
from dptrain.program.cost.parallelism import MODEL, SENT, Mode
from dptrain.program.pipeline.stages import predict_pipeline
from dptrain.program.program import Program
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.tensor import Tensor, Variable


class Scaling:
    """A training step in one mode, on any number of ranks.

    Args:
        program: of the global batch, not placed.
        mode: one of `modes`.
        slots: of each trained variable.
        bucket_bytes: of messages that travel together at most; None for any number.

    Attributes:
        mode: as above.
        demands: what a rank does.
    """

    def __init__(
        self,
        program: Program,
        mode: Mode,
        slots: Mapping[Variable, Collection[Variable]],
        bucket_bytes: int | None = None,
    ) -> None:
        self.mode, self.demands = mode, Demands(program, mode, slots, bucket_bytes)

    def predict(self, ranks: int, rows: int, machine: Machine) -> Prediction:
        """Return what a step takes.

        Args:
            ranks: of which a node's are one group of tensor parallelism, or one pipeline, at most.
            rows: of the global batch.
            machine: the nodes.
        """
        if self.mode.way == "pipeline":
            return predict_pipeline(self.demands, ranks, rows, machine)
        sharded = any(MODEL in axes for axes in self.mode.layouts.values())
        model = math.gcd(ranks, machine.node) if sharded else 1
        lengths = {BATCH: ranks // model, MODEL: model}
        works = self.demands.works(lengths, rows)
        times = {one: machine.seconds(work) * machine.busy(ranks) for one, work in works.items()}
        buckets = [one for one in self.demands.buckets(lengths, rows) if lengths[one[1].mesh] > 1]
        return Prediction(
            self.mode.name,
            ranks,
            f"{lengths[BATCH]} x {model}" if sharded else str(ranks),
            rows,
            self._scheduled(times, buckets, lengths, machine) + machine.step,
            sum(times.values()) + machine.step,
            sum(message.nbytes for _, message in buckets),
            len(buckets),
            self.demands.memory(lengths, rows),
        )

    def idle(self, rows: int, machine: Machine) -> float:
        """Return the part of a rank's step, alone, in which launches and small products leave the device idle."""
        works = self.demands.works({BATCH: 1, MODEL: 1}, rows).values()
        full = replace(machine, launch=0.0, least=0.0)
        busy, total = (sum(map(one.seconds, works)) for one in (full, machine))
        return 1 - busy / (total + machine.step)

    def _scheduled(
        self,
        times: Mapping[Tensor, float],
        buckets: Collection[tuple[list[Tensor], Message]],
        lengths: Mapping[str, int],
        machine: Machine,
    ) -> float:
        """Return when a step ends: ops run in order, and messages in order, each when what it needs is there."""
        done: dict[Tensor, float] = {}
        computed = sent = 0.0
        stage, hierarchical = self.demands.stage, self.mode.way == "hierarchical"
        for number in range(1 + max(stage.values(), default=0)):
            for one in self.demands.order:
                if stage[one] == number and one.op not in SENT:
                    computed = max([computed, *(done.get(read, 0.0) for read in one.inputs)]) + times.get(one, 0.0)
                    done[one] = computed
            for tensors, message in buckets:
                if stage[tensors[0]] == number:
                    ready = max(done.get(read, 0.0) for one in tensors for read in one.inputs)
                    stride = lengths[MODEL] if message.mesh == BATCH else 1
                    took = machine.collective(message.name, message.nbytes, lengths[message.mesh], stride, hierarchical)
                    sent = max(sent, ready if machine.overlaps else computed) + took
                    done |= dict.fromkeys(tensors, sent)
                    computed = computed if machine.overlaps else sent
        return max(computed, sent)
