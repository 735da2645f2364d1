"""Branches of traced steps: which is executed, and its gradients."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.program.body import body_of, has_body
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.schedule import loops
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.sharding.placement import place
from dptrain.program.steps import unrolled, with_branches_selected
from dptrain.program.structure import structure_of
from dptrain.program.tensor import Variable, applied_gradients, note_applied
from tests.programs.check import by_numpy, compiled
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh
from tests.unit.program.virtual_ranks import on_ranks

WAYS = {"NumPy": by_numpy, "C++": compiled(), "C++ of one loop an op": compiled(join=False)}
X = np.array([1.0, 4.0, 9.0], np.float32)


def made(way, step, **values):
    """Return what a step computes, in one way; it assigns variables."""
    program = trace(
        lambda *tensors: step(*tensors), {name: (value.shape, value.dtype) for name, value in values.items()}
    )
    executable = WAYS[way](program, values)
    executable.run()
    return {name: np.array(value) for name, value in executable.outputs.items()}


def derivatives(y, x):
    """Return a sum's first and second derivatives."""
    (first,) = gradients(ops.sum(y), [x])
    (second,) = gradients(ops.sum(first), [x])
    return {"y": y, "first": first, "second": second}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_are_none_stay_in_the_branch_that_is_not_taken(way, sign):
    def step(x):
        return derivatives(ops.cond(ops.sum(x) > 0, lambda: ops.sqrt(x), lambda: 0 * x), x)

    outputs = made(way, step, x=sign * X)
    expected = [X**0.5, 0.5 * X**-0.5, -0.25 * X**-1.5] if sign > 0 else [0 * X] * 3
    for value, right in zip(outputs.values(), expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [-1.0, 0.0, 0.5, np.nan, -1, 0, 1, 2])
def test_a_condition_that_is_a_number_holds_unless_it_is_zero(way, number):
    outputs = made(way, lambda x, n: {"y": ops.cond(n, lambda: x + 1, lambda: x - 1)}, x=X, n=np.array(number))
    np.testing.assert_array_equal(outputs["y"], X + (1 if bool(number) else -1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [-3, 0, 1, 2, 9])
def test_the_number_of_a_branch_is_clamped(way, number):
    def step(x, n):
        branches = [lambda x: ops.sin(x), lambda x: ops.log(-x), lambda x: x * x * x]
        return derivatives(ops.switch(n, branches, x), x)

    x = -X if number == 1 else X
    outputs = made(way, step, x=x, n=np.int64(number))
    rights = [(np.sin(x), np.cos(x), -np.sin(x)), (np.log(X), 1 / x, -1 / x**2), (x**3, 3 * x**2, 6 * x)]
    for value, right in zip(outputs.values(), rights[min(max(number, 0), 2)], strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_assigns_variables_that_others_leave(way, sign):
    """What it reads is what was assigned before; an assignment ends gradients, as outside."""
    count, total = (Variable(np.zeros(3, np.float32), name) for name in ("count", "total"))

    def step(x):
        total.assign(x * 2)

        def yes():
            count.assign_add(ops.ones_like(x))
            total.assign(total * x)
            return total.value + count

        y = ops.cond(ops.sum(x) > 0, yes, lambda: total * 3)
        return {"y": y}

    x = sign * X
    outputs = made(way, step, x=x)
    ones = np.ones(3) if sign > 0 else np.zeros(3)
    right_total = 2 * x * x if sign > 0 else 2 * x
    np.testing.assert_allclose(outputs["y"], right_total + 1 if sign > 0 else 3 * right_total)
    np.testing.assert_allclose(count.numpy(), ones)
    np.testing.assert_allclose(total.numpy(), right_total)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_other_branch_reads_no_rows(way, sign):
    """Its indices, which may lie anywhere, are not looked up."""
    indices = np.array([0, 7 if sign > 0 else 1])

    def step(x, indices):
        return {"y": ops.cond(ops.sum(x) > 0, lambda: x, lambda: ops.sum(ops.take(x, indices)) + 0 * x)}

    outputs = made(way, step, x=sign * X, indices=indices)
    np.testing.assert_allclose(outputs["y"], X if sign > 0 else [-5] * 3)


@pytest.mark.parametrize("way", WAYS)
def test_branches_within_steps_and_steps_within_branches(way):
    """Each step chooses anew; captured weights get the gradients of the steps that chose them."""
    w, u = (Variable(np.float32([a, 0.5, -0.25]), name) for name, a in [("w", 0.75), ("u", -1)])

    def step(x):
        def of_part(carry, part):
            def yes():
                inner = ops.scan(lambda a, b: (ops.tanh(a * w + b), a), carry, ops.stack([part, carry, part]))
                return inner[0], ops.sum(inner[1])

            nested = ops.cond(part[0] > 5, lambda: ops.sqrt(part - 5), lambda: u * part)
            return ops.cond(ops.sum(carry) > 0.5, yes, lambda: (carry + nested * u, ops.max(part)))

        last, outputs = ops.scan(of_part, ops.zeros_like(x[0]), x)
        grads = gradients(ops.sum(last * last) + ops.sum(outputs), [x, w.value, u.value])
        return dict(zip(["last", "outputs", "dx", "dw", "du"], [last, outputs, *grads], strict=True))

    x = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)
    x[2, 0] = 9
    program = trace(step, {"x": (x.shape, np.float64)})
    assert "scan" in {tensor.op.name for tensor in program.tensors if tensor.op is not None}

    def of_floats(**leaves):
        for variable in (w, u):
            variable.assign(leaves.pop(variable.name, variable))
        return float(np.sum(evaluate(program, {"x": x.astype(np.float64)} | leaves)[0]["outputs"]))

    outputs = made(way, step, x=x)
    right = evaluate(program, {"x": x.astype(np.float64)})[0]
    for name, value in outputs.items():
        np.testing.assert_allclose(value, right[name], rtol=2e-5, atol=1e-5, err_msg=name)
    eager = step(ops.convert_to_tensor(x)) if way == "NumPy" else {}
    for name in ("last", "outputs")[: len(eager)]:
        np.testing.assert_allclose(outputs[name], eager[name], rtol=1e-5)


def doubled(x):
    """Double a tensor until it is above 100, for ever if it is 0."""
    return ops.while_loop(lambda value: ops.max(value) < 100, lambda value: 2 * value, x)


ENDLESS = {
    "loop": doubled,
    "loop in a branch": lambda x: ops.cond(ops.sum(x) > -1, lambda: doubled(x), lambda: x),
    "loop in steps": lambda x: ops.fori_loop(0, 3, lambda _, value: doubled(value), x),
    "loop in a branch in steps": lambda x: ops.fori_loop(
        0, 3, lambda _, value: ops.cond(ops.sum(value) > -1, lambda: doubled(value), lambda: value), x
    ),
    "steps in a branch around a loop": lambda x: ops.cond(
        ops.sum(x) > -1, lambda: ops.fori_loop(0, 3, lambda _, value: doubled(value), x), lambda: x
    ),
}
PASSES = {"as it is": lambda program: program, "branches selected": with_branches_selected, "unrolled": unrolled}


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", PASSES)
@pytest.mark.parametrize("content", ENDLESS)
def test_a_loop_in_a_branch_that_is_not_taken_has_no_step(monkeypatch, content, change):
    """Nor where all branches are computed: there it might never end."""

    def numbers():
        yield from range(1000)
        raise AssertionError("the loop does not end")

    monkeypatch.setattr(loops, "count", numbers)
    program = trace(
        lambda x: {"y": ops.cond(ops.sum(x) > 0, lambda: ENDLESS[content](x), lambda: x)}, {"x": ((2,), np.float64)}
    )
    for number, expected in ((0, 0), (1, 128), (200, 200)):
        outputs, _ = evaluate(PASSES[change](program), {"x": np.full(2, float(number))})
        assert outputs["y"].tolist() == [expected] * 2


def test_a_gradient_is_that_of_central_differences():
    w = np.random.default_rng(1).normal(size=(3, 3))

    def step(x, w):
        y = ops.cond(ops.sum(x) > 0, lambda: ops.tanh(x[None] @ w) @ w, lambda: ops.exp(x)[None] * w[0])
        (dw,) = gradients(ops.sum(y * y), [w])
        (second,) = gradients(ops.sum(dw * dw), [x])
        return {"loss": ops.sum(y * y), "norm": ops.sum(dw * dw), "dw": dw, "second": second}

    program = trace(step, {"x": ((3,), np.float64), "w": ((3, 3), np.float64)})
    for sign in (1, -1):
        x = 0.1 * sign * X.astype(np.float64)
        outputs = evaluate(program, {"x": x, "w": w})[0]
        for name, of, point in [("dw", "loss", "w"), ("second", "norm", "x")]:
            values = {"x": x, "w": w}
            for element in np.ndindex(values[point].shape):
                ends = []
                for shift in (1e-6, -1e-6):
                    moved = values[point].copy()
                    moved[element] += shift
                    ends.append(evaluate(program, values | {point: moved})[0][of])
                np.testing.assert_allclose(outputs[name][element], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_loops_stay_where_branches_are_selected_and_branches_where_loops_are_unrolled():
    def chosen(x):
        return ops.cond(ops.sum(x) > 0, lambda: ops.scan(lambda c, _: (ops.sin(c), None), x, length=500)[0], lambda: x)

    def bodies(program):
        return [body_of(tensor).guarded for tensor in program.tensors if has_body(tensor)]

    program = trace(lambda x: {"y": chosen(x)}, {"x": ((3,), np.float32)})
    assert bodies(program) == [True]
    assert bodies(with_branches_selected(program)) == [False]
    step = {"x": ((3,), np.float32)}
    program = trace(lambda x: {"y": ops.scan(lambda c, _: (chosen(c), None), x, length=2)[0]}, step)
    assert bodies(program) == [False]
    assert bodies(unrolled(program)) == [True, True]


def test_optimizers_within_a_branch():
    """What finds gradients that are not finite sees those of the branch that is taken."""
    w = Variable(np.float32([2, 3, 4]), "w")

    def step(x):
        def trains():
            (grad,) = gradients(ops.sum(w * ops.sqrt(x)), [w.value])
            note_applied([grad])
            w.assign_sub(grad)
            return ops.sum(grad)

        y = ops.cond(ops.sum(x) > 0, trains, lambda: ops.sum(x))
        (applied,) = applied_gradients()
        return {"y": y, "applied": applied}

    program = trace(step, {"x": ((3,), np.float32)})
    assert list(program.weight_gradients.values()) == [w]
    assert set(program.weight_gradients) <= set(program.tensors)
    for x in (X, -X):
        outputs, updates = evaluate(program, {"x": x})
        grad = np.sqrt(X) if x is X else 0 * X
        np.testing.assert_allclose(outputs["applied"], grad)
        np.testing.assert_allclose(updates[w], w.numpy() - grad)


@pytest.mark.parametrize("body", ["branch", "step"])
def test_a_gradient_of_ones_own_within(body):
    """It reads a weight, and what was computed outside and inside."""
    w = Variable(np.float32([2, 3, 5]), "w")

    def step(x):
        outside = ops.sin(x)

        @ops.custom_gradient
        def scaled(a, b):
            inside = ops.cos(a)

            def grad(upstream):
                return upstream * outside * inside * w, upstream * 7.0

            return a * b, grad

        if body == "branch":
            y = ops.cond(ops.sum(x) > 0, lambda: scaled(x * w, ops.exp(x)), lambda: x)
            right = scaled(x * w, ops.exp(x))
        else:
            y, right = (
                ops.scan(lambda c, part: (scaled(c * w, part), None), x, ops.stack([x, 0.5 * x]), unroll=unroll)[0]
                for unroll in (1, True)
            )
        return {"grad": gradients(ops.sum(y), [x])[0], "right": gradients(ops.sum(right), [x])[0]}

    for way in WAYS:
        outputs = made(way, step, x=np.float32([0.5, 1, 2]))
        np.testing.assert_allclose(outputs["grad"], outputs["right"], rtol=2e-5)
        assert np.all(np.abs(outputs["grad"]) > 0.1)


def test_kernels_of_a_branch_are_not_those_of_a_loop():
    def key(guarded):
        step = {"x": ((3,), "float32")}
        program = trace(lambda x: {"y": ops.cond(ops.sum(x) > 0, lambda: ops.sin(x), lambda: x)}, step)
        for tensor in program.tensors:
            if has_body(tensor):
                tensor.attributes["body"] = replace(body_of(tensor), guarded=guarded)
        return structure_of(program).key

    assert key(True) == key(True) != key(False)


def test_what_nobody_reads_of_a_branch_is_left_out():
    def step(x):
        values = ops.cond(ops.sum(x) > 0, lambda: (ops.sin(x), ops.exp(x)), lambda: (ops.cos(x), x))
        return {"y": values[0]}

    program = trace(step, {"x": ((3,), np.float32)})
    scans = [tensor for tensor in program.tensors if tensor.op is not None and tensor.op.name == "scan"]
    assert [len(tensor.node.values) for tensor in scans] == [1, 1]


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_on_ranks(sign):
    """A condition is the same on all ranks; weight gradients are summed over them once."""
    rows = Dim.rows(5)
    w, bias = Variable(np.random.default_rng(2).normal(size=(4, 6)), "w"), Variable(np.zeros(6), "bias")

    def step(x):
        def yes():
            bias.assign_add(ops.mean(x @ w, 0))
            return ops.sqrt(ops.sum(x * x, 1, keepdims=True)) * ops.tanh(x @ w)

        y = ops.cond(ops.sum(x) > 0, yes, lambda: x @ w + bias)
        y = ops.cond(ops.any(x == ops.max(x)), lambda: 2 * y, lambda: y)  # of a single rank's rows
        (grad,) = gradients(ops.mean(y * y), [w.value])
        return {"y": y, "grad": grad, "mean": ops.mean(y)}

    x = sign * np.random.default_rng(0).uniform(size=(5, 4))
    program = trace(step, {"x": ((rows, 4), np.float64)})
    for layouts in ({}, {w: (BATCH, None)}, {w: (None, "model")}, {w: ("model", None)}):
        assert_same_on_mesh(program, {"x": x}, layouts, VirtualMesh([3, 2], model=2))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_communicate_for_a_branch_in_a_loop_of_unknown_length(way):
    def step(x):
        def body(n, a):
            return n + 1, ops.cond(ops.sum(a) > 3, lambda: a * ops.tanh(ops.sum(a)), lambda: 2 * a + 0.1)

        end = 3 + ops.cast(ops.sum(x) > 0, "int32")
        return {"a": ops.while_loop(lambda n, a: n < end, body, (np.int32(0), x))[1]}

    program, x = trace(step, {"x": ((Dim.rows(5), 2), np.float64)}), np.random.default_rng(0).normal(size=(5, 2))

    def work(comm):
        rows = slice(0, 3) if comm.rank == 0 else slice(3, 5)
        place_of = {"rows": rows.stop - rows.start, "first_row": rows.start, "comm": comm}
        executable = WAYS[way](place(program), {"x": x[rows]}, **place_of)
        executable.run()
        return np.array(executable.outputs["a"])

    np.testing.assert_allclose(np.concatenate(on_ranks(2, work)), evaluate(program, {"x": x})[0]["a"], rtol=1e-12)


def test_gradients_of_backward_within_a_branch():
    w = Variable(np.float32([2, 3, 4]), "w")

    def step(x):
        ops.sum(w * w).backward()

        def yes():
            ops.sum(w * x).backward()
            return ops.sum(x)

        ops.cond(ops.sum(x) > 0, yes, lambda: ops.sum(x) * 2)
        return {"grad": w.value.grad}

    for x in (X, -X):
        program = trace(step, {"x": ((3,), np.float32)})
        np.testing.assert_allclose(evaluate(program, {"x": x})[0]["grad"], 2 * w.numpy() + (x if x[0] > 0 else 0))


class Depth(layers.Layer):
    """A block that is left out of two steps of three."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)
        self.count = self.add_weight((), "zeros", trainable=False, name="count")

    def call(self, x, training=False):
        self.count.assign_add(1.0)

        def block():
            return x + self.drop(self.norm(self.inner(x), training=training), training=training)

        return ops.cond(self.count % 3 > 1, block, lambda: x)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_layer_left_out_of_some_steps(jit_compile):
    """Its moving statistics and draws are those of its own steps, as in eager ones; one rank takes one branch."""

    def trained(**options):
        dp.utils.set_random_seed(1)
        model = dp.Sequential([dp.Input((8,)), layers.Dense(8), Depth(), layers.Dense(1)])
        model.compile(dp.optimizers.SGD(0.01), "mse", device="cpu", **options)
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        losses = model.fit(x, x.sum(1, keepdims=True), batch_size=16, epochs=2, verbose=0).history["loss"]
        return losses, [variable.numpy() for variable in model.variables]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")  # of eager steps without the block
        eager = trained(run_eagerly=True)
    traced = trained(jit_compile=jit_compile)
    for value, right in zip([*traced[0], *traced[1]], [*eager[0], *eager[1]], strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5)


def test_branches_with_sums_over_ranks_are_unrolled_where_there_are_ranks():
    """Here the gradient of a weight within a branch."""
    w = Variable(np.random.default_rng(2).normal(size=(4, 6)), "w")

    def step(x):
        def trains():
            (grad,) = gradients(ops.mean(ops.square(x @ w)), [w.value])
            w.assign_sub(0.1 * grad)
            return ops.tanh(ops.sum(grad))

        return {"y": ops.cond(ops.sum(x) > 0, trains, lambda: ops.sum(w))}

    program = trace(step, {"x": ((Dim.rows(5), 4), np.float64)})
    alone = place(program, alone=True)
    branches = [{tensor.node for tensor in placed.tensors if has_body(tensor)} for placed in (place(program), alone)]
    assert list(map(len, branches)) == [1, 2]
    for sign in (1, -1):
        x = sign * np.random.default_rng(0).uniform(size=(5, 4))
        (right, changed), (value, updated) = evaluate(program, {"x": x}), evaluate(alone, {"x": x})
        np.testing.assert_allclose(value["y"], right["y"])
        np.testing.assert_allclose(updated[w], changed[w])
        assert_same_on_mesh(program, {"x": x}, {}, VirtualMesh([3, 2]))
