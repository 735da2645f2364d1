"""Attention by dot products, against NumPy in float64."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace

RNG = np.random.default_rng(4)
Q, K, V = RNG.normal(size=(2, 5, 4, 3)), RNG.normal(size=(2, 6, 4, 3)), RNG.normal(size=(2, 6, 4, 2))
MASK, BIAS = RNG.random((2, 1, 5, 6)) < 0.7, RNG.normal(size=(4, 5, 6))
MASK[..., 0] = True


def attention(q, k, v, mask=True, bias=0.0, scale=None, cap=None):
    scores = np.einsum("btnh,bsnh->bnts", q, k) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    scores = (scores if cap is None else cap * np.tanh(scores / cap)) + bias
    powers = np.where(mask, np.exp(scores), 0)
    return np.einsum("bnts,bsnh->btnh", powers / powers.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    "options", [{}, {"mask": MASK}, {"bias": BIAS}, {"mask": MASK, "bias": BIAS, "scale": 0.7}], ids=str
)
@pytest.mark.parametrize("flash_attention", [None, False, True])
def test_values(options, flash_attention):
    output = ops.dot_product_attention(Q, K, V, **options, flash_attention=flash_attention)
    np.testing.assert_allclose(output, attention(Q, K, V, **options), rtol=1e-10)


def test_what_is_behind_takes_no_part():
    causal = ops.dot_product_attention(Q, K, V, is_causal=True)
    np.testing.assert_allclose(causal, attention(Q, K, V, np.tri(5, 6, dtype=bool)), rtol=1e-10)
    output = ops.dot_product_attention(Q, K, V, mask=MASK, is_causal=True)
    np.testing.assert_allclose(output, attention(Q, K, V, MASK & np.tri(5, 6, dtype=bool)), rtol=1e-10)


def test_where_nothing_takes_part_all_count_alike():
    mask = np.ones((5, 6), bool)
    mask[2] = False
    output = ops.dot_product_attention(Q, K, V, mask=mask)
    np.testing.assert_allclose(output[:, 2], np.broadcast_to(V.mean(1), (2, 4, 2)), rtol=1e-12)


def test_heads_share_keys():
    grouped = attention(Q, *(np.repeat(array[:, :, :2], 2, 2) for array in (K, V)))
    np.testing.assert_allclose(ops.dot_product_attention(Q, K[:, :, :2], V[:, :, :2]), grouped, rtol=1e-10)


def test_scores_are_capped():
    output = ops.dot_product_attention(Q, K, V, mask=MASK, attn_logits_soft_cap=0.5)
    np.testing.assert_allclose(output, attention(Q, K, V, MASK, cap=0.5), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_of_half_precision_are_computed_in_float32(dtype):
    halves = [ops.cast(array * 4, dtype) for array in (Q, K, V)]
    actual = ops.dot_product_attention(*halves, mask=MASK)
    assert actual.dtype.name == dtype
    expected = attention(*(ops.cast(half, "float64").numpy() for half in halves), MASK)
    assert np.abs(ops.cast(actual, "float64").numpy() - expected).max() < (0.005 if dtype == "float16" else 0.04)


@pytest.mark.parametrize("options", [{}, {"mask": MASK}, {"is_causal": True}], ids=str)
def test_gradients_of_gradients_beside_differences(options):
    """The gradient's own gradient, of a loss that is not linear, in query, key and value."""
    points = {"q": Q[:1, :3, :2], "k": K[:1, :4, :2], "v": V[:1, :4, :2]}
    if "mask" in options:
        options = {"mask": options["mask"][:1, :, :3, :4]}
    direction = RNG.normal(size=points["q"].shape)

    def slope(q, k, v):
        output = ops.dot_product_attention(q, k, v, **options)
        return ops.sum(gradients(ops.sum(ops.sin(output)), [q])[0] * direction)

    def step(q, k, v):
        along = slope(q, k, v)
        return {"slope": along} | dict(zip("qkv", gradients(along, [q, k, v]), strict=True))

    program = trace(step, {name: (value.shape, "float64") for name, value in points.items()})
    outputs, _ = evaluate(program, points)
    for name, value in points.items():
        there = RNG.normal(size=value.shape)
        ends = [evaluate(program, points | {name: value + h * there})[0]["slope"] for h in (1e-5, -1e-5)]
        np.testing.assert_allclose(np.sum(outputs[name] * there), (ends[0] - ends[1]) / 2e-5, rtol=1e-6, err_msg=name)


def test_shapes_that_do_not_go_together():
    with pytest.raises(ConfigError, match="query, key and value of shapes"):
        ops.dot_product_attention(Q, K[:, :, :3], V[:, :, :3])
    with pytest.raises(ConfigError, match="query, key and value of shapes"):
        ops.dot_product_attention(Q, K[..., :2], V)
    with pytest.raises(ConfigError, match="only supports 4D inputs"):
        ops.dot_product_attention(Q[0], K[0], V[0])
