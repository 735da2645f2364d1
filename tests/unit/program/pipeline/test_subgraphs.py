"""Programs cut into the subgraphs of a pipeline's stages compute what they compute as a whole."""

import itertools

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.models.explaining import program_of
from dptrain.program.execute import evaluate
from dptrain.program.pipeline.order import one_forward_one_backward
from dptrain.program.pipeline.stage_assignment import assigned, cut_into_stages
from dptrain.program.pipeline.subgraphs import FIRST, in_microbatches, subgraphs_of

ROWS = 7


def model(*stack, loss="sparse_categorical_crossentropy", **optimizer):
    dp.utils.set_random_seed(1)
    made = dp.Sequential([dp.Input((5,)), *stack, layers.Dense(3, "softmax")])
    made.compile(dp.optimizers.Adam(0.1, **optimizer), loss, metrics=["accuracy"], dtype="float64")
    return made


def perceptron():
    return model(layers.Dense(6, "relu", kernel_regularizer="l2"), layers.Dense(4, "tanh"), global_clipnorm=0.01)


def values(program, rows=slice(0, ROWS)):
    rng = np.random.default_rng(3)
    data = {"x": rng.normal(size=(ROWS, 5)), "y": rng.integers(0, 3, ROWS)}
    return {name: data[name][rows] for name in program.inputs if name in data}


def slots_of(made):
    return {slot: weight for slot, weight in made.optimizer._all_slots}


def run(tasks, state, cuts):
    """Execute subgraphs one after the other; return what stages have made of outputs, and change the state."""
    held, made = {}, {}
    for task in tasks:
        subgraph, mine = task.subgraph, held.setdefault((task.subgraph.stage, task.microbatch), {})
        for name, source in subgraph.receives.items():
            mine[name] = held[source, task.microbatch]["given", name]
        rows = cuts[task.microbatch]
        data = values(subgraph.program, slice(*rows)) | {FIRST: np.array(task.microbatch == 0)}
        inputs = {name: mine[name] if name in mine else data[name] for name in subgraph.program.inputs}
        own = {one: state[subgraph.stage][one] for one in subgraph.program.state}
        found, new = evaluate(subgraph.program, inputs, own, rows=rows[1] - rows[0], first_row=rows[0])
        mine |= found | {("given", name): found[name] for name in subgraph.sends}
        for name in subgraph.frees:
            mine.pop(name, None)
        state[subgraph.stage] |= new
        made |= {(subgraph.stage, name): one for name, one in found.items()}
    return made


def agree(program, owners, stages, tasks, cuts):
    outputs, updates = evaluate(program, values(program))
    state = [{one: one.numpy() for one in program.state} for _ in range(stages)]
    made = run(tasks, state, cuts)
    for name in program.outputs:
        for stage in range(stages):
            np.testing.assert_allclose(made[stage, name], outputs[name], rtol=1e-12)
    for one, new in updates.items():
        for stage in [owners[one]] if one in owners else range(stages):
            np.testing.assert_allclose(state[stage][one], new, rtol=1e-12, atol=1e-14, err_msg=one.path)


def in_turn(subgraphs, microbatches, stages):
    return one_forward_one_backward(subgraphs, microbatches, stages, dict.fromkeys(subgraphs, 1))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_stage_computes_what_the_result_is_that_of_the_whole(seed):
    """The rules of `cutting` say what is fast, not what is right: here stages are drawn for each tensor."""
    rng, program = np.random.default_rng(seed), program_of(perceptron(), ROWS)
    variables = [one for one in program.state if rng.random() < 0.7]
    owners = {one: int(rng.integers(3)) for one in variables}
    where = assigned(program, owners)
    where = {one: stage if one.op is None or seed == 0 else int(rng.integers(3)) for one, stage in where.items()}
    subgraphs = subgraphs_of(program, where, owners, 3)
    agree(program, owners, 3, in_turn(subgraphs, 1, 3), [(0, ROWS)])


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 7)])
def test_sums_over_microbatches_are_those_over_the_batch(stages, microbatches):
    made = perceptron()
    program, slots = program_of(made, ROWS), slots_of(made)
    weights = cut_into_stages(program, made.weights, {}, stages, ROWS, microbatches)
    owners = weights | {slot: weights[weight] for slot, weight in slots.items()}
    programs = in_microbatches(program, assigned(program, owners), alone=True)
    known = owners | programs.owners
    each, once = (
        subgraphs_of(one, programs.stages, known, stages) for one in (programs.per_microbatch, programs.per_step)
    )
    ends = np.linspace(0, ROWS, microbatches + 1).astype(int)
    cuts = list(itertools.pairwise(ends))
    state = [{one: one.numpy() for one in program.state} for _ in range(stages)]
    for own in state:
        own |= {
            one: np.full(one.shape, np.nan) for one in programs.per_microbatch.updates
        }  # what an interrupted step leaves
    run(in_turn(each, microbatches, stages), state, cuts)
    found = run(in_turn(once, 1, stages), state, [(0, ROWS)])
    outputs, updates = evaluate(program, values(program))
    assert {name for _, name in found} >= set(program.outputs)
    assert all(np.allclose(found[0, name], one, rtol=1e-12) for name, one in outputs.items() if name in program.outputs)
    for one, new in updates.items():
        for stage in [owners[one]] if one in owners else range(stages):
            np.testing.assert_allclose(state[stage][one], new, rtol=1e-12, atol=1e-14, err_msg=one.path)
    forward = [one for one in each if one.sends and not one.receives]
    assert [list(one.sends.values()) for one in forward] == [[[1]]], "one tensor goes on to the next stage"
    assert all(len(one.sends) <= 1 for one in each)


def test_a_layer_that_needs_the_whole_batch_is_named():
    made = model(layers.Dense(6), layers.BatchNormalization(name="norm"))
    program = program_of(made, ROWS)
    with pytest.raises(ConfigError, match="layer 'norm' needs all samples of a batch at once, which microbatches are"):
        in_microbatches(program, {}, alone=True)
