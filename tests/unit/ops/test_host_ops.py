"""Ops that the host computes: in compiled programs, in threads, on ranks, and functions made of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.gradient import gradients
from dptrain.program.lowering import HostCall
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import OPS, Variable
from tests.unit.program.virtual_ranks import run_on_ranks

B = 6


def step(x):
    """A loss with host calls between generated loops, and a variable that it updates."""
    q, r = ops.qr(ops.matmul(ops.transpose(x, (0, 2, 1)), x) + np.eye(3, dtype=np.float32))
    ordered = ops.sort(ops.sum(x, 1), -1) * 2
    real, imaginary = ops.rfft(ops.tanh(x), 4)
    loss = ops.mean(ops.logdet(ops.matmul(q, r))) + ops.mean(ordered * ops.sum(real**2 + imaginary**2, (1, 2))[:, None])
    diagonal = ops.einsum("bii->bi", ops.einsum("bij,bik->bjk", x, x))
    loss += ops.sum(diagonal**2)
    outputs = {"bits": ops.view(ops.cast(x, "float16"), "int16"), "diagonal": diagonal, "median": ops.median(x, (0, 2))}
    return {"loss": loss, "dx": gradients(loss, [x])[0], "ordered": ordered, **outputs}


def program_and_values():
    x = np.random.default_rng(0).normal(size=(B, 2, 3)).astype(np.float32)
    return trace(step, {"x": ((Dim.rows(B), 2, 3), "float32")}), {"x": x}


def test_compiled_code_calls_the_host_between_its_loops():
    program, values = program_and_values()
    expected, _ = evaluate(program, values)
    executable = CompiledExecutable(program, HostMemory(), values)
    executable.run([0, 0])
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_threads_compute_beside_each_other():
    program, values = program_and_values()
    expected, _ = evaluate(program, values)

    def run(number):
        executable = CompiledExecutable(program, HostMemory(), values)
        executable.run([0] * 5)
        return executable.outputs["loss"]

    with ThreadPoolExecutor(4) as pool:
        for loss in pool.map(run, range(8)):
            np.testing.assert_allclose(loss, expected["loss"], rtol=2e-5)


@pytest.mark.parametrize("shards", [[4, 2], [0, 5, 1]], ids=str)
def test_ranks(shards):
    program, values = program_and_values()
    expected, _ = evaluate(program, values)
    per_rank, _ = run_on_ranks(place(program), values, shards, {"x": 0})
    for outputs, _ in per_rank:
        np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(outputs["median"], expected["median"], rtol=1e-6)


def test_every_host_op_leaves_its_inputs_alone():
    from tests.unit.ops.cases import CASES

    for name, cases in CASES.items():
        if isinstance(OPS[name].lowering, HostCall):
            for case in cases:
                arrays = [make(np.random.default_rng(7)) for make in case.inputs]
                for array in arrays:
                    array.flags.writeable = False
                OPS[name](*arrays, **case.attributes)


def test_a_layer_trains_through_them():
    class Whitened(dp.layers.Layer):
        def call(self, inputs):
            covariance = ops.matmul(ops.transpose(inputs), inputs) / 8 + np.eye(3, dtype=np.float32)
            return ops.transpose(ops.solve_triangular(ops.cholesky(covariance), ops.transpose(inputs), lower=True))

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(16, 4)).astype(np.float32), rng.normal(size=(16, 1)).astype(np.float32)
    losses = {}
    for eager in (False, True):
        dp.utils.set_random_seed(3)
        model = dp.Sequential([dp.Input((4,)), dp.layers.Dense(3), Whitened(), dp.layers.Dense(1)])
        model.compile(dp.optimizers.SGD(0.1), "mse", run_eagerly=eager)
        losses[eager] = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False).history["loss"]
    assert losses[False][-1] < losses[False][0]
    np.testing.assert_allclose(losses[False], losses[True], rtol=1e-5)


# Functions of several ops


def test_a_primal_may_depend_on_another():
    def step(x):
        direction = ops.ones_like(x)
        return {"d": ops.jvp(lambda a, b: ops.sum(a * a * b), [x, ops.sin(x)], [direction, 2 * direction])[1]}

    x = np.array([0.3, -1.2, 2.0])
    derivative = evaluate(trace(step, {"x": ((3,), "float64")}), {"x": x})[0]["d"]
    np.testing.assert_allclose(derivative, np.sum(2 * x * np.sin(x) + 2 * x * x), rtol=1e-12)


def test_derivative_along_a_direction():
    x, t = np.array([0.3, -1.2, 2.0]), np.array([1.0, 0.5, -2.0])
    value, derivative = ops.jvp(lambda x: ops.sin(x) * ops.sum(x), [x], [t])
    np.testing.assert_allclose(value, np.sin(x) * x.sum(), rtol=1e-12)
    np.testing.assert_allclose(derivative, np.cos(x) * t * x.sum() + np.sin(x) * t.sum(), rtol=1e-12)
    pair, slopes, auxiliary = ops.jvp(lambda x, y: ((x * y, y), 7), [x, x], [t, t], has_aux=True)
    assert auxiliary == 7
    np.testing.assert_allclose(pair[0], x * x, rtol=1e-12)
    np.testing.assert_allclose(slopes[0], 2 * x * t, rtol=1e-12)
    np.testing.assert_allclose(slopes[1], t, rtol=1e-12)
    program = trace(lambda x, t: {"d": ops.jvp(ops.exp, [x], [t])[1]}, {"x": ((3,), "float64"), "t": ((3,), "float64")})
    np.testing.assert_allclose(evaluate(program, {"x": x, "t": t})[0]["d"], np.exp(x) * t, rtol=1e-12)
    with pytest.raises(ConfigError, match="jvp: primals of shapes"):
        ops.jvp(ops.sin, [x], [t[:2]])


def test_a_gradient_of_ones_own():
    @ops.custom_gradient
    def log1pexp(x):
        e = ops.exp(x)

        def grad(*args, upstream=None):
            if upstream is None:
                (upstream,) = args
            return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1, e))

        return ops.log(1 + e), grad

    v = Variable(np.array([100.0, 0.0, -3.0]), "v")
    y = log1pexp(v)
    ops.sum(y * 2).backward()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(v.value.grad, 2 / (1 + np.exp(-v.numpy())), rtol=1e-12)

    @ops.custom_gradient
    def cut(x, y):  # what it returns is connected with nothing
        return ops.stop_gradient(x * y), lambda dy: (dy * 5, None)

    def step(x, y):
        z = cut(x, y)
        return {"z": z, "dx": gradients(z, [x])[0]}

    program = trace(step, {"x": ((Dim.rows(3),), "float64"), "y": ((Dim.rows(3),), "float64")})
    outputs, _ = evaluate(program, {"x": np.arange(3.0), "y": np.ones(3)})
    np.testing.assert_array_equal(outputs["dx"], [5, 5, 5])
    np.testing.assert_array_equal(outputs["z"], [0, 1, 2])
    w = Variable(np.ones(3), "w")
    cut(w, w).backward()
    np.testing.assert_array_equal(w.value.grad, [5, 5, 5])
    with pytest.raises(ConfigError, match="custom_gradient: 1 gradients for 2 tensors"):
        ops.custom_gradient(lambda x, y: (x + y, lambda dy: dy))(v, v).backward()


def test_vectorize():
    f = ops.vectorize(lambda a, b: a + 2 * b)
    np.testing.assert_array_equal(f(np.arange(3.0), np.ones((2, 1))), np.arange(3.0) + np.full((2, 3), 2))
    product = ops.vectorize(ops.matmul, signature="(i,j),(j)->(i)")
    m, v = np.random.default_rng(0).normal(size=(4, 2, 3)), np.arange(3.0)
    np.testing.assert_allclose(product(m, v), m @ v, rtol=1e-12)
    with pytest.raises(ConfigError, match="to be a callable"):
        ops.vectorize(3)


def test_rearrange():
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 3))
    actual = ops.rearrange(x, "b (h1 h) (w1 w) c -> (b h1 w1) h w c", h1=2, w1=3)
    expected = x.reshape(2, 2, 2, 3, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(12, 2, 2, 3)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(ops.rearrange(x, "b h w c -> b (c h w)"), x.transpose(0, 3, 1, 2).reshape(2, -1))
    for pattern in ("b h w -> b", "b h w c -> b h w", "b (h k) w c -> b h k w c", "b h w c"):
        with pytest.raises(ConfigError, match="rearrange"):
            ops.rearrange(x, pattern)


def test_associative_scan():
    x = np.random.default_rng(0).normal(size=(3, 7))
    np.testing.assert_allclose(ops.associative_scan(lambda a, b: a + b, x, axis=1), np.cumsum(x, 1), rtol=1e-12)
    matrices = np.random.default_rng(1).normal(size=(5, 2, 2))
    expected = [matrices[-1]]
    for matrix in matrices[-2::-1]:
        expected.append(expected[-1] @ matrix)
    actual = ops.associative_scan(lambda a, b: a @ b, matrices, reverse=True)
    np.testing.assert_allclose(actual, expected[::-1], rtol=1e-12)
    with pytest.raises(ConfigError, match="same first dimension"):
        ops.associative_scan(lambda a, b: a, (x, x[:2]))
