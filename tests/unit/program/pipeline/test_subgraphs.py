"""Programs cut into the subgraphs of a pipeline's stages compute what they compute as a whole."""

import itertools

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.models.explaining import program_of
from dptrain.program.body import has_body
from dptrain.program.execute import evaluate
from dptrain.program.pipeline.order import one_forward_one_backward
from dptrain.program.pipeline.stage_assignment import assigned, cut_into_stages
from dptrain.program.pipeline.subgraphs import FIRST, in_microbatches, subgraphs_of

ROWS = 7


def model(*stack, loss="sparse_categorical_crossentropy", **optimizer):
    dp.utils.set_random_seed(1)
    network = dp.Sequential([dp.Input((5,)), *stack, layers.Dense(3, "softmax")])
    network.compile(dp.optimizers.Adam(0.1, **optimizer), loss, metrics=["accuracy"], dtype="float64")
    return network


def perceptron():
    return model(layers.Dense(6, "relu", kernel_regularizer="l2"), layers.Dense(4, "tanh"), global_clipnorm=0.01)


def recurrent():
    """Loops that go on from one another, forwards and backwards, of which one has a layer of its own beside it."""
    stack = [layers.Reshape((5, 1)), layers.LSTM(4, return_sequences=True, kernel_regularizer="l2")]
    return model(*stack, layers.Bidirectional(layers.GRU(3)), layers.Dense(4, "tanh"), global_clipnorm=0.01)


class Chosen(layers.Layer):
    """A layer or another, by the weights of the first."""

    def __init__(self, units):
        super().__init__()
        self.first, self.second = layers.Dense(units, "tanh"), layers.Dense(units, "relu")

    def call(self, x):
        first = self.first(x)  # which also makes its weights
        return ops.cond(ops.sum(self.first.kernel) > 0, lambda: self.second(x), lambda: ops.sqrt(2 + first) * first)

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.first.units)


def branching():
    return model(Chosen(6), Chosen(4), layers.Dense(4, "tanh"), global_clipnorm=0.01)


NETWORKS = [perceptron, recurrent, branching]


def loops(program):
    return {tensor.node for tensor in program.tensors if has_body(tensor)}


def values(program, rows=slice(0, ROWS)):
    rng = np.random.default_rng(3)
    data = {"x": rng.normal(size=(ROWS, 5)), "y": rng.integers(0, 3, ROWS)}
    return {name: data[name][rows] for name in program.inputs if name in data}


def slots_of(network):
    return {slot: weight for slot, weight in network.optimizer._all_slots}


def run(tasks, state, cuts):
    """Execute subgraphs one after the other; return what stages have made of outputs, and change the state."""
    held_tensors, stage_outputs = {}, {}
    for task in tasks:
        subgraph, tensors = task.subgraph, held_tensors.setdefault((task.subgraph.stage, task.microbatch), {})
        for name, source in subgraph.receives.items():
            tensors[name] = held_tensors[source, task.microbatch]["given", name]
        rows = cuts[task.microbatch]
        data = values(subgraph.program, slice(*rows)) | {FIRST: np.array(task.microbatch == 0)}
        inputs = {name: tensors[name] if name in tensors else data[name] for name in subgraph.program.inputs}
        own_state = {variable: state[subgraph.stage][variable] for variable in subgraph.program.state}
        outputs, new = evaluate(subgraph.program, inputs, own_state, rows=rows[1] - rows[0], first_row=rows[0])
        tensors |= outputs | {("given", name): outputs[name] for name in subgraph.sends}
        for name in subgraph.frees:
            tensors.pop(name, None)
        state[subgraph.stage] |= new
        stage_outputs |= {(subgraph.stage, name): value for name, value in outputs.items()}
    return stage_outputs


def agree(program, owners, stages, tasks, cuts):
    outputs, updates = evaluate(program, values(program))
    state = [{variable: variable.numpy() for variable in program.state} for _ in range(stages)]
    stage_outputs = run(tasks, state, cuts)
    for name in program.outputs:
        for stage in range(stages):
            np.testing.assert_allclose(stage_outputs[stage, name], outputs[name], rtol=1e-12)
    for variable, new in updates.items():
        for stage in [owners[variable]] if variable in owners else range(stages):
            np.testing.assert_allclose(state[stage][variable], new, rtol=1e-12, atol=1e-14, err_msg=variable.path)


def in_turn(subgraphs, microbatches, stages):
    return one_forward_one_backward(subgraphs, microbatches, stages, dict.fromkeys(subgraphs, 1))


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_stage_computes_what_the_result_is_that_of_the_whole(seed, make):
    """The rules of `cutting` say what is fast, not what is right: here stages are drawn for each tensor."""
    rng, program = np.random.default_rng(seed), program_of(make(), ROWS)
    variables = [variable for variable in program.state if rng.random() < 0.7]
    owners = {variable: int(rng.integers(3)) for variable in variables}
    where = assigned(program, owners)
    where = {
        tensor: stage if tensor.op is None or seed == 0 else int(rng.integers(3)) for tensor, stage in where.items()
    }
    subgraphs = subgraphs_of(program, where, owners, 3)
    agree(program, owners, 3, in_turn(subgraphs, 1, 3), [(0, ROWS)])


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 7)])
def test_sums_over_microbatches_are_those_over_the_batch(stages, microbatches, make):
    network = make()
    program, slots = program_of(network, ROWS), slots_of(network)
    weights = cut_into_stages(program, network.weights, {}, stages, ROWS, microbatches)
    owners = weights | {slot: weights[weight] for slot, weight in slots.items()}
    programs = in_microbatches(program, assigned(program, owners), alone=True)
    all_owners = owners | programs.owners
    per_microbatch, per_step = (
        subgraphs_of(cut_program, programs.stages, all_owners, stages)
        for cut_program in (programs.per_microbatch, programs.per_step)
    )
    ends = np.linspace(0, ROWS, microbatches + 1).astype(int)
    cuts = list(itertools.pairwise(ends))
    state = [{variable: variable.numpy() for variable in program.state} for _ in range(stages)]
    for stage_state in state:
        stage_state |= {
            variable: np.full(variable.shape, np.nan) for variable in programs.per_microbatch.updates
        }  # what an interrupted step leaves
    run(in_turn(per_microbatch, microbatches, stages), state, cuts)
    stage_outputs = run(in_turn(per_step, 1, stages), state, [(0, ROWS)])
    outputs, updates = evaluate(program, values(program))
    assert {name for _, name in stage_outputs} >= set(program.outputs)
    assert all(
        np.allclose(stage_outputs[0, name], value, rtol=1e-12)
        for name, value in outputs.items()
        if name in program.outputs
    )
    for variable, new in updates.items():
        for stage in [owners[variable]] if variable in owners else range(stages):
            np.testing.assert_allclose(state[stage][variable], new, rtol=1e-12, atol=1e-14, err_msg=variable.path)
    all_loops = [node for subgraph in per_microbatch for node in loops(subgraph.program)]
    assert len(all_loops) == len(loops(program)) == {recurrent: 6, branching: 8}.get(make, 0)  # each on one stage
    if make is not perceptron:
        return
    forward = [subgraph for subgraph in per_microbatch if subgraph.sends and not subgraph.receives]
    assert [list(subgraph.sends.values()) for subgraph in forward] == [[[1]]], "one tensor goes on to the next stage"
    assert all(len(subgraph.sends) <= 1 for subgraph in per_microbatch)


def test_a_layer_that_needs_the_whole_batch_is_named():
    network = model(layers.Dense(6), layers.BatchNormalization(name="norm"))
    program = program_of(network, ROWS)
    with pytest.raises(ConfigError, match="layer 'norm' needs the whole batch at once, which microbatches"):
        in_microbatches(program, {}, alone=True)
