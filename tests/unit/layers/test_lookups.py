"""Hashes and vocabularies: the numbers of Keras' own examples and tests, which run on TensorFlow alone."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.layers import Input

LETTERS = [["A"], ["B"], ["C"], ["D"], ["E"]]
PEOPLE = [["omar"], ["stringer"], ["marlo"], ["wire"], ["skywalker"]]


def again(layer):
    """Return a layer that went through JSON."""
    return layers.deserialize(json.loads(json.dumps(layers.serialize(layer))))


@pytest.mark.parametrize(
    ("make", "inputs", "expected"),
    [
        (lambda: layers.Hashing(3), LETTERS, [1, 0, 1, 1, 2]),
        (lambda: layers.Hashing(3, mask_value=""), [["A"], ["B"], [""], ["C"], ["D"]], [1, 1, 0, 2, 2]),
        (lambda: layers.Hashing(3, salt=[133, 137]), LETTERS, [1, 2, 1, 0, 2]),
        (lambda: layers.Hashing(3, salt=133), LETTERS, [0, 0, 2, 1, 0]),
        (lambda: layers.Hashing(1), LETTERS, [0] * 5),
        (lambda: layers.Hashing(3, mask_value="omar"), PEOPLE, [0, 1, 2, 1, 1]),
        (lambda: layers.Hashing(2, salt=[211, 137]), PEOPLE, [1, 0, 1, 0, 1]),
        (lambda: layers.Hashing(3), np.arange(5)[:, None], [1, 0, 1, 0, 2]),
        (lambda: layers.Hashing(3), np.arange(5.0)[:, None] + 0.5, [1, 0, 1, 0, 2]),
        (lambda: layers.Hashing(3, salt=[133, 137]), np.arange(5)[:, None], [1, 1, 2, 0, 1]),
    ],
)
def test_hashing(make, inputs, expected):
    layer = make()
    for lookup in (layer, again(layer)):
        actual = lookup(inputs)
        assert actual.dtype == np.int64
        assert actual.numpy().tolist() == [[place] for place in expected]
    assert again(layer).get_config() == layer.get_config()


def test_hashes_as_vectors():
    one_hot, counts = (layers.Hashing(3, output_mode=mode) for mode in ("one_hot", "count"))
    assert one_hot(LETTERS).numpy().tolist() == np.eye(3)[[1, 0, 1, 1, 2]].tolist()
    assert counts([["A", "B", "C"]]).numpy().tolist() == [[1, 2, 0]]
    assert counts([["A"]]).dtype == np.float32
    assert again(one_hot).get_config() == one_hot.get_config()


def test_crossing():
    first, second = np.array(["A", "B", "A", "B", "A"]), np.array([101, 101, 101, 102, 102])
    layer = layers.HashedCrossing(5)
    assert layer((first, second)).numpy().tolist() == [1, 4, 1, 1, 3]
    assert again(layer)([first[:, None], second[:, None]]).numpy().tolist() == [[1], [4], [1], [1], [3]]
    one_hot = layers.HashedCrossing(5, output_mode="one_hot")
    assert one_hot((first, second)).numpy().tolist() == np.eye(5)[[1, 4, 1, 1, 3]].tolist()
    assert int(layer(("A", 101))) == 1


VOCABULARY = ["a", "b", "c", "d"]
DATA = [["a", "c", "d"], ["d", "z", "b"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1, 3, 4], [4, 0, 2]]),
        ({"mask_token": "d"}, None),
        ({"mask_token": "z"}, [[2, 4, 5], [5, 0, 3]]),
        ({"output_mode": "multi_hot"}, [[0, 1, 0, 1, 1], [1, 0, 1, 0, 1]]),
        ({"output_mode": "multi_hot", "mask_token": "z"}, [[0, 1, 0, 1, 1], [0, 0, 1, 0, 1]]),
        (
            {"output_mode": "count", "max_tokens": 6, "pad_to_max_tokens": True},
            [[0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 1, 0]],
        ),
        (
            {"output_mode": "tf_idf", "idf_weights": [0.25, 0.75, 0.6, 0.4]},
            [[0, 0.25, 0, 0.6, 0.4], [0.5, 0, 0.75, 0, 0.4]],
        ),
    ],
)
def test_places_of_texts(options, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="Found reserved token 'd'"):
            layers.StringLookup(vocabulary=VOCABULARY, **options)
        return
    layer = layers.StringLookup(vocabulary=VOCABULARY, **options)
    for lookup in (layer, again(layer)):
        for texts in (DATA, np.array(DATA), np.array(DATA, dtype=object), np.char.encode(DATA)):
            np.testing.assert_allclose(lookup(texts), expected, rtol=1e-6)
    assert layer(DATA).dtype == (np.int64 if layer.output_mode == "int" else np.float32)
    assert again(layer).get_config() == layer.get_config()


def test_unknown_texts_and_the_way_back():
    several = layers.StringLookup(num_oov_indices=2, vocabulary=VOCABULARY)
    assert several([["m", "a"], ["o", "p"]]).numpy()[0, 1] == 2
    assert set(several(PEOPLE).numpy().ravel()) == {0, 1}
    none = layers.StringLookup(num_oov_indices=0, vocabulary=VOCABULARY)
    assert none(["a", "d"]).numpy().tolist() == [0, 3]
    with pytest.raises(ConfigError, match=r"found OOV values \['z'\], consider setting"):
        none(DATA)
    back = layers.StringLookup(vocabulary=VOCABULARY, invert=True, mask_token="")
    assert back([[2, 4], [0, 9]]).tolist() == [["a", "c"], ["", "[UNK]"]]
    assert back.get_vocabulary() == ["", "[UNK]", *VOCABULARY]
    assert back.get_vocabulary(include_special_tokens=False) == VOCABULARY
    assert back.vocabulary_size() == 6
    full = layers.StringLookup(vocabulary=["[UNK]", *VOCABULARY])
    assert full.get_vocabulary() == ["[UNK]", *VOCABULARY]


def test_adapting():
    layer = layers.StringLookup()
    layer.adapt([["a", "c", "d"], ["d", "z", "b"]])
    assert layer.get_vocabulary() == ["[UNK]", "d", "z", "c", "b", "a"]
    layer.adapt((np.array(batch) for batch in (["x", "y"], ["y", "y"], ["w"])), steps=2)
    assert layer.get_vocabulary() == ["[UNK]", "y", "x"]
    assert again(layer)(["x", "q"]).numpy().tolist() == [2, 0]
    short = layers.StringLookup(max_tokens=3, mask_token="", num_oov_indices=1)
    short.adapt(["b", "b", "", "a", "[UNK]"])
    assert short.get_vocabulary() == ["", "[UNK]", "b"]
    weighted = layers.StringLookup(output_mode="tf_idf")
    weighted.adapt([["a", "b"], ["a", "a"], ["c", "a"]])  # in 3, 1 and 1 of 3 documents
    expected = np.log(1 + 3 / (1 + np.array([3, 1, 1])))
    np.testing.assert_allclose(weighted.idf_weights, [expected.mean(), *expected], rtol=1e-6)
    np.testing.assert_allclose(again(weighted)(["a", "a"]), [0, 2 * expected[0], 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    "batches",
    [
        [["a", "b"], ["c"]],
        [[["a"], ["b"]], [["c"], ["c"]]],
        [np.array(["a", "b"]), np.array(["c"])],
        [("a", "b"), ("c",)],
        [(np.array(["a", "b"]), np.zeros(2)), (np.array(["c"]), np.zeros(1))],
        [(["a", "b"], [0, 1]), (["c"], [1])],
    ],
)
def test_batches_of_a_generator(batches):
    layer, generator = layers.StringLookup(), iter([*batches, np.array(["z"])])
    layer.adapt(generator, steps=2)
    assert {*layer.get_vocabulary()} == {"[UNK]", "a", "b", "c"}
    assert next(generator) == ["z"]  # no batch is taken that is not looked at


NUMBERS = np.array([[12, 1138, 42], [42, 1000, 36]])


def test_places_of_numbers():
    vocabulary = [12, 36, 1138, 42]
    assert layers.IntegerLookup(vocabulary=vocabulary)(NUMBERS).numpy().tolist() == [[1, 3, 4], [4, 0, 2]]
    several = layers.IntegerLookup(num_oov_indices=2, vocabulary=vocabulary)
    assert several(np.array([37, 1000, -3])).numpy().tolist() == [1, 0, 1]
    hashed = layers.IntegerLookup(num_oov_indices=2, vocabulary=vocabulary, oov_method="farmhash")
    assert set(hashed(np.arange(100, 120)).numpy()) == {0, 1}
    back = layers.IntegerLookup(vocabulary=vocabulary, invert=True)
    assert back(np.array([[1, 3], [4, 9]])).numpy().tolist() == [[12, 1138], [42, -1]]
    adapted = layers.IntegerLookup()
    adapted.adapt(NUMBERS)
    assert adapted.get_vocabulary() == [-1, 42, 1138, 1000, 36, 12]
    assert again(adapted).get_config() == adapted.get_config()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_token": 7},
        {"num_oov_indices": 3},
        {"num_oov_indices": 0},
        {"invert": True},
        {"output_mode": "one_hot", "mask_token": 7},
    ],
)
def test_numbers_inside_a_model(options):
    """The same as on the host, on both executors."""
    layer = layers.IntegerLookup(vocabulary=[12, 36, 5, 42], **options)
    least = 0 if options.get("invert") else None
    x = np.array([[12], [5], [42], [36]]) if options.get("num_oov_indices") == 0 else np.array([[12], [7], [-4], [42]])
    x = np.array([[0], [4], [2], [9]]) if least == 0 else x
    symbol = Input((1,), dtype="int64")
    model = dp.Model(symbol, layer(symbol))
    np.testing.assert_array_equal(model.predict(x, verbose=0), layer(x).numpy())
    assert model.predict(x, verbose=0).dtype == layer(x).dtype


def test_a_vocabulary_is_saved_with_its_model(tmp_path):
    lookup = layers.IntegerLookup(output_mode="count")
    lookup.adapt(NUMBERS)
    model = dp.Sequential([Input((3,), dtype="int64"), lookup, layers.Dense(2)])
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(NUMBERS, verbose=0), model.predict(NUMBERS, verbose=0))


def test_a_vocabulary_in_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("b\na\n", encoding="utf-8")
    layer = layers.StringLookup()
    layer.set_vocabulary(path)
    assert layer(["a"]).numpy().tolist() == [2]
    with pytest.raises(ConfigError, match=r"Vocabulary file .*: "):
        layer.set_vocabulary(str(tmp_path / "none"))
    for kind, tokens in ((layers.StringLookup, ["b", "a"]), (layers.TextVectorization, ["b", "a"])):
        named = kind(vocabulary=path)
        assert named.vocabulary == tokens
        again = kind.from_config(named.get_config())  # of the tokens, not of the file
        assert again.vocabulary == tokens
        assert again(["a"]).numpy().tolist() == named(["a"]).numpy().tolist()
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("30\n-7\n", encoding="utf-8")
    assert layers.IntegerLookup(vocabulary=str(numbers))([-7, 30, 1]).numpy().tolist() == [2, 1, 0]


@pytest.mark.parametrize("kind", ["StringLookup", "IntegerLookup", "TextVectorization"])
def test_a_configuration_reads_no_file(tmp_path, kind):
    """A model's file could name any."""
    path = tmp_path / "words.txt"
    path.write_text("1\n", encoding="utf-8")
    description = {"class_name": kind, "config": {"vocabulary": str(path)}}
    for build in (layers.deserialize, lambda description: getattr(layers, kind).from_config(description["config"])):
        with pytest.raises(ConfigError, match=r"words.txt' in a configuration, which would read that file"):
            build(description)


# Layers on the host, and the shapes that they take.
HOST_LAYERS = {
    "Hashing": (lambda: layers.Hashing(5), [(4,), (4, 1), ()]),
    "Hashing, count": (lambda: layers.Hashing(5, output_mode="count"), [(4,), (3, 4)]),
    "Hashing, one_hot": (lambda: layers.Hashing(5, output_mode="one_hot"), [(4,), (4, 1), ()]),
    "Hashing, multi_hot": (lambda: layers.Hashing(5, output_mode="multi_hot"), [(4,), (3, 4)]),
    "StringLookup": (lambda: layers.StringLookup(vocabulary=["b", "a"]), [(4,), (4, 1), ()]),
    "StringLookup, one_hot": (lambda: layers.StringLookup(vocabulary=["b"], output_mode="one_hot"), [(1,), (4, 1)]),
    "StringLookup, inverted": (lambda: layers.StringLookup(vocabulary=["b"], invert=True), [(1,), ()]),
    "TextVectorization": (lambda: layers.TextVectorization(vocabulary=["b"], output_sequence_length=7), [(), (1,)]),
    "TextVectorization, any": (lambda: layers.TextVectorization(vocabulary=["b"]), [()]),
    "TextVectorization, count": (lambda: layers.TextVectorization(vocabulary=["b"], output_mode="count"), [()]),
    "HashedCrossing": (lambda: layers.HashedCrossing(5), [[(), ()], [(1,), (1,)]]),
    "HashedCrossing, one_hot": (lambda: layers.HashedCrossing(5, output_mode="one_hot"), [[(1,), (1,)]]),
}


@pytest.mark.parametrize("name", HOST_LAYERS)
def test_output_shapes_on_the_host(name):
    build, shapes = HOST_LAYERS[name]
    dtype = "string" if ("String" in name and "inverted" not in name) or "Text" in name else "int64"
    for shape in shapes:
        layer = build()
        if isinstance(shape, list):
            of_inputs = layer.compute_output_shape([(None, *each) for each in shape])
            called = build()([Input(each, dtype=dtype) for each in shape])
        else:
            of_inputs, called = layer.compute_output_shape((None, *shape)), build()(Input(shape, dtype=dtype))
        assert of_inputs == called.shape
        with pytest.raises(AttributeError, match="has never been called"):
            layer.output  # noqa: B018
    assert layers.Hashing(5, output_mode="one_hot").compute_output_shape((None, 4)) == (None, 4, 5)
    assert layers.TextVectorization(vocabulary=["b"]).compute_output_shape((None,)) == (None, None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.Hashing(0), "cannot be `None` or non-positive values"),
        (lambda: layers.Hashing(2, dtype="float32"), "`dtype` should be an integer type"),
        (lambda: layers.Hashing(2, output_mode="tf_idf"), "Invalid value for argument `output_mode`"),
        (lambda: layers.Hashing(2, salt=[1, 2, 3]), "can only be a tuple of size 2 integers"),
        (lambda: layers.Hashing(2, sparse=True), "not supported: sparse"),
        (lambda: layers.HashedCrossing(2, "count"), "expected 'int' or 'one_hot'"),
        (lambda: layers.HashedCrossing(0), "num_bins=0 of HashedCrossing"),
        (lambda: layers.HashedCrossing(2)(["a"]), "at least two inputs"),
        (lambda: layers.HashedCrossing(2)((["a"], [1, 2])), "should have the same shape"),
        (lambda: layers.HashedCrossing(2)((["a"], [0.5])), "integer or string dtype"),
        (lambda: layers.StringLookup(1), "must be greater than 1"),
        (lambda: layers.StringLookup(pad_to_max_tokens=True), "must set `max_tokens`"),
        (lambda: layers.StringLookup(num_oov_indices=-1), "greater than or equal to 0"),
        (lambda: layers.StringLookup(output_mode="bits"), "Invalid value for argument `output_mode`"),
        (lambda: layers.StringLookup(output_mode="count", invert=True), "must be `'int'` when `invert` is true"),
        (lambda: layers.StringLookup(idf_weights=[1]), "should only be set if `output_mode` is `'tf_idf'`"),
        (lambda: layers.StringLookup(vocabulary=["a"], output_mode="tf_idf"), "must be set if output_mode is 'tf_idf'"),
        (
            lambda: layers.StringLookup(vocabulary=["a"], output_mode="tf_idf", idf_weights=[1, 2]),
            "must be the same length as vocabulary",
        ),
        (lambda: layers.StringLookup(vocabulary=["a", "a"]), "at least one repeated term"),
        (lambda: layers.StringLookup(vocabulary=[]), "Cannot set an empty vocabulary"),
        (lambda: layers.StringLookup(2, vocabulary=["a", "b"]), "larger than the maximum vocab size"),
        (lambda: layers.StringLookup(vocabulary=["a"]).adapt(["b"]), "after setting a static vocabulary"),
        (lambda: layers.StringLookup()(["a"]), "You must set the vocabulary"),
        (lambda: layers.StringLookup(encoding="latin-1"), "not supported: encoding='latin-1'"),
        (lambda: layers.IntegerLookup(vocabulary_dtype="int32"), "Only `vocabulary_dtype='int64'`"),
        (lambda: layers.IntegerLookup(oov_method="md5"), "expected 'floormod' or 'farmhash'"),
        (lambda: layers.IntegerLookup(salt=1), "`oov_method='farmhash'`"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    "layer",
    [
        layers.Hashing(3),
        layers.StringLookup(vocabulary=["a", "b"]),
        layers.TextVectorization(vocabulary=["a", "b"]),
        layers.IntegerLookup(vocabulary=[1, 2]),
    ],
)
def test_what_works_on_the_host_takes_training(layer):
    inputs = [1, 2] if isinstance(layer, layers.IntegerLookup) else ["a", "b"]
    np.testing.assert_array_equal(layer(inputs, training=True), layer(inputs))
