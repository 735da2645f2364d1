"""Where a GPU's messages begin, what they read and write, and the memory that they share with kernels."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition, problems
from dptrain.layers import LSTM
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding.local import MeshPosition
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, BATCH, REDUCE_SCATTER
from dptrain.program.sharding.placement import place
from tests.ops.test_recurrent_on_cuda import program_of as recurrent
from tests.unit.program.sharding.test_local import Deep, of_rank, program_of
from tests.unit.program.sharding.test_mesh import FIRST, Perceptron


def composed(program, rows=4):
    return Composition(program, rows, 0, alone=False)


def messages_of(composition, op):
    return [message for messages in composition.messages for message in messages if message.results[0].op is op]


def test_data_parallel_programs_are_what_they_were_before_their_rank_was_known():
    placed = place(Perceptron(dtype="float32").program)
    compositions = [
        composed(program)
        for program in (placed, of_rank(Perceptron(dtype="float32"), {}, MeshPosition({BATCH: 2}, {BATCH: 0}))[0])
    ]
    assert len({composition.source() for composition in compositions}) == 1
    assert len({(composition.plan.size, tuple(map(len, composition.stages))) for composition in compositions}) == 1
    messages = messages_of(compositions[0], ALL_REDUCE)
    assert compositions[0].messages[0] == messages
    assert all(message.parts == message.results for message in messages)  # the sum is written over the summands


def test_new_weights_of_zero_1_are_gathered_into_the_variables():
    step = Perceptron(dtype="float32")
    composition = composed(program_of({}, FIRST, {BATCH: 2}, step))
    (gathers,) = messages_of(composition, ALL_GATHER)
    assert [composition.targets[tensor].path for tensor in gathers.results] == ["w2", "b2", "w1", "b1"]
    assert composition.in_place >= set(gathers.results)
    (scatter,) = messages_of(composition, REDUCE_SCATTER)
    assert not composition.targets.keys() & {*scatter.parts, *scatter.results}
    # Results lie in the arena like what kernels make; those of all-reduces do not.
    assert {*scatter.parts, *scatter.results, *gathers.parts} <= composition.plan.offsets.keys()
    assert (
        not {tensor for sums in messages_of(composition, ALL_REDUCE) for tensor in sums.results}
        & composition.plan.offsets.keys()
    )


def test_weights_are_given_where_they_lie_as_soon_as_a_stage_begins():
    composition = composed(program_of(FIRST, FIRST, {BATCH: 2}, Perceptron(dtype="float32")))
    gathered = [
        (message.after, [part.variable.path for part in message.parts])
        for message in messages_of(composition, ALL_GATHER)
    ]
    # The last one for the backward pass, which reads it transposed.
    assert gathered == [(0, ["w1", "b1"]), (0, ["w2", "b2"])]
    assert [message.results[-1].shape for message in messages_of(composition, ALL_GATHER)] == [(8,), (5,)]


class Strided(Deep):
    """A step that gathers every other column of its weights."""

    def traced(self):
        (w,) = self.weights.values()

        def step(x):
            return {"y": ops.relu(ops.relu(x @ w[:, 1::2]) @ ops.transpose(w)[::2])}

        return trace(step, {"x": ((Dim.rows(4), 64), self.dtype)})


def test_what_lies_apart_is_copied_in_the_stage_that_sends_it():
    composition = composed(program_of({"w0": (BATCH, None)}, {}, {BATCH: 2}, Strided(1, "float32")))
    assert [[tensor.shape for tensor in message.results] for message in messages_of(composition, ALL_GATHER)] == [
        [(64, 32)],
        [(32, 64)],
    ]
    for stage, messages in zip(composition.stages, composition.messages, strict=True):
        for message in messages:
            (part,) = message.parts
            assert part.shape == (32, 32)
            assert any(part in function.writes for function in stage[message.after - 1].functions)


class Mixed(Deep):
    """A step of layers that compute in bfloat16 with weights of float32."""

    def traced(self):
        def step(x):
            for weight in self.weights.values():
                x = ops.relu(ops.cast(ops.cast(x, "bfloat16") @ ops.cast(weight, "bfloat16"), "float32"))
            loss = ops.mean(x * x)
            loss.backward()
            for weight in self.weights.values():
                weight.assign(weight - 0.1 * weight.value.grad)
            return {"loss": loss}

        return trace(step, {"x": ((Dim.rows(4), 64), self.dtype)})


def test_rounded_weights_travel_and_are_multiplied_in_half_precision():
    """Rounded layer by layer, by a launch of its own, so that they are on their way while the layer before is used."""
    sizes = {}
    for layers in (4, 12):
        weights = dict.fromkeys((f"w{n}" for n in range(layers)), (BATCH, None))
        composition = composed(program_of(weights, {}, {BATCH: 4}, Mixed(layers, "float32")), 1)
        sizes[layers] = composition.plan.size
    assert sizes[12] - sizes[4] < 12 * 64 * 4 * 4  # no part of a layer for each of them, but its activations
    gathers = messages_of(composition, ALL_GATHER)
    assert len(gathers) == 12 + 10  # the last layer is still there; the first one's input needs no gradient
    assert {str(result.dtype) for gather in gathers for result in gather.results} == {"bfloat16"}
    for stage, messages in zip(composition.stages, composition.messages, strict=True):
        for message in set(gathers) & set(messages):
            assert message.after == 1
            assert [function.writes for function in stage[0].functions] == [set(message.parts)]
    assert {name for name in ("product<", "product_half<") if name in composition.source()} == {"product_half<"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_two_gathered_layers_are_there_at_a_time(dtype):
    """One that is used, and one that is on its way."""
    sizes = {}
    for layers in (4, 12):
        weights = dict.fromkeys((f"w{n}" for n in range(layers)), (BATCH, None))
        sizes[layers] = composed(program_of(weights, {}, {BATCH: 4}, Deep(layers, dtype)), 1).plan.size
    one_layer = 64 * 64 * np.dtype(dtype).itemsize
    assert sizes[12] - sizes[4] < one_layer / 4
    assert 2 * one_layer < sizes[12] < 4 * one_layer


def test_a_program_always_has_one_layout():
    def layout():
        def step(x):
            roots = [ops.sqrt(x + number) for number in range(12)]
            sums = [ops.sum(root, axis=-1, keepdims=True) for root in roots]
            return {"y": sum(root @ ops.transpose(root) * total for root, total in zip(roots, sums, strict=True))}

        composition = composed(trace(step, {"x": ((4, 8), np.float32)}))
        numbers = {tensor: number for number, tensor in enumerate(composition.program.tensors)}
        return sorted((numbers.get(key, -1), str(key), start) for key, start in composition.plan.offsets.items())

    assert len({str(layout()) for _ in range(8)}) == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_products_that_auto_measures_are_those_of_the_program(policy):
    """Also those of a loop's steps, and of all its steps together."""
    program, _ = recurrent(LSTM(5, dtype=policy), 4, 3, 6)
    asked = set()

    def provider(problem):
        asked.add(problem)
        return "dptrain"

    products = {"precision": "float32", "of_halves": "half"}
    Composition(program, 4, provider=provider, **products)
    assert set(problems(program, 4, **products)) == asked
    assert {problem.dtype for problem in asked} == {"float32" if policy == "float32" else "bfloat16"}
    rows_of_steps = {problem.sizes[-1] for problem in asked}
    assert 3 * 4 in rows_of_steps
