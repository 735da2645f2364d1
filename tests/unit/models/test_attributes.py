"""What may be changed of a model or a layer after it was made, as Keras' guides do."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError

X = np.array([[1.0, -2.0], [3.0, 4.0]])


def negative() -> keras.Sequential:
    """y = relu(-x)."""
    model = keras.Sequential([keras.Input((2,)), L.Dense(2, "relu", use_bias=False)])
    model.compile("sgd", "mse", dtype="float64")
    model.set_weights([-np.eye(2)])
    return model


def test_an_activation_that_is_taken_off_is_off():
    model = negative()
    np.testing.assert_array_equal(model.predict(X, verbose=0), np.maximum(-X, 0))
    model.layers[0].activation = None
    np.testing.assert_array_equal(model.predict(X, verbose=0), -X)
    np.testing.assert_array_equal(model(X), -X)
    assert model.get_config()["layers"][1]["config"]["activation"] == "linear"


@pytest.mark.parametrize("activation", ["tanh", keras.activations.tanh, keras.ops.tanh])
def test_another_activation_holds_from_the_next_call(activation):
    model = negative()
    model.predict(X, verbose=0)
    model.layers[0].activation = activation
    np.testing.assert_allclose(model.predict(X, verbose=0), np.tanh(-X), rtol=1e-12)
    layer = L.Activation("relu")
    layer.activation = activation
    np.testing.assert_allclose(layer(X), np.tanh(X), rtol=1e-6)


def test_an_activation_that_there_is_not():
    with pytest.raises(ConfigError, match="unknown activation 'tan'"):
        negative().layers[0].activation = "tan"


def test_run_eagerly_is_an_attribute():
    calls = []

    class Looks(L.Layer):
        def call(self, x):
            calls.append(getattr(x, "value", None) is not None)
            return x

    model = keras.Sequential([keras.Input((2,)), Looks(), L.Dense(1)])
    model.run_eagerly = True
    assert model.run_eagerly
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)
    calls.clear()
    model.run_eagerly = True
    model.fit(X, X[:, :1], verbose=0)
    assert model.run_eagerly
    assert calls == [True]
    model.run_eagerly = False
    model.fit(X, X[:, :1], verbose=0)
    assert not all(calls)


def test_an_embedding_is_built_without_a_shape():
    layer = L.Embedding(3, 2)
    layer.build()
    assert (layer.built, layer.embeddings.shape) == (True, (3, 2))


def test_weights_come_and_go_as_arrays():
    layer = L.Dense(2)
    assert (layer.weights, layer.get_weights()) == ([], [])
    layer.build((None, 3))
    layer.set_weights([np.ones((3, 2)), np.arange(2.0)])
    assert [weight.tolist() for weight in layer.get_weights()] == [[[1, 1]] * 3, [0, 1]]
    assert layer.count_params() == 8


def test_a_layer_is_built_once():
    layer = L.Dense(2)
    layer.build((None, 3))
    with pytest.raises(ConfigError, match="layer 'dense' is already built: a second `build` would add its weights"):
        layer.build((None, 3))
    assert len(layer.weights) == 2
    layer = L.ReLU()
    layer.build((None, 3)), layer.build((None, 4))

    class More(L.Dense):
        def build(self, input_shape):
            super().build(input_shape)
            self.scale = self.add_weight((1,), "ones")

    assert len(More(2)(X).shape) == 2


def test_a_model_of_nothing():
    with pytest.raises(ConfigError, match="`inputs` argument cannot be empty"):
        keras.Model(inputs=[], outputs=[])


def test_layers_have_names_before_the_weights_are_there():
    model = keras.Sequential([L.Dense(2), L.Dense(1)])
    assert model.get_layer("dense_1").units == 1
    with pytest.raises(ConfigError, match=r"No such layer: head\. Existing layers are: \['dense', 'dense_1'\]"):
        model.get_layer("head")


def test_jit_compile_is_an_attribute():
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    assert model.jit_compile
    model.compile("sgd", "mse", jit_compile=False)
    before = model.predict(X, verbose=0)
    assert not model.jit_compile
    model.jit_compile = True
    assert model.jit_compile
    np.testing.assert_allclose(model.predict(X, verbose=0), before, rtol=1e-6)


def test_a_configuration_that_is_none():
    with pytest.raises(TypeError, match="Unable to revive model from config"):
        keras.Model.from_config([1])
