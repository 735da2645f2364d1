"""What a training step takes in each mode of parallelism: exact messages, shares and memory, and times that follow."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.program.cost.cost_model import CostModel
from dptrain.program.cost.hardware import Hardware, Link
from dptrain.program.cost.parallelism import MODEL, kinds_of_parallelism
from dptrain.program.cost.scaling import Scaling
from dptrain.program.explain import flops
from dptrain.program.lowering import Product, lowering_of
from dptrain.program.pipeline.stages import cut
from dptrain.program.sharding.mesh import BATCH
from tests.unit.program.sharding.test_mesh import Perceptron

# Parameters of 6-8-5 in float64: kernels 48 and 40, biases 8 and 5.
P = 48 + 8 + 40 + 5
ROWS = 12
MACHINE = Hardware({"float32": 1e9}, 1e9, 0.0, 0.0, 0.0, 4, Link(1e9, 1e-6), Link(1e8, 1e-5))
STEP = Perceptron()
SLOTS = {weight: list(STEP.optimizer._slots_of(weight).values()) for weight in STEP.weights.values()}
MODES = {mode.name: mode for mode in kinds_of_parallelism(STEP.program, SLOTS)}
SCALING = {name: Scaling(STEP.program, mode, SLOTS) for name, mode in MODES.items()}


def messages(name, batch, model=1, **options):
    """Return (collective, axis of the mesh, bytes) of a step's messages but those of one number, such as the loss."""
    cost_model = CostModel(STEP.program, MODES[name], SLOTS, **options)
    collectives = [collective for _, collective in cost_model.buckets({BATCH: batch, MODEL: model}, ROWS)]
    return [
        (collective.name, collective.mesh, collective.nbytes)
        for collective in collectives
        if collective.nbytes > 8 or collective.mesh != BATCH
    ]


def test_messages_are_those_computed_by_hand():
    """8 bytes a number; the loss, 8 bytes, travels with gradients that are all-reduced."""
    assert messages("data parallel", 4) == [("all_reduce", BATCH, 8 * P + 8)]
    assert messages("hierarchical all-reduce", 4) == messages("data parallel", 4)
    assert messages("ZeRO-1", 4) == [("reduce_scatter", BATCH, 8 * P), ("all_gather", BATCH, 8 * P)]
    # The second kernel is gathered for the forward and for the backward pass.
    assert messages("FSDP", 4) == [("all_gather", BATCH, 8 * (P + 40)), ("reduce_scatter", BATCH, 8 * P)]
    # Logits of 12 rows over the model's axis; over the batch's a rank's part of gradients: 6x2, 2, 2x5 and 5.
    over_batch = 8 * (12 + 2 + 10 + 5) + 8
    assert messages("tensor parallel", 1, 4)[0] == ("all_reduce", MODEL, 8 * 12 * 5)
    assert messages("tensor parallel", 2, 4) == [("all_reduce", MODEL, 8 * 6 * 5), ("all_reduce", BATCH, over_batch)]


def test_buckets_go_out_in_the_order_of_the_backward_pass():
    """The second layer's gradients are known first."""
    buckets = messages("data parallel", 4, bucket_bytes=8 * 56)
    assert [nbytes for _, _, nbytes in buckets] == [8 * (1 + 5 + 40), 8 * (48 + 8)]


def test_a_pipeline_hands_on_activations():
    """Two stages, the cut behind the first kernel: 8 microbatches of 2 rows, 8 numbers each, there and back."""
    prediction = SCALING["pipeline"].predict(2, ROWS, MACHINE)
    assert (prediction.sent, prediction.messages) == (8 * 2 * (2 * 8 * 8), 16)
    # 3 x 8 rows more for the ranks' 4 pipelines' gradients: those of the larger stage, and the loss.
    assert SCALING["pipeline"].predict(8, ROWS, replace(MACHINE, node=2)).mesh == "4 x 2"


def test_memory_by_hand():
    def memory(name, batch, model=1):
        return SCALING[name].cost_model.memory({BATCH: batch, MODEL: model}, ROWS)

    others = 8 * 2  # learning rate and iterations
    whole_one = memory("data parallel", 4)
    assert (whole_one.weights, whole_one.gradients, whole_one.slots) == (8 * P + others, 8 * P, 2 * 8 * P)
    # Parts of axes of 8, 8, 8 and 5 over 4 ranks, the largest: 2 of each.
    part = 8 * (6 * 2 + 2 + 2 * 5 + 2)
    zero, fsdp = memory("ZeRO-1", 4), memory("FSDP", 4)
    assert (zero.weights, zero.gradients, zero.slots) == (8 * P + others, 8 * P, 2 * part)
    assert (fsdp.weights, fsdp.gradients, fsdp.slots) == (part + others, part, 2 * part)
    assert zero.activations == whole_one.activations
    assert fsdp.activations == whole_one.activations + 2 * 8 * (48 + 8 + 0 * 40)  # each variable is a layer here
    assert memory("tensor parallel", 1, 4).weights == 8 * (12 + 2 + 10 + 5) + others
    assert whole_one.total == sum((whole_one.weights, whole_one.gradients, whole_one.slots, whole_one.activations))


def test_ranks_share_the_operations():
    """Products are divided in every mode; the update is whole in data parallelism, divided in the others."""
    for name, (batch, model) in {"data parallel": (4, 1), "FSDP": (4, 1), "tensor parallel": (1, 4)}.items():
        works = SCALING[name].cost_model.works({BATCH: batch, MODEL: model}, 11)
        alone = SCALING[name].cost_model.works({BATCH: 1, MODEL: 1}, 11)
        part = 1 / 4 if model == 4 else 3 / 11  # of 11 rows a rank has 3 at most
        products = [tensor for tensor in works if isinstance(lowering_of(tensor), Product)]
        assert len(products) == 5
        for product in products:
            assert works[product].operations == pytest.approx(part * flops(product))
            assert alone[product].operations == flops(product)
    plain, zero = (
        SCALING[name].cost_model.works({BATCH: 4, MODEL: 1}, ROWS).values() for name in ("data parallel", "ZeRO-1")
    )
    assert sum(work.operations for work in zero) < sum(work.operations for work in plain)
    # Of four arrays of P numbers that Adam reads, and three that it writes, a rank has a part of each.
    saved = sum(work.nbytes for work in plain) - sum(work.nbytes for work in zero)
    assert saved >= 7 * 8 * (P - (6 * 2 + 2 + 2 * 5 + 2))


def test_one_rank_takes_the_same_in_all_modes():
    predictions = [scaling.predict(1, ROWS, MACHINE) for scaling in SCALING.values()]
    assert all(prediction.seconds == pytest.approx(predictions[0].seconds, rel=0.01) for prediction in predictions)
    assert all(prediction.memory == predictions[0].memory and prediction.sent == 0 for prediction in predictions)
    assert predictions[0].efficiency(predictions[0]) == 1


def test_what_overlaps_costs_nothing():
    """A step is no shorter than compute or messages, and with overlap no longer than one after the other."""
    for name in ("data parallel", "ZeRO-1", "FSDP"):
        scaling = Scaling(STEP.program, MODES[name], SLOTS, 300)
        overlapped, sequential = (
            scaling.predict(4, ROWS, replace(MACHINE, overlaps=overlaps)) for overlaps in (True, False)
        )
        buckets = scaling.cost_model.buckets({BATCH: 4, MODEL: 1}, ROWS)
        sending = sum(MACHINE.collective(collective.name, collective.nbytes, 4) for _, collective in buckets)
        assert sequential.seconds == pytest.approx(sequential.compute + sending)
        assert max(overlapped.compute, sending) <= overlapped.seconds < sequential.seconds


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(list(MODES)), power=st.integers(0, 8), rows=st.integers(1, 10**6), factor=st.integers(2, 9))
def test_times_and_memory_are_monotone(name, power, rows, factor):
    scaling, ranks = SCALING[name], 2**power
    prediction = scaling.predict(ranks, rows, MACHINE)
    assert prediction.seconds <= scaling.predict(ranks, factor * rows, MACHINE).seconds * (1 + 1e-9)
    faster = replace(MACHINE, rates={"float32": factor * 1e9}, bandwidth=factor * 1e9)
    assert scaling.predict(ranks, rows, faster).seconds <= prediction.seconds * (1 + 1e-9)
    wider = replace(MACHINE, link=Link(factor * 1e9, 1e-6), network=Link(factor * 1e8, 1e-5))
    assert scaling.predict(ranks, rows, wider).seconds <= prediction.seconds * (1 + 1e-9)
    doubled = scaling.predict(2 * ranks, rows, MACHINE)
    assert doubled.memory.total <= prediction.memory.total + 2 * 8 * P  # layers that FSDP gathers
    assert prediction.compute <= prediction.seconds * (1 + 1e-9)
    assert 0 < prediction.efficiency(scaling.predict(1, rows, MACHINE)) <= 1 + 1e-9


def test_stages_follow_the_layers():
    cost_model = SCALING["pipeline"].cost_model
    stage, weights = cut(cost_model, 4), STEP.weights
    assert [stage[cost_model.placed.state[weight]] for weight in weights.values()] == [0, 1, 2, 3]
    for number, weight in enumerate(weights.values()):
        new = (cost_model.placed.updates[variable] for variable in (weight, *SLOTS[weight]))
        assert {stage[tensor] for tensor in new} == {number}, "an update is where its weight is"
    products = [stage[tensor] for tensor in cost_model.order if isinstance(lowering_of(tensor), Product)]
    assert sorted(products) == [0, 0, 2, 2, 2]
