"""Models that take texts: their first layers work on the host, before the program of the rest."""

import json

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops
from dptrain.errors import ConfigError, DataError

TEXTS = np.array(["good film", "bad film", "good good", "bad bad story"] * 4)
Y = np.array([1.0, 0, 1, 0] * 4, np.float32)
COLORS, AMOUNTS = np.array([["red"], ["blue"], ["green"], ["pink"]] * 4), np.arange(16.0, dtype="f").reshape(16, 1)


def vectorizer(**options):
    layer = layers.TextVectorization(**({"max_tokens": 20, "output_sequence_length": 4} | options))
    layer.adapt(TEXTS)
    return layer


def classifier():
    tokens = layers.Input((None,), dtype="int64")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(tokens))
    return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(x))


def functional(vectorize):
    inputs = layers.Input((1,), dtype="string", name="text")
    return keras.Model(inputs, classifier()(vectorize(inputs)))


def sequential(vectorize):
    return keras.Sequential([layers.Input((1,), dtype="string"), vectorize, classifier()])


def pairs(model):
    """Return a model's logs and predictions on texts, and those of its classifier on tokens, from the same weights."""
    vectorize, inner = model.layers[-2:]
    weights = inner.get_weights()
    inner.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    tokens = vectorize(TEXTS).numpy()
    expected = inner.fit(tokens, Y, batch_size=8, epochs=2, verbose=0, validation_split=0.25, shuffle=False).history
    predictions = inner.predict(tokens, verbose=0)
    inner.set_weights(weights)
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    return expected, predictions


@pytest.mark.parametrize("make", [functional, sequential])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:, None], TEXTS.astype(object), np.char.encode(TEXTS)], ids=range(4))
def test_a_model_of_texts_is_that_of_their_tokens(make, texts, tmp_path):
    model = make(vectorizer())
    expected, _ = pairs(model)
    logs = model.fit(texts, Y, batch_size=8, epochs=2, verbose=0, validation_split=0.25, shuffle=True).history
    assert list(logs) == list(expected)
    model.save(tmp_path / "m.keras")
    before = model.predict(TEXTS, batch_size=3, verbose=0)
    for each in (model, keras.models.load_model(tmp_path / "m.keras")):
        assert (each.input_shape, each.output_shape) == ((None, 1), (None, 1))
        assert each.inputs[0].dtype.kind == "U"
        results = each.predict(texts, verbose=0)
        np.testing.assert_allclose(results, before, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(each(texts)), results, rtol=1e-6)
        np.testing.assert_array_equal(each.predict_on_batch(texts), results)
        loss = each.evaluate(texts, Y, verbose=0)[0]
        assert loss == pytest.approx(each.test_on_batch(texts, Y)[0], rel=1e-6)
        assert loss == pytest.approx(-np.mean(np.log(np.where(Y, results[:, 0], 1 - results[:, 0]))), rel=1e-5)
        assert each.train_on_batch(texts, Y)[0] == pytest.approx(loss, rel=1e-6)


def test_trainings_are_those_of_tokens():
    for make in (functional, sequential):
        model = make(vectorizer())
        expected, predictions = pairs(model)
        logs = model.fit(TEXTS, Y, batch_size=8, epochs=2, verbose=0, validation_split=0.25, shuffle=False).history
        for key, values in expected.items():
            np.testing.assert_allclose(logs[key], values, rtol=1e-6)
        np.testing.assert_allclose(model.predict(TEXTS, verbose=0), predictions, rtol=1e-6)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return TEXTS[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def test_batches_of_texts():
    def generator():
        for index in range(len(Batches())):
            yield Batches()[index]

    logs = []
    for data in (Batches(), generator(), (TEXTS, Y)):
        keras.utils.set_random_seed(0)
        model = functional(vectorizer(output_sequence_length=None))
        model.compile("sgd", "binary_crossentropy")
        options = {"batch_size": 4} if isinstance(data, tuple) else {"steps_per_epoch": 4}
        arguments = data if isinstance(data, tuple) else (data,)
        logs.append(model.fit(*arguments, shuffle=False, verbose=0, **options).history)
        assert model.evaluate(Batches(), verbose=0) > 0
        assert model.predict(Batches(), verbose=0).shape == (16, 1)
    np.testing.assert_allclose(logs[1]["loss"], logs[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(logs[2]["loss"], logs[0]["loss"], rtol=1e-6)


def of_columns(nested):
    color, amount = layers.Input((1,), dtype="string", name="color"), layers.Input((1,), name="amount")
    text = layers.Input((1,), dtype="string", name="text")
    indices = layers.StringLookup(vocabulary=["red", "blue", "green"], output_mode="one_hot")(color)
    parts = [
        indices,
        amount / 16,
        vectorizer(output_mode="tf_idf", output_sequence_length=None, pad_to_max_tokens=True)(text),
        ops.cast(layers.Hashing(8)(color), "float32"),
        layers.HashedCrossing(5, output_mode="one_hot")((color, text)),
    ]
    outputs = layers.Concatenate()(parts)
    inputs = {"color": color, "amount": amount, "text": text} if nested else [color, amount, text]
    return keras.Model(inputs, [outputs, indices])


@pytest.mark.parametrize("nested", [False, True])
def test_texts_beside_numbers(nested, tmp_path):
    model = of_columns(nested)
    x = [COLORS, AMOUNTS, TEXTS[:, None]]
    x = dict(zip(("color", "amount", "text"), x, strict=True)) if nested else x
    encoded, indices = model.predict(x, verbose=0)
    np.testing.assert_array_equal(indices, np.eye(4)[[1, 2, 3, 0] * 4])
    np.testing.assert_allclose(encoded[:, 4], AMOUNTS[:, 0] / 16)
    vectors = vectorizer(output_mode="tf_idf", output_sequence_length=None, pad_to_max_tokens=True)(TEXTS)
    np.testing.assert_allclose(encoded[:, 5:25], vectors, rtol=1e-6)
    np.testing.assert_array_equal(encoded[:, 25], layers.Hashing(8)(COLORS[:, 0]))
    crossed = layers.HashedCrossing(5, output_mode="one_hot")((COLORS, TEXTS[:, None]))
    np.testing.assert_array_equal(encoded[:, 26:], crossed)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert [symbol.dtype.kind for symbol in loaded.inputs].count("U") == 2
    for copy in (loaded, keras.models.clone_model(model), keras.models.model_from_json(model.to_json())):
        np.testing.assert_array_equal(copy.predict(x, verbose=0)[0], encoded)
    assert json.loads(model.to_json())["config"]["layers"][0]["config"]["dtype"] in ("string", "float32")


def test_a_model_of_texts_within_another():
    inner = functional(vectorizer())
    inputs = layers.Input((1,), dtype="string")
    outer = keras.Model(inputs, 2 * inner(inputs))
    np.testing.assert_allclose(outer.predict(TEXTS, verbose=0), 2 * inner.predict(TEXTS, verbose=0), rtol=1e-6)


def test_shapes_of_symbolic_texts():
    inputs = layers.Input((1,), dtype="string")
    assert vectorizer()(inputs).shape == (None, 4)
    assert vectorizer(output_sequence_length=None)(inputs).shape == (None, None)
    counted = vectorizer(output_mode="count", output_sequence_length=None)
    assert counted(inputs).shape == (None, counted.vocabulary_size())
    assert vectorizer(ngrams=2)(inputs).dtype == np.int64
    lookup = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
    assert lookup(layers.Input((3, None), dtype="string")).shape == (None, 3, None)
    assert layers.Hashing(4)(layers.Input((2,), dtype="int64")).shape == (None, 2)


def test_mistakes_in_one_line(tmp_path):
    inputs, numbers = layers.Input((1,), dtype="string"), layers.Input((1,))
    with pytest.raises(ConfigError, match=r"is text, which only TextVectorization, StringLookup, Hashing and"):
        keras.Model(inputs, layers.Dense(2)(inputs))
    with pytest.raises(ConfigError, match=r"layer 'hashing' works on the host, before the model, and cannot take what"):
        keras.Model(numbers, layers.Hashing(3)(layers.Dense(1)(numbers)))
    with pytest.raises(ConfigError, match=r"You must set the vocabulary of layer 'string_lookup' before calling it"):
        layers.StringLookup()(inputs)
    model = functional(vectorizer())
    model.compile("sgd", "mse")
    with pytest.raises(DataError, match=r"x: input 'text' takes texts, found float64"):
        model.predict(np.zeros((3, 1)), verbose=0)
    with pytest.raises(DataError, match=r"x: input 'text' takes texts of shape \(1,\), found \(2,\)"):
        model.fit(np.array([["a", "b"]] * 3), np.zeros(3), verbose=0)
    with pytest.raises(DataError, match=r"takes rows of texts, found a single one"):
        model.predict(np.array("a"), verbose=0)
    with pytest.raises(DataError, match="cardinality"):
        model.fit(TEXTS, Y[:3], verbose=0)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.vectorize = vectorizer()

        def call(self, inputs):
            return self.vectorize(inputs)

    with pytest.raises(ConfigError, match="in a `call`: it works on the host; call it on an `Input`"):
        Own()(layers.Input((1,)))


def test_no_texts_and_exported_programs(tmp_path):
    model = functional(vectorizer())
    for empty in (TEXTS[:0], np.array([])):
        assert model.predict(empty, verbose=0).shape == (0, 1)
    model.export(tmp_path / "program")
    program = keras.saving.load_program(tmp_path / "program", device="cpu")
    np.testing.assert_allclose(program(vectorizer()(TEXTS).numpy()), model.predict(TEXTS, verbose=0), rtol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_numbers_that_the_host_hashes(eager):
    """A call tells raw numbers from hashed ones, which have the same shape and type."""
    inputs, hashing = layers.Input((1,), dtype="int64"), layers.Hashing(3)
    x = np.arange(12)[:, None]
    hashed = hashing(x).numpy()
    assert (hashed != x).any()
    model = keras.Model(inputs, hashing(inputs))
    model.compile("sgd", "mse", run_eagerly=eager)
    outer_inputs = layers.Input((1,), dtype="int64")
    for each in (model, keras.Model(outer_inputs, model(outer_inputs))):
        np.testing.assert_array_equal(each(x), hashed)
        np.testing.assert_array_equal(each(ops.convert_to_tensor(x)), hashed)
        np.testing.assert_array_equal(each.predict(x, verbose=0), hashed)
    assert model.evaluate(x, hashed, verbose=0) == 0

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, inputs):
            return self.inner(inputs)

    with pytest.raises(ConfigError, match="in a `call`: it works on the host"):
        Outer().predict(x, verbose=0)
