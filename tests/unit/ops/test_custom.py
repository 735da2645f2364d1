"""Ops that users bring along, called on tensors: executed, differentiated, traced, shared out among ranks."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.unit.program.virtual_ranks import run_on_ranks

RNG = np.random.default_rng(2)
X, W = RNG.normal(size=(7, 3)), RNG.normal(size=3)


@dp.ops.op(source="", arguments="PPPqf")
def scaled_cube(x, w, y, *, scale=0.5):
    y[...] = scale * w * x**3


@scaled_cube.gradient(arguments="PPPPPqf")
def scaled_cube_gradient(x, w, dy, dx, dw, *, scale=0.5):
    dx[...] = 3 * scale * w * x**2 * dy
    dw[...] = (scale * x**3 * dy).sum(axis=0)


def built_in(x, w, scale=0.5):
    return scale * w * x * x * x


@dp.ops.op(source="", arguments="PPPq", outputs=2)
def halves(x, y, z):
    y[...] = x / 2
    z[...] = x * x / 2


@halves.gradient(arguments="PPPPq")
def halves_gradient(x, dy, dz, dx):
    dx[...] = dy / 2 + dz * x


@dp.ops.op(
    source="",
    arguments="PPq",
    launch=lambda x, y: dp.ops.Launch((1, 1), (32, 1, 1), (x, y, len(x))),
    output_shapes=lambda x: [x[1:]],
    letters="aX->X",
)
def column_sums(x, y):
    y[...] = x.sum(axis=0)


@column_sums.gradient(arguments="PPPq")
def column_sums_gradient(x, dy, dx):
    dx[...] = dy


def test_a_call_is_executed_at_once():
    y = scaled_cube(X, W, scale=2.0)
    np.testing.assert_array_equal(y.numpy(), 2.0 * W * X**3)
    np.testing.assert_array_equal(scaled_cube(X, W).numpy(), 0.5 * W * X**3)
    assert scaled_cube(X.astype(np.float32), W.astype(np.float32)).dtype == np.float32
    first, second = halves(X)
    np.testing.assert_array_equal(first.numpy(), X / 2)
    np.testing.assert_array_equal(second.numpy(), X * X / 2)
    assert column_sums(X).shape == (3,)


def test_gradients_are_those_of_built_in_ops():
    x, w = Variable(X), Variable(W)
    results = []
    for function in (scaled_cube, built_in):
        ops.sum(ops.square(function(x, w))).backward()
        results.append([x.value.grad.numpy(), w.value.grad.numpy()])
        x._gradient = w._gradient = None
    for gradient, other in zip(*results, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-12)
    first, second = halves(x)
    ops.sum(3.0 * first + second).backward()
    np.testing.assert_allclose(x.value.grad.numpy(), 1.5 + X, rtol=1e-12)


def step(x):
    w = Variable(W, "w")
    y = scaled_cube(x, w)
    first, second = halves(y)
    loss = ops.sum(ops.square(column_sums(first))) + ops.mean(second)
    dx, dw = gradients(loss, [x, w.value])
    return {"y": y, "loss": loss, "dx": dx, "dw": dw, "sums": column_sums(y)}


def test_ranks_compute_what_one_does():
    program = trace(step, {"x": ((Dim.rows(len(X)), 3), np.float64)})
    alone = step(Variable(X).value)
    for shards in ([7], [3, 0, 4]):
        per_rank, _ = run_on_ranks(place(program), {"x": X}, shards, {"x": 0})
        for name, expected in alone.items():
            parts = [outputs[name] for outputs, _ in per_rank]
            value = np.concatenate(parts) if name in ("y", "dx") else parts[0]
            np.testing.assert_allclose(value, expected.numpy(), rtol=1e-12, err_msg=f"{name} of {shards}")


def test_a_layer_of_it_is_trained():
    class Cubes(dp.layers.Layer):
        def build(self, input_shape):
            self.w = self.add_weight((input_shape[-1],), "ones", name="w")

        def call(self, inputs):
            return scaled_cube(inputs, self.w) if self.own else built_in(inputs, self.w)

    histories = []
    for custom, eager in ((True, False), (True, True), (False, False)):
        layer = Cubes()
        layer.own = custom
        model = dp.Sequential([dp.layers.Dense(3, input_shape=(3,)), layer, dp.layers.Dense(1)], seed=1)
        model.compile("adam", "mse", dtype="float64", run_eagerly=eager)
        histories.append(model.fit(X, X[:, :1], batch_size=3, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[0], histories[2], rtol=1e-10)
    np.testing.assert_allclose(histories[1], histories[2], rtol=1e-10)


def test_what_nobody_can_know_is_said():
    @dp.ops.op(source="", arguments="PPq", output_shapes=lambda x: [x[1:]])
    def total(x, y):
        y[...] = x.sum(axis=0)

    with pytest.raises(ConfigError, match=r"op 'total' has no gradient: register one with @total.gradient"):
        ops.sum(total(Variable(X))).backward()
    program = trace(lambda x: {"y": total(x)}, {"x": ((Dim.rows(7), 3), np.float64)})
    with pytest.raises(
        ConfigError, match=r"op 'total': its output of shape .* does not have one row per .* letters='aX->X'"
    ):
        place(program)
    transposed = trace(lambda x: {"y": halves(ops.transpose(x))[0]}, {"x": ((Dim.rows(7), 3), np.float64)})
    with pytest.raises(ConfigError, match="op 'halves': the rows of the batch are not along the first axis"):
        place(transposed)
