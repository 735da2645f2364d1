"""Whole programs on the CUDA backend: state, fusion, launches, and random ones, against NumPy."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.indexing import take_rows
from dptrain.ops.random import SeedGenerator, dropout
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

B, F = 6, 5


def both(cuda_backend, program, values, steps=1, rows=None, first_row=0):
    """Return outputs and state after some steps, by the executable and by NumPy."""
    state = {variable: variable.numpy() for variable in program.state}
    executable = cuda_backend.executable(program, values, rows=rows, first_row=first_row)
    expected = {}
    for _ in range(steps):
        expected, new = evaluate(program, values, state, rows=rows, first_row=first_row)
        state |= new
    executable.run([0] * steps)
    actual = {name: executable.outputs[name] for name in program.outputs}
    return executable, actual, {name: expected[name] for name in actual}, state


def check(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_allclose(actual[name], value, rtol=tolerance, atol=tolerance, err_msg=str(name))


def check_state(state, tolerance=1e-5):
    for variable, value in state.items():
        np.testing.assert_allclose(variable.numpy(), value, rtol=tolerance, atol=tolerance, err_msg=variable.path)


def mlp(rng, inputs=20, hidden=16, classes=4, rows=B, stored=50, compute="float32"):
    """Return the program of a training step with Adam of a network of two layers on stored pixels, and its data.

    Layers compute in the type `compute`, weights are float32.
    """
    sizes = {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, classes), "b2": (classes,)}
    weights = [Variable(rng.normal(0, 0.3, shape).astype(np.float32), name) for name, shape in sizes.items()]
    slots = [
        [Variable(np.zeros(weight.shape, np.float32), f"{weight.name}/{name}", trainable=False) for name in ("m", "v")]
        for weight in weights
    ]
    iterations = Variable(np.array(0, np.int64), "iterations", trainable=False)
    totals = [Variable(np.array(0.0), name, trainable=False) for name in ("loss", "correct")]

    def step(pixels, labels, rows):
        x, y = ops.cast(take_rows(pixels, rows), "float32") * (1 / 255), take_rows(labels, rows)
        x, w1, b1, w2, b2 = (ops.cast(tensor, compute) for tensor in (x, *weights))
        scores = ops.cast(ops.relu(x @ w1 + b1) @ w2 + b2, "float32")
        losses = -ops.sum(ops.one_hot(y, classes) * ops.log_softmax(scores), axis=-1)
        loss = ops.mean(losses)
        loss.backward()
        correct = ops.sum(ops.cast(ops.equal(ops.argmax(scores, -1), y), "float32"))
        for total, value in zip(totals, (ops.sum(losses), correct), strict=True):
            total.assign_add(ops.cast(value, "float64"))
        t = ops.cast(iterations + 1, "float64")
        rate = 0.01 * ops.sqrt(1 - ops.power(np.float64(0.999), t)) / (1 - ops.power(np.float64(0.9), t))
        for weight, (m, v) in zip(weights, slots, strict=True):
            m.assign(m + (weight.value.grad - m) * 0.1)
            v.assign(v + (ops.square(weight.value.grad) - v) * 0.001)
            weight.assign(weight - ops.cast(rate, "float32") * m.value / (ops.sqrt(v.value) + 1e-7))
        iterations.assign_add(1)
        return {"loss": loss}

    specs = {
        "pixels": ((stored, inputs), "uint8"),
        "labels": ((stored,), "int64"),
        "rows": ((Dim.rows(rows),), "int64"),
    }
    data = {"pixels": rng.integers(0, 256, (stored, inputs)).astype(np.uint8)}
    data["labels"] = rng.integers(0, classes, stored)
    return trace(step, specs), data


@pytest.mark.sample(2)
@pytest.mark.parametrize("graph", [True, False])
def test_training_is_that_of_numpy(cuda_backend, graph, monkeypatch):
    monkeypatch.setattr(cuda_backend, "graph", graph)
    rng = np.random.default_rng(0)
    program, data = mlp(rng)
    order = np.concatenate([rng.permutation(50) for _ in range(4)])
    starts = [B * n for n in range(20)]
    executable = cuda_backend.executable(program, data | {"rows": order})
    assert executable.launches <= 8
    state = {variable: variable.numpy() for variable in program.state}
    for start in starts:
        expected, new = evaluate(program, data | {"rows": order[start : start + B]}, state)
        state |= new
    executable.run(starts[:7])
    executable.run(starts[7:])
    check(dict(executable.outputs), expected)
    check_state(state)


def test_source_is_the_same_for_any_number_of_rows(cuda_backend):
    rng = np.random.default_rng(0)
    sources = set()
    for rows in (B, 11):
        program, data = mlp(np.random.default_rng(1), rows=rows)
        executable = cuda_backend.executable(program, data | {"rows": rng.integers(0, 50, 3 * rows)})
        sources.add(executable.source)
    assert len(sources) == 1
    four_rows = cuda_backend.executable(program, data | {"rows": rng.integers(0, 50, 33)}, rows=4, first_row=3)
    assert four_rows.source in sources


def test_state_is_read_and_written_through_its_variable(cuda_backend):
    total = Variable(np.zeros(3, np.float32), "total", trainable=False)

    def step(x):
        total.assign_add(ops.sum(x, 0))
        return {}

    x = np.arange(B * 3, dtype=np.float32).reshape(B, 3)
    executable = cuda_backend.executable(trace(step, {"x": ((Dim.rows(B), 3), "float32")}), {"x": x})
    executable.run([0, 0])
    np.testing.assert_allclose(total.numpy(), 2 * x.sum(0))
    total.assign(np.ones(3))
    executable.run()
    np.testing.assert_allclose(total.numpy(), 1 + x.sum(0))


def shapes_program(rng, rows):
    """Return a program whose sums, rows and products are large enough for every way to compute them."""

    def step(x, long, a, b):
        weights = ops.transpose(b)
        return {
            "columns": ops.sum(x, 0),
            "mean of columns": ops.mean(x * x, 0) + 1.0,
            "greatest of columns": ops.max(x, 0),
            "all": ops.sum(x * x),
            "greatest": ops.max(x),
            "rows": ops.sum(x, 1),
            "long": ops.log_softmax(long),
            "best of long": ops.argmax(long, -1),
            "first of equals": ops.argmax(ops.cast(ops.cast(long, "int32"), "float32"), -1),
            "first of few equals": ops.argmax(ops.cast(ops.cast(x, "int32"), "float32"), -1),
            "middle": ops.sum(ops.reshape(long, (8, 50, 50)), 1),
            "nn": ops.relu(x @ a),
            "nt": x @ weights,
            "tn": ops.transpose(x) @ x,
            "tt": ops.transpose(a) @ ops.transpose(x),
            "batch": ops.reshape(a, (3, 7, 65)) @ ops.reshape(b[:, :21], (3, 65, 7)),
            "rows of a batch": ops.reshape(long, (8, 50, 50)) @ ops.ones((50, 3)),
            "half": ops.sum(ops.reshape(x, (-1, 3, 7)) @ a[:7], (0, 2)),
        }

    specs = {"x": ((Dim.rows(rows), 21), "float32"), "long": ((8, 2500), "float32"), "a": ((21, 65), "float32")}
    specs["b"] = ((65, 21), "float32")
    return trace(step, specs), {
        name: rng.normal(size=tuple(map(int, shape))).astype(np.float32) for name, (shape, _) in specs.items()
    }


@pytest.mark.parametrize("rows", [700, 1, 0])
def test_sums_and_products_of_many_shapes(cuda_backend, rows):
    rng = np.random.default_rng(0)
    program, values = shapes_program(rng, 700)
    values["x"] = values["x"][:rows]
    _, actual, expected, _ = both(cuda_backend, program, values, rows=rows)
    for name, value in expected.items():
        scale = max(1.0, float(np.max(np.abs(value), initial=0, where=np.isfinite(value))))
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("length", [40, 200, 1100])
def test_products_in_every_tile(cuda_backend, length):
    check_products(cuda_backend, length, 1e-5)


@pytest.mark.parametrize("length", [40, 200, 1100])
def test_products_on_tensor_cores(cuda_backend, length, monkeypatch):
    monkeypatch.setattr(cuda_backend, "precision", "tf32")
    check_products(cuda_backend, length, 2e-3)


def check_products(cuda_backend, length, tolerance):
    """Compare the corners of products with an uneven number of terms, of factors that TF32 would cut off unevenly."""
    rng, terms = np.random.default_rng(0), 69

    def step(a, b, a_t, b_t):
        left, right = ops.transpose(a_t), ops.transpose(b_t)
        return {"nn": ops.relu(a @ b), "nt": a @ right, "tn": left @ b, "tt": left @ right}

    shapes = {"a": (length, terms), "b": (terms, length), "a_t": (terms, length), "b_t": (length, terms)}
    values = {name: rng.random(shape).astype(np.float32) + 1 for name, shape in shapes.items()}
    program = trace(step, {name: (shape, "float32") for name, shape in shapes.items()})
    _, actual, expected, _ = both(cuda_backend, program, values)
    for name, value in expected.items():
        exact = evaluate(program, {key: value.astype(np.float64) for key, value in values.items()})[0][name]
        np.testing.assert_allclose(actual[name], value, rtol=tolerance, err_msg=name)
        # Rounded to nearest, errors cancel; cut off, they add up.
        assert abs(np.mean(actual[name] / exact - 1)) < tolerance / 20


def test_a_program_serves_fewer_stored_rows(cuda_backend):
    rng = np.random.default_rng(0)
    program, data = mlp(rng)
    few, order = {name: array[:33] for name, array in data.items()}, rng.permutation(33)
    executable = cuda_backend.executable(program, few | {"rows": order})
    expected, state = evaluate(program, few | {"rows": order[20 : 20 + B]})
    executable.run([20])
    check({"loss": executable.outputs["loss"]}, {"loss": expected["loss"]})
    check_state(state)
    with pytest.raises(ConfigError, match=r"input 'pixels' has shape \(51, 20\): expected \(50, 20\)"):
        cuda_backend.executable(program, data | {"pixels": np.zeros((51, 20), np.uint8), "rows": order})


def test_random_numbers_are_those_of_the_global_row(cuda_backend):
    seeds = SeedGenerator(5, "seeds")

    def step(x):
        bits, dropped = seeds.bits((x.shape[0], 11)), dropout(x, 0.3, seed=seeds)
        few, pairs = seeds.bits((x.shape[0], 3)), ops.reshape(seeds.bits((2 * x.shape[0], 5)), (-1, 2, 5))
        return {"bits": bits, "dropped": dropped, "few": few, "pairs": pairs}

    program = trace(step, {"x": ((Dim.rows(B), 9), "float32")})
    x = np.ones((B, 9), np.float32)
    all_rows, _ = evaluate(program, {"x": x}, {seeds.count: np.array(3)})
    seeds.count.assign(3)
    executable = cuda_backend.executable(program, {"x": x[2:5]}, rows=3, first_row=2)
    executable.run()
    for name, value in all_rows.items():
        np.testing.assert_array_equal(executable.outputs[name], value[2:5], err_msg=name)


def test_what_is_wrong_is_said(cuda_backend):
    program = trace(lambda x: {"y": x * 2}, {"x": ((Dim.rows(B), 2), "float32")})
    with pytest.raises(ConfigError, match="input 'x' is missing"):
        cuda_backend.executable(program, {})
    with pytest.raises(ConfigError, match=r"input 'x' has shape \(3, 3\): expected \(6, 2\)"):
        cuda_backend.executable(program, {"x": np.zeros((3, 3), np.float32)})
    with pytest.raises(ConfigError, match="input 'x' has dtype float64 on the device: expected float32"):
        cuda_backend.executable(program, {"x": np.zeros((B, 2))})


@pytest.mark.parametrize("widths", [((0, 1), (15, 0)), ((1, 0), (15, 0)), ((0, 1), (0, 15)), ((2, 0), (0, 0))])
def test_parts_load_nothing_outside_of_their_operand(cuda_backend, widths):
    # The row is known outside of the loop over columns: what it loads must not leave the condition on both.
    def step(x):
        return {"y": ops.sum(ops.pad(x[:, :, None], ((0, 0), *widths)), 2)}

    program = trace(step, {"x": ((5, 3), np.float32)})
    _, actual, expected, _ = both(cuda_backend, program, {"x": np.arange(15, dtype=np.float32).reshape(5, 3)})
    check(actual, expected)
