"""`.keras` files of sequences both ways: every layer of theirs, and functional models with masks and operations."""

import inspect
import json

import numpy as np
import pytest

import dptrain as dp
from tests.unit.models import golden_masks

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*destroy the mask information:UserWarning"),
]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, 5, 4)).astype(np.float32)
PICTURES = {rank: RNG.normal(size=(3, 4, *(5,) * rank, 2)).astype(np.float32) for rank in (1, 2, 3)}
IDS = RNG.integers(1, 9, (12, 5)) * (np.arange(5) < RNG.integers(2, 6, (12, 1)))
TEXTS = ["the cat sat", "a dog, the dog", "more words here"]
WAVES = RNG.normal(size=(2, 4000)).astype(np.float32)

# Name -> layers of module k.layers one after the other, and what they take.
LAYERS = {
    "SimpleRNN": (lambda L: [L.SimpleRNN(3, "relu", return_sequences=True), L.SimpleRNN(2, use_bias=False)], X),
    "LSTM": (lambda L: [L.LSTM(3, return_sequences=True, unit_forget_bias=False), L.LSTM(2, go_backwards=True)], X),
    "GRU": (lambda L: [L.GRU(3, reset_after=False, return_sequences=True), L.GRU(2, recurrent_dropout=0.2)], X),
    "stateful LSTM": (lambda L: [L.LSTM(3, stateful=True, unroll=True)], X),
    "RNN": (lambda L: [L.RNN([L.LSTMCell(3), L.GRUCell(2), L.SimpleRNNCell(4)], return_sequences=True)], X),
    "StackedRNNCells": (lambda L: [L.RNN(L.StackedRNNCells([L.GRUCell(2), L.LSTMCell(3)]))], X),
    "Bidirectional": (
        lambda L: [L.Bidirectional(L.LSTM(2, return_sequences=True), "sum"), L.Bidirectional(L.GRU(2))],
        X,
    ),
    "two directions": (lambda L: [L.Bidirectional(L.GRU(2), backward_layer=L.GRU(3, go_backwards=True))], X),
    "TimeDistributed": (lambda L: [L.TimeDistributed(L.Dense(3, "tanh"))], X),
    "ConvLSTM1D": (lambda L: [L.ConvLSTM1D(2, 3, padding="same", return_sequences=True)], PICTURES[1]),
    "ConvLSTM2D": (lambda L: [L.ConvLSTM2D(2, (2, 3), strides=2)], PICTURES[2]),
    "ConvLSTM3D": (lambda L: [L.ConvLSTM3D(2, 2, recurrent_dropout=0.1)], PICTURES[3]),
    "Masking": (lambda L: [L.Masking(0.5), L.LSTM(2)], np.round(X * 2) / 2),
    "Embedding": (lambda L: [L.Embedding(9, 3, mask_zero=True), L.GRU(2)], IDS),
    "MelSpectrogram": (lambda L: [L.MelSpectrogram(256, 128, num_mel_bins=16, sampling_rate=8000)], WAVES),
    "STFTSpectrogram": (lambda L: [L.STFTSpectrogram("log", 64, 32)], WAVES[:, :, None]),
}
# Name -> a layer that is called on two tensors, and how.
PAIRS = {
    "MultiHeadAttention": (lambda L: L.MultiHeadAttention(2, 3, output_shape=5), False),
    "GroupQueryAttention": (lambda L: L.GroupQueryAttention(3, 4, 2, use_bias=False), False),
    "Attention": (lambda L: L.Attention(use_scale=True, score_mode="concat"), True),
    "AdditiveAttention": (lambda L: L.AdditiveAttention(), True),
}


@pytest.fixture(scope="module", autouse=True)
def _in_float32(keras):
    keras.config.set_floatx("float32")
    yield
    keras.config.set_floatx("float64")


def assert_both_ways(keras, theirs, x, tmp_path, tolerance=1e-5):
    """Compare a model of Keras' with its file read here, and that written here with both."""
    theirs.save(tmp_path / "theirs.keras")
    expected = theirs.predict(x, verbose=0)
    ours = dp.models.load_model(tmp_path / "theirs.keras")
    ours.save(tmp_path / "ours.keras")
    reloaded = keras.models.load_model(tmp_path / "ours.keras")
    once_more = dp.models.load_model(tmp_path / "ours.keras")
    for model in (ours, reloaded, once_more):
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(keras, name, tmp_path):
    make, x = LAYERS[name]
    batch = {"batch_size": len(x)} if "stateful" in name else {}
    start = keras.Input(x.shape[1:], dtype="int32" if x is IDS else None, **batch)
    theirs = keras.Sequential([start, *make(keras.layers)])
    assert_both_ways(keras, theirs, x, tmp_path, 1e-4 if "Spectrogram" in name else 1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_every_attention(keras, name, tmp_path):
    make, in_a_list = PAIRS[name]
    query, value = keras.Input((5, 4)), keras.Input((3, 4))
    layer = make(keras.layers)
    outputs = layer([query, value]) if in_a_list else layer(query, value)
    assert_both_ways(keras, keras.Model([query, value], outputs), [X, X[:, :3]], tmp_path)


@pytest.mark.parametrize("name", golden_masks.MODELS)
def test_functional_models_with_masks(keras, name, tmp_path):
    make, x = golden_masks.MODELS[name]
    assert_both_ways(keras, make(keras), x, tmp_path)


def test_texts(keras):
    """Keras' own layer needs TensorFlow: what is written must be arguments of its constructor."""
    layer = dp.layers.TextVectorization(20, output_sequence_length=4, ngrams=2)
    layer.adapt(TEXTS)
    config = dp.saving.serialize_keras_object(layer)
    assert (config["module"], config["class_name"]) == ("keras.layers", "TextVectorization")
    arguments = inspect.signature(keras.layers.TextVectorization).parameters
    assert set(config["config"]) - {"trainable", "dtype", "name"} <= set(arguments)
    restored = dp.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    np.testing.assert_array_equal(restored(TEXTS), layer(TEXTS))


OPERATIONS = {
    "joined": lambda ops, x: ops.concatenate([ops.stack([x, x], axis=1)[:, 0], ops.flip(x, axis=1)], axis=-1),
    "counted": lambda ops, x: ops.cast(ops.any(ops.logical_or(x > 0.5, ops.equal(x, 0)), axis=-1), "float32"),
    "reduced": lambda ops, x: ops.mean(x, axis=(1, 2), keepdims=True) + ops.var(x) + ops.logsumexp(x, axis=1)[:, None],
    "shaped": lambda ops, x: ops.transpose(ops.reshape(ops.squeeze(x[:, None], 1), (-1, 4, 5)), (0, 2, 1)),
    "multiplied": lambda ops, x: ops.einsum("abc,abd->acd", x, x) @ ops.swapaxes(x, 1, 2),
    "selected": lambda ops, x: ops.take(ops.where(x > 0, x, 0.5), [0, 2], axis=1)[..., ::2],
    "arrays": lambda ops, x: ops.conv(x, np.ones((2, 4, 3), np.float32)) + np.arange(3, dtype=np.float32),
    "attended": lambda ops, x: ops.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], is_causal=True),
    "activated": lambda ops, x: ops.softmax(ops.gelu(x) + ops.leaky_relu(x, 0.1)) + ops.one_hot(ops.argmax(x, -1), 4),
    "sorted": lambda ops, x: ops.cumsum(ops.sort(x, axis=-1), axis=1) + ops.median(x, axis=1, keepdims=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(keras, name, tmp_path):
    x = keras.Input((5, 4))
    theirs = keras.Model(x, OPERATIONS[name](keras.ops, x))
    assert_both_ways(keras, theirs, X, tmp_path)
    ours = dp.models.load_model(tmp_path / "ours.keras")
    kinds = [[layer["class_name"] for layer in model.get_config()["layers"]] for model in (ours, theirs)]
    assert sorted(kinds[0]) == sorted(kinds[1])
