"""Kernels of users and calls of the host in loops on the CUDA backend, and over variables."""

import numpy as np

import dptrain as dp
from dptrain import ops
from dptrain.models.explaining import explain
from dptrain.program.body import has_body
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.ops.test_custom_ops import cube_op

SHIFT = """
extern "C" __global__ void shift(const float *x, float *y, long long size) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += step) y[i] = x[(i + 1) % size];
}
"""


def check(cuda_backend, step, steps=1):
    x = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    program = trace(step, {"x": ((5, Dim.rows(4), 3), "float32")})
    assert any(map(has_body, program.tensors))
    expected = evaluate(program, {"x": x})[0]
    executable = cuda_backend.executable(program, {"x": x})
    assert any(kernel.loop is not None for stage in executable._made.stages for kernel in stage)
    for _ in range(steps):
        executable.run([0, 0])
        for name, value in expected.items():
            np.testing.assert_allclose(executable.outputs[name], value, rtol=3e-5, atol=3e-5, err_msg=name)


def test_a_users_kernel_in_a_loop(cuda_backend):
    cube = cube_op()

    def step(x):
        h, ys = ops.scan(lambda h, xt: (cube(h, scale=0.5) + xt, cube(xt, scale=2.0)), ops.tanh(x[0]), 0.3 * x)
        return {"h": h, "ys": ys}

    check(cuda_backend, step, 2)


def test_the_host_in_a_loop(cuda_backend):
    def step(x):
        h, ys = ops.scan(lambda h, xt: (ops.sort(h + xt), ops.sort(xt) * h), x[0], x, reverse=True)
        return {"h": h, "ys": ys}

    check(cuda_backend, step, 2)


def test_explain_names_what_the_host_computes_in_loops():
    class Ordered(dp.layers.Layer):
        def call(self, inputs):
            return ops.map(ops.sort, ops.transpose(inputs, (1, 0, 2)))[0]

    model = dp.Sequential([dp.Input((4, 3)), Ordered(), dp.layers.Dense(1)])
    model.compile("sgd", "mse", device="cuda")
    assert "on the host, between two copies: sort_last\n" in explain(model) + "\n"


def test_a_users_kernel_does_not_replace_what_it_reads(cuda_backend):
    @dp.ops.op(source=SHIFT, arguments="PPq")
    def shift(x, y):
        y[...] = np.roll(x, -1)

    w = Variable(np.arange(600, dtype=np.float32), "w", trainable=False)

    def step(x):
        w.assign(shift(w))
        return {"x": x}

    executable = cuda_backend.executable(trace(step, {"x": ((1,), "float32")}), {"x": np.ones(1, np.float32)})
    executable.run([0])
    np.testing.assert_array_equal(w.numpy(), np.roll(np.arange(600), -1))
