"""What a rank of a mesh executes: programs of its own parts, whose weights are gathered while they are needed."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.backend.cpu import compiled
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.backend.cpu.compiled import lowered, planned
from dptrain.backend.cuda.compose import Composition
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.optimizers import SGD, Adagrad, Adam, Muon, RMSprop, muon
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.passes import rewritten
from dptrain.program.program import trace
from dptrain.program.sharding import messages
from dptrain.program.sharding.local import MeshPosition, localized
from dptrain.program.sharding.mesh import ALL_GATHER, BATCH, REDUCE_SCATTER
from dptrain.program.sharding.messages import SENT, levels, stages
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, Variable
from tests.sample import examples, sample
from tests.thread_ranks import on_mesh
from tests.unit.program.sharding.test_mesh import BOTH, DATA, FIRST, ROWS, TENSOR, Perceptron

FORMS = {
    "data parallel": ({}, {}, {"batch": 3}),
    "ZeRO-1": ({}, FIRST, {"batch": 3}),
    "FSDP": (FIRST, FIRST, {"batch": 3}),
    "tensor parallel": (TENSOR, TENSOR, {"batch": 1, "model": 2}),
    "2 x 2": (BOTH, BOTH, {"batch": 2, "model": 2}),
    "FSDP on a mesh with an axis that nothing is sharded over": (FIRST, FIRST, {"model": 2, "batch": 2}),
}


def of_rank(step, layouts, at, comm_dtype=None):
    """Return the program of a rank, and its parts of variables."""
    parts = {
        variable: Variable(variable.numpy()[at.key(variable.shape, axes)], variable.path)
        for variable, axes in layouts.items()
        if any(axes)
    }
    if hasattr(step, "optimizer"):
        slots = {weight: [*step.optimizer._slots_of(weight).values()] for weight in step.weights.values()}
    else:
        slots = {step.weights[name]: [slot] for name, slot in getattr(step, "slots", {}).items()}
    return localized(place(step.program, layouts=layouts, slots=slots, comm_dtype=comm_dtype), at, parts), parts


def assert_trains(
    comm, layouts_of, weighted=False, compiled=True, steps=3, optimizer=Adam, comm_dtype=None, rtol=1e-12
):
    """Assert that ranks get to the weights and results that one device gets to; return the program of this rank."""
    alone, step = (Perceptron(weighted, optimizer(0.01)) for _ in range(2))
    state = {variable: variable.numpy() for variable in alone.program.state}
    for _ in range(steps):
        outputs, updates = evaluate(alone.program, DATA, state)
        state |= updates
    layouts = layouts_of(step)
    at = MeshPosition(comm.lengths, comm.coordinates)
    program, parts = of_rank(step, layouts, at, comm_dtype)
    start, stop = cut(0, ROWS, comm.replicas)[comm.replica]
    inputs = {name: array[start:stop] for name, array in DATA.items()}
    backend = CpuBackend(np.float64, jit_compile=compiled)
    executable = backend.executable(program, inputs, rows=stop - start, first_row=start, comm=comm)
    executable.run([0] * steps)
    np.testing.assert_allclose(executable.outputs["loss"], outputs["loss"], rtol=rtol)
    np.testing.assert_allclose(executable.outputs["logits"], outputs["logits"][start:stop], rtol=rtol, atol=rtol / 10)
    for variable, other in zip(step.program.state, alone.program.state, strict=True):
        key = at.key(variable.shape, layouts[variable]) if variable in parts else ()
        actual = parts.get(variable, variable).numpy()
        np.testing.assert_allclose(actual, state[other][key], rtol=rtol, atol=rtol / 10, err_msg=variable.path)
    return program


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", sample(FORMS, 2))
def test_ranks_get_where_one_gets(form, weighted, compiled):
    weights, slots, lengths = FORMS[form]
    on_mesh(lambda comm: assert_trains(comm, lambda step: step.layouts(weights, slots), weighted, compiled), **lengths)


AXES = st.sampled_from([None, BATCH, "model"])


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), weighted=st.booleans())
def test_any_layout_on_any_mesh(data, weighted):
    """By NumPy: each rank's code is another one where parts are uneven."""
    lengths = {mesh: data.draw(st.integers(1, 3), label=mesh) for mesh in (BATCH, "model")}
    chosen = {}
    for number, variable in enumerate(Perceptron(weighted).program.state):
        axes = [data.draw(AXES, label=variable.path) if n >= 3 else None for n in variable.shape]
        chosen[number] = tuple(None if mesh in axes[:axis] else mesh for axis, mesh in enumerate(axes))

    def layouts(step):
        return {variable: chosen[number] for number, variable in enumerate(step.program.state)}

    on_mesh(lambda comm: assert_trains(comm, layouts, weighted, compiled=False), **lengths)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(RMSprop, Adagrad, Muon, partial(Muon, nesterov=False)),
        *(partial(Adam, clipnorm=0.1), partial(Adam, global_clipnorm=0.1), partial(Adam, clipvalue=0.01)),
    ],
)
@pytest.mark.parametrize("form", ["ZeRO-1", "FSDP"])
def test_gradients_are_reduce_scattered_whatever_an_optimizer_does_with_them(optimizer, form):
    """Squares, norms and clipping are of a rank's part, and only numbers are all-reduced."""
    weights, slots, lengths = FORMS[form]

    def action(comm):
        layouts = lambda step: step.layouts(weights, slots)  # noqa: E731
        return assert_trains(comm, layouts, weighted=True, compiled=False, optimizer=optimizer)

    for program in on_mesh(action, **lengths):
        travelling = [tensor for tensor in program.tensors if tensor.op in SENT and tensor.shape]
        assert Counter(tensor.op for tensor in travelling)[REDUCE_SCATTER] == 4
        assert all(tensor.op in (REDUCE_SCATTER, ALL_GATHER) for tensor in travelling)


def test_gradients_of_one_weight_are_added_up_before_they_travel():
    step, slot = Deep(1), Variable(np.zeros((64, 64)), "slot")
    (weight,) = step.weights.values()

    def two_losses(x):
        for power in (2, 3):
            ops.mean((x @ weight) ** power).backward()
        slot.assign(slot * 0.9 + weight.value.grad)
        return {}

    program = trace(two_losses, {"x": ((Dim.rows(4), 64), "float64")})
    placed = place(program, layouts={slot: (BATCH, None)}, slots={weight: [slot]})
    assert [tensor.op for tensor in placed.tensors if tensor.op in SENT and tensor.shape] == [REDUCE_SCATTER]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["ZeRO-1", "FSDP"])
def test_gradients_are_reduce_scattered_in_half_precision(form, compiled):
    weights, slots, lengths = FORMS[form]

    def action(comm):
        layouts = lambda step: step.layouts(weights, slots)  # noqa: E731
        optimizer = partial(SGD, momentum=0.9)
        options = {"optimizer": optimizer, "comm_dtype": "bfloat16", "rtol": 1e-3}
        return assert_trains(comm, layouts, weighted=True, compiled=compiled, **options)

    for program in on_mesh(action, **lengths):
        travelling = [tensor for tensor in program.tensors if tensor.op in SENT and tensor.shape]
        assert {tensor.op for tensor in travelling} == {REDUCE_SCATTER, ALL_GATHER}
        assert all((tensor.dtype == "bfloat16") == (tensor.op is REDUCE_SCATTER) for tensor in travelling)


def test_ranks_pack_the_same_messages():
    """Though their parts are not equal: what fits into a bucket is counted in whole tensors."""
    step = Perceptron()
    layouts = step.layouts({}, FIRST)
    programs = [of_rank(step, layouts, MeshPosition({"batch": 2}, {"batch": number}))[0] for number in range(2)]
    counts = set()
    for most in range(8, 800, 24):
        first, second = (
            [
                [tensor.attributes["number"] for tensor in message]
                for stage in stages(replace(program, bucket_bytes=most))
                for message in stage.messages
            ]
            for program in programs
        )
        assert first == second
        counts.add(len(first))
    assert len(counts) > 2


def test_what_travels_is_sent_when_its_program_says():
    """Not when it could be: what a rank finds equal later must not move its messages."""
    step = Perceptron()
    program, _ = of_rank(step, step.layouts({}, FIRST), MeshPosition({"batch": 2}, {"batch": 0}))
    last = max(tensor.attributes["stage"] for tensor in program.tensors if tensor.op in SENT)

    def later(tensor):
        if tensor.op not in SENT:
            return tensor
        attributes = {**tensor.attributes, "stage": tensor.attributes["stage"] + (tensor.attributes["stage"] == last)}
        return Tensor(tensor.op, tensor.inputs, attributes, tensor.shape, tensor.dtype)

    moved = rewritten(program, later)
    level, sent_at = levels(moved)
    assert {sent_at[tensor] for tensor in sent_at} == {*range(last), last + 1}
    assert all(sent_at[tensor] == tensor.attributes["stage"] == level[tensor] - 1 for tensor in sent_at)
    assert [len(stage.messages) > 0 for stage in stages(moved)] == [*[True] * last, False, True, False]


def test_a_layout_that_leaves_ranks_without_a_part_is_refused():
    """On both sides of the shortest length that can be sharded."""
    program_of({"b2": (BATCH,)}, {}, {"batch": 5})
    with pytest.raises(ConfigError) as error:
        program_of({"b2": (BATCH,)}, {}, {"batch": 6})
    assert str(error.value) == (
        "layout ('batch',) of 'b2', of shape (5,): axis 0 of length 5 cannot be sharded over the 6 ranks along "
        "'batch'; choose a longer axis, or None"
    )


def program_of(weights, slots, lengths, step=None):
    step = step or Perceptron()
    at = MeshPosition(lengths, dict.fromkeys(lengths, 0))
    return of_rank(step, step.layouts(weights, slots), at)[0]


def test_gathers_are_sent_when_they_are_needed():
    """Weights are gathered layer by layer; those of the last one once; new ones of ZeRO-1 in one message."""
    program = program_of(FIRST, FIRST, {"batch": 2})
    shapes_by_op = [
        {tensor.op: [str(other.shape) for other in message] for message in stage.messages for tensor in message}
        for stage in stages(program)
    ]
    gathers = [shapes.get(ALL_GATHER, []) for shapes in shapes_by_op]
    assert gathers == [["(6, 8)", "(8,)"], ["(8, 5)", "(5,)"], [], []]
    assert [len(shapes.get(REDUCE_SCATTER, [])) for shapes in shapes_by_op] == [0, 0, 4, 0]
    zero = program_of({}, FIRST, {"batch": 2})
    assert [sorted(map(len, stage.messages)) for stage in stages(zero)] == [[1, 1, 4], [4], []]


def test_ranks_of_one_along_an_axis_send_nothing():
    program = program_of(BOTH, BOTH, {"batch": 1, "model": 1})
    assert [stage.messages for stage in stages(program)] == [[]]
    assert {variable.path: variable.shape for variable in program.state}["w1"] == (6, 8)


class Deep(Perceptron):
    """A step of many layers that are alike, by gradient descent."""

    def __init__(self, layers, dtype="float64"):
        rng = np.random.default_rng(0)
        self.dtype = dtype
        self.weights = {
            f"w{n}": Variable((rng.normal(size=(64, 64)) / 8).astype(dtype), f"w{n}") for n in range(layers)
        }
        self.program = self.traced()

    def traced(self):
        def step(x):
            for weight in self.weights.values():
                x = ops.relu(x @ weight)
            loss = ops.mean(x * x)
            loss.backward()
            for weight in self.weights.values():
                weight.assign(weight - 0.1 * weight.value.grad)
            return {"loss": loss}

        return trace(step, {"x": ((Dim.rows(4), 64), self.dtype)})

    def layouts(self, weights, slots):
        return {self.weights[name]: axes for name, axes in weights.items()}


def test_only_two_gathered_layers_are_there_at_a_time():
    """However many layers there are: what is gathered is freed when it has been used."""
    sizes = {}
    for layers in (4, 12):
        names = [f"w{n}" for n in range(layers)]
        program = program_of(dict.fromkeys(names, (BATCH, None)), {}, {"batch": 4}, Deep(layers))
        sizes[layers] = planned(*lowered(program, alone=False), 1)[1].size
    one_layer = 64 * 64 * 8
    # Activations of a row aside; gradients are scattered as soon as they are there.
    assert sizes[12] - sizes[4] < one_layer / 4
    assert sizes[12] < 4 * one_layer


class Momentum(Deep):
    """As `Deep`, with a slot for each weight."""

    def traced(self):
        self.slots = {name: Variable(np.zeros_like(weight.numpy()), name) for name, weight in self.weights.items()}

        def step(x):
            for weight in self.weights.values():
                x = ops.relu(x @ weight)
            ops.mean(x * x).backward()
            for name, weight in self.weights.items():
                self.update(weight, self.slots[name])
            return {}

        return trace(step, {"x": ((Dim.rows(4), 64), self.dtype)})

    def update(self, weight, slot):
        slot.assign(slot + 0.1 * (weight.value.grad - slot))
        weight.assign(weight - 0.1 * slot)

    def layouts(self, weights, slots):
        return {self.slots[name]: axes for name, axes in slots.items()}


class Decayed(Momentum):
    """As `Momentum`, with products of slots and of weights alone, as those of SGD with momentum and of AdamW."""

    def update(self, weight, slot):
        weight.assign(weight * 0.99)
        slot.assign(slot * 0.9 + weight.value.grad)
        weight.assign(weight - 0.1 * slot)


@pytest.mark.parametrize("network", [Momentum, Decayed])
@pytest.mark.parametrize(("large", "layers"), [(1, 12.25), (1 << 20, 15)])
def test_parts_of_gradients_and_new_weights_lie_where_whole_gradients_lay(monkeypatch, large, layers, network):
    """ZeRO-1: beside twelve whole gradients there is the part of one alone, or of what one message brings."""
    monkeypatch.setattr(messages, "_LARGE", large)
    monkeypatch.setattr(compiled, "_LOWERED", type(compiled._LOWERED)())  # of messages that are large elsewhere
    step, names = network(12), [f"w{n}" for n in range(12)]
    program = program_of({}, dict.fromkeys(names, (BATCH, None)), {"batch": 4}, step)
    one_layer = 64 * 64 * 8
    assert layers <= planned(*lowered(program, alone=False), 1)[1].size / one_layer < layers + 0.1


class Layers(Perceptron):
    """A step of products of these shapes."""

    def __init__(self, shapes, optimizer):
        rng = np.random.default_rng(0)
        self.weights = {f"w{n}": Variable(rng.normal(size=shape) / 8, f"w{n}") for n, shape in enumerate(shapes)}
        self.optimizer = optimizer
        optimizer.build(self.weights.values())

        def step(x):
            for weight in self.weights.values():
                x = ops.relu(x @ weight)
            ops.mean(x * x).backward()
            optimizer.apply([weight.value.grad for weight in self.weights.values()], list(self.weights.values()))
            return {}

        self.program = trace(step, {"x": ((Dim.rows(4), shapes[0][0]), "float64")})


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("axes", [(BATCH, None), (None, BATCH), (BATCH, "model")], ids=str)
def test_a_step_of_muon_gathers_each_matrix_once(axes, of_weights, nesterov):
    """Whatever its shape, and then computes with whole ones: new weights of ZeRO-1 need not be gathered."""
    step = Layers([(6, 12), (12, 12), (12, 5)], Muon(nesterov=nesterov))
    sharded = dict.fromkeys(step.weights, axes)
    program = program_of(sharded if of_weights else {}, sharded, {BATCH: 2, "model": 2}, step)
    of_slots = {tensor for variable, tensor in program.state.items() if variable.path.endswith("momentum")}
    assert len(of_slots) == 3
    for tensor in program.tensors:
        if not of_slots.isdisjoint(tensor.inputs):
            of_slots.add(tensor)
    travelling = [tensor for tensor in program.tensors if tensor in of_slots and tensor.op in SENT]
    over = [mesh for mesh in axes if mesh is not None]
    assert Counter((tensor.op, tensor.attributes["mesh"]) for tensor in travelling) == {
        (ALL_GATHER, mesh): 3 for mesh in over
    }


def test_nothing_is_computed_for_what_is_whole_anyway(monkeypatch):
    """On one rank kernels are those of the same step without a word about shards, up to numbers in their names."""
    sources = []
    for word in (muon.unshard, lambda x: x):
        monkeypatch.setattr(muon, "unshard", word)
        program = place(Layers([(6, 12), (12, 5)], Muon()).program)
        sources.append([lowered(program)[1].source, re.sub(r"_\d+", "", Composition(program).source())])
    assert sources[0] == sources[1]


def test_muon_has_one_whole_matrix_at_a_time(monkeypatch):
    """Also where all updates can begin at once, since all gradients wait for their norm."""
    monkeypatch.setattr(messages, "_LARGE", 1)
    monkeypatch.setattr(compiled, "_LOWERED", type(compiled._LOWERED)())
    sizes = {}
    for layers in (4, 12):
        step = Layers([(64, 64)] * layers, Muon(global_clipnorm=0.1))
        sharded = dict.fromkeys(step.weights, (BATCH, None))
        program = program_of(sharded, sharded, {"batch": 4}, step)
        sizes[layers] = planned(*lowered(program, alone=False), 1)[1].size
    one_layer = 64 * 64 * 8
    assert sizes[12] - sizes[4] < 8 * one_layer / 4 * 1.1, "a gradient's part a layer"
    assert sizes[4] < 6 * one_layer


def test_what_is_summed_in_place_may_be_gathered_at_once():
    """A partial sum that some need whole along one axis of the mesh, and others summed over another one."""
    data = np.arange(24.0).reshape(4, 6)

    def action(comm):
        at = MeshPosition(comm.lengths, comm.coordinates)
        weight, slot = (Variable(np.arange(6.0), name) for name in ("weight", "slot"))

        def step(x):
            total = ops.sum(x * weight, 0)
            slot.assign(slot + total)
            return {"norm": ops.sum(ops.square(total))}

        program = trace(step, {"x": ((Dim.rows(4), 6), "float64")})
        outputs, updates = evaluate(program, {"x": data})
        layouts = {weight: ("model",), slot: (BATCH,)}
        parts = {
            variable: Variable(variable.numpy()[at.key(variable.shape, axes)], variable.path)
            for variable, axes in layouts.items()
        }
        start, stop = cut(0, 4, comm.replicas)[comm.replica]
        place_of_rank = {"rows": stop - start, "first_row": start, "comm": comm}
        local = localized(place(program, layouts=layouts), at, parts)
        executable = CpuBackend(np.float64).executable(local, {"x": data[start:stop]}, **place_of_rank)
        executable.run()
        np.testing.assert_allclose(executable.outputs["norm"], outputs["norm"])
        np.testing.assert_allclose(parts[slot].numpy(), updates[slot][at.key((6,), (BATCH,))])

    on_mesh(action, batch=2, model=2)


@pytest.mark.parametrize("axes", [(BATCH, None), (None, BATCH), (BATCH, "model")])
def test_a_rank_computes_its_own_part_of_what_follows_from_weights(axes):
    """Elements of weights that all ranks have, hundreds of ops in a row, beside a slot of which each has a part."""
    shape = (5, 6)

    def action(comm):
        at = MeshPosition(comm.lengths, comm.coordinates)
        weight, slot = (Variable(np.arange(30.0).reshape(shape) + n, f"v{n}") for n in (0, 1))
        column, row = Variable(np.arange(5.0).reshape(5, 1), "column"), Variable(np.arange(6.0), "row")

        def step(x):
            decayed = weight * column + row
            for _ in range(600):
                decayed = ops.sin(decayed) * 1.5
            slot.assign(slot * 0.9 + ops.transpose(x) @ x[:, :1] + decayed)
            return {"total": ops.sum(x)}

        program = trace(step, {"x": ((Dim.rows(4), 5), "float64")})
        data = np.arange(20.0).reshape(4, 5)
        _, updates = evaluate(program, {"x": data})
        layouts = {slot: axes}
        parts = {slot: Variable(slot.numpy()[at.key(shape, axes)], "slot")}
        local = localized(place(program, layouts=layouts), at, parts)
        sines = [tensor for tensor in local.tensors if tensor.op is not None and tensor.op.name == "sin"]
        assert {sine.shape for sine in sines} == {parts[slot].shape}
        start, stop = cut(0, 4, comm.replicas)[comm.replica]
        place_of_rank = {"rows": stop - start, "first_row": start, "comm": comm}
        executable = CpuBackend(np.float64, jit_compile=False).executable(
            local, {"x": data[start:stop]}, **place_of_rank
        )
        executable.run()
        np.testing.assert_allclose(parts[slot].numpy(), updates[slot][at.key(shape, axes)], rtol=1e-12)

    on_mesh(action, batch=2, model=2)


SHAPE, LAYOUT = (3, 4, 5), (None, BATCH, None)


def views(x):
    tensors = {}
    for axes in itertools.permutations(range(3)):
        transposed = ops.transpose(x, axes)
        tensors |= {
            f"once {axes}": transposed,
            f"twice {axes}": ops.transpose(transposed, (1, 2, 0)),
            f"part {axes}": transposed[:, ::2],
        }
    return tensors


def test_gathers_of_transposes_are_transposes_of_gathers():
    variable = Variable(np.arange(60.0).reshape(SHAPE), "x")
    expected = views(variable)
    copies = {name: Variable(np.zeros(view.shape), name) for name, view in expected.items()}

    def step():
        for name, view in views(variable).items():
            copies[name].assign(view)
        return {}

    program = trace(step, {})

    def on_rank(comm):
        at = MeshPosition(comm.lengths, comm.coordinates)
        part = Variable(variable.numpy()[at.key(SHAPE, LAYOUT)], "x")
        local = localized(place(program, layouts={variable: LAYOUT}), at, {variable: part})
        gathered = {
            tensor.inputs[0].op.name if tensor.inputs[0].op else "x"
            for tensor in local.tensors
            if tensor.op is ALL_GATHER
        }
        assert gathered == {"x", expected["part (0, 1, 2)"].op.name}
        _, updates = evaluate(local, {}, comm=comm)
        for name, view in expected.items():
            np.testing.assert_array_equal(updates[copies[name]], view.numpy(), err_msg=name)

    on_mesh(on_rank, **{BATCH: 3})


def test_what_follows_from_samples_is_gathered_once():
    """However late it is read again: only weights are gathered anew."""
    w = Variable(np.ones((3, 4)), "w")

    def step(x):
        hidden = x @ w
        total = ops.sum(ops.square(ops.cumsum(hidden, 1)))
        return {"joined": ops.concatenate([hidden, hidden[:, :1] * 0 + total * total], 1)}

    traced = trace(step, {"x": ((Dim.rows(5), 3), "float64")})
    layouts = {w: (None, "model")}
    at = MeshPosition({"batch": 2, "model": 2}, {"batch": 0, "model": 1})
    program = localized(place(traced, layouts=layouts), at, {w: Variable(np.ones((3, 2)), "w")})
    gathers = [tensor for tensor in program.tensors if tensor.op is ALL_GATHER]
    assert [gather.inputs[0].op.name for gather in gathers] == ["batch_matmul"]


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_have_each_value_of_an_op_for_their_heads(compiled):
    """The gradients of queries, keys and values are values of one op, whose parts were all the first one's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, 3, 2))
    biases = [Variable(rng.normal(size=(3, 2)), name) for name in ("query", "key", "value")]

    def step(x):
        attended = ops.dot_product_attention(*(x * (number + 1) + bias for number, bias in enumerate(biases)))
        ops.sum(ops.power(attended, 3)).backward()
        return {bias.path: bias.value.grad for bias in biases}

    program = trace(step, {"x": ((Dim.rows(4), *x.shape[1:]), "float64")})
    expected, _ = evaluate(program, {"x": x})
    layouts = dict.fromkeys(biases, ("model", None))

    def on_rank(comm):
        at = MeshPosition(comm.lengths, comm.coordinates)
        parts = {bias: Variable(bias.numpy()[at.key((3, 2), layouts[bias])], bias.path) for bias in biases}
        start, stop = cut(0, 4, comm.replicas)[comm.replica]
        local = localized(place(program, layouts=layouts), at, parts)
        backend = CpuBackend(np.float64, jit_compile=compiled)
        rows = {"x": x[start:stop]}
        executable = backend.executable(local, rows, rows=stop - start, first_row=start, comm=comm)
        executable.run([0])
        for name, gradient in expected.items():
            np.testing.assert_allclose(executable.outputs[name], gradient, rtol=1e-11, atol=1e-12, err_msg=name)

    on_mesh(on_rank, batch=2, model=2)
