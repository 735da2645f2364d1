"""Configurations of users' classes: what `super().get_config()` returns, names, and how layers are built from files."""

import json

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers
from dptrain.errors import ConfigError

POLICY = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None}


class Units(layers.Layer):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], self.units), name="kernel")

    def call(self, inputs):
        return inputs @ self.kernel

    def get_config(self):
        return dict(units=self.units, **super().get_config())


class Factor(Units):
    def __init__(self, units, factor=2, **options):
        super().__init__(units, **options)
        self.factor = factor

    def get_config(self):
        return dict(factor=self.factor, **super().get_config())


class OwnDense(layers.Dense):
    def __init__(self, units, extra=1, **options):
        super().__init__(units, **options)
        self.extra = extra

    def get_config(self):
        return dict(extra=self.extra, **super().get_config())


class OwnCell(layers.LSTMCell):
    def __init__(self, units, extra=1, **options):
        super().__init__(units, **options)
        self.extra = extra

    def get_config(self):
        return dict(extra=self.extra, **super().get_config())


class OwnWrapper(layers.Wrapper):
    def __init__(self, layer, extra=1, **options):
        super().__init__(layer, **options)
        self.extra = extra

    def get_config(self):
        return dict(extra=self.extra, **super().get_config())


class OwnModel(keras.Model):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.units, self.dense = units, layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return dict(units=self.units, **super().get_config())


OBJECTS = {cls.__name__: cls for cls in (Units, Factor, OwnDense, OwnCell, OwnWrapper, OwnModel)}


def test_the_base_configuration_of_an_override_is_what_all_layers_share():
    assert Units(3).get_config() == {"units": 3, "name": None, "trainable": True, "dtype": POLICY}
    named = Units(3, name="x", dtype="float64", trainable=False)
    assert named.get_config() == {"units": 3, "name": "x", "trainable": False, "dtype": "float64"}
    assert list(Factor(3).get_config()) == ["factor", "units", "name", "trainable", "dtype"]
    assert OwnModel(3).get_config() == {"units": 3, "name": "own_model", "trainable": True, "dtype": POLICY}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Units(3, activity_regularizer="l2", dtype="float64"),
        lambda: Factor(3, 5),
        lambda: OwnDense(3, 7, activation="relu", trainable=False),
        lambda: layers.RNN(OwnCell(3, 7)),
        lambda: OwnWrapper(Units(3), 7, name="outer"),
        lambda: OwnModel(3),
    ],
    ids=["layer", "subclass of a subclass", "Dense", "cell", "wrapper", "model"],
)
def test_the_configuration_makes_an_equal_layer(make):
    layer = make()
    with keras.saving.custom_object_scope(OBJECTS):
        again = layers.deserialize(layers.serialize(layer))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    assert again.dtype == layer.dtype


def test_a_models_policy_stays_that_of_a_clone():
    """A described policy that is not the layer's own does not become so."""
    model = keras.Sequential([layers.Input((3,)), OwnDense(2)])
    model.compile("sgd", "mse", dtype="float64")
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse", dtype="float32")
    assert clone.layers[0].dtype == "float32"


def test_names_before_there_is_a_model():
    first, second = layers.Dense(2), layers.Dense(2)
    assert (first.name, second.name, Units(2).name, keras.Sequential().name) == (
        "dense",
        "dense",
        "units",
        "sequential",
    )
    model = keras.Sequential([layers.Input((3,)), first, second])
    assert [layer.name for layer in model.layers] == ["dense", "dense_1"]
    assert model.get_layer("dense_1") is second
    assert layers.Dropout(0.5).get_config()["dtype"] == POLICY


@pytest.mark.parametrize("make", [lambda x, y: keras.Model(x, y), lambda x, y: keras.Sequential([x, layers.Dense(2)])])
def test_a_model_is_described_as_a_layer(make):
    inputs = layers.Input((3,))
    model = make(inputs, layers.Dense(2)(inputs))
    again = layers.deserialize(layers.serialize(model))
    assert type(again) is type(model)
    assert again.built
    again.set_weights(model.get_weights())
    x = np.arange(6.0).reshape(2, 3).astype("float32")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    nested = layers.deserialize(layers.serialize(layers.TimeDistributed(model)))
    assert type(nested.layer) is type(model)


@keras.saving.register_keras_serializable("own_config")
class BuiltFromConfig(layers.Layer):
    """Its `build` takes more than a shape."""

    calls = ()

    def build(self, shape, depth=1):
        self.depth = depth
        self.kernels = [self.add_weight((shape[-1], shape[-1]), name=f"kernel_{index}") for index in range(depth)]

    def call(self, inputs):
        for kernel in self.kernels:
            inputs = inputs @ kernel
        return inputs

    def get_build_config(self):
        return {"shape": (None, 3), "depth": self.depth}

    def build_from_config(self, config):
        self.build(tuple(config["shape"]), config["depth"])


def test_files_build_layers_by_their_own_build_config(tmp_path):
    layer = BuiltFromConfig()
    layer.build((None, 3), depth=4)
    model = keras.Sequential([layers.Input((3,)), layer])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x = np.ones((2, 3), np.float32)
    assert loaded.layers[0].depth == 4
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert layers.deserialize(layers.serialize(layer)).depth == 4


def test_build_configs():
    dense, attention = layers.Dense(2), layers.MultiHeadAttention(2, 2)
    assert dense.get_build_config() is None
    dense.build((None, 3))
    assert dense.get_build_config() == {"input_shape": (None, 3)}
    attention.build((None, 4, 3), (None, 5, 3))
    for layer in (dense, attention, keras.Sequential([layers.Input((3,)), layers.Dense(2)])):
        again = layers.deserialize(layers.serialize(layer))
        again.build_from_config(layer.get_build_config())
        assert again.built
        assert [weight.shape for weight in again.weights] == [weight.shape for weight in layer.weights]
    model = OwnModel(2)
    model.build((None, 3))
    assert model.get_build_config() == {"input_shape": [None, 3]}


WITH_INNER_LAYERS = {
    "Bidirectional": (lambda: layers.Bidirectional(layers.SimpleRNN(2)), (2, 4, 3)),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(2)), (2, 4, 3)),
    "SpectralNormalization": (lambda: layers.SpectralNormalization(layers.Dense(2)), (2, 3)),
    "Pipeline": (lambda: layers.Pipeline([layers.Rescaling(2.0), layers.Dense(2)]), (2, 3)),
    "RNN": (lambda: layers.RNN(layers.GRUCell(2)), (2, 4, 3)),
    "StackedRNNCells": (lambda: layers.RNN([layers.GRUCell(2), layers.LSTMCell(2)]), (2, 4, 3)),
}


@pytest.mark.parametrize("name", WITH_INNER_LAYERS)
def test_a_copy_describes_how_its_inner_layers_were_built(name):
    make, shape = WITH_INNER_LAYERS[name]
    layer = make()
    layer(np.ones(shape))
    config = layer.get_config()
    again = type(layer).from_config(config)
    assert not again.built
    assert json.dumps(again.get_config()) == json.dumps(config)
    assert layers.deserialize(layers.serialize(layer)).get_build_config() == layer.get_build_config()
    again(np.ones((*shape[:-1], 5)))  # another shape than the described one
    assert again.get_build_config() == {"input_shape": (None, *shape[1:-1], 5)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([layers.Dense(2)]), lambda: OwnModel(2)], ids=["Sequential", "subclass"]
)
def test_a_model_without_weights_is_saved(make, compiled, tmp_path):
    model = make()
    if compiled:
        model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="has not yet been built"):
        model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects=OBJECTS)
    assert not loaded.built
    assert loaded.compiled == compiled
    x = np.ones((4, 3), np.float32)
    assert loaded(x).shape == (4, 2)
    if compiled:
        loaded.fit(x, np.zeros((4, 2)), verbose=0)
    with pytest.raises(ConfigError, match=r"input_shape|no weights yet"):
        make().save_weights(tmp_path / "m.weights.h5")


def test_an_empty_model_is_saved(tmp_path):
    with pytest.warns(UserWarning, match="has not yet been built"):
        keras.Sequential(name="empty").save(tmp_path / "m.keras")
    assert keras.models.load_model(tmp_path / "m.keras").layers == []


def doubled(x):
    return 2 * x


def test_configurations_name_functions_of_custom_objects():
    named = {"module": "builtins", "class_name": "function", "config": "doubled", "registered_name": "function"}
    config = {"name": "lambda", "function": named, "arguments": {}}
    with pytest.raises(ConfigError, match="doubled"):
        layers.Lambda.from_config(config)
    layer = layers.Lambda.from_config(config, custom_objects={"doubled": doubled}, safe_mode=False)
    np.testing.assert_array_equal(layer(np.ones((2, 3))), np.full((2, 3), 2))
    rescaling = layers.Rescaling.from_config(layers.Rescaling([1.0, 2.0], 3).get_config(), custom_objects={})
    assert (rescaling.scale, rescaling.offset) == ([1.0, 2.0], 3.0)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (lambda: layers.Conv2D(3, 2), {"kernel_size": (2, 2), "strides": (1, 1), "dilation_rate": (1, 1)}),
        (lambda: layers.MaxPooling1D(2), {"pool_size": (2,), "strides": (2,)}),
        (lambda: layers.ZeroPadding2D((1, 2)), {"padding": ((1, 1), (2, 2))}),
        (lambda: layers.Cropping1D(1), {"cropping": (1, 1)}),
        (lambda: layers.AdaptiveAveragePooling2D(3), {"output_size": (3, 3)}),
        (lambda: layers.Reshape((3, -1)), {"target_shape": (3, -1)}),
        (lambda: layers.Permute((2, 1)), {"dims": (2, 1)}),
    ],
)
def test_tuples_are_tuples_in_configurations(build, arguments):
    """As in Keras; JSON makes lists of them, which constructors take as well."""
    config = build().get_config()
    assert {name: config[name] for name in arguments} == arguments
    assert type(build()).from_config(json.loads(json.dumps(config))).get_config() == config
