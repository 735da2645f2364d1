"""Attention layers beside Keras': values, scores, gradients by 200 steps, half precision, configurations and files."""

import json

import numpy as np
import pytest

import dptrain as dp

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Tensor.T is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning"),
]
RNG = np.random.default_rng(8)
CPU = {"device": "cpu", "jit_compile": False}
QUERY, VALUE, KEY = RNG.normal(size=(4, 5, 6)), RNG.normal(size=(4, 3, 6)), RNG.normal(size=(4, 3, 6))
MASK = RNG.random((4, 5, 3)) < 0.6
MASK[0, 1] = False  # nothing takes part


def heads(k, **arguments):
    return k.layers.MultiHeadAttention(2, 3, bias_initializer="glorot_uniform", **arguments)


def groups(k, **arguments):
    return k.layers.GroupQueryAttention(3, 4, 2, bias_initializer="glorot_uniform", **arguments)


# Name -> layer of a module, further inputs than query and value, arguments of the call.
CALLS = {
    "heads": (heads, (), {}),
    "heads with a key": (heads, (KEY,), {}),
    "heads of other lengths": (
        lambda k: heads(k, value_dim=2, output_shape=(2, 3), use_gate=True, dropout=0.5),
        (KEY,),
        {},
    ),
    "causal heads": (heads, (), {"use_causal_mask": True}),
    "masked heads": (heads, (), {"attention_mask": MASK}),
    "masked and causal heads": (heads, (), {"attention_mask": MASK, "use_causal_mask": True}),
    "heads in a window": (lambda k: heads(k, sliding_window=2), (), {"use_causal_mask": True}),
    "heads with scores": (heads, (), {"attention_mask": MASK, "return_attention_scores": True}),
    "heads with dropout": (lambda k: heads(k, dropout=0.5), (), {"attention_mask": MASK}),
    "groups": (groups, (), {}),
    "causal groups with a gate": (lambda k: groups(k, use_gate=True, use_bias=False), (), {"use_causal_mask": True}),
    "groups in a window with scores": (
        lambda k: groups(k, sliding_window=1, dropout=0.5),
        *((KEY,), {"attention_mask": MASK, "return_attention_scores": True}),
    ),
}
LISTS = {
    "dots": (lambda k: k.layers.Attention(), {}),
    "scaled dots": (lambda k: k.layers.Attention(True), {"use_causal_mask": True}),
    "sums": (lambda k: k.layers.Attention(True, "concat"), {"return_attention_scores": True}),
    "masked dots": (lambda k: k.layers.Attention(dropout=0.5), {"mask": [MASK[:, :, 0], MASK[:, 0]]}),
    "additive": (lambda k: k.layers.AdditiveAttention(), {"mask": [None, MASK[:, 2]], "use_causal_mask": True}),
    "additive without a scale": (lambda k: k.layers.AdditiveAttention(False), {"return_attention_scores": True}),
}


def both(keras, make):
    """Return Keras' layer and ours in float64."""
    return make(keras), make(dp)


def call(layer, inputs, arguments):
    outputs = layer(*inputs, **arguments)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def numbers(keras, tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), np.float64)


def assert_same_call(keras, layers, inputs, arguments, tolerance=1e-8):
    theirs, ours = layers
    expected = call(theirs, inputs, arguments)
    call(ours, inputs, arguments)
    ours._set_dtype("float64")
    assert [weight.path.split("/", 1)[1] for weight in theirs.weights] == [*ours._weights_by_path()]
    assert [tuple(weight.shape) for weight in theirs.weights] == [weight.shape for weight in ours.weights]
    ours.set_weights(theirs.get_weights())
    for mine, reference in zip(call(ours, inputs, arguments), expected, strict=True):
        np.testing.assert_allclose(mine, numbers(keras, reference), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CALLS)
def test_values_of_several_heads(keras, name):
    make, call_args, arguments = CALLS[name]
    # What Keras computes without dropout and scores, it computes in float32 on JAX.
    exact = keras.backend.backend() == "torch" or "dropout" in name or "scores" in name
    assert_same_call(keras, both(keras, make), (QUERY, VALUE, *call_args), arguments, 1e-8 if exact else 1e-6)


@pytest.mark.parametrize("axes", [None, (1, 2), (2,), -2])
def test_values_over_several_axes(keras, axes):
    query, value = RNG.normal(size=(2, 3, 2, 6)), RNG.normal(size=(2, 3, 2, 4))
    if axes not in ((2,), -2):
        value = RNG.normal(size=(2, 4, 3, 4))
    layers = both(keras, lambda k: heads(k, attention_axes=axes))
    assert_same_call(keras, layers, (query, value), {"return_attention_scores": True})
    assert layers[0].attention_axes == layers[1].attention_axes


@pytest.mark.parametrize("name", LISTS)
def test_values_of_lists(keras, name):
    make, arguments = LISTS[name]
    for extra_inputs in ((), (KEY,)):
        assert_same_call(keras, both(keras, make), ([QUERY, VALUE, *extra_inputs],), arguments)


def test_the_op(keras):
    q, k, v = RNG.normal(size=(2, 5, 4, 3)), RNG.normal(size=(2, 6, 2, 3)), RNG.normal(size=(2, 6, 2, 3))
    mask, bias = RNG.random((2, 1, 5, 6)) < 0.5, RNG.normal(size=(1, 4, 5, 6))
    for options in ({}, {"mask": mask}, {"bias": bias, "scale": 0.3}, {"mask": mask, "is_causal": True}):
        if keras.backend.backend() == "torch":
            if "is_causal" in options:
                continue  # PyTorch takes no mask beside it
            both_heads = [np.repeat(tensor, 2, 2) for tensor in (k, v)]
        else:
            both_heads = [k, v]
        expected = numbers(keras, keras.ops.dot_product_attention(q, *both_heads, **options))
        np.testing.assert_allclose(dp.ops.dot_product_attention(q, k, v, **options), expected, rtol=1e-6, atol=1e-6)


def block(k, attention, length=6):
    """Return a small transformer of one block: ids of 7, two classes."""
    L = k.layers
    inputs = k.Input((length,), dtype="int32")
    x = L.Embedding(7, 6)(inputs)
    layer = attention(k)
    output = layer([x, x]) if isinstance(layer, k.layers.Attention) else layer(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(L.Add()([x, output]))
    x = L.Add()([x, L.Dense(6)(L.Dense(12, "gelu")(x))])
    return k.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(x)))


BLOCKS = {
    "heads": lambda k: k.layers.MultiHeadAttention(2, 3),
    "gated heads": lambda k: k.layers.MultiHeadAttention(2, 3, use_gate=True, kernel_regularizer="l2"),
    "groups": lambda k: k.layers.GroupQueryAttention(3, 4, 2, sliding_window=3),
    "scaled": lambda k: k.layers.Attention(True),
    "additive": lambda k: k.layers.AdditiveAttention(),
}
IDS, CLASSES = RNG.integers(0, 7, (95, 6)), RNG.integers(0, 2, 95)


@pytest.mark.parametrize("name", BLOCKS)
def test_200_steps(keras, name):
    keras.utils.set_random_seed(1)
    theirs, ours = (block(k, BLOCKS[name]) for k in (keras, dp))
    start = [weight + 0.1 * RNG.random(weight.shape) for weight in theirs.get_weights()]
    for model, k in ((theirs, keras), (ours, dp)):
        loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(k.optimizers.SGD(0.05), loss, **({} if k is keras else {"dtype": "float64", **CPU}))
        model.set_weights(start)
    arguments = {"batch_size": 10, "epochs": 20, "shuffle": False, "verbose": 0}
    expected, losses = (model.fit(IDS, CLASSES, **arguments).history["loss"] for model in (theirs, ours))
    # JAX's softmax is one of float32 where Keras needs no scores.
    rounds = keras.backend.backend() == "jax" and ("heads" in name or name == "groups")
    np.testing.assert_allclose(losses, expected, rtol=1e-5 if rounds else 1e-8)
    for place, (mine, other) in enumerate(zip(ours.get_weights(), theirs.get_weights(), strict=True)):
        tolerance = 2e-5 if rounds else 1e-7
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance, err_msg=f"weight {place}")


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [heads, groups])
def test_half_precision(keras, make, policy):
    if keras.backend.backend() == "torch" and policy == "mixed_float16":
        pytest.skip("PyTorch has no such products on a CPU")
    theirs, ours = (make(k, dtype=policy) for k in (keras, dp))
    for arguments in ({}, {"attention_mask": MASK}, {"use_causal_mask": True}):
        expected = call(theirs, (QUERY, VALUE), arguments)
        call(ours, (QUERY, VALUE), arguments)
        ours.set_weights(theirs.get_weights())
        (output,) = call(ours, (QUERY, VALUE), arguments)
        assert output.dtype.name == ours.compute_dtype
        close = 5e-3 if policy == "mixed_float16" else 4e-2
        output = dp.ops.cast(output, "float32").numpy()
        np.testing.assert_allclose(output, numbers(keras, expected[0]), rtol=close, atol=close)


@pytest.mark.parametrize(
    "make",
    [
        *(call[0] for call in CALLS.values()),
        *(layer[0] for layer in LISTS.values()),
        lambda k: k.layers.ReversibleEmbedding(5, 3),
        lambda k: k.layers.ReversibleEmbedding(5, 3, False, reverse_dtype="float32", logit_soft_cap=2.0),
    ],
)
def test_configurations_are_those_of_keras(keras, make):
    theirs = json.loads(json.dumps(keras.saving.serialize_keras_object(make(keras))))
    mine = make(dp)
    described = dp.layers.serialize(mine)
    assert described["class_name"] == theirs["class_name"]
    config = {key: value for key, value in theirs["config"].items() if key not in ("dtype", "name")}
    assert {key: value for key, value in described["config"].items() if key not in ("dtype", "name")} == config
    assert theirs["config"]["name"].rstrip("_0123456789") == mine._default_name
    restored = keras.saving.deserialize_keras_object(dp.layers.serialize(dp.layers.deserialize(theirs)))
    assert restored.get_config() == make(keras).get_config() | {"name": restored.name}


@pytest.mark.parametrize("name", BLOCKS)
def test_files_go_both_ways(keras, tmp_path, name):
    theirs, ours = (block(k, BLOCKS[name]) for k in (keras, dp))
    theirs.save(tmp_path / "theirs.keras")
    loaded = dp.models.load_model(tmp_path / "theirs.keras")
    loaded.compile(dtype="float64", **CPU)
    expected = theirs.predict(IDS, verbose=0)
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), expected, rtol=1e-6, atol=1e-6)
    ours.compile(dtype="float64", **CPU)
    ours.set_weights(theirs.get_weights())
    ours.save(tmp_path / "ours.keras")
    reloaded = keras.models.load_model(tmp_path / "ours.keras", compile=False)
    np.testing.assert_allclose(reloaded.predict(IDS, verbose=0), expected, rtol=1e-6, atol=1e-6)
    ours.save_weights(tmp_path / "ours.weights.h5")
    fresh = block(keras, BLOCKS[name])
    fresh.load_weights(tmp_path / "ours.weights.h5")
    np.testing.assert_allclose(fresh.predict(IDS, verbose=0), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_both_ways(keras, tied):
    theirs, ours = (k.layers.ReversibleEmbedding(5, 3, tied, logit_soft_cap=0.5) for k in (keras, dp))
    ids, x = RNG.integers(0, 5, (4, 2)), RNG.normal(size=(4, 2, 3))
    expected = numbers(keras, theirs(ids)), numbers(keras, theirs(x, reverse=True))
    ours(ids)
    ours._set_dtype("float64")
    ours.set_weights(theirs.get_weights())
    np.testing.assert_allclose(ours(ids), expected[0], rtol=1e-12)
    np.testing.assert_allclose(ours(x, reverse=True), expected[1], rtol=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda k: k.layers.MultiHeadAttention(0, 3),
        lambda k: k.layers.MultiHeadAttention(2, 1.5),
        lambda k: k.layers.MultiHeadAttention(2, 3, value_dim=-1),
        lambda k: k.layers.MultiHeadAttention(2, 3, sliding_window=0),
        lambda k: k.layers.MultiHeadAttention(2, 3, flash_attention=True, dropout=0.5),
        lambda k: k.layers.GroupQueryAttention(3, 4, 3),
        lambda k: k.layers.Attention(score_mode="scaled_dot"),
        lambda k: k.layers.Attention()(QUERY),
        lambda k: k.layers.Attention()([QUERY]),
        lambda k: k.layers.Attention()([QUERY, VALUE], mask=MASK),
        lambda k: k.layers.Attention()([QUERY, VALUE], mask=[None]),
        lambda k: heads(k).compute_output_shape((2, 4, 8), (2, 2, 8), (2, 1, 7)),
        lambda k: groups(k).compute_output_shape((2, 4, 8), (2, 2, 7)),
    ],
)
def test_errors_are_those_of_keras(keras, wrong):
    with pytest.raises(ValueError, match=r".") as expected:
        wrong(keras)
    with pytest.raises(dp.errors.ConfigError) as error:
        wrong(dp)
    start = str(expected.value).split("Received")[0].replace("Exception encountered when calling ", "")[:60]
    assert start in str(error.value) or str(error.value)[:40] in str(expected.value)


@pytest.mark.parametrize("make", [heads, groups, lambda k: k.layers.Attention()])
def test_masks_that_come_with_tensors(keras, make):
    ids = np.array([[1, 2, 3, 0, 0], [3, 3, 1, 1, 2]]), np.array([[4, 1, 0], [3, 0, 2]])

    def outputs(k, weights=None):
        words, layer = k.layers.Embedding(5, 6, mask_zero=True), make(k)
        query, value = (words(sequence) for sequence in ids)
        inputs = ([query, value],) if isinstance(layer, k.layers.Attention) else (query, value)
        output = layer(*inputs)
        if weights is None:
            return numbers(k, output), [words.get_weights(), layer.get_weights()]
        for part, values in zip((words, layer), weights, strict=True):
            part.set_weights(values)
        return outputs_of(words, layer)

    def outputs_of(words, layer):
        query, value = (words(sequence) for sequence in ids)
        return layer([query, value]) if isinstance(layer, dp.layers.Attention) else layer(query, value)

    expected, weights = outputs(keras)
    np.testing.assert_allclose(outputs(dp, weights), expected, rtol=1e-4, atol=1e-5)
