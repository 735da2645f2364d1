"""The functional API: layers called on layers, models as layers, several inputs and outputs."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops

RNG = np.random.default_rng(0)


def test_a_classifier_is_built_summarized_trained_and_saved(tmp_path):
    pytest.importorskip("h5py")
    inputs = keras.Input(shape=(16,), name="digits")
    x = layers.Dense(8, activation="relu")(inputs)
    x = layers.Dense(8, activation="relu")(x)
    model = keras.Model(inputs=inputs, outputs=layers.Dense(3)(x), name="classifier")
    assert inputs.shape[1:] == (16,)
    assert inputs.dtype == "float32"
    lines = []
    model.summary(print_fn=lines.append)
    assert " Trainable params: 235 (" in lines[0]
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.RMSprop(),
        metrics=["accuracy"],
    )
    x_train = RNG.normal(size=(60, 16)).astype("float32")
    y_train = x_train[:, :3].argmax(1)
    history = model.fit(x_train, y_train, batch_size=16, epochs=4, validation_split=0.2, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    scores = model.evaluate(x_train, y_train, verbose=0)
    model.save(tmp_path / "model.keras")
    del model
    model = keras.models.load_model(tmp_path / "model.keras")
    assert model.evaluate(x_train, y_train, verbose=0) == pytest.approx(scores)


def test_one_graph_is_two_models():
    encoder_input = keras.Input(shape=(8, 8, 1), name="img")
    x = layers.Conv2D(4, 3, activation="relu")(encoder_input)
    x = layers.MaxPooling2D(2)(x)
    encoder_output = layers.GlobalMaxPooling2D()(x)
    encoder = keras.Model(encoder_input, encoder_output, name="encoder")
    x = layers.Reshape((2, 2, 1))(encoder_output)
    decoder_output = layers.Conv2DTranspose(1, 7, activation="relu")(x)
    autoencoder = keras.Model(encoder_input, decoder_output, name="autoencoder")
    assert (encoder.output_shape, autoencoder.output_shape) == ((None, 4), (None, 8, 8, 1))
    assert {id(weight) for weight in encoder.weights} < {id(weight) for weight in autoencoder.weights}


def test_a_model_is_called_like_a_layer():
    encoder_input = keras.Input(shape=(6,), name="original")
    encoder = keras.Model(encoder_input, layers.Dense(2, "tanh")(encoder_input), name="encoder")
    decoder_input = keras.Input(shape=(2,), name="encoded")
    decoder = keras.Model(decoder_input, layers.Dense(6)(decoder_input), name="decoder")
    whole_input = keras.Input(shape=(6,), name="img")
    autoencoder = keras.Model(whole_input, decoder(encoder(whole_input)), name="autoencoder")
    x = RNG.normal(size=(5, 6)).astype("float32")
    together = decoder.predict(encoder.predict(x, verbose=0), verbose=0)
    np.testing.assert_allclose(autoencoder.predict(x, verbose=0), together, rtol=1e-6, atol=1e-7)
    assert [layer.name for layer in autoencoder.layers] == ["img", "encoder", "decoder"]


def test_an_ensemble_is_the_mean_of_models():
    def get_model():
        inputs = keras.Input(shape=(12,))
        return keras.Model(inputs, layers.Dense(1)(inputs))

    models = [get_model() for _ in range(3)]
    inputs = keras.Input(shape=(12,))
    outputs = layers.average([model(inputs) for model in models])
    ensemble = keras.Model(inputs=inputs, outputs=outputs)
    x = RNG.normal(size=(4, 12)).astype("float32")
    mean = np.mean([model.predict(x, verbose=0) for model in models], axis=0)
    np.testing.assert_allclose(ensemble.predict(x, verbose=0), mean, rtol=1e-5, atol=1e-6)
    assert not np.allclose(models[0].get_weights()[0], models[1].get_weights()[0])


def test_tickets_with_two_inputs_and_two_outputs():
    title = keras.Input(shape=(4,), name="title")
    tags = keras.Input(shape=(3,), name="tags")
    x = layers.concatenate([layers.Dense(5, "relu")(title), tags])
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(4, name="department")(x)
    model = keras.Model(inputs=[title, tags], outputs={"priority": priority, "department": department})
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-2),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    x = {"title": RNG.normal(size=(32, 4)), "tags": RNG.normal(size=(32, 3))}
    y = {"priority": RNG.integers(0, 2, (32, 1)), "department": np.eye(4)[RNG.integers(0, 4, 32)]}
    logs = model.fit(x, y, epochs=2, batch_size=16, verbose=0).history
    total = np.array(logs["priority_loss"]) + 0.2 * np.array(logs["department_loss"])
    np.testing.assert_allclose(logs["loss"], total, rtol=1e-5)


def test_a_residual_network():
    inputs = keras.Input(shape=(8, 8, 3), name="img")
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    block_1 = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(block_1)
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(x)
    block_2 = layers.add([x, block_1])
    x = layers.GlobalAveragePooling2D()(block_2)
    model = keras.Model(inputs, layers.Dense(10)(layers.Dropout(0.5)(x)), name="toy_resnet")
    model.compile("rmsprop", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["acc"])
    logs = model.fit(RNG.random((16, 8, 8, 3)), np.eye(10)[np.arange(16) % 10], batch_size=8, verbose=0).history
    assert set(logs) == {"loss", "acc"}
    assert model.count_params() == 458


def test_shared_layers_have_one_table():
    shared_embedding = layers.Embedding(20, 3)
    first, second = keras.Input(shape=(4,), dtype="int32"), keras.Input(shape=(4,), dtype="int32")
    model = keras.Model([first, second], [shared_embedding(first), shared_embedding(second)])
    words = RNG.integers(0, 20, (3, 4))
    predicted, other = model.predict([words, words], verbose=0)
    np.testing.assert_array_equal(predicted, other)
    np.testing.assert_array_equal(predicted, model.get_weights()[0][words])


def test_features_of_every_layer_are_extracted():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(2)])
    features = keras.Model(inputs=model.inputs, outputs=[layer.output for layer in model.layers])
    x = np.ones((2, 3), "float32")
    hidden, output = features(x)
    (kernel, bias), expected = model.layers[0].get_weights(), model.predict(x, verbose=0)
    np.testing.assert_allclose(hidden, np.maximum(x @ kernel + bias, 0), rtol=1e-6)
    np.testing.assert_allclose(output, expected, rtol=1e-6)
    longer = keras.Model(model.input, layers.Dense(1)(model.output))
    assert longer.count_params() == model.count_params() + 3
    assert keras.Model(model.input, model.get_layer("dense").output).output_shape == (None, 4)


class CustomDense(layers.Layer):
    def __init__(self, units=32):
        super().__init__()
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="random_normal", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self):
        return {"units": self.units}


def test_a_custom_layer_comes_back_from_the_configuration():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, CustomDense(10)(inputs))
    again = keras.Model.from_config(model.get_config(), custom_objects={"CustomDense": CustomDense})
    again.set_weights(model.get_weights())
    x = RNG.normal(size=(2, 4)).astype("float32")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


class MLP(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense_1 = layers.Dense(6, activation="relu")
        self.dense_2 = layers.Dense(2)

    def call(self, inputs):
        return self.dense_2(self.dense_1(inputs))


def test_styles_mix():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.ReLU()(MLP()(inputs)))
    assert model.output_shape == (None, 2)
    assert model.predict(RNG.normal(size=(3, 5)), verbose=0).min() >= 0
