"""Attention by kernels/attention.cuh and all its gradients, against NumPy in float64 and the ops that it replaces."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import compose
from dptrain.ops.loops import remat
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from tests.ops.test_convolutions_on_cuda import HALVES
from tests.programs.case import Case
from tests.programs.check import wrong_on_cuda
from tests.sample import sample
from tests.tolerances import assert_near

# Targets, sources, heads, widths of queries and of values: around the tiles of 64 queries, of 32 and 16 rows, and of
# widths of 32, 64 and 128.
SHAPES = [
    (5, 7, 3, 4, 2),
    (65, 33, 2, 32, 17),
    (33, 70, 1, 128, 100),
    (64, 64, 1, 33, 64),
    (1, 1, 1, 1, 1),
    (1, 40, 4, 8, 8),
    (40, 1, 1, 3, 65),
    (70, 130, 1, 16, 8),
]
# Lengths of a mask: 1, or those of the batch, heads, targets and sources.
MASKS = [None, "1111", "BNTS", "11TS", "B11S", "BN1S", "1NT1"]


def inputs_of(shape, mask, rows=2):
    """Return specs of the inputs of `step_of` for any number of rows, and their values for so many.

    The mask of the middle target lets no source through, nor does any mask of the first row.
    """
    T, S, N, H, V = shape
    rng = np.random.default_rng(T + S + rows)
    shapes = {"q": (rows, T, N, H), "k": (rows, S, N, H), "v": (rows, S, N, V), "w": (rows, T, N, V)}
    values = {name: rng.normal(size=lengths).astype(np.float32) for name, lengths in shapes.items()}
    if mask is not None:
        lengths = dict(zip("BNTS1", (rows, N, T, S, 1), strict=True))
        values["mask"] = rng.random([lengths[letter] for letter in mask]) < 0.6
        if mask[2] == "T":
            values["mask"][:, :, T // 2] = False
        if mask[0] == "B":
            values["mask"][:1, 0] = False
    specs = {
        name: ((Dim.rows(rows) if name != "mask" or mask[0] == "B" else 1, *value.shape[1:]), value.dtype.name)
        for name, value in values.items()
    }
    return specs, values


def step_of(causal, dtype="float32", scale=None):
    """Return a step with attention and its gradients; from rounded inputs."""

    def step(q, k, v, w, mask=None):
        halves = [ops.cast(tensor, dtype) for tensor in (q, k, v)]
        y = ops.dot_product_attention(*halves, mask=mask, is_causal=causal, scale=scale)
        grads = gradients(ops.sum(ops.cast(y, "float32") * w), halves)
        return {"y": y, **{f"d{name}": grad for name, grad in zip("qkv", grads, strict=True)}}

    return step


def check(cuda_backend, shape, mask, causal, rows=2, traced=2):
    program, values = trace(step_of(causal), inputs_of(shape, mask, traced)[0]), inputs_of(shape, mask, rows)[1]
    executable = cuda_backend.executable(program, values, rows=rows)
    executable.run()
    exact = {name: value if name == "mask" else value.astype(np.float64) for name, value in values.items()}
    for name, value in evaluate(program, exact, rows=rows)[0].items():
        try:
            # Sums over widths are subtracted from each other.
            scale = np.sqrt(max(shape[3:])) * max(1.0, np.abs(value).max(initial=0))
            assert_near(executable.outputs[name], value, "float32", scale)
        except AssertionError as error:
            raise AssertionError(f"{name} of {shape}, mask {mask}, causal {causal}: {error}") from None
    return executable


@pytest.mark.parametrize(
    ("shape", "causal"), sample([(shape, causal) for shape in SHAPES for causal in (False, True)], 10, first=1)
)
def test_it_computes_what_numpy_computes(cuda_backend, shape, causal):
    source = check(cuda_backend, shape, "BNTS" if shape[0] % 2 else None, causal).source
    assert source.count("    attention<") == 1, "the gradients read what the forward pass leaves"
    assert source.count("    attention_gradients<") == 2


@pytest.mark.parametrize(
    ("mask", "causal"), sample([(mask, causal) for mask in MASKS for causal in (True, False)], 8, first=6)
)
def test_masks_of_any_shape(cuda_backend, mask, causal):
    check(cuda_backend, (35, 37, 2, 3, 4), mask, causal)


@pytest.mark.parametrize(("targets", "sources"), sample([(67, 20), (20, 67), (64, 65), (1, 3), (3, 1)], 5))
def test_sources_after_a_target_are_left_out(cuda_backend, targets, sources):
    check(cuda_backend, (targets, sources, 1, 5, 6), None, True)


@pytest.mark.parametrize(("targets", "sources"), sample([(3, 0), (0, 3)], 2))
def test_no_sources_and_no_targets(cuda_backend, targets, sources):
    executable = check(cuda_backend, (targets, sources, 2, 4, 4), None, False)
    assert not any(np.abs(value).any() for value in executable.outputs.values())


@pytest.mark.long
def test_one_text_for_any_number_of_rows(cuda_backend):
    texts = {check(cuda_backend, (6, 9, 2, 4, 8), "BN1S", True, rows, traced=3).source for rows in (3, 1, 0)}
    assert len(texts) == 1


@pytest.mark.parametrize(("width", "by_kernel"), sample([(128, True), (129, False)], 2))
def test_wider_heads_are_composed(cuda_backend, width, by_kernel):
    for shape in ((3, 4, 1, width, 5), (3, 4, 1, 5, width)):
        assert ("attention<" in check(cuda_backend, shape, None, True).source) == by_kernel


def test_float64_is_composed(cuda_backend):
    q = np.random.default_rng(0).normal(size=(2, 5, 1, 3))
    program = trace(lambda q: {"y": ops.dot_product_attention(q, q, q)}, {"q": (q.shape, "float64")})
    executable = cuda_backend.executable(program, {"q": q})
    executable.run()
    assert "attention<" not in executable.source
    np.testing.assert_allclose(executable.outputs["y"], evaluate(program, {"q": q})[0]["y"], rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(65, 50, 2, 24, 40), (35, 30, 1, 70, 8)])
def test_beside_the_ops_that_it_replaces(cuda_backend, monkeypatch, shape):
    by_kernel = check(cuda_backend, shape, "B11S", True)
    monkeypatch.setattr(compose, "attention_precision", lambda operands, of_halves: None)
    composed = check(cuda_backend, shape, "B11S", True)
    assert "attention<" not in composed.source
    for name, value in composed.outputs.items():
        assert_near(by_kernel.outputs[name], value, "float32", 4)


@pytest.mark.long
def test_the_same_bits_at_every_run_and_alone(cuda_backend):
    shape = (70, 90, 2, 8, 8)
    executable = check(cuda_backend, shape, "BNTS", False)
    first = {name: value.tobytes() for name, value in executable.outputs.items()}
    executable.run()
    assert first == {name: value.tobytes() for name, value in executable.outputs.items()}
    specs, values = inputs_of(shape, "BNTS")
    alone = cuda_backend.executable(
        trace(step_of(False), specs), {name: value[1:] for name, value in values.items()}, rows=1
    )
    alone.run()
    for name, value in executable.outputs.items():
        np.testing.assert_array_equal(alone.outputs[name], value[1:], err_msg=name)


def check_halves(cuda_backend, shape, mask, causal, dtype):
    specs, values = inputs_of(shape, mask)
    program = trace(step_of(causal, dtype), specs)
    executable = cuda_backend.executable(program, values)
    executable.run()
    exact = {name: value if name == "mask" else value.astype(np.float64) for name, value in values.items()}
    exact |= {name: ops.cast(values[name], dtype).numpy().astype(np.float64) for name in "qkv"}
    for name, value in evaluate(trace(step_of(causal), specs), exact)[0].items():
        error = np.abs(np.asarray(executable.outputs[name], np.float64) - value).max()
        assert error < (0.004 if dtype == "float16" else 0.03) * max(np.abs(value).max(), 0.3), name
    return executable


HALF_SHAPES = [
    (35, 40, 2, 12, 7),
    (65, 33, 1, 64, 40),
    (70, 130, 1, 128, 32),
    (64, 64, 2, 32, 8),
    (1, 1, 1, 1, 1),
    (33, 97, 1, 24, 100),
]


@pytest.mark.parametrize("dtype", sample(HALVES, 2))
@pytest.mark.parametrize(
    ("shape", "causal"), sample([(shape, causal) for shape in HALF_SHAPES for causal in (False, True)], 12, first=1)
)
def test_half_precision(cuda_backend, monkeypatch, shape, causal, dtype):
    monkeypatch.setattr(cuda_backend, "of_halves", "half")
    source = check_halves(cuda_backend, shape, "BNTS" if shape[0] % 2 else None, causal, dtype).source
    assert source.count(", HalfTile, ") == 2
    assert source.count("attention<HalfTile, ") == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_without_its_tensor_cores(cuda_backend, monkeypatch, dtype):
    monkeypatch.setattr(cuda_backend, "of_halves", "float32")
    source = check_halves(cuda_backend, (35, 40, 2, 12, 7), "B11S", True, dtype).source
    assert source.count(", FloatTile, ") == 2


@pytest.mark.parametrize("dtype", sample(["float32", "bfloat16"], 2))
def test_greatest_scores_that_come_late_or_are_infinite(cuda_backend, dtype):
    """Each tile of sources has greater scores than all before, or none but those of -inf; one target's is NaN."""
    q = np.ones((1, 3, 1, 1), np.float32)
    q[0, 1] = np.nan
    k = np.arange(100, dtype=np.float32).reshape(1, 100, 1, 1)
    k[0, :40] = -np.inf
    v = np.random.default_rng(0).normal(size=(1, 100, 1, 2)).astype(np.float32)
    program = trace(
        lambda *heads: {"y": ops.dot_product_attention(*(ops.cast(x, dtype) for x in heads), scale=3.0)},
        {name: (value.shape, "float32") for name, value in (("q", q), ("k", k), ("v", v))},
    )
    executable = cuda_backend.executable(program, {"q": q, "k": k, "v": v})
    executable.run()
    weights = np.exp(3.0 * (k[0, :, 0, 0].astype(np.float64) - 99))
    expected = weights @ v[0, :, 0] / weights.sum()
    assert np.isnan(executable.outputs["y"][0, 1]).all()
    for target in (0, 2):
        actual = np.asarray(executable.outputs["y"][0, target, 0], np.float64)
        np.testing.assert_allclose(actual, expected, rtol=1e-5 if dtype == "float32" else 0.02)


@pytest.mark.long
def test_gradients_of_gradients_and_what_is_computed_again(cuda_backend):
    specs, values = inputs_of((5, 6, 2, 3, 4), "BNTS")

    def step(q, k, v, w, mask):
        y = remat(lambda *heads: ops.dot_product_attention(*heads, mask=mask))(q, k, v)
        grads = gradients(ops.sum(y * y * w), [q, k, v])
        penalty = ops.sum(ops.square(grads[0])) + ops.sum(grads[2] * grads[2])
        return {"y": y, **dict(zip("qkv", gradients(penalty, [q, k, v]), strict=True))}

    program = trace(step, specs)
    executable = cuda_backend.executable(program, values)
    executable.run()
    assert "    attention<" in executable.source
    exact = {name: value if name == "mask" else value.astype(np.float64) for name, value in values.items()}
    for name, value in evaluate(program, exact)[0].items():
        assert_near(executable.outputs[name], value, "float32", 10 * np.abs(value).max())


CASE = Case(
    lengths={"n": 5},
    leaves={
        "x0": "input n 9 4 float32 normal",
        "x1": "input n 1 9 9 int64 below 2",
        "w1": "variable 4 2 3 float32 normal",
        "w2": "variable 4 2 3 float32 normal",
    },
    lines=(
        "h0 = ops.einsum('bld,dnh->blnh', x0, w1)",
        "h1 = ops.einsum('bld,dnh->blnh', x0, w2)",
        "y0 = ops.dot_product_attention(h0, h1, h1, mask=x1 > 0)",
        "y1 = ops.dot_product_attention(y0, h0, h1, is_causal=True)",
        "d1, d2, d0 = gradients(ops.sum(y1 * y1) * 0.1, [w1, w2, x0])",
    ),
    outputs=("y1", "d0"),
    updates={"w1": "w1 - 0.1 * d1", "w2": "w2 - 0.1 * d2"},
    steps=2,
    pack=True,
)


@pytest.mark.long
@pytest.mark.parametrize("shards", [(), (3, 2), (2, 0, 3)], ids=str)
def test_ranks_and_packs(cuda_backend, another, shards):
    case = Case(**{**vars(CASE), "shards": shards})
    assert not wrong_on_cuda(case, cuda_backend, another)


def test_steps_of_a_loop(cuda_backend):
    specs, values = inputs_of((5, 5, 2, 4, 4), "BNTS")

    def step(q, k, v, w, mask):
        def attended(carry, _):
            carry = ops.dot_product_attention(carry, k, v, mask=mask)
            return carry, ops.sum(carry * w)

        last, sums = ops.scan(attended, q, ops.arange(3))
        grads = gradients(ops.sum(last * w) + ops.sum(sums), [q, k, v])
        return {"y": last, **dict(zip("qkv", grads, strict=True))}

    program = trace(step, specs)
    executable = cuda_backend.executable(program, values)
    executable.run()
    assert "    attention<" in executable.source
    exact = {name: value if name == "mask" else value.astype(np.float64) for name, value in values.items()}
    for name, value in evaluate(program, exact)[0].items():
        assert_near(executable.outputs[name], value, "float32", 4 * np.abs(value).max())
