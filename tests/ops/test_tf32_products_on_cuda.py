"""Products in TF32 on tensor cores: `kernels/product_tf32.cuh`."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from tests.ops.test_half_products_on_cuda import calls, whole
from tests.sample import sample
from tests.tolerances import assert_near, rounded


@pytest.fixture
def tf32_backend(cuda_backend, monkeypatch):
    """The CUDA backend, set to TF32."""
    monkeypatch.setattr(cuda_backend, "precision", "tf32")
    return cuda_backend


def run(backend, step, specs, values, rows=None):
    """Run a step; return its outputs, and the sizes and layouts of the products that its source calls."""
    executable = backend.executable(trace(step, specs), values, rows=rows)
    executable.run()
    products = calls(executable.source)
    assert {kernel for kernel, _ in products} == {"product_tf32"}
    return executable.outputs, [numbers.split(", ") for _, numbers in products]


def test_every_layout_and_edge_in_tf32(tf32_backend):
    """The batch is M, N or K in turn; rows begin at multiples of 16 bytes or anywhere; 600 terms are sliced."""

    def step(x, y, w, v):
        x_t, y_t = ops.transpose(x), ops.transpose(y)
        return {
            "nn": x @ w,
            "odd nn": y @ v,
            "tt": ops.transpose(w) @ x_t,
            "odd tt": ops.transpose(v) @ y_t,
            "nt": y @ ops.transpose(ops.transpose(v) * 3),
            "wide nt": x @ ops.transpose(ops.transpose(w) * 3),
            "tn": x_t @ y,
            "odd tn": y_t @ x,
        }

    sizes = (0, 1, 3, 4, 5, 16, 31, 33, 64, 129, 600)
    specs = {name: ((Dim.rows(sizes[-1]), n), "float32") for name, n in (("x", 40), ("y", 33))}
    specs |= {"w": ((40, 40), "float32"), "v": ((33, 7), "float32")}
    rng = np.random.default_rng(0)
    for rows in sizes:
        x, y, w, v = whole(rng, rows, 40), whole(rng, rows, 33), whole(rng, 40, 40), whole(rng, 33, 7)
        outputs, products = run(tf32_backend, step, specs, {"x": x, "y": y, "w": w, "v": v}, rows)
        expected = {
            "nn": x @ w,
            "odd nn": y @ v,
            "tt": w.T @ x.T,
            "odd tt": v.T @ y.T,
            "nt": 3 * y @ v,
            "wide nt": 3 * x @ w,
            "tn": x.T @ y,
            "odd tn": y.T @ x,
        }
        for name, value in expected.items():
            np.testing.assert_array_equal(outputs[name], value, err_msg=f"{name}, {rows} rows")
        assert len({tuple(numbers[-2:]) for numbers in products}) == 4


@pytest.mark.parametrize(
    ("length", "terms", "tile"),
    sample([(448, 20, 32), (449, 109, 64), (452, 52, 64), (897, 109, 128), (900, 552, 128)], 5),
)
def test_every_tile_in_tf32(tf32_backend, length, terms, tile):
    """On both sides of the lengths from which on larger tiles give enough blocks; copies of 4 and of 16 bytes."""

    def step(a, b, a_t, b_t):
        right, left = ops.transpose(b_t), ops.transpose(a_t)
        return {"nn": a @ b, "nt": ops.relu(a @ right), "tn": left @ b, "tt": left @ right + 1}

    shapes = {"a": (length, terms), "b": (terms, length), "a_t": (terms, length), "b_t": (length, terms)}
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    outputs, products = run(tf32_backend, step, {name: (shape, "float32") for name, shape in shapes.items()}, values)
    assert {numbers[0] for numbers in products} == {str(tile)}
    a, b, a_t, b_t = (rounded(value, "tf32") for value in values.values())
    expected = {"nn": a @ b, "nt": np.maximum(a @ b_t.T, 0), "tn": a_t.T @ b, "tt": a_t.T @ b_t.T + 1}
    for name, value in expected.items():
        assert_near(outputs[name], value, "tf32", scale=np.sqrt(terms))


def test_numbers_at_the_ends_in_tf32(tf32_backend):
    """NaN of any bits stays NaN, and an infinity what it is; the largest numbers round to infinity."""
    largest, nan = np.finfo(np.float32).max, np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    x = np.array([[np.inf, 1], [nan[0], 0], [nan[1], 0], [-np.inf, 1], [largest, 0], [1e-38, 0], [1 + 2**-11, 0]])
    x, w = x.astype(np.float32), np.array([[1, 0.5], [2, 1]], np.float32)
    x[1:3, 0] = nan
    specs = {"x": (x.shape, "float32"), "w": (w.shape, "float32")}
    outputs, _ = run(tf32_backend, lambda x, w: {"y": x @ w}, specs, {"x": x, "w": w})
    expected = rounded(x, "tf32")
    expected[1:3, 0] = np.nan
    expected[[0, 3], 0] = [np.inf, -np.inf]
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(outputs["y"], expected @ w.astype(np.float64), rtol=1e-6)
