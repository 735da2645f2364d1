"""Transfer learning: what is frozen, what BatchNormalization does then, and fine-tuning."""

import numpy as np

import dptrain as keras
from dptrain import layers

RNG = np.random.default_rng(0)


def test_which_weights_are_trained():
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    assert (len(layer.weights), len(layer.trainable_weights), len(layer.non_trainable_weights)) == (2, 2, 0)
    layer = keras.layers.BatchNormalization()
    layer.build((None, 4))
    assert (len(layer.weights), len(layer.trainable_weights), len(layer.non_trainable_weights)) == (4, 2, 2)
    layer.trainable = False
    assert (len(layer.trainable_weights), len(layer.non_trainable_weights)) == (0, 4)


def test_a_frozen_layer_stays_as_it_is():
    layer1, layer2 = keras.layers.Dense(3, activation="relu"), keras.layers.Dense(3, activation="sigmoid")
    model = keras.Sequential([keras.Input(shape=(3,)), layer1, layer2])
    layer1.trainable = False
    initial, other = layer1.get_weights(), layer2.get_weights()
    model.compile(optimizer="adam", loss="mse")
    model.fit(RNG.random((2, 3)), RNG.random((2, 3)), verbose=0)
    np.testing.assert_array_equal(layer1.get_weights()[0], initial[0])
    assert (layer2.get_weights()[0] != other[0]).all()


def test_trainable_reaches_the_layers_in_a_model():
    inner_model = keras.Sequential([keras.Input(shape=(3,)), layers.Dense(3, "relu"), layers.Dense(3, "relu")])
    model = keras.Sequential([keras.Input(shape=(3,)), inner_model, layers.Dense(3, activation="sigmoid")])
    model.trainable = False
    assert inner_model.trainable is False
    assert inner_model.layers[0].trainable is False


def base():
    return keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(momentum=0.5), layers.ReLU()],
        name="base",
    )


def with_head(base_model):
    inputs = keras.Input(shape=(8, 8, 3))
    x = base_model(layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs), training=False)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def test_a_new_head_and_then_fine_tuning():
    base_model = base()
    base_model.trainable = False
    model = with_head(base_model)
    x, y = RNG.random((16, 8, 8, 3)) * 255, RNG.integers(0, 2, (16, 1))
    assert [len(model.trainable_weights), len(model.non_trainable_weights)] == [2, 6]
    loss, metrics = keras.losses.BinaryCrossentropy(from_logits=True), [keras.metrics.BinaryAccuracy()]
    model.compile(optimizer=keras.optimizers.Adam(), loss=loss, metrics=metrics)
    before = base_model.get_weights()
    model.fit(x, y, epochs=2, batch_size=8, verbose=0)
    for old, new in zip(before, base_model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    base_model.trainable = True
    assert len(model.trainable_weights) == 6
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss, metrics=metrics)
    model.fit(x, y, epochs=1, batch_size=8, verbose=0)
    kernel, _, _, _, moving_mean, moving_variance = (
        not np.array_equal(old, new) for old, new in zip(before, base_model.get_weights(), strict=True)
    )
    assert kernel
    # `training=False` holds in fine-tuning: the statistics stay.
    assert (moving_mean, moving_variance) == (False, False)


def test_training_mode_of_a_call_is_that_of_what_it_calls():
    base_model = base()
    x = RNG.normal(2, 1, (16, 8, 8, 3)).astype("float32")
    inputs = keras.Input(shape=(8, 8, 3))
    following = keras.Model(inputs, base_model(inputs))
    before = base_model.get_weights()[4]
    following(x, training=False)
    np.testing.assert_array_equal(base_model.get_weights()[4], before)
    following(x, training=True)
    assert not np.array_equal(base_model.get_weights()[4], before)


def test_features_of_a_frozen_base_are_data_for_a_new_model():
    base_model = base()
    base_model.trainable = False
    x, y = RNG.random((12, 8, 8, 3)), RNG.random((12, 1))
    features = base_model.predict(x, verbose=0)
    head = keras.Sequential([layers.GlobalAveragePooling2D(), layers.Dense(1)])
    head.compile("adam", "mse")
    losses = head.fit(features, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
