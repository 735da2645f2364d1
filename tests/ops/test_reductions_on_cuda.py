"""Reductions over any axes: what NumPy computes, by many threads, with the same bits in a pack and on ranks."""

import dataclasses
import itertools
import os

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.policy import reduction
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from tests.programs.table import TABLE
from tests.sample import sample

B = 5
# Random shapes; more of them by DPTRAIN_PROGRAMS.
SHAPES = int(os.environ.get("DPTRAIN_PROGRAMS", "4"))


def kind(shape, axes, reduce=ops.sum):
    """Return the frame of a reduction, None where a thread makes an element alone."""
    program = trace(lambda x: {"y": reduce(x, axes)}, {"x": (shape, "float32")})
    tensor = program.outputs["y"]
    if tensor.op.name == "cast_to":  # places of the greatest, counted in int64
        (tensor,) = tensor.inputs
    reduced = reduction(tensor)
    return reduced and reduced[0]


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((Dim.rows(B), 8, 4), (0, 1, 2), "map"),
        ((Dim.rows(B), 8, 4), (2,), "rows"),
        ((Dim.rows(B), 8, 4), (0,), "columns"),
        ((Dim.rows(B), 31, 4), (1,), None),
        ((Dim.rows(B), 32, 4), (1,), "columns"),
        ((3, Dim.rows(B), 4), (1,), "columns"),
        ((Dim.rows(B), 2, 1, 16, 3), (1, 3), "columns"),
        ((Dim.rows(B), 4, 4, 4, 2), (1, 2, 4), "rows"),
        ((Dim.rows(B), 4, 4, 4, 1), (1, 2, 4), None),
        ((Dim.rows(B), 6, 4, 4, 1), (1, 2, 4), None),
        ((Dim.rows(B), 6, 6, 4, 1), (1, 2, 4), "columns"),
        ((Dim.rows(B), 8, 7), (0, 2), "columns"),
        ((Dim.rows(B), 8, 8), (0, 2), "totals"),
        ((8, 4, Dim.rows(B)), (0, 2), "totals"),
        ((Dim.rows(B), 8, 1, 8), (0, 2, 3), "totals"),
        ((255, 8, 8), (0, 2), "rows"),
        ((256, 8, 8), (0, 2), "totals"),
        ((3, 8, 8), (0, 2), None),
        ((40, 1, 8), (1,), None),
    ],
    ids=str,
)
def test_who_computes_a_sum(shape, axes, expected):
    assert kind(shape, axes) == expected


def test_places_of_the_greatest_are_found_like_sums():
    assert kind((50, 3), 0, ops.argmax) == "columns"
    assert kind((Dim.rows(B), 50, 3), 1, ops.argmax) == "columns"
    assert kind((Dim.rows(B), 3, 3), 1, ops.argmax) is None
    assert kind((50,), 0, ops.argmax) == "map"


def group_normalization(rows):
    """Return the program of a step through one, as a user would write it."""
    case = TABLE["group_normalization, n=5, s=8"]
    return dataclasses.replace(case, lengths={**case.lengths, "n": rows}).trace()


def test_a_group_normalization_is_one_pass_over_the_groups_of_samples():
    launches = [kernel for stage in Composition(group_normalization(B)).stages for kernel in stage]
    functions = [function for kernel in launches for function in kernel.functions]
    kinds = [function.nest.frame for function in functions]
    assert len(launches) == 4
    assert kinds == ["product", "rows", "product", "columns", "map"], "forward and backward, weights"
    assert functions[1].blocks == B * 4, "each group of each sample"


def drawn(seed):
    """Return a step of reductions over axes of one shape, and what it reads.

    Lengths are those around which the generator decides, and axes any.
    """
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(2, 6))
    lengths = [int(rng.choice([1, 2, 3, 4, 7, 8, 9])) for _ in range(ndim)]
    lengths[rng.integers(ndim)] = int(rng.choice([31, 32, 33, 65, 257, 2047, 2048, 2100] if ndim < 4 else [31, 33, 65]))
    batch = int(rng.integers(ndim + 1))  # beyond the last: nothing counts rows
    shape = tuple(Dim.rows(n) if axis == batch else n for axis, n in enumerate(lengths))
    chosen = [subset for n in range(1, ndim + 1) for subset in itertools.combinations(range(ndim), n)]
    chosen = [chosen[n] for n in rng.permutation(len(chosen))[:6]]

    def step(x):
        outputs = {}
        for number, axes in enumerate(chosen):
            keepdims = bool(rng.integers(2))
            outputs[f"sum {axes}"] = ops.sum(x, axes, keepdims=keepdims) + 0.5
            outputs[f"max {axes}"] = ops.max(x * 2, axes, keepdims=not keepdims)
            if number < 2:
                outputs[f"var {axes}"] = x * ops.var(x, axes, keepdims=True)
            if len(axes) == 1 and axes[0] != batch:
                outputs[f"argmax {axes}"] = ops.argmax(ops.cast(ops.cast(x, "int32"), "float32"), axes[0])
                outputs[f"softmax {axes}"] = ops.softmax(x, axes[0])
        return outputs

    return trace(step, {"x": (shape, "float32")}), rng.normal(size=lengths).astype(np.float32), batch


@pytest.mark.parametrize("seed", sample(range(SHAPES), 3))
def test_reductions_of_random_shapes(cuda_backend, seed):
    program, x, batch = drawn(seed)
    exact, _ = evaluate(program, {"x": x.astype(np.float64)})
    executable = cuda_backend.executable(program, {"x": x})
    executable.run()
    for name, value in exact.items():
        scale = max(1.0, float(np.max(np.abs(value), initial=0)))
        np.testing.assert_allclose(
            executable.outputs[name], value, rtol=1e-5, atol=3e-6 * scale, err_msg=f"{name} of {x.shape}, rows {batch}"
        )


# Columns on both sides of each width of a tile, with the width.
WIDTHS = {2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 16, 48: 16, 49: 32, 64: 32, 65: 32}


def sums_of_columns(columns, rows=5):
    """Return a program of sums over rows: of elements, of quotients, of places, and one that stores its terms."""

    def step(x, y, of_column):
        product = x * y  # a factor, stored by the pass that sums it
        return {
            "sum": ops.sum(x, 0),
            "place": ops.argmax(x, 0),
            "quotients": ops.sum((x - of_column) / (of_column + 1) * y, 0),
            "reversed": ops.sum(ops.flip(x, 1) * y, 0),
            "products": ops.sum(product, 0),
            "factor": product @ ops.ones((columns, 2)),
        }

    shape = (Dim.rows(rows), columns)
    return trace(step, {"x": (shape, "float32"), "y": (shape, "float32"), "of_column": ((columns,), "float32")})


@pytest.mark.parametrize(("columns", "width"), WIDTHS.items())
def test_lanes_without_a_column_take_a_row(columns, width):
    text = Composition(sums_of_columns(columns)).source()
    assert f"threadIdx.x % {width};" in text
    assert f"column_join<Sum, {width}>" in text
    assert f"column_join<First, {width}>" in text


def test_elements_of_several_rows_are_loaded_before_any_is_used():
    """Of fewer rows where a row takes many statements, and one by one where elements are not the row's own."""

    def text(term):
        specs = {"x": ((Dim.rows(B), 16), "float32"), "y": ((Dim.rows(B), 16), "float32")}
        return Composition(trace(lambda x, y: {"sum": ops.sum(term(x, y), 0)}, specs)).source()

    def long(x, y):
        for number in range(6):
            x = ops.tanh(x * (number + 2.0)) + y
        return x

    short, longer = text(lambda x, y: x / y), text(long)
    assert short.count("Ahead<float, 8> quad") == 2
    assert longer.count("Ahead<float, 4> quad") == 2
    assert "Ahead" not in text(lambda x, y: long(long(x, y), y))
    assert "Ahead" not in (flipped := text(lambda x, y: ops.flip(x, 1)))
    assert "#pragma unroll 4" in flipped


def check_sums_of_columns(cuda_backend, columns, rows):
    """Compare them with NumPy, which is exact here: all are sums of few bits."""
    rng = np.random.default_rng(rows)
    x = rng.integers(-4, 5, (rows, columns)).astype(np.float32)
    y = rng.integers(-1, 2, (rows, columns)).astype(np.float32)
    x[rows - 1], y[rows - 1] = 9, 1  # of the last block
    values = {"x": x, "y": y, "of_column": (2.0 ** (np.arange(columns) % 3) - 1).astype(np.float32)}
    executable = cuda_backend.executable(sums_of_columns(columns, rows), values)
    executable.run()
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    expected, _ = evaluate(sums_of_columns(columns, rows), wide)
    for name, value in expected.items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"{name} of {x.shape}")
    assert (executable.outputs["place"] == rows - 1).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("columns", "width"), sample(list(WIDTHS.items()), 3))
def test_blocks_share_the_rows_of_columns(cuda_backend, columns, width):
    """At least eight rows a thread for each block."""
    least = 256 // width * 8
    for rows in (1, least, least + 1, 3 * least - 1):
        check_sums_of_columns(cuda_backend, columns, rows)


@pytest.mark.long
@pytest.mark.parametrize("rows", [64 * 256, 64 * 256 + 1])
def test_many_blocks_share_a_column(cuda_backend, rows):
    """At most 256."""
    check_sums_of_columns(cuda_backend, 32, rows)
    check_sums_of_columns(cuda_backend, 33, 2 * rows)


@pytest.mark.sample(2, 0)
@pytest.mark.parametrize("blocks", [256, 1024])
def test_many_blocks_share_a_sum_of_all(cuda_backend, blocks):
    """A block has 4096 elements; 256 threads join the blocks, of which each loads four at once."""
    x = np.random.default_rng(blocks).integers(-9, 10, blocks * 4096 + 1).astype(np.float32)
    x[-1] = 99  # of the last block
    program = trace(lambda x: {"sum": ops.sum(x), "place": ops.argmax(x)}, {"x": ((Dim.rows(len(x)),), "float32")})
    executable = cuda_backend.executable(program, {"x": x})
    executable.run()
    assert (executable.outputs["sum"], executable.outputs["place"]) == (x.sum(dtype=np.float64), len(x) - 1)
