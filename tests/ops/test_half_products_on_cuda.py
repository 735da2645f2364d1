"""Products of half precision on tensor cores, which read two bytes a number: `kernels/product_half.cuh`."""

import re

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from tests.sample import sample

HALVES = ["bfloat16", "float16"]


def product(a, b, dtype):
    """Return a product of factors that are rounded to half precision, itself in float32."""
    return ops.matmul(*(ops.cast(ops.cast(factor, dtype), "float32") for factor in (a, b)))


def whole(rng, *shape):
    """Return numbers that half precision holds, and whose sums of products float32 holds."""
    return rng.integers(-16, 17, shape).astype(np.float32)


def calls(source):
    """Return which kernels a source calls, and with which template arguments."""
    return re.findall(r"^ *(product\w*)<(.*)>\(shared, of", source, re.MULTILINE)


def run(backend, program, values, rows=None):
    assert backend.of_halves in ("half", "wgmma")
    executable = backend.executable(program, values, rows=rows)
    executable.run()
    return executable


@pytest.mark.parametrize("dtype", sample(HALVES, 2))
def test_every_layout_and_edge(cuda_backend, dtype):
    """The batch is M, N or K in turn; rows begin at multiples of 16 bytes or anywhere; 600 terms are sliced."""

    def step(x, y, w, v):
        x, y, w, v = (
            ops.cast(tensor, dtype) for tensor in (x, y, w, v)
        )  # transposed are then those that are multiplied
        turned_x, turned_y = ops.transpose(x), ops.transpose(y)
        return {
            "rows x features": product(x, w, dtype),
            "odd rows x features": product(y, v, dtype),
            "features x rows": product(ops.transpose(w), turned_x, dtype),
            "odd features x rows": product(ops.transpose(v), turned_y, dtype),
            "rows x stored by columns": product(y, ops.transpose(ops.transpose(v) * 3), dtype),
            "over rows": product(turned_x, y, dtype),
            "rows that lie side by side": product(turned_y * 2, x, dtype),
            "rounded": x @ w,
        }

    sizes = (0, 1, 7, 8, 9, 16, 31, 33, 64, 129, 600)
    specs = {name: ((Dim.rows(sizes[-1]), n), "float32") for name, n in (("x", 40), ("y", 33))}
    program = trace(step, specs | {"w": ((40, 40), "float32"), "v": ((33, 7), "float32")})
    rng, sources = np.random.default_rng(0), set()
    for rows in sizes:
        x, y, w, v = whole(rng, rows, 40), whole(rng, rows, 33), whole(rng, 40, 40), whole(rng, 33, 7)
        executable = run(cuda_backend, program, {"x": x, "y": y, "w": w, "v": v}, rows)
        sources.add(executable.source)
        expected = {
            "rows x features": x @ w,
            "odd rows x features": y @ v,
            "features x rows": w.T @ x.T,
            "odd features x rows": v.T @ y.T,
            "rows x stored by columns": 3 * y @ v,
            "over rows": x.T @ y,
            "rows that lie side by side": 2 * y.T @ x,
            "rounded": (x @ w).astype(dtype),
        }
        for name, value in expected.items():
            np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"{name}, {rows} rows")
    (source,) = sources
    launched = calls(source)
    assert [kernel for kernel, _ in launched] == ["product_half"] * len(expected)
    assert len({tuple(rest.split(", ")[-2:]) for _, rest in launched}) == 4


@pytest.mark.parametrize("dtype", sample(HALVES, 2, 1))
def test_batches_of_matrices(cuda_backend, dtype):
    """Of both factors, of one of them, or others of each; matrices begin at multiples of 16 bytes or anywhere."""

    def step(x, y, w, v):
        expanded = ops.reshape(x, (x.shape[0], 1, *x.shape[1:]))
        return {
            "neither": product(expanded, ops.stack([w, 2 * w]), dtype),
            "both": product(x, y, dtype),
            "both, transposed": product(ops.transpose(y, (0, 2, 1)), ops.transpose(x, (0, 2, 1)), dtype),
            "the first": product(x, w, dtype),
            "the second": product(v, x, dtype),
        }

    program = trace(
        step,
        {
            "x": ((Dim.rows(5), 9, 17), "float32"),
            "y": ((Dim.rows(5), 17, 12), "float32"),
            "w": ((17, 8), "float32"),
            "v": ((35, 9), "float32"),
        },
    )
    rng = np.random.default_rng(0)
    for rows in (5, 1, 0):
        x, y, w, v = whole(rng, rows, 9, 17), whole(rng, rows, 17, 12), whole(rng, 17, 8), whole(rng, 35, 9)
        executable = run(cuda_backend, program, {"x": x, "y": y, "w": w, "v": v}, rows)
        expected = {"both": x @ y, "both, transposed": (x @ y).swapaxes(1, 2), "the first": x @ w, "the second": v @ x}
        expected["neither"] = np.stack([x @ w, x @ (2 * w)], 1)
        for name, value in expected.items():
            np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"{name}, {rows} rows")


@pytest.mark.parametrize(
    ("length", "of_halves", "tile", "dtype", "layouts"),
    sample(
        [
            (448, "half", 32, "bfloat16", ["nn"]),
            (449, "half", 64, "float16", ["nn", "nt", "tn", "tt"]),
            (896, "wgmma", 64, "bfloat16", ["tt"]),
            (897, "half", 128, "bfloat16", ["nn", "nt", "tn", "tt"]),
            (897, "wgmma", 128, "float16", ["nt"]),
        ],
        4,
    ),
)
def test_every_tile(cuda_backend, monkeypatch, length, of_halves, tile, dtype, layouts):
    """On both sides of the lengths from which on larger tiles give enough blocks; of numbers with all digits."""
    if of_halves == "wgmma" != cuda_backend.of_halves:
        pytest.skip("the device is not of compute capability 9.0")
    monkeypatch.setattr(cuda_backend, "of_halves", of_halves)
    rng, terms = np.random.default_rng(0), 109

    def step(a, b, a_t, b_t):
        a, b, a_t, b_t = (ops.cast(matrix, dtype) for matrix in (a, b, a_t, b_t))
        right, left = ops.transpose(b_t), ops.transpose(a_t)
        factors = {"nn": (a, b), "nt": (a, right), "tn": (left, b), "tt": (left, right)}
        return {layout: ops.relu(product(*factors[layout], dtype)) for layout in layouts}

    shapes = {"a": (length, terms), "b": (terms, length), "a_t": (terms, length), "b_t": (length, terms)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    executable = run(cuda_backend, trace(step, {name: (shape, "float32") for name, shape in shapes.items()}), values)
    launched = [(kernel, rest.split(", ")) for kernel, rest in calls(executable.source)]
    kernel = "product_wgmma" if of_halves == "wgmma" and tile == 128 else "product_half"
    assert {(name, rest[1]) for name, rest in launched} == {(kernel, str(tile))}
    assert {tuple("nt"[flag == "true"] for flag in rest[-2:]) for _, rest in launched} == set(map(tuple, layouts))
    a, b, a_t, b_t = (value.astype(dtype).astype(np.float64) for value in values.values())
    exact = {"nn": a @ b, "nt": a @ b_t.T, "tn": a_t.T @ b, "tt": a_t.T @ b_t.T}
    for name in layouts:
        np.testing.assert_allclose(
            executable.outputs[name], np.maximum(exact[name], 0), rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("dtype", HALVES)
def test_what_no_number_is_and_what_is_smallest(cuda_backend, dtype):
    smallest = {"bfloat16": 1e-38, "float16": 2.0**-24}[dtype]
    x = np.array([[np.inf, 1], [np.nan, 0], [smallest, 0], [-0.0, 1]], np.float32)
    w = np.array([[1, 0], [2, 1]], np.float32)
    program = trace(lambda x, w: {"y": product(x, w, dtype)}, {"x": ((4, 2), "float32"), "w": ((2, 2), "float32")})
    with np.errstate(invalid="ignore"):
        expected = x.astype(dtype).astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(run(cuda_backend, program, {"x": x, "w": w}).outputs["y"], expected, rtol=1e-6)
