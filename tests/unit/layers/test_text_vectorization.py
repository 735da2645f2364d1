"""TextVectorization: the examples of Keras' documentation and tests, which run on TensorFlow alone."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError

TEXTS = ["The cat sat.", "the dog, the DOG!", "", "a  cat\n"]


def again(layer):
    return layers.deserialize(json.loads(json.dumps(layers.serialize(layer))))


def test_places_of_tokens():
    layer = layers.TextVectorization(max_tokens=5)
    layer.adapt(TEXTS)
    assert layer.get_vocabulary() == ["", "[UNK]", "the", "dog", "cat"]
    for layer_copy in (layer, again(layer)):
        tokens = layer_copy(TEXTS)
        assert tokens.dtype == np.int64
        assert tokens.numpy().tolist() == [[2, 4, 1, 0], [2, 3, 2, 3], [0, 0, 0, 0], [1, 4, 0, 0]]
        np.testing.assert_array_equal(layer_copy(np.array(TEXTS)[:, None]), tokens)
    assert layer("the cat").numpy().tolist() == [2, 4]
    assert layer.vocabulary_size() == 5
    assert again(layer).get_config() == layer.get_config()


@pytest.mark.parametrize(("length", "expected"), [(2, [[2, 4], [2, 3]]), (5, [[2, 4, 1, 0, 0], [2, 3, 2, 3, 0]])])
def test_rows_of_one_length(length, expected):
    layer = layers.TextVectorization(vocabulary=["the", "dog", "cat"], output_sequence_length=length)
    assert layer(TEXTS[:2]).numpy().tolist() == expected


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"standardize": None}, ["The", "cat", "sat."]),
        ({"standardize": "lower"}, ["the", "cat", "sat."]),
        ({"standardize": "strip_punctuation"}, ["The", "cat", "sat"]),
        ({"ngrams": 2}, ["the", "cat", "sat", "the cat", "cat sat"]),
        ({"ngrams": (1, 3)}, ["the", "cat", "sat", "the cat sat"]),
        ({"split": "character", "ngrams": (3,)}, ["the", "he ", "e c", " ca", "cat", "at ", "t s", " sa", "sat"]),
        ({"split": lambda texts: [text.split("t") for text in texts]}, ["", "he ca", " sa", ""]),
        ({"standardize": np.char.upper}, ["THE", "CAT", "SAT."]),
        ({"split": None}, ["the cat sat"]),
    ],
)
def test_tokens(options, tokens):
    actual = [token.replace(" ", "") if "character" in str(options) else token for token in tokens]
    expected = layers.TextVectorization(**options)._tokens(TEXTS[:1])[0]
    expected = [token.replace(" ", "") if "character" in str(options) else token for token in expected]
    assert expected == actual


def test_vectors():
    vocabulary = ["the", "cat"]
    for mode, expected in (
        ("count", [[1, 1, 1], [2, 2, 0], [0, 0, 0], [1, 0, 1]]),
        ("multi_hot", [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]]),
    ):
        layer = layers.TextVectorization(output_mode=mode, vocabulary=vocabulary)
        assert layer(TEXTS).numpy().tolist() == expected
    padded = layers.TextVectorization(5, output_mode="count", vocabulary=vocabulary, pad_to_max_tokens=True)
    assert padded(TEXTS).shape == (4, 5)
    weighted = layers.TextVectorization(output_mode="tf_idf", vocabulary=vocabulary, idf_weights=[0.5, 2.0])
    np.testing.assert_allclose(weighted(TEXTS)[1], [2 * 1.25, 2 * 0.5, 0], rtol=1e-6)
    learned = layers.TextVectorization(output_mode="tf_idf")
    learned.adapt(iter([TEXTS[:2], TEXTS[2:]]))
    assert learned.get_vocabulary(include_special_tokens=False) == ["the", "dog", "cat", "sat", "a"]
    np.testing.assert_allclose(again(learned)(TEXTS), learned(TEXTS))


def test_vocabulary_files(tmp_path):
    (tmp_path / "words.txt").write_text("dog\ncat\n", encoding="utf-8")
    layer = layers.TextVectorization()
    layer.set_vocabulary(tmp_path / "words.txt")
    assert layer(["cat bird dog"]).numpy().tolist() == [[3, 1, 2]]


def test_a_generator_of_texts_trains_a_model():
    rng, layer = np.random.default_rng(0), layers.TextVectorization(vocabulary=["good", "bad", "film"])

    class Reviews(dp.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            labels = rng.integers(0, 2, 8)
            return layer([f"{('bad', 'good')[label]} film" for label in labels]), labels.astype(np.float32)[:, None]

    model = dp.Sequential(
        [dp.Input((2,)), layers.Embedding(5, 4), layers.GlobalAveragePooling1D(), layers.Dense(1, "sigmoid")]
    )
    model.compile(dp.optimizers.Adam(0.1), "bce")
    history = model.fit(Reviews(), epochs=6, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ragged": True}, "not supported: ragged"),
        ({"sparse": True}, "not supported: sparse"),
        ({"standardize": "upper"}, "Unknown value for `standardize`"),
        ({"split": "words"}, "Unknown value for `split`"),
        ({"output_mode": "places"}, "Invalid value for argument `output_mode`"),
        ({"ngrams": "2"}, "`ngrams` must be None"),
        ({"output_mode": "count", "output_sequence_length": 3}, "must not be set"),
        ({"encoding": "latin-1"}, "only 'utf-8'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        layers.TextVectorization(**options)


def test_what_is_no_text():
    layer = layers.TextVectorization(vocabulary=["a"])
    for call, message in (
        (lambda: layer([["a", "b"]]), "input rank must be 1"),
        (lambda: layer(np.ones(3)), "expected texts"),
        (lambda: layers.TextVectorization()(["a"]), "must set the vocabulary"),
        (lambda: layer.adapt(["a"]), "after setting a static vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
