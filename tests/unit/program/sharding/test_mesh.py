"""A step computes on any mesh, wherever its variables lie, what it computes on one device."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops import random
from dptrain.optimizers import OPTIMIZERS, Adam
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.explain import explain
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, BATCH, REDUCE_SCATTER, Placement
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.sample import examples, sample
from tests.unit.ops.test_every_op import ALL as CASES
from tests.unit.ops.test_every_op import inputs_of, step_of
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh, spread

ROWS = 11
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(ROWS, 6)), "y": RNG.integers(0, 5, ROWS), "weights": RNG.random(ROWS)}
ALL = [param.values for param in CASES]
SENT = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)


class Perceptron:
    """A training step of two layers, by Adam if nothing else is said."""

    def __init__(self, weighted=False, optimizer=None, dtype="float64"):
        rng = np.random.default_rng(1)
        self.dtype = dtype
        self.weights = {
            name: Variable(rng.normal(size=shape).astype(dtype), name)
            for name, shape in {"w1": (6, 8), "b1": (8,), "w2": (8, 5), "b2": (5,)}.items()
        }
        self.optimizer, self.weighted = optimizer or Adam(0.01), weighted
        self.optimizer.build(self.weights.values())
        self.program = trace(
            self.step, {name: ((Dim.rows(ROWS), *array.shape[1:]), array.dtype) for name, array in self.data.items()}
        )

    @property
    def data(self):
        return {name: array.astype(self.dtype) if array.dtype.kind == "f" else array for name, array in DATA.items()}

    def step(self, x, y, weights):
        w1, b1, w2, b2 = self.weights.values()
        logits = ops.relu(x @ w1 + b1) @ w2 + b2
        losses = -ops.sum(ops.one_hot(y, 5, dtype=self.dtype) * ops.log_softmax(logits), -1)
        loss = ops.sum(losses * weights) / ops.sum(weights) if self.weighted else ops.mean(losses)
        loss.backward()
        self.optimizer.apply([weight.value.grad for weight in self.weights.values()], list(self.weights.values()))
        right = ops.sum(ops.equal(ops.argmax(logits, -1), y))
        return {"loss": loss, "right": right, "logits": logits}

    def layouts(self, weights, slots):
        """Return layouts of weights by name, and of their slots."""
        by_variable = {self.weights[name]: axes for name, axes in weights.items()}
        for name, axes in slots.items():
            by_variable |= dict.fromkeys(self.optimizer._slots_of(self.weights[name]).values(), axes)
        return by_variable


def sent(placed):
    """Count how often a placed program's ranks send something but numbers, by op and axis of the mesh."""
    travelling = [tensor for tensor in placed.tensors if tensor.op in SENT and tensor.shape]
    return dict(Counter(f"{tensor.op.name} over {tensor.attributes['mesh']}" for tensor in travelling))


FIRST = {"w1": (BATCH, None), "b1": (BATCH,), "w2": (BATCH, None), "b2": (BATCH,)}
TENSOR = {"w1": (None, "model"), "b1": ("model",), "w2": ("model", None)}
BOTH = {"w1": (BATCH, "model"), "b1": ("model",), "w2": ("model", BATCH), "b2": (BATCH,)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("mesh", "weights", "slots"),
    [
        pytest.param(VirtualMesh([4, 0, 7]), {}, {}, id="data parallel"),
        pytest.param(VirtualMesh([6, 5]), {}, FIRST, id="ZeRO-1"),
        pytest.param(VirtualMesh([3, 6, 2]), FIRST, FIRST, id="FSDP"),
        pytest.param(VirtualMesh([11], model=3), TENSOR, TENSOR, id="tensor parallel"),
        pytest.param(VirtualMesh([4, 7], model=2), BOTH, BOTH, id="2 x 2"),
    ],
)
def test_a_perceptron_with_adam(mesh, weights, slots, weighted):
    step = Perceptron(weighted)
    assert_same_on_mesh(step.program, DATA, step.layouts(weights, slots), mesh)


@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 0.1, "weight_decay": 0.1, "use_ema": True}], ids=str)
@pytest.mark.parametrize("name", sample(OPTIMIZERS, 2))
def test_every_optimizer(name, options):
    program = Perceptron(optimizer=OPTIMIZERS[name](**options)).program
    assert_same_on_mesh(program, DATA, spread(program), VirtualMesh([4, 0, 7], model=2))


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_sent(weighted):
    """Sums of numbers aside, such as the loss."""
    step = Perceptron(weighted)

    def messages(weights, slots):
        return sent(place(step.program, layouts=step.layouts(weights, slots)))

    assert messages({}, {}) == {"all_reduce over batch": 4}
    # Each gradient's parts go to those who have the slots; of new weights everybody gets all.
    assert messages({}, FIRST) == {"reduce_scatter over batch": 4, "all_gather over batch": 4}
    # Weights are gathered where they are used: w2 forward, and transposed backward.
    assert messages(FIRST, FIRST) == {"reduce_scatter over batch": 4, "all_gather over batch": 5}
    # As Megatron: one sum forward, for the second layer's output; nothing backward, as nobody asks for x's gradient.
    assert messages(TENSOR, TENSOR) == {"all_reduce over batch": 4, "all_reduce over model": 1}


AXES = st.sampled_from([None, BATCH, "model", "pipe"])


@st.composite
def layouts(draw, shape):
    axes = []
    for _ in shape:
        axis = draw(AXES)
        axes.append(None if axis in axes else axis)
    return tuple(axes)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), weighted=st.booleans())
def test_any_layout_on_any_mesh(data, weighted):
    step = Perceptron(weighted)
    chosen = {variable: data.draw(layouts(variable.shape), label=variable.path) for variable in step.program.state}
    parts = data.draw(st.lists(st.integers(0, ROWS), max_size=2).map(sorted), label="cuts of the batch")
    shards = [int(n) for n in np.diff([0, *parts, ROWS])]
    lengths = {mesh: data.draw(st.integers(1, 3), label=mesh) for mesh in ("model", "pipe")}
    assert_same_on_mesh(step.program, DATA, chosen, VirtualMesh(shards, **lengths))


def mixed(variables, seeds):
    """Return a step that has something of everything: images, tables, slices, random numbers, extremes, products."""

    def step(x, y, weights):
        kernel, table, dense, scale = variables.values()
        images = ops.reshape(x, (-1, 2, 3, 1))
        features = ops.reshape(ops.max_pool(ops.relu(ops.conv(images, kernel, padding="same")), (2, 1)), (-1, 12))
        features = random.dropout(features, 0.3, seed=seeds)
        rows = ops.concatenate([features[:, ::2], ops.take(table, y, 0)[:, 1:]], -1)
        centered = (rows - ops.mean(rows, 0)) / ops.sqrt(ops.var(rows, 0) + 1e-3)
        joined = ops.concatenate([centered, ops.transpose(ops.transpose(centered) * 2)], 0)
        logits = ops.softmax(joined @ dense) * scale
        loss = ops.sum(ops.square(logits) * ops.concatenate([weights, weights], 0)[:, None]) / ops.sum(weights)
        loss = loss + ops.max(logits) + 0.1 * ops.sum(ops.absolute(table)) / (1 + ops.max(ops.square(dense)))
        loss.backward()
        norm = ops.sqrt(sum(ops.sum(ops.square(variable.value.grad)) for variable in variables.values()))
        for variable in variables.values():
            variable.assign(variable - 0.1 * variable.value.grad / ops.maximum(norm, 1.0))
        return {"loss": loss, "norm": norm, "logits": logits[: x.shape[0]]}

    return step


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_all_kinds_of_ops(data):
    rng = np.random.default_rng(2)
    shapes = {"kernel": (2, 2, 1, 4), "table": (5, 4), "dense": (9, 3), "scale": (3,)}
    variables = {name: Variable(rng.normal(size=shape), name) for name, shape in shapes.items()}
    specs = {name: ((Dim.rows(ROWS), *array.shape[1:]), array.dtype) for name, array in DATA.items()}
    program = trace(mixed(variables, random.SeedGenerator(3)), specs)
    chosen = {variable: data.draw(layouts(variable.shape), label=variable.path) for variable in program.state}
    cut = data.draw(st.integers(0, ROWS), label="rows of the first rank")
    assert_same_on_mesh(program, DATA, chosen, VirtualMesh([cut, ROWS - cut], model=2, pipe=3))


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_every_op_of_operands_that_lie_anywhere(data):
    """And its gradients; operands may be partial, as multiples of a sum over rows."""
    name, case = data.draw(st.sampled_from(ALL))
    variables = [Variable(array, f"x{number}") for number, array in enumerate(inputs_of(case))]
    operands = [(variable, data.draw(st.booleans(), label=f"{variable.path} is partial")) for variable in variables]

    def step(weights):
        share = ops.sum(weights)
        xs = [
            variable * share if is_partial and variable.dtype.kind == "f" else variable.value
            for variable, is_partial in operands
        ]
        return step_of(name, case)(*xs)

    values = {"weights": np.abs(DATA["weights"]) / 8}
    program = trace(step, {"weights": ((Dim.rows(ROWS),), "float64")})
    chosen = {variable: data.draw(layouts(variable.shape), label=variable.path) for variable in program.state}
    assert_same_on_mesh(program, values, chosen, VirtualMesh([4, 0, 7], model=2, pipe=2))


def test_rows_come_first():
    """A table over one axis of the mesh that meets rows over another is cut to these."""
    table = Variable(np.arange(2.0 * ROWS).reshape(ROWS, 2), "table")

    def step(x, y, weights):
        met = table.value * weights[:, None] + x[:, :2]
        table.assign(table - ops.sum(met) * ops.square(table))
        return {"met": met}

    program = trace(step, {name: ((Dim.rows(ROWS), *array.shape[1:]), array.dtype) for name, array in DATA.items()})
    for axes in (("model", None), (BATCH, "model"), (BATCH, None), ("model", BATCH)):
        assert_same_on_mesh(program, DATA, {table: axes}, VirtualMesh([4, 0, 7], model=2))


def test_placements_as_text():
    assert str(Placement((None, None))) == "replicated"
    assert str(Placement((BATCH, None))) == "sharded 0"
    assert str(Placement((BATCH, "model"))) == "sharded 0, sharded 1 over model"
    assert str(Placement((None,), (BATCH, "model"))) == "partial, partial over model"
    assert str(Placement((), (BATCH,), "max")) == "partial max"
    assert Placement((), (BATCH, "model"), "max").without(BATCH) == Placement((), ("model",), "max")


def test_what_does_not_fit_is_said():
    step = Perceptron()
    for axes in (("model",), ("model", "model"), (None, None, None)):
        with pytest.raises(ConfigError, match=r"layout .* of 'w1', of shape \(6, 8\): expected an axis of the mesh or"):
            place(step.program, layouts={step.weights["w1"]: axes})
    placed = place(step.program, layouts=step.layouts(TENSOR, {}))
    for work in (lambda: evaluate(placed, DATA), lambda: explain(placed)):
        with pytest.raises(ConfigError, match="must be localized before it is executed: 'w1', "):
            work()
