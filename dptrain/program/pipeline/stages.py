"""Pipelines: the layers of a step cut into stages, each on a rank, through which microbatches go one after the other.

The order is 1F1B: a stage works on a backward pass as soon as there is one, so the first of p stages holds p
microbatches at most. A step of m microbatches takes as long as m + p - 1 of them on the slowest stage. For p - 1 of
these a stage waits: the bubble, (p - 1) / (m + p - 1) of a step. Source: D. Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2.
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
    """Return what a step takes in pipelines within nodes, and replicas of them.

    A pipeline has no more stages than layers. Its weights' gradients are all-reduced between replicas at the end.

    Args:
        cost_model: of the data parallel step.
        ranks: of all pipelines.
        rows: of the global batch.
        hardware: the nodes.
    """
    most = math.gcd(ranks, hardware.node)
    stages = next(one for one in range(max(min(most, len(cost_model.layers)), 1), 0, -1) if most % one == 0)
    replicas, stage, alone = ranks // stages, cut(cost_model, stages), {BATCH: 1, MODEL: 1}
    own_rows = -(-rows // replicas)
    microbatches = min(MICROBATCHES * stages, own_rows) if stages > 1 else 1
    micro_rows = -(-own_rows // microbatches)
    groups = grouped(cost_model.placed)
    at_end = {one for name in ("update", "messages") for one in groups.get(name, [])}
    again, once = [0.0] * stages, [0.0] * stages  # for each microbatch, and at the end of a step
    for one, work in cost_model.works(alone, micro_rows).items():
        (once if one in at_end else again)[stage[one]] += hardware.seconds(work) * hardware.busy(ranks)
    sums, messages, waits = [0.0] * stages, [0] * stages, [0.0] * stages
    for tensors, _ in cost_model.buckets(alone, rows) if replicas > 1 else []:
        for at in {stage[one] for one in tensors}:
            nbytes = sum(cost_model.nbytes(one, alone, rows) for one in tensors if stage[one] == at)
            waits[at] += hardware.collective("all_reduce", nbytes, replicas, stages)
            sums[at], messages[at] = sums[at] + nbytes, messages[at] + 1
    handed = max((_handed_on(cost_model, stage, at, micro_rows) for at in range(1, stages)), default=0.0)
    last = max(own + wait for own, wait in zip(once, waits, strict=True))
    hops = 2 * microbatches if stages > 1 else 0
    hop = 2 * (hardware.link.latency + handed / hardware.link.bandwidth) if stages > 1 else 0.0
    held = []
    for at in range(stages):
        own = cost_model.memory(alone, micro_rows, {one for one, number in stage.items() if number == at})
        held.append(replace(own, activations=own.activations * min(stages - at, microbatches)))
    return StepPrediction(
        cost_model.parallelism.name,
        ranks,
        f"{replicas} x {stages}",
        rows,
        (microbatches + stages - 1) * (max(again) + hop) + last + hardware.step,
        microbatches * max(again) + max(once) + hardware.step,
        max(sums) + hops * handed,
        max(messages) + hops,
        max(held, key=lambda one: one.total),
    )


def cut(cost_model: CostModel, stages: int) -> dict[Tensor, int]:
    """Return the stage of each tensor; stages have about as many bytes of weights, gradients and slots."""
    state, slots = cost_model.placed.state, cost_model.slots
    weighs = [
        sum(_nbytes(state[one]) for weight in layer for one in (weight, weight, *slots[weight]) if one in state)
        for layer in cost_model.layers
    ]
    found: dict[Tensor, int] = {}
    parts = balanced(len(weighs), stages, lambda first, end, _: sum(weighs[first:end]))
    for layer, at in zip(cost_model.layers, parts, strict=True):
        found |= {state[one]: at for weight in layer for one in (weight, *slots[weight]) if one in state}
    forward = set(grouped(cost_model.placed)["forward"])
    for one in cost_model.tensors:  # what comes after the weights of a stage is in that or a later one
        if one in forward and (behind := [found[read] for read in one.inputs if read in found]):
            found[one] = max(behind)
    made = {cost_model.placed.updates[one]: found[leaf] for one, leaf in state.items() if leaf in found}
    readers: dict[Tensor, list[Tensor]] = {}
    for one in cost_model.tensors:
        for read in one.inputs:
            readers.setdefault(read, []).append(one)
    for one in reversed(
        cost_model.tensors
    ):  # and the backward pass makes it where it is first needed, or has the weights
        if one.op is not None and one not in forward:
            needed = [found[reader] for reader in readers.get(one, []) if reader not in forward]
            weights = [found[source] for source in map(source_of, one.inputs) if source.op is None and source in found]
            found[one] = made.get(one, max([*needed, *weights], default=0))
    for one in reversed(cost_model.tensors):  # data, and what is made of it alone, is where it is first read
        if one not in found:
            found[one] = min((found[reader] for reader in readers.get(one, [])), default=0)
    return found


def _nbytes(tensor: Tensor) -> float:
    return size(tensor.shape) * tensor.dtype.itemsize


def _handed_on(cost_model: CostModel, stage: Mapping[Tensor, int], at: int, rows: int) -> float:
    """Return the bytes that the forward pass of so many rows hands to a stage: of rows that an earlier one has."""
    forward = grouped(cost_model.placed)["forward"]
    read = {source_of(one) for reader in forward if stage[reader] >= at for one in reader.inputs}
    made = (one for one in read if one.op is not None and stage[one] < at and row_axis(one.shape) is not None)
    return sum(cost_model.nbytes(one, {}, rows) for one in made)
