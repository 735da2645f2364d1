"""Loops on the CUDA backend: values and gradients beside NumPy in float64, and the text that is generated of them."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.errors import DataError
from dptrain.ops.indexing import take_rows
from dptrain.ops.loops import remat
from dptrain.program.body import has_body
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from tests.sample import sample

B, WIDTH = 5, 3
MODELS = {}


def model(function):
    MODELS[function.__name__] = function
    return function


@model
def recurrent(x, u, b, reverse=False):
    def cell(h, xt):
        h = ops.tanh(xt @ u + h @ u + b)
        return h, h * h

    h, ys = ops.scan(cell, ops.zeros((x.shape[1], WIDTH), x.dtype), x, reverse=reverse)
    return ops.sum(h) + ops.mean(ys)


@model
def reversed_steps(x, u, b):
    return recurrent(x, u, b, reverse=True)


@model
def of_last(x, u, b):
    return ops.sum(ops.scan(lambda h, xt: (ops.sigmoid(xt @ u - h), None), x[0], x)[0] ** 2)


@model
def of_stacked(x, u, b):
    return ops.mean(ops.map(lambda xt: ops.softmax(xt @ u + b), x))


@model
def of_carries_that_nobody_reads(x, u, b):
    """The last carry lies where no other tensor does, though it is read by nobody."""
    return ops.mean(ops.scan(lambda h, xt: (ops.tanh(xt + h @ u), h * b), x[0], x)[1])


@model
def nested(x, u, b):
    def outer(h, xt):
        h, ys = ops.scan(lambda g, n: (ops.tanh(g @ u) + n, g * b), h, ops.cast(np.arange(3), x.dtype), reverse=True)
        return h + xt, ops.sum(ys, 0)

    h, ys = ops.scan(outer, x[0], x)
    return ops.mean(h * h) + ops.mean(ys)


@model
def nested_over_slices(x, u, b):
    """The inner loop goes over a slice of the outer one, stacks what the outer one stacks, and captures its carry."""

    def outer(h, xt):
        g, ys = ops.scan(lambda g, part: (g + part * h, ops.tanh(part @ u)), h, xt)
        return h - ops.mean(ys) + 0.1 * g, ys

    h, ys = ops.scan(outer, x[0], ops.stack([x, 2 * x]) * b)
    return ops.mean(h * h) + ops.mean(ys * ys)


@model
def of_counter(x, u, b):
    return ops.sum(ops.fori_loop(0, 3, lambda n, h: ops.tanh(h @ u) * ops.cast(n + 1, h.dtype), x[1]))


@model
def of_first(x, u, b):
    """What each step passes on is what the step before has read."""
    h, ys = ops.scan(lambda h, xt: ((xt, h[0] * b), h[1]), (x[0], x[1]), x)
    return ops.sum(ys * ys) + ops.sum(h[1])


@model
def chained(x, u, b):
    """A loop over what another one has stacked, which begins with its last carry."""
    h, ys = ops.scan(lambda h, xt: (ops.tanh(h + xt @ u), h * xt), x[0] * 0.5, x)
    g, zs = ops.scan(lambda g, yt: (ops.tanh(g @ u + yt) + h, (g, g * b)), h, ys, reverse=True)
    return ops.mean(g * h) + ops.mean(zs[0]) + ops.mean(zs[1])


def trained(make, dtype, seed=1):
    """Return a step with two weights: a loss, its gradients, and a descent along one of them."""
    rng = np.random.default_rng(seed)
    u = Variable(rng.normal(size=(WIDTH, WIDTH)).astype(dtype), "u")
    b = Variable(rng.normal(size=WIDTH).astype(dtype), "b")

    def step(x):
        u._gradient = b._gradient = None
        loss = make(x, u, b)
        loss.backward()
        grads = {"u": u.value.grad, "b": b.value.grad}
        if u.value.grad is not None:
            u.assign(u - 0.1 * u.value.grad)
        return {"loss": loss, **{name: grad for name, grad in grads.items() if grad is not None}}

    return step


def assert_equal_to_float64(backend, make, length, steps=2):
    """Execute some steps in float32, and by NumPy in float64."""
    x = np.random.default_rng(0).normal(size=(length, B, WIDTH))
    shape = (length, Dim.rows(B), WIDTH)
    program, wide = (trace(trained(make, dtype), {"x": (shape, dtype)}) for dtype in ("float32", "float64"))
    assert any(map(has_body, program.tensors)) == (length != 1)  # one step is no loop
    state, expected = {}, {}
    for _ in range(steps):
        expected, new = evaluate(wide, {"x": x}, {**{variable: variable.numpy() for variable in wide.state}, **state})
        state |= new
    executable = backend.executable(program, {"x": x.astype(np.float32)})
    executable.run([0] * steps)
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
    for variable, other in zip(program.state, wide.state, strict=True):
        np.testing.assert_allclose(variable.numpy(), state.get(other, other.numpy()), rtol=2e-5, atol=2e-5)
    return executable


@pytest.mark.parametrize("name", sample(MODELS, 2))
def test_values_and_gradients_are_those_of_float64(cuda_backend, name):
    executable = assert_equal_to_float64(cuda_backend, MODELS[name], 4)
    assert any(kernel.loop is not None for stage in executable._made.stages for kernel in stage)


@pytest.mark.parametrize("length", sample([0, 1, 2, 7], 3))
def test_numbers_of_steps(cuda_backend, length):
    def last(x, u, b):
        h, ys = ops.scan(lambda h, xt: (ops.tanh(h @ u + xt), h), ops.ones((B, WIDTH), x.dtype), x)
        return ops.sum(h * b) + ops.sum(ys * ys)

    assert_equal_to_float64(cuda_backend, last, length)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_of_a_loop_is_as_long_for_many_steps_as_for_few(name):
    def composed(steps):
        return Composition(trace(trained(MODELS[name], "float32"), {"x": ((steps, Dim.rows(B), WIDTH), "float32")}))

    short, long = composed(10).source(), composed(1000).source()
    assert short.count("\n") == long.count("\n")
    assert len(long) - len(short) < 100


def test_a_step_looks_up_rows_that_are_not_there(cuda_backend):
    """By numbers that it computes of its slice, and by those of the batch's samples."""
    table = Variable(np.arange(8, dtype=np.float32).reshape(4, 2), "table")

    def step(x, rows):
        return {"y": ops.map(lambda n: take_rows(table, rows + n), x)}

    program = trace(step, {"x": ((3,), "int64"), ROWS: ((Dim.rows(2),), "int64")})
    x, rows = np.arange(3), np.array([1, 0, 1])
    executable = cuda_backend.executable(program, {"x": x, ROWS: rows})
    for start in (0, 1):
        executable.run([start])
        expected = table.numpy()[rows[start : start + 2] + x[:, None]]
        np.testing.assert_array_equal(executable.outputs["y"], expected)
    executable = cuda_backend.executable(program, {"x": x, ROWS: rows + 2})
    executable.run([0])
    with pytest.raises(DataError, match="row"):
        _ = executable.outputs["y"]


@pytest.mark.parametrize("name", sample(["nested_over_slices", "chained"], 2, first=1))
def test_runs_in_a_pack_have_the_bits_of_runs_alone(cuda_backend, another, name):
    shapes = {"x": ((4, Dim.rows(B), WIDTH), "float32")}
    data = [np.random.default_rng(seed).normal(size=(4, B, WIDTH)).astype(np.float32) for seed in range(3)]
    results = []
    for packed in (False, True):
        programs = [trace(trained(MODELS[name], "float32", seed), shapes) for seed in range(3)]
        backends = [another() if packed else cuda_backend for _ in programs]
        executables = [
            backend.executable(program, {"x": x}) for backend, program, x in zip(backends, programs, data, strict=True)
        ]
        assert len({executable.pack_key for executable in executables}) == 1
        for executable in executables:
            executable.run([0] * 3)
        results.append(
            [
                {**executable.outputs, **{v.path: v.numpy() for v in p.state}}
                for executable, p in zip(executables, programs, strict=True)
            ]
        )
    for alone, packed in zip(*results, strict=True):
        for key, value in alone.items():
            np.testing.assert_array_equal(packed[key], value, err_msg=key)
    assert not np.array_equal(results[0][0]["u"], results[0][1]["u"])


@pytest.mark.parametrize("by_graph", sample([True, False], 2))
def test_what_remat_computes_again(cuda_backend, by_graph):
    def blocks(x, u, b):
        block = remat(lambda x, k: ops.tanh(x @ u + k * b) * ops.sigmoid(x))
        h, ys = ops.scan(lambda h, xt: (block(h, 1) + xt, block(xt, 2)), x[0], x)
        return ops.mean(block(block(h, 3), 4)) + ops.mean(ys * ys)

    cuda_backend.graph = by_graph
    try:
        assert_equal_to_float64(cuda_backend, blocks, 3)
    finally:
        cuda_backend.graph = True


def test_each_step_is_launched_once(cuda_backend):
    short, long = (assert_equal_to_float64(cuda_backend, of_last, length).launches for length in (3, 13))
    per_step = (long - short) / 10
    assert 0 < per_step <= 6
    assert per_step == int(per_step)
