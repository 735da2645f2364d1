"""New layers and models by subclassing: weights, sublayers, losses, training by hand."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops

RNG = np.random.default_rng(0)


class Linear(keras.layers.Layer):
    def __init__(self, units=32, input_dim=None, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self):
        config = super().get_config()
        config.update({"units": self.units})
        return config


def test_weights_and_computation():
    layer = Linear(4)
    assert layer.weights == []
    x = np.ones((2, 2), "float32")
    y = layer(x)
    assert layer.weights == [layer.w, layer.b]
    np.testing.assert_allclose(y, x @ layer.w.numpy() + layer.b.numpy(), rtol=1e-6)


class ComputeSum(keras.layers.Layer):
    def __init__(self, input_dim):
        super().__init__()
        self.total = self.add_weight(initializer="zeros", shape=(input_dim,), trainable=False)

    def call(self, inputs):
        self.total.assign_add(ops.sum(inputs, axis=0))
        return self.total


def test_a_weight_that_is_not_trained():
    my_sum = ComputeSum(2)
    x = np.ones((2, 2))
    assert my_sum(x).numpy().tolist() == [2, 2]
    assert my_sum(x).numpy().tolist() == [4, 4]
    assert (len(my_sum.weights), len(my_sum.non_trainable_weights), my_sum.trainable_weights) == (1, 1, [])


class MLPBlock(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.linear_1, self.linear_2, self.linear_3 = Linear(32), Linear(32), Linear(1)

    def call(self, inputs):
        x = keras.activations.relu(self.linear_1(inputs))
        return self.linear_3(keras.activations.relu(self.linear_2(x)))


def test_layers_of_layers():
    mlp = MLPBlock()
    assert mlp(np.ones((3, 64))).shape == (3, 1)
    assert (len(mlp.weights), len(mlp.trainable_weights)) == (6, 6)


class ActivityRegularizationLayer(keras.layers.Layer):
    def __init__(self, rate=1e-2):
        super().__init__()
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(inputs))
        return inputs


class OuterLayer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.activity_reg = ActivityRegularizationLayer(1e-2)

    def call(self, inputs):
        return self.activity_reg(inputs)


def test_losses_of_a_layer_begin_anew_with_every_call():
    layer = OuterLayer()
    assert layer.losses == []
    for value in (0.0, 3.0):
        layer(np.full((1, 2), value))
        assert [float(penalty) for penalty in layer.losses] == pytest.approx([0.01 * value])


def test_losses_of_layers_are_part_of_the_models():
    inputs = keras.Input(shape=(3,))
    model = keras.Model(inputs, ActivityRegularizationLayer()(inputs))
    model.compile(optimizer="adam", loss="mse")
    x = np.full((2, 3), 2.0)
    assert model.evaluate(x, np.zeros((2, 3)), verbose=0) == pytest.approx(4 + 0.02)


def test_configurations():
    layer = Linear(64, name="my_linear")
    config = layer.get_config()
    new_layer = Linear.from_config(config)
    assert (new_layer.units, new_layer.name) == (64, "my_linear")


class CustomDropout(keras.layers.Layer):
    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs, training=None):
        if training:
            return keras.random.dropout(inputs, rate=self.rate, seed=self.seed_generator)
        return inputs


def test_training_is_an_argument():
    layer, x = CustomDropout(0.5), np.ones((100, 10), "float32")
    np.testing.assert_array_equal(layer(x), x)
    dropped = layer(x, training=True).numpy()
    assert set(np.unique(dropped)) == {0, 2}
    assert 0.4 < (dropped == 0).mean() < 0.6


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(shape=ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class Encoder(layers.Layer):
    def __init__(self, latent_dim=2, intermediate_dim=8, name="encoder", **kwargs):
        super().__init__(name=name, **kwargs)
        self.dense_proj = layers.Dense(intermediate_dim, activation="relu")
        self.dense_mean, self.dense_log_var = layers.Dense(latent_dim), layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.dense_proj(inputs)
        z_mean, z_log_var = self.dense_mean(x), self.dense_log_var(x)
        return z_mean, z_log_var, self.sampling((z_mean, z_log_var))


class VariationalAutoEncoder(keras.Model):
    def __init__(self, original_dim, name="autoencoder", **kwargs):
        super().__init__(name=name, **kwargs)
        self.encoder = Encoder()
        self.decoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(original_dim, "sigmoid")])

    def call(self, inputs):
        z_mean, z_log_var, z = self.encoder(inputs)
        kl_loss = -0.5 * ops.mean(z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1)
        self.add_loss(kl_loss)
        return self.decoder(z)


def test_a_variational_autoencoder_end_to_end():
    vae = VariationalAutoEncoder(12)
    vae.compile(keras.optimizers.Adam(learning_rate=1e-2), loss=keras.losses.MeanSquaredError())
    x = RNG.random((64, 12)).astype("float32")
    losses = vae.fit(x, x, epochs=6, batch_size=32, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert vae.predict(x[:5], verbose=0).shape == (5, 12)
    assert [layer.name for layer in vae.layers] == ["encoder", "sequential"]


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        self.zero_grad()
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def test_a_step_of_ones_own_of_a_functional_model():
    inputs = keras.Input(shape=(4,))
    model = CustomModel(inputs, layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    x, y = np.eye(4, dtype="float32"), np.ones((4, 1), "float32")
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["loss"], [1, 0.5625], rtol=1e-6)  # a step takes each error to three quarters
