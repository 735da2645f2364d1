"""Ops that users bring along, on a GPU or the emulator: right ones pass `check_op`, planted mistakes do not."""

import runpy

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cuda.compile import kernel_cache
from dptrain.errors import DeviceError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.testing import CheckError, check_layer, check_op
from tests.conftest import ROOT

CUBE = """
extern "C" __global__ void cube(const float *x, float *y, long long size, float scale) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += step)
        y[i] = scale * x[i] * x[i] * x[i];
}
extern "C" __global__ void cube_gradient(const float *x, const float *dy, float *dx, long long size, float scale) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += step)
        dx[i] = 3.0f * scale * x[i] * x[i] * dy[i];
}
"""
ROW_SUMS = """
#include "common.cuh"
// A block a row, in a fixed order.
extern "C" __global__ void row_sums(const float *x_BF, float *y_B, int F) {
    extern __shared__ float sums[];
    float sum = 0.0f;
    for (int f = threadIdx.x; f < F; f += blockDim.x) sum += x_BF[(long long)blockIdx.x * F + f];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) y_B[blockIdx.x] = sums[0] + sums[1];
}
"""


def cube_op(source: str = CUBE, **options) -> dp.ops.CustomOp:
    @dp.ops.op(source=source, **{"arguments": "PPqf"} | options)
    def cube(x, y, *, scale):
        y[...] = scale * x**3

    @cube.gradient(arguments="PPPqf")
    def cube_gradient(x, dy, dx, *, scale):
        dx[...] = 3 * scale * x**2 * dy

    return cube


@pytest.mark.parametrize("shape", [(1,), (0, 3), (7, 13), (1031,), (2, 3, 5)])
def test_a_right_kernel(cuda_backend, shape):
    checks = check_op(cube_op(), shape, scale=1.5, device="cuda")
    assert checks == (
        "numpy float32", "gradient", "cuda float32", "numpy float32 gradient", "cuda float32 gradient"
    )  # fmt: skip


PLANTED = {
    "the last element is left out": ("i < size; i += step)\n        y", "i < size - 1; i += step)\n        y", "nan"),
    "one element too many": ("i < size; i += step)\n        y", "i <= size; i += step)\n        y", "past its end"),
    "one element before": ("        y[i] = scale", "        y[i - 1] = scale", "before its begin"),
    "another formula": ("scale * x[i] * x[i] * x[i]", "scale * x[i] * x[i]", r"'y' differs first at \[0\]"),
    "a number is not used": ("y[i] = scale * x", "y[i] = x", r"'y' differs first at \[0\]"),
    "one block alone": ("= blockIdx.x * (long long)blockDim.x + threadIdx.x", "= threadIdx.x + 256 * 0 + 1", "nan"),
    "the gradient": ("dx[i] = 3.0f", "dx[i] = 2.0f", "op 'cube_gradient' on cuda: 'dx' differs first at"),
    "the input is overwritten": ("        y[i] = scale", "        ((float *)x)[i] = 0, y[i] = scale", "overwrites its"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(cuda_backend, name):
    right, wrong, message = PLANTED[name]
    assert right in CUBE
    with pytest.raises(CheckError, match=message):
        check_op(cube_op(CUBE.replace(right, wrong, 1)), (301,), scale=1.5, device="cuda")


def test_a_launch_of_its_own(cuda_backend, tmp_path):
    """With dynamic shared memory, from a file, with the built-in header."""
    path = tmp_path / "sums.cu"
    path.write_text(ROW_SUMS)

    @dp.ops.op(
        source=path,
        arguments="PPi",
        launch=lambda x, y: dp.ops.Launch((len(x), 1), (64, 1, 1), (x, y, x.shape[1]), shared=8),
        output_shapes=lambda x: [x[:1]],
    )
    def row_sums(x, y):
        y[...] = x.sum(axis=1)

    for shape in ((1, 1), (5, 67), (3, 200)):
        assert "cuda float32" in check_op(row_sums, shape, device="cuda")
    assert list(kernel_cache().glob("own-row_sums-*.cubin"))


REVERSED = """
extern "C" __global__ void reversed(const float *x, float *y, int n) {
    extern __shared__ float whole[];
    __shared__ float last;
    for (int i = threadIdx.x; i < n; i += blockDim.x) whole[i] = x[i];
    if (threadIdx.x == 0) last = x[n - 1];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = i ? whole[n - 1 - i] : last;
}
"""


def reversed_op(extra_bytes=0):
    """Return an op that holds all of a vector in shared memory, and `extra_bytes` more."""

    @dp.ops.op(
        source=REVERSED,
        arguments="PPi",
        launch=lambda x, y: dp.ops.Launch((1, 1), (256, 1, 1), (x, y, x.size), shared=4 * x.size + extra_bytes),
    )
    def reversed(x, y):
        y[...] = x[::-1]

    return reversed


@pytest.mark.parametrize("size", [12_287, 12_288, 50_000, 100, 12_289])
def test_shared_memory_beyond_48_kilobytes(cuda_backend, size):
    """Up to what one block of a GPU may have, 227 KB of an H100; in any order of sizes."""
    assert "cuda float32" in check_op(reversed_op(), (size,), device="cuda")


def test_more_shared_memory_than_a_block_can_have(cuda_backend):
    message = (
        r"op 'reversed': kernel 'reversed' needs 400,040 bytes of dynamic and (4|16) of "
        r"static shared memory, but .* allows [\d,]+ per block$"
    )
    with pytest.raises(DeviceError, match=message):
        check_op(reversed_op(400_000), (10,), device="cuda")


# Whether a thread that goes along rows draws anew for each number.
DRAWN = """
#include "random.cuh"
extern "C" __global__ void drawn(const float *x, float *y, int rows, int features) {
    Drawn last;
    for (int row = 0; row < rows; ++row)
        for (int feature = 0; feature < features; ++feature) {
            const int block = last.block;
            const Word of_row = block < 0 ? ~0ull : last.of_row;
            last.bits(1, 2, 3, 4, row, feature, features);
            y[row * features + feature] = last.block != block || last.of_row != of_row;
        }
}
"""


def test_all_eight_numbers_of_a_block_are_used(cuda_backend):
    @dp.ops.op(
        source=DRAWN,
        arguments="PPii",
        launch=lambda x, y: dp.ops.Launch((1, 1), (1, 1, 1), (x, y, *x.shape)),
        output_shapes=lambda x: [x],
    )
    def drawn(x, y):
        y[...] = (np.arange(x.shape[1]) % 8 == 0).astype(np.float32)

    for shape in ((3, 16), (2, 11), (2, 3)):
        assert "cuda float32" in check_op(drawn, shape, device="cuda")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (cube_op(CUBE.replace("scale *", "skale *")), r"nvcc cannot compile cube.cu for sm_\d+a?: .*skale"),
        (cube_op(kernel="cub"), "op 'cube': kernel 'cub' cannot be loaded .*extern \"C\" __global__"),
        (
            cube_op(launch=lambda x, y, scale: dp.ops.Launch((1, 1), (2048, 1, 1), (x, y, x.size, scale))),
            r"op 'cube': kernel 'cube' cannot be launched on grid \(1, 1\), block \(2048, 1, 1\)",
        ),
        (
            cube_op(launch=lambda x, y, scale: dp.ops.Launch((1, 1), (64, 1, 1), (x, y, "many", scale))),
            "op 'cube': kernel 'cube' cannot be launched .*arguments 'PPqf'",
        ),
    ],
    ids=["syntax", "name", "block", "argument"],
)
def test_what_cannot_run_is_one_clear_line(cuda_backend, op, message):
    with pytest.raises(DeviceError, match=message) as raised:
        check_op(op, (8,), scale=1.0, device="cuda")
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_the_examples(cuda_backend):
    layer = runpy.run_path(str(ROOT / "examples" / "custom_layer.py"))["ResidualGate"]
    assert check_layer(layer(), (19,), rows=7, device="cuda") == ("gradients", "program", "cuda float32")
    swish = runpy.run_path(str(ROOT / "examples" / "custom_op.py"))
    assert "cuda float32 gradient" in check_op(swish["swish"], (7, 13), beta=0.7, device="cuda")
    assert check_layer(swish["Swish"](2.0), (3, 5), device="cuda") == ("gradients", "program", "cuda float32")


class Halved(dp.layers.Layer):
    """Right on the CPU, wrong on a GPU."""

    def call(self, inputs):
        return cube_op(CUBE.replace("scale *", "0.5f * scale *", 1))(inputs, scale=1.0)


def test_a_layer_that_differs_on_the_gpu_is_found(cuda_backend):
    with pytest.raises(CheckError, match=r"layer 'halved' on cuda: output differs first at \[0, 0\]"):
        check_layer(Halved(), (3,), device="cuda")


def test_the_kernel_runs_in_the_order_of_the_ops(cuda_backend):
    """Between built-in ops, in a program with a gradient, on a rank's rows."""
    op = cube_op()

    def step(x):
        loss = dp.ops.sum(op(2 * x, scale=0.5) + 1)
        (dx,) = gradients(loss, [x])
        return {"loss": loss, "dx": dx, "cubes": op(x, scale=1.0) * 2}

    program = trace(step, {"x": ((Dim.rows(4), 5), "float32")})
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    expected, _ = evaluate(program, {"x": x[:3]}, rows=3)
    executable = cuda_backend.executable(program, {"x": x[:3]}, rows=3)
    executable.run([0, 0])
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-5)


def test_several_outputs_each_have_a_launch_of_their_own(cuda_backend):
    source = CUBE.replace("cube(const float *x, float *y,", "cube(const float *x, float *y, float *z,").replace(
        "y[i] = scale", "z[i] = -x[i], y[i] = scale"
    )

    @dp.ops.op(source=source, arguments="PPPqf", outputs=2)
    def cube(x, y, z, *, scale):
        y[...], z[...] = scale * x**3, -x

    x = np.random.default_rng(0).normal(size=(7,)).astype(np.float32)
    program = trace(lambda x: dict(zip("yz", cube(x, scale=2.0), strict=True)), {"x": ((7,), "float32")})
    executable = cuda_backend.executable(program, {"x": x})
    executable.run()
    np.testing.assert_allclose(executable.outputs["y"], 2 * x**3, rtol=1e-5)
    np.testing.assert_array_equal(executable.outputs["z"], -x)
