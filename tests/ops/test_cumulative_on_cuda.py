"""Cumulative sums and products on the CUDA backend: in kernels whose work is linear."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace


@pytest.mark.long
def test_sums_products_and_their_gradients(cuda_backend):
    x = np.random.default_rng(0).uniform(0.8, 1.2, (3, 300))

    def step(x):
        sums, products = ops.cumsum(x, 1), ops.cumprod(x[:, :40], 1)
        (slope,) = gradients(ops.sum(ops.square(sums)) + ops.sum(products), [x])
        return {"sums": sums, "products": products, "slope": slope}

    program = trace(step, {"x": ((Dim.rows(3), 300), x.dtype)})
    expected, _ = evaluate(program, {"x": x})
    executable = cuda_backend.executable(program, {"x": x})
    executable.run()
    np.testing.assert_allclose(expected["sums"], np.cumsum(x, 1), rtol=1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-11)
