"""Saving: whole models, architectures, weights, and what is the user's own in them."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops

pytest.importorskip("h5py")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@keras.saving.register_keras_serializable(package="MyLayers")
class CustomLayer(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {"factor": self.factor}


@keras.saving.register_keras_serializable(package="my_package", name="custom_fn")
def custom_fn(x):
    return x**2


def test_registered_classes_and_functions_need_no_custom_objects(tmp_path):
    inputs = keras.Input((4,))
    x = CustomLayer(0.5)(inputs)
    model = keras.Model(inputs, layers.Dense(1, activation=custom_fn)(x))
    model.compile("adam", "mse")
    model.fit(X, X[:, :1], verbose=0)
    model.save(tmp_path / "custom_model.keras")
    reconstructed = keras.models.load_model(tmp_path / "custom_model.keras")
    np.testing.assert_array_equal(reconstructed.predict(X, verbose=0), model.predict(X, verbose=0))
    assert reconstructed.layers[2].activation is custom_fn
    reconstructed.fit(X, X[:, :1], verbose=0)


class Plain(keras.layers.Layer):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units)
        self.units = units

    def call(self, x):
        return plain_activation(self.dense(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def plain_activation(x):
    return ops.tanh(x) ** 2


def test_custom_objects_as_an_argument_and_as_a_scope(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Plain(), layers.Dense(1, activation=plain_activation)])
    expected = model.predict(X, verbose=0)
    model.save(tmp_path / "m.keras")
    custom_objects = {"Plain": Plain, "plain_activation": plain_activation}
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects=custom_objects)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)
    with keras.saving.custom_object_scope(custom_objects):
        again = keras.models.load_model(tmp_path / "m.keras")
        config_of = keras.Sequential.from_config(model.get_config())
    np.testing.assert_array_equal(again.predict(X, verbose=0), expected)
    assert config_of.count_params() == model.count_params()


def test_architectures_without_weights():
    model = keras.Sequential([keras.Input((32,)), layers.Dense(1)])
    assert keras.Sequential.from_config(model.get_config()).count_params() == 33
    inputs = keras.Input((32,))
    functional = keras.Model(inputs, layers.Dense(1)(inputs))
    assert keras.Model.from_config(functional.get_config()).count_params() == 33
    assert keras.models.model_from_json(functional.to_json()).count_params() == 33
    layer = keras.layers.Dense(3, activation="relu")
    assert keras.layers.Dense.from_config(layer.get_config()).units == 3
    restored = keras.layers.deserialize(keras.layers.serialize(layer))
    assert restored.activation is keras.activations.relu
    clone = keras.models.clone_model(functional)
    assert clone.count_params() == 33


def test_arbitrary_objects():
    reg = keras.regularizers.L1(0.005)
    config = keras.saving.serialize_keras_object(reg)
    assert (config["module"], config["class_name"], config["config"]["l1"]) == ("keras.regularizers", "L1", 0.005)
    assert keras.saving.deserialize_keras_object(config).l1 == 0.005


def test_weights_go_from_layer_to_layer_and_from_model_to_model(tmp_path):
    layer_1, layer_2 = layers.Dense(4, activation="relu"), layers.Dense(4, activation="relu")
    layer_1.build((None, 4)), layer_2.build((None, 4))
    layer_2.set_weights(layer_1.get_weights())
    np.testing.assert_array_equal(layer_2(X), layer_1(X))

    def build():
        inputs = keras.Input(shape=(4,), name="digits")
        x = layers.Dense(8, activation="relu", name="dense_1")(inputs)
        return keras.Model(inputs=inputs, outputs=layers.Dense(2, name="predictions")(x), name="mlp")

    saved, other = build(), build()
    saved.set_weights([weight + 1 for weight in saved.get_weights()])
    saved.save_weights(tmp_path / "w.weights.h5")
    other.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(other(X), saved(X))


def test_the_end_of_a_model_is_cut_off_and_what_is_left_transferred(tmp_path):
    inputs = keras.Input(shape=(4,))
    x = layers.Dense(8, activation="relu", name="dense_1")(inputs)
    functional = keras.Model(inputs, layers.Dense(2, name="predictions")(x))
    pretrained = keras.Model(functional.inputs, functional.layers[-1].input, name="pretrained_model")
    for w in pretrained.weights:
        w.assign(np.full(w.shape, 0.25))
    pretrained.save_weights(tmp_path / "pretrained.weights.h5")
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu", name="dense_1"), layers.Dense(5, name="predictions")]
    )
    with pytest.warns(UserWarning, match="skipped what does not fit the model: predictions/kernel"):
        model.load_weights(tmp_path / "pretrained.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(model.get_layer("dense_1").get_weights()[0], 0.25)
    assert pretrained.output_shape == (None, 8)


@keras.saving.register_keras_serializable(package="ComplexModels")
class CustomModel(keras.Model):
    def __init__(self, hidden_units=2, **kwargs):
        super().__init__(**kwargs)
        self.hidden_units = hidden_units
        self.first, self.last = layers.Dense(hidden_units, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))

    def get_config(self):
        return {**super().get_config(), "hidden_units": self.hidden_units}


def test_a_subclassed_model_comes_back_whole(tmp_path):
    model = CustomModel(3)
    model.compile("adam", "mse")
    model.fit(X, X[:, :1], verbose=0)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert (type(again), again.hidden_units, int(again.optimizer.iterations)) == (CustomModel, 3, 1)
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


@keras.saving.register_keras_serializable(package="guide")
def tenth_of_squares(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_pred - y_true) / 10.0, axis=1)


@keras.saving.register_keras_serializable(package="guide")
class OwnCompile(keras.Model):
    """Keeps what it was compiled with, and compiles itself when it is loaded."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="softmax")

    def call(self, inputs):
        return self.dense(inputs)

    def compile(self, optimizer, loss_fn, metrics):
        super().compile(optimizer=optimizer, loss=loss_fn, metrics=metrics)
        self.model_optimizer, self.loss_fn, self.loss_metrics = optimizer, loss_fn, metrics

    def get_compile_config(self):
        return {"model_optimizer": self.model_optimizer, "loss_fn": self.loss_fn, "metric": self.loss_metrics}

    def compile_from_config(self, config):
        parts = [
            keras.saving.deserialize_keras_object(config[name]) for name in ("model_optimizer", "loss_fn", "metric")
        ]
        self.compile(*parts)


def test_a_compile_of_ones_own_is_restored(tmp_path):
    model = OwnCompile()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), tenth_of_squares, ["mae"])
    x, y = np.random.default_rng(0).random((2, 8, 4))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m.keras")
    restored = keras.models.load_model(tmp_path / "m.keras")
    assert (restored.loss_fn, restored.loss_metrics) == (tenth_of_squares, ["mae"])
    assert type(restored.model_optimizer) is keras.optimizers.SGD
    assert float(restored.optimizer.learning_rate) == 0.5
    assert int(restored.optimizer.iterations.numpy()) == 1
    losses = [each.fit(x, y, verbose=0, shuffle=False).history for each in (model, restored)]
    for name, values in losses[0].items():
        np.testing.assert_allclose(losses[1][name], values, rtol=1e-6)
