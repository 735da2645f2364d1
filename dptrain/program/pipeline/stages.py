"""Predicts steps of pipelines: layers cut into stages, each on a rank, through which microbatches pass.

In 1F1B order a stage starts a backward pass as soon as it can, so the first of p stages holds at most p microbatches. A
step of m microbatches takes as long as m + p - 1 of them on the slowest stage. For p - 1 of these a stage waits: the
bubble, (p - 1) / (m + p - 1) of a step. Source: D. Narayanan et al., "Efficient large-scale language model training on
GPU clusters using Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from dptrain.program.cost.cost_model import CostModel, StepPrediction, source_of
from dptrain.program.cost.hardware import Hardware
from dptrain.program.cost.parallelism import MODEL
from dptrain.program.explain import grouped
from dptrain.program.pipeline.stage_assignment import balanced
from dptrain.program.shapes import row_axis, size
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.tensor import Tensor

# Microbatches for each stage: enough for a bubble of a fifth.
MICROBATCHES = 4


def predict_pipeline(cost_model: CostModel, ranks: int, rows: int, hardware: Hardware) -> StepPrediction:
    """Predict a step of pipelines within nodes, and of their replicas, from the cost model of the data-parallel step.

    A pipeline has at most as many stages as layers. Gradients are all-reduced between replicas at the end.
    """
    most = math.gcd(ranks, hardware.node)
    stages = next(count for count in range(max(min(most, len(cost_model.layers)), 1), 0, -1) if most % count == 0)
    replicas, stage, alone = ranks // stages, cut(cost_model, stages), {BATCH: 1, MODEL: 1}
    own_rows = -(-rows // replicas)
    microbatches = min(MICROBATCHES * stages, own_rows) if stages > 1 else 1
    micro_rows = -(-own_rows // microbatches)
    groups = grouped(cost_model.placed)
    at_end = {tensor for name in ("update", "messages") for tensor in groups.get(name, [])}
    per_microbatch, per_step = [0.0] * stages, [0.0] * stages  # for each microbatch, and at the end of a step
    for tensor, work in cost_model.works(alone, micro_rows).items():
        (per_step if tensor in at_end else per_microbatch)[stage[tensor]] += hardware.seconds(work) * hardware.busy(
            ranks
        )
    sums, messages, messages_seconds = [0.0] * stages, [0] * stages, [0.0] * stages
    for tensors, _ in cost_model.buckets(alone, rows) if replicas > 1 else []:
        for at in {stage[tensor] for tensor in tensors}:
            nbytes = sum(cost_model.nbytes(tensor, alone, rows) for tensor in tensors if stage[tensor] == at)
            messages_seconds[at] += hardware.collective("all_reduce", nbytes, replicas, stages)
            sums[at], messages[at] = sums[at] + nbytes, messages[at] + 1
    sent_bytes = max((_activation_bytes(cost_model, stage, at, micro_rows) for at in range(1, stages)), default=0.0)
    last = max(seconds + wait for seconds, wait in zip(per_step, messages_seconds, strict=True))
    hops = 2 * microbatches if stages > 1 else 0
    hop = 2 * (hardware.link.latency + sent_bytes / hardware.link.bandwidth) if stages > 1 else 0.0
    usages = []
    for at in range(stages):
        usage = cost_model.memory(alone, micro_rows, {tensor for tensor, number in stage.items() if number == at})
        usages.append(replace(usage, activations=usage.activations * min(stages - at, microbatches)))
    return StepPrediction(
        cost_model.parallelism.name,
        ranks,
        f"{replicas} x {stages}",
        rows,
        (microbatches + stages - 1) * (max(per_microbatch) + hop) + last + hardware.step,
        microbatches * max(per_microbatch) + max(per_step) + hardware.step,
        max(sums) + hops * sent_bytes,
        max(messages) + hops,
        max(usages, key=lambda usage: usage.total),
    )


def cut(cost_model: CostModel, stages: int) -> dict[Tensor, int]:
    """Return the stage of each tensor, with about equal bytes of weights, gradients and slots."""
    state, slots = cost_model.placed.state, cost_model.slots
    weighs = [
        sum(
            _nbytes(state[variable])
            for weight in layer
            for variable in (weight, weight, *slots[weight])
            if variable in state
        )
        for layer in cost_model.layers
    ]
    stage_of: dict[Tensor, int] = {}
    parts = balanced(len(weighs), stages, lambda first, end, _: sum(weighs[first:end]))
    for layer, at in zip(cost_model.layers, parts, strict=True):
        stage_of |= {
            state[variable]: at for weight in layer for variable in (weight, *slots[weight]) if variable in state
        }
    forward = set(grouped(cost_model.placed)["forward"])
    for tensor in cost_model.tensors:  # tensors after the weights of a stage are in that or a later one
        if tensor in forward and (behind := [stage_of[read] for read in tensor.inputs if read in stage_of]):
            stage_of[tensor] = max(behind)
    update_stages = {
        cost_model.placed.updates[tensor]: stage_of[leaf] for tensor, leaf in state.items() if leaf in stage_of
    }
    readers: dict[Tensor, list[Tensor]] = {}
    for tensor in cost_model.tensors:
        for read in tensor.inputs:
            readers.setdefault(read, []).append(tensor)
    for tensor in reversed(
        cost_model.tensors
    ):  # the backward pass computes tensors where they are first needed, or where the weights are
        if tensor.op is not None and tensor not in forward:
            needed_stages = [stage_of[reader] for reader in readers.get(tensor, []) if reader not in forward]
            weights = [
                stage_of[source] for source in map(source_of, tensor.inputs) if source.op is None and source in stage_of
            ]
            stage_of[tensor] = update_stages.get(tensor, max([*needed_stages, *weights], default=0))
    for tensor in reversed(cost_model.tensors):  # data, and tensors of data alone, are where they are first read
        if tensor not in stage_of:
            stage_of[tensor] = min((stage_of[reader] for reader in readers.get(tensor, [])), default=0)
    return stage_of


def _nbytes(tensor: Tensor) -> float:
    return size(tensor.shape) * tensor.dtype.itemsize


def _activation_bytes(cost_model: CostModel, stage: Mapping[Tensor, int], at: int, rows: int) -> float:
    """Return the bytes of activations that the forward pass of so many rows sends to a stage."""
    forward = grouped(cost_model.placed)["forward"]
    read = {source_of(operand) for reader in forward if stage[reader] >= at for operand in reader.inputs}
    sent = (
        tensor for tensor in read if tensor.op is not None and stage[tensor] < at and row_axis(tensor.shape) is not None
    )
    return sum(cost_model.nbytes(operand, {}, rows) for operand in sent)
