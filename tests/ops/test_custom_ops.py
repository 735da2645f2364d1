"""Ops that users bring along, on a GPU or the emulator: right ones pass `check_op`, planted mistakes do not."""

import runpy

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cuda.compile import kernel_cache
from dptrain.errors import DeviceError
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


def cube_op(source: str = CUBE, **options) -> dp.ops.Op:
    @dp.ops.op(source=source, **{"arguments": "PPqf"} | options)
    def cube(x, y, *, scale):
        y[...] = scale * x**3

    @cube.gradient(arguments="PPPqf")
    def cube_gradient(x, dy, dx, *, scale):
        dx[...] = 3 * scale * x**2 * dy

    return cube


@pytest.mark.parametrize("shape", [(1,), (0, 3), (7, 13), (1031,), (2, 3, 5)])
def test_a_right_kernel(cuda_ops, shape):
    done = check_op(cube_op(), shape, scale=1.5, device="cuda")
    assert done == (
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
def test_a_planted_mistake_is_found(cuda_ops, name):
    right, wrong, message = PLANTED[name]
    assert right in CUBE
    with pytest.raises(CheckError, match=message):
        check_op(cube_op(CUBE.replace(right, wrong, 1)), (301,), scale=1.5, device="cuda")


def test_a_launch_of_its_own(cuda_ops, tmp_path):
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


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (cube_op(CUBE.replace("scale *", "skale *")), r"nvcc cannot compile cube.cu for sm_\d+, it says: .*skale"),
        (cube_op(kernel="cub"), "op 'cube': kernel 'cub' does not load .*extern \"C\" __global__"),
        (
            cube_op(launch=lambda x, y, scale: dp.ops.Launch((1, 1), (2048, 1, 1), (x, y, x.size, scale))),
            r"op 'cube': kernel 'cube' does not launch on grid \(1, 1\), block \(2048, 1, 1\)",
        ),
        (
            cube_op(launch=lambda x, y, scale: dp.ops.Launch((1, 1), (64, 1, 1), (x, y, "many", scale))),
            "op 'cube': kernel 'cube' does not launch .*arguments 'PPqf'",
        ),
    ],
    ids=["syntax", "name", "block", "argument"],
)
def test_what_cannot_run_is_one_clear_line(cuda_ops, op, message):
    with pytest.raises(DeviceError, match=message) as raised:
        check_op(op, (8,), scale=1.0, device="cuda")
    assert "\n" not in str(raised.value)


def test_the_examples(cuda_ops):
    layer = runpy.run_path(str(ROOT / "examples" / "custom_layer.py"))["ResidualGate"]
    assert check_layer(layer(), (19,), rows=7, device="cuda") == ("gradients", "cuda float32")
    swish = runpy.run_path(str(ROOT / "examples" / "custom_op.py"))
    assert "cuda float32 gradient" in check_op(swish["swish"], (7, 13), beta=0.7, device="cuda")
    assert check_layer(swish["Swish"](2.0), (3, 5), device="cuda") == ("gradients", "cuda float32")


class Halved(dp.layers.Activation):
    """Right on the CPU, wrong on a GPU."""

    def forward(self, ops, buffers, context):
        super().forward(ops, buffers, context)
        if ops.name == "cuda":
            ops.affine(buffers.y[1:], 0.5, 0.0, buffers.y[1:])


def test_a_layer_that_differs_on_the_gpu_is_found(cuda_ops):
    with pytest.raises(CheckError, match=r"layer 'halved' on cuda: 'y' differs first at \[1, 0\]"):
        check_layer(Halved("tanh"), (3,), device="cuda")


def test_the_kernel_runs_in_the_order_of_the_ops(ops):
    """Between built-in ops on the same buffers, on every backend."""
    op = cube_op()
    x, y = ops.upload(np.full((3, 5), 2.0, ops.dtype)), ops.empty((3, 5))
    ops.affine(x, 2.0, 0.0, x)
    op(ops, x, y, scale=0.5)
    ops.affine(y, 1.0, 1.0, y)
    np.testing.assert_array_equal(ops.download(y), 33.0)
