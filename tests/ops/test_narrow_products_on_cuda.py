"""Products in float32 of few columns, as of 16 channels: tiles of 128 x 16, and of 64 x 16 in groups of threads."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import products
from dptrain.backend.cuda.products import product_plan
from dptrain.ops.nn.convolution import conv2d
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from tests.ops.test_convolutions_on_cuda import check as check_convolutions
from tests.ops.test_half_products_on_cuda import run, whole
from tests.sample import sample

TILED, GROUPED = "product<128, 16, 16, 8, 4, 1, ", "product<64, 16, 64, 4, 4, 4, "
# Rows, terms and columns: on both sides of 64 tiles, of a thread's columns, of vectors, and of a stage's terms.
CASES = [
    (63 * 128 + 1, 64, 16, TILED),
    (63 * 128 + 1, 69, 10, TILED),
    (64 * 128, 81, 4, TILED),
    (64 * 128, 66, 1, TILED),
    (63 * 128, 512, 5, GROUPED),
    (65, 130, 16, GROUPED),
    (40, 512, 16, GROUPED),
    (33, 1100, 13, GROUPED),
    (32, 575, 4, GROUPED),
    (1, 513, 3, GROUPED),
]


@pytest.fixture
def as_of_convolutions(monkeypatch):
    """Let dense products take the tiles of gathered ones."""
    monkeypatch.setattr(products, "_GROUPED", products._NARROW_GROUPED)
    product_plan.cache_clear()
    yield
    product_plan.cache_clear()


@pytest.mark.usefixtures("as_of_convolutions")
@pytest.mark.parametrize(("rows", "terms", "columns", "kernel"), sample(CASES, 2))
def test_every_layout_and_edge(cuda_backend, rows, terms, columns, kernel):
    def step(a, b, a_t, b_t):
        left, right = ops.transpose(a_t), ops.transpose(b_t)
        outputs = {"nn": ops.relu(a @ b + 1), "nt": a @ right, "tn": left @ b, "tt": left @ right}
        return outputs | {"sum": ops.sum(outputs["tt"], 0)}

    rng = np.random.default_rng(0)
    a, b = whole(rng, rows, terms), whole(rng, terms, columns)
    values = {"a": a, "b": b, "a_t": np.ascontiguousarray(a.T), "b_t": np.ascontiguousarray(b.T)}
    program = trace(step, {name: (value.shape, "float32") for name, value in values.items()})
    executable = run(cuda_backend, program, values)
    assert executable.source.count(kernel) == 4
    product = a @ b
    for name in ("nt", "tn", "tt"):
        np.testing.assert_array_equal(executable.outputs[name], product, err_msg=name)
    np.testing.assert_array_equal(executable.outputs["nn"], np.maximum(product + 1, 0))
    np.testing.assert_array_equal(executable.outputs["sum"], product.sum(0))


@pytest.mark.parametrize(
    ("M", "N", "K", "dense", "gathered"),
    [
        (63 * 128 + 1, 16, 64, 16, 16),
        (63 * 128 + 1, 17, 64, 32, 32),
        (63 * 128, 16, 64, 32, 16),
        (255 * 32, 16, 63, 32, 16),
        (255 * 32 + 1, 16, 63, 32, 32),
        (40, 16, 1, 32, 16),
        (40, 17, 1, 32, 32),
    ],
)
def test_the_sizes_at_which_tiles_are_narrow(M, N, K, dense, gathered):
    assert product_plan(M, N, K).tiling.columns == dense
    assert product_plan(M, N, K, gathered=True).tiling.columns == gathered
    assert product_plan(M, N, K, "tf32", gathered=True).tiling.columns == 32


# As in test_convolutions_on_cuda.py. Results and both gradients, of 16 channels, of fewer, and with strides.
IMAGES = {
    "of 8 into 16 channels": ((16, 16), (3, 3, 8, 16), (1, 1), (1, 1), (1, 1), (16, 16)),
    "of 16 into 5 channels": ((16, 16), (3, 2, 16, 5), (1, 1), (1, 2), (1, 0), (16, 14)),
    "strides": ((32, 16), (3, 3, 12, 16), (2, 1), (1, 1), (1, 1), (16, 16)),
}


@pytest.mark.parametrize("name", sample(IMAGES, len(IMAGES), single=True))
def test_convolutions_of_few_channels(cuda_backend, name):
    text, _ = check_convolutions(cuda_backend, {name: IMAGES[name]}, 37, 37)
    assert TILED in text
    assert GROUPED in text


@pytest.mark.parametrize("rows", [0, 8, 37])
def test_sums_of_results_over_rows(cuda_backend, rows):
    """As BatchNormalization's; of whole numbers, which float64 sums exactly."""

    def step(x, kernel):
        y = conv2d(x, kernel, strides=(1, 1), dilation=(1, 1), before=(1, 1), size=(16, 16))
        return {"y": y, "sum": ops.sum(y, (0, 1, 2)), "squares": ops.sum(y * y, (0, 1, 2))}

    rng = np.random.default_rng(rows)
    program = trace(step, {"x": ((Dim.rows(37), 16, 16, 8), "float32"), "kernel": ((3, 3, 8, 11), "float32")})
    values = {"x": rng.integers(-2, 3, (rows, 16, 16, 8)), "kernel": rng.integers(-1, 2, (3, 3, 8, 11))}
    values = {key: value.astype(np.float32) for key, value in values.items()}
    executable = cuda_backend.executable(program, values, rows=rows)
    assert "columns.over_tiles(" in executable.source
    executable.run()
    for name, value in evaluate(program, values, rows=rows)[0].items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=name)
