"""Attention layers: masks, scores, names of weights, errors; against NumPy and among each other."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import mask_of, with_mask
from tests.unit.layers import golden_attention as golden

GOLDEN = json.loads(golden.PAGE.read_text())
RNG = np.random.default_rng(6)
QUERY, VALUE = RNG.normal(size=(3, 5, 8)).astype(np.float32), RNG.normal(size=(3, 4, 8)).astype(np.float32)
LEFT = RNG.random((3, 4)) < 0.6
LEFT[:, 0] = True


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def by_numpy(layer, query, value, mask=True):
    """Return what a MultiHeadAttention returns."""
    q, k, v = (
        np.einsum("btf,fnh->btnh", x, dense.kernel.numpy()) + dense.bias.numpy()
        for x, dense in ((query, layer.query_dense), (value, layer.key_dense), (value, layer.value_dense))
    )
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(layer.key_dim)
    heads = np.einsum("bnts,bsnh->btnh", softmax(np.where(mask, scores, -1e9)), v)
    return np.einsum("btnh,nho->bto", heads, layer.output_dense.kernel.numpy()) + layer.output_dense.bias.numpy()


@pytest.fixture
def layer():
    attention = L.MultiHeadAttention(2, 3, bias_initializer="glorot_uniform")
    attention(QUERY, VALUE)
    return attention


def test_values(layer):
    np.testing.assert_allclose(layer(QUERY, VALUE), by_numpy(layer, QUERY, VALUE), rtol=1e-4, atol=1e-5)
    expected = by_numpy(layer, QUERY, VALUE, np.tri(5, 4, dtype=bool))
    np.testing.assert_allclose(layer(QUERY, VALUE, use_causal_mask=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_parts_are_one_mask(layer, causal):
    left = np.broadcast_to(LEFT[:, None, :], (3, 5, 4))
    mask = left & np.tri(5, 4, dtype=bool) if causal else left
    expected = by_numpy(layer, QUERY, VALUE, mask[:, None])
    for masks in ({"value_mask": LEFT}, {"key_mask": LEFT}, {"attention_mask": left}):
        actual = layer(QUERY, VALUE, use_causal_mask=causal, **masks)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    heads = np.broadcast_to(left[:, None], (3, 2, 5, 4))
    actual = layer(QUERY, VALUE, attention_mask=heads, use_causal_mask=False)
    np.testing.assert_allclose(actual, by_numpy(layer, QUERY, VALUE, left[:, None]), rtol=1e-4, atol=1e-5)


def test_a_mask_of_heads_meets_masks_of_sources_row_by_row():
    """Also where there are as many heads as rows."""
    layer = L.MultiHeadAttention(len(QUERY), 2)
    heads = RNG.random((3, 3, 5, 4)) < 0.6
    heads[..., 0] = True
    together = layer(QUERY, VALUE, attention_mask=heads & LEFT[:, None, None])
    np.testing.assert_array_equal(layer(QUERY, VALUE, attention_mask=heads, value_mask=LEFT), together)
    shared = heads[:, :1]
    together = layer(QUERY, VALUE, attention_mask=shared & LEFT[:, None, None])
    np.testing.assert_array_equal(layer(QUERY, VALUE, attention_mask=shared, key_mask=LEFT), together)


def test_scores_are_those_that_the_output_is_of(layer):
    output, scores = layer(QUERY, VALUE, use_causal_mask=True, return_attention_scores=True)
    np.testing.assert_allclose(output, layer(QUERY, VALUE, use_causal_mask=True), rtol=1e-4, atol=1e-5)
    assert scores.shape == (3, 2, 5, 4)
    np.testing.assert_allclose(ops.sum(scores, -1), 1, rtol=1e-5)
    assert (scores.numpy()[..., np.tri(5, 4, dtype=bool) == 0] == 0).all()


def test_a_window(layer):
    narrow = L.MultiHeadAttention(2, 3, sliding_window=2)
    narrow(QUERY, VALUE)
    narrow.set_weights(layer.get_weights())
    near = np.abs(np.arange(5)[:, None] - np.arange(4)) < 2
    near[4, 3] = True
    _, scores = narrow(QUERY, VALUE, return_attention_scores=True)
    assert (scores.numpy()[..., ~near] == 0).all()
    assert (scores.numpy()[..., near] > 0).all()


def test_as_many_groups_as_heads_are_heads(layer):
    groups = L.GroupQueryAttention(3, 2, 2)
    groups(QUERY, VALUE)
    groups.set_weights(layer.get_weights())
    np.testing.assert_allclose(groups(QUERY, VALUE), layer(QUERY, VALUE), rtol=1e-5, atol=1e-6)


def test_weights_have_the_names_and_the_order_of_keras():
    for attention in (L.MultiHeadAttention(2, 3, use_gate=True), L.GroupQueryAttention(3, 2, 1, use_gate=True)):
        attention(QUERY, VALUE)
        parts = ("query", "key", "gate", "value", "attention_output")
        assert [*attention._weights_by_path()] == [f"{part}/{name}" for part in parts for name in ("kernel", "bias")]


def test_sizes_that_are_not_known():
    query, value = dp.Input((None, 8)), dp.Input((None, 8))
    outputs = L.MultiHeadAttention(2, 3)(query, value, use_causal_mask=True)
    assert outputs.shape[1:] == (None, 8)
    model = dp.Model([query, value], outputs)
    assert model.predict([QUERY, VALUE], verbose=0).shape == (3, 5, 8)
    assert model.predict([QUERY[:, :2], VALUE], verbose=0).shape == (3, 2, 8)


def test_lists_of_query_value_and_key():
    layer = L.Attention()
    np.testing.assert_allclose(
        layer([QUERY, VALUE]), softmax(QUERY @ VALUE.swapaxes(1, 2)) @ VALUE, rtol=1e-4, atol=1e-5
    )
    of_query = RNG.random((3, 5)) < 0.5
    output, scores = layer([QUERY, VALUE], mask=[of_query, LEFT], return_attention_scores=True)
    assert (scores.numpy()[~np.broadcast_to(LEFT[:, None], scores.shape)] == 0).all()
    assert (output.numpy()[~of_query] == 0).all()
    np.testing.assert_array_equal(layer.compute_mask([QUERY, VALUE], [of_query, None]), of_query)


def test_additive():
    layer = L.AdditiveAttention()
    layer([QUERY, VALUE])
    sums = np.tanh(QUERY[:, :, None] + VALUE[:, None]) @ layer.scale.numpy()
    np.testing.assert_allclose(layer([QUERY, VALUE]), softmax(sums) @ VALUE, rtol=1e-4, atol=1e-5)


def test_scores_are_dropped_in_training_alone():
    for attention in (L.MultiHeadAttention(2, 3, dropout=0.5, seed=1), L.Attention(dropout=0.5, seed=1)):
        inputs = ([QUERY, VALUE],) if isinstance(attention, L.Attention) else (QUERY, VALUE)
        calm, calm_again = attention(*inputs), attention(*inputs)
        np.testing.assert_array_equal(calm, calm_again)
        assert np.abs(attention(*inputs, training=True).numpy() - calm.numpy()).max() > 0.01


def test_penalties_are_those_of_the_dense_layers():
    layer = L.MultiHeadAttention(2, 3, activity_regularizer="l2")
    assert layer(QUERY, VALUE).shape == (3, 5, 8)
    assert len(layer.losses) == 4


def test_flash_attention_refuses_what_it_cannot_do(monkeypatch):
    with pytest.raises(ConfigError, match="Dropout is not supported when flash attention is enabled"):
        L.MultiHeadAttention(2, 3, dropout=0.5, flash_attention=True)
    with pytest.raises(ConfigError, match="Returning attention scores is not supported when flash"):
        L.MultiHeadAttention(2, 3, flash_attention=True)(QUERY, VALUE, return_attention_scores=True)
    monkeypatch.setattr(dp.config, "_flash_attention", None)
    dp.config.enable_flash_attention()
    assert dp.config.is_flash_attention_enabled()
    with pytest.raises(ConfigError, match="Dropout is not supported when flash attention is enabled"):
        L.GroupQueryAttention(3, 2, 1, dropout=0.5)
    dp.config.disable_flash_attention()
    assert L.GroupQueryAttention(3, 2, 1, dropout=0.5).dropout == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L.MultiHeadAttention(0, 3), "argument `num_heads`, expected a positive integer"),
        (lambda: L.MultiHeadAttention(2, 3, value_dim=1.5), "expected a positive integer or `None`"),
        (lambda: L.MultiHeadAttention(2, 3, sliding_window=0), "`sliding_window` must be `None` or a positive integer"),
        (lambda: L.MultiHeadAttention(2, 3, attention_axes="a"), "`attention_axes` must be an int, list, or tuple"),
        (lambda: L.MultiHeadAttention(2, 3)(QUERY, VALUE, VALUE[:, 1:]), "except the last one, must be equal"),
        (lambda: L.GroupQueryAttention(3, 4, 3), "must be divisible by `num_key_value_heads`"),
        (lambda: L.Attention(score_mode="sum"), r"Expected one of {'dot', 'concat'}. Received: score_mode=sum"),
        (lambda: L.Attention()(QUERY), "must be called on a list of inputs"),
        (lambda: L.Attention()([QUERY, VALUE], mask=LEFT), "layer mask must be a list"),
    ],
)
def test_arguments_that_are_wrong(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_override_gets_a_causal_mask():
    class Plain(L.MultiHeadAttention):
        def _compute_attention(self, query, key, value, attention_mask=None, training=None):
            assert attention_mask is not None
            return super()._compute_attention(query, key, value, attention_mask, training)

    attention = Plain(2, 3)
    attention(QUERY, VALUE, use_causal_mask=True)
    expected = by_numpy(attention, QUERY, VALUE, np.tri(5, 4, dtype=bool))
    np.testing.assert_allclose(attention(QUERY, VALUE, use_causal_mask=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_maps_back(tied):
    layer = L.ReversibleEmbedding(5, 8, tied, logit_soft_cap=2.0)
    ids = np.array([[1, 4], [0, 0]])
    table = layer.embeddings.numpy() if layer(ids) is not None else None
    np.testing.assert_array_equal(layer(ids), table[ids])
    back = table.T if tied else layer.reverse_embeddings.numpy()
    np.testing.assert_allclose(layer(QUERY, reverse=True), 2 * np.tanh(QUERY @ back / 2), rtol=1e-4, atol=1e-6)
    assert layer.compute_output_shape((None, 5, 8), reverse=True) == (None, 5, 5)
    assert [weight.name for weight in layer.weights] == ["embeddings", "reverse_embeddings"][: 1 if tied else 2]


IDS = np.array([[1, 2, 3, 0, 0], [3, 3, 1, 1, 2], [1, 0, 0, 0, 0]])
OTHER_IDS = np.array([[4, 1, 0, 0], [3, 0, 0, 0], [2, 1, 1, 3]])


@pytest.mark.parametrize("make", [lambda: L.MultiHeadAttention(2, 3), lambda: L.GroupQueryAttention(3, 2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_come_with_query_and_value(make, causal):
    words, layer = L.Embedding(5, 8, mask_zero=True), make()
    query, value = words(IDS), words(OTHER_IDS)
    output = layer(query, value, use_causal_mask=causal)
    mask = (IDS != 0)[:, :, None] & (OTHER_IDS != 0)[:, None] & (np.tri(5, 4, dtype=bool) if causal else True)
    plain = [with_mask(tensor, None) for tensor in (query, value)]
    np.testing.assert_array_equal(output, layer(*plain, attention_mask=mask))
    np.testing.assert_array_equal(mask_of(output), IDS != 0)
    _, scores = layer(query, value, return_attention_scores=True)
    assert mask_of(scores) is None


def test_masks_that_come_in_a_list():
    words, layer = L.Embedding(5, 8, mask_zero=True), L.Attention()
    output = layer([words(IDS), words(OTHER_IDS)])
    plain = [with_mask(words(ids), None) for ids in (IDS, OTHER_IDS)]
    np.testing.assert_array_equal(output, layer(plain, mask=[IDS != 0, OTHER_IDS != 0]))
    np.testing.assert_array_equal(mask_of(output), IDS != 0)


def test_a_mask_of_ids_and_none_on_the_way_back():
    layer = L.ReversibleEmbedding(5, 8, mask_zero=True)
    np.testing.assert_array_equal(mask_of(layer(IDS)), IDS != 0)
    assert mask_of(layer(QUERY, reverse=True)) is None


def test_gradients_where_nothing_takes_part_in_float16():
    layer = L.MultiHeadAttention(2, 3, dtype="mixed_float16")
    mask = np.ones((3, 5, 4), bool)
    mask[0, 1] = False
    output, _ = layer(QUERY, VALUE, attention_mask=mask, return_attention_scores=True)
    ops.sum(ops.square(output)).backward()
    assert all(np.isfinite(weight.value.grad.numpy()).all() for weight in layer.trainable_weights)


@pytest.mark.parametrize("name", golden.layers(L))
def test_outputs_and_scores_are_those_of_keras(name):
    layer, arguments, keywords = golden.layers(L)[name]
    outputs = golden.results(layer, arguments, keywords, np.asarray)
    for mine, theirs in zip(outputs, GOLDEN[name], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13)
    alone = layer(*arguments, **keywords | {"return_attention_scores": False})  # by the kernel without scores
    np.testing.assert_allclose(alone, GOLDEN[name][0], rtol=1e-11, atol=1e-13)
