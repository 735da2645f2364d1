"""Products whose sums are cut into slices, which a tree of blocks joins: `ProductOf::join` in `kernels/tiles.cuh`."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.products import product_plan
from dptrain.program.program import trace
from tests.ops.test_half_products_on_cuda import product, run, whole
from tests.sample import sample


@pytest.mark.parametrize(
    ("dtype", "terms", "slices"),
    sample(
        [
            *(("float32", *sizes) for sizes in ((512, 8), (576, 9), (960, 15), (1024, 16), (1088, 17))),
            *(("float32", *sizes) for sizes in ((2049, 17), (16384, 128))),
            *(("bfloat16", *sizes) for sizes in ((960, 15), (1024, 16), (1088, 17), (2049, 22), (16384, 256))),
        ],
        3,
        first=1,
    ),
)
def test_on_both_sides_of_a_node(cuda_backend, dtype, terms, slices):
    """16 slices are one node, which loads eight at once; sums of columns have counters too; again, all are zero."""

    def step(a, b):
        y = product(a, b, dtype)
        return {"y": y, "columns": ops.sum(ops.relu(y + 1), axis=0)}

    rng = np.random.default_rng(0)
    a, b = whole(rng, 40, terms), whole(rng, terms, 9)
    assert product_plan(40, 9, terms, "float32" if dtype == "float32" else "half").slices == slices
    program = trace(step, {"a": (a.shape, "float32"), "b": (b.shape, "float32")})
    executable = run(cuda_backend, program, {"a": a, "b": b})
    for _ in range(2):
        np.testing.assert_array_equal(executable.outputs["y"], a @ b)
        np.testing.assert_array_equal(executable.outputs["columns"], np.maximum(a @ b + 1, 0).sum(axis=0))
        executable.run()


def test_the_gradient_of_a_kernel_of_few_channels(cuda_backend):
    """Of 3 x 3 x 2 x 4 results of sums over 4 x 33 x 33 places, and of the bias with them."""
    from dptrain.program.gradient import gradients

    def step(x, kernel, bias, dy):
        y = ops.conv(x, kernel, padding="same") + bias
        dkernel, dbias = gradients(y, [kernel, bias], dy)
        return {"dkernel": dkernel, "dbias": dbias}

    rng = np.random.default_rng(0)
    shapes = {"x": (4, 33, 33, 2), "kernel": (3, 3, 2, 4), "bias": (4,), "dy": (4, 33, 33, 4)}
    values = {name: rng.integers(-4, 5, shape).astype(np.float32) for name, shape in shapes.items()}
    executable = run(cuda_backend, trace(step, {name: (shape, "float32") for name, shape in shapes.items()}), values)
    padded, dy = np.pad(values["x"], ((0, 0), (1, 1), (1, 1), (0, 0))), values["dy"]
    expected = [[np.einsum("bhwi,bhwo->io", padded[:, i : i + 33, j : j + 33], dy) for j in range(3)] for i in range(3)]
    np.testing.assert_array_equal(executable.outputs["dkernel"], expected)
    np.testing.assert_array_equal(executable.outputs["dbias"], dy.sum(axis=(0, 1, 2)))
