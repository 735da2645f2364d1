"""The Sequential model: layers in a row, built at once or by the first batch, looked into, and transferred."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers

X = np.ones((3, 3), "float32")


def test_three_ways_to_write_the_same():
    listed = keras.Sequential([layers.Dense(2, activation="relu", name="layer1"), layers.Dense(4, name="layer2")])
    added = keras.Sequential()
    added.add(layers.Dense(2, activation="relu", name="layer1"))
    added.add(layers.Dense(4, name="layer2"))
    first, second = layers.Dense(2, activation="relu"), layers.Dense(4)
    called = second(first(X))
    for model in (added, listed):
        model(X)
        model.set_weights(first.get_weights() + second.get_weights())
        np.testing.assert_allclose(model(X), called, rtol=1e-6)


def test_layers_are_listed_and_popped():
    model = keras.Sequential([layers.Dense(2), layers.Dense(3), layers.Dense(4)], name="my_sequential")
    assert (model.name, len(model.layers)) == ("my_sequential", 3)
    model.pop()
    assert len(model.layers) == 2


def test_weights_come_with_the_first_input():
    layer = layers.Dense(3)
    assert layer.weights == []
    layer(np.ones((1, 4)))
    assert [weight.shape for weight in layer.weights] == [(4, 3), (3,)]
    model = keras.Sequential([layers.Dense(2, activation="relu"), layers.Dense(4)])
    assert not model.built
    model(np.ones((1, 4)))
    assert len(model.weights) == 4


def test_a_model_is_summarized_while_it_grows():
    model = keras.Sequential()
    model.add(keras.Input(shape=(32, 32, 3)))
    model.add(layers.Conv2D(4, 5, strides=2, activation="relu"))
    model.add(layers.Conv2D(4, 3, activation="relu"))
    model.add(layers.MaxPooling2D(3))
    assert model.output_shape == (None, 4, 4, 4)
    lines = []
    model.summary(print_fn=lines.append)
    assert "(None, 14, 14, 4)" in lines[0]
    model.add(layers.GlobalMaxPooling2D())
    model.add(layers.Dense(10))
    assert (model.output_shape, len(model.layers)) == ((None, 10), 5)


def test_intermediate_outputs_are_features():
    model = keras.Sequential(
        [
            keras.Input(shape=(16, 16, 3)),
            layers.Conv2D(4, 5, strides=2, activation="relu"),
            layers.Conv2D(4, 3, activation="relu", name="my_intermediate_layer"),
            layers.Conv2D(4, 3, activation="relu"),
        ]
    )
    every = keras.Model(inputs=model.inputs, outputs=[layer.output for layer in model.layers])
    intermediate = keras.Model(inputs=model.inputs, outputs=model.get_layer(name="my_intermediate_layer").output)
    x = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")
    features = every(x)
    assert [each.shape for each in features] == [(2, 6, 6, 4), (2, 4, 4, 4), (2, 2, 2, 4)]
    np.testing.assert_array_equal(intermediate(x), features[1])
    np.testing.assert_array_equal(model(x), features[2])


@pytest.mark.filterwarnings("error")
def test_all_layers_but_the_last_are_frozen():
    model = keras.Sequential(
        [keras.Input(shape=(4,)), layers.Dense(3, "relu"), layers.Dense(3, "relu"), layers.Dense(1)]
    )
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.compile("sgd", "mse")
    before = model.get_weights()
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    changed = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert changed[:4] == [False] * 4
    assert changed[5]


def test_a_frozen_base_under_a_new_head():
    base_model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu")])
    base_model.trainable = False
    model = keras.Sequential([base_model, layers.Dense(5)])
    model(np.ones((1, 4)))
    assert (len(model.trainable_weights), len(model.non_trainable_weights)) == (2, 2)
