"""FeatureSpace: columns of a table become vectors, also after a file."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.utils import FeatureSpace

TABLE = {
    "age": np.array([20.0, 30, 40, 50]),
    "size": np.array([1.0, 2, 3, 4]),
    "city": np.array(["a", "b", "a", "c"]),
    "code": np.array([3, 4, 3, 9]),
    "word": np.array(["x", "y", "x", "z"]),
    "number": np.array([5, 6, 5, 7]),
}


def space(**options):
    features = {
        "age": "float_normalized",
        "size": FeatureSpace.float_discretized(2),
        "city": "string_categorical",
        "code": FeatureSpace.integer_categorical(num_oov_indices=0),
        "word": FeatureSpace.string_hashed(4),
        "number": "integer_hashed",
    }
    return FeatureSpace(features, crosses=[("city", "code")], crossing_dim=5, hashing_dim=3, **options)


def test_each_feature_is_encoded():
    feature_space = space(output_mode="dict")
    feature_space.adapt(TABLE)
    features = feature_space(TABLE)
    assert list(features) == ["age", "city", "code", "number", "size", "word", "city_X_code"]
    np.testing.assert_allclose(features["age"], np.array([-3, -1, 1, 3])[:, None] / 5**0.5, rtol=1e-6)
    np.testing.assert_array_equal(features["city"], np.eye(4)[[1, 3, 1, 2]])  # of equal counts, the greater text first
    np.testing.assert_array_equal(features["code"], np.eye(3)[[0, 2, 0, 1]])
    hashed = layers.Hashing(3)(TABLE["number"]).numpy()
    np.testing.assert_array_equal(features["number"], np.eye(3)[hashed])
    places = (layers.StringLookup(vocabulary=["a", "c", "b"])(TABLE["city"]), np.array([0, 2, 0, 1]))
    crossed = layers.HashedCrossing(5)(
        [column if isinstance(column, np.ndarray) else column.numpy() for column in places]
    )
    np.testing.assert_array_equal(features["city_X_code"], np.eye(5)[crossed.numpy()])
    np.testing.assert_array_equal(features["size"].numpy().sum(1), np.ones(4))
    encoded_row = feature_space({name: column[2] for name, column in TABLE.items()})
    for name, encoded in encoded_row.items():
        np.testing.assert_array_equal(encoded, features[name].numpy()[2])


def test_generators_that_refill_their_columns():
    def refilling():
        buffer = {name: column[:2].copy() for name, column in TABLE.items()}
        for rows in (slice(0, 2), slice(2, 4)):
            for name, column in TABLE.items():
                buffer[name][:] = column[rows]
            yield buffer

    feature_space, other = space(), space()
    feature_space.adapt(TABLE)
    other.adapt(refilling())
    np.testing.assert_array_equal(feature_space(TABLE), other(TABLE))


def test_in_batches_as_in_one():
    feature_space, other = space(), space()
    feature_space.adapt(TABLE)
    other.adapt(
        [{name: column[:3] for name, column in TABLE.items()}, {name: column[3:] for name, column in TABLE.items()}]
    )
    np.testing.assert_array_equal(
        feature_space(TABLE), other({name: column[:, None] for name, column in TABLE.items()})
    )


def test_a_model_for_it_and_a_file_of_it(tmp_path):
    feature_space = space()
    feature_space.adapt(TABLE)
    x = feature_space.get_encoded_features()
    model = dp.Model(x, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    model.fit(feature_space(TABLE), np.ones(4), verbose=0)
    feature_space.save(tmp_path / "space.keras")
    loaded = dp.models.load_model(tmp_path / "space.keras")
    assert isinstance(loaded, FeatureSpace)
    np.testing.assert_array_equal(loaded(TABLE), feature_space(TABLE))
    assert loaded.get_config() == feature_space.get_config()
    with pytest.raises(dp.errors.OutputError, match="exists"):
        feature_space.save(tmp_path / "space.keras", overwrite=False)


def test_own_features_and_whole_numbers():
    rescaled = FeatureSpace.feature("float32", layers.Rescaling(0.5), "float")
    crosses = [FeatureSpace.cross(("a", "b"), 7, "int")]
    feature_space = FeatureSpace({"a": rescaled, "b": FeatureSpace.integer_hashed(3, "int"), "c": "float"}, "dict")
    encoded = feature_space({"a": [2.0], "b": [1], "c": [3]})
    assert [float(encoded[name].numpy()[0, 0]) for name in ("a", "c")] == [1, 3]
    assert encoded["b"].dtype == np.int64
    assert list(feature_space.get_encoded_features()) == ["a", "b", "c"]
    feature_space = FeatureSpace({name: FeatureSpace.integer_hashed(3, "int") for name in "ab"}, "dict", crosses)
    assert feature_space({"a": [1], "b": [2]})["a_X_b"].dtype == np.int64
    with pytest.raises(ConfigError, match="Cannot concatenate features because feature 'b'"):
        FeatureSpace({"b": FeatureSpace.integer_hashed(3, "int")})({"b": [1]})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FeatureSpace({}), "cannot be None or empty"),
        (lambda: FeatureSpace({"a": "float"}, "list"), "Invalid value for argument `output_mode`"),
        (lambda: FeatureSpace({"a": "text"}), "Invalid feature type: text"),
        (lambda: FeatureSpace({"a": "float"}, crosses=[("a", "b")]), r"unknown features: \['b'\]"),
        (lambda: FeatureSpace.cross(("a",), 3, "float"), "Expected one of {'int', 'one_hot'}"),
        (
            lambda: FeatureSpace.feature("float32", layers.Identity(), "text"),
            "Invalid value for argument `output_mode`",
        ),
        (lambda: space()(TABLE), "You need to call `.adapt.dataset.` .*: age, size, city, code of"),
        (lambda: FeatureSpace({"a": "float"})([1.0]), "can only be called with a dict"),
        (lambda: FeatureSpace({"a": "float"})({"b": [1.0]}), "no column 'a'; found b"),
        (lambda: space().adapt(np.ones(3)), "can only be called on a dict"),
        (lambda: FeatureSpace({"a": "float"}).get_inputs(), "not supported: FeatureSpace.get_inputs"),
        (
            lambda: FeatureSpace({"a": FeatureSpace.feature("float32", layers.Identity(), "one_hot")})({"a": [1.0]}),
            "should return an integer dtype",
        ),
        (
            lambda: FeatureSpace({"a": FeatureSpace.feature("int32", layers.Identity(), "one_hot")})({"a": [1]}),
            "it isn't a standard feature",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
