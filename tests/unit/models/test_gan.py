"""A model that holds other models and trains them against each other, as in Keras' guide "Customizing fit"."""

import numpy as np
import pytest

import dptrain as keras
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from tests.unit.program.virtual_ranks import run_on_ranks

SIDE, LATENT = 8, 5


def discriminator() -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input(shape=(SIDE, SIDE, 1)),
            keras.layers.Conv2D(4, (3, 3), strides=(2, 2), padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Conv2D(6, (3, 3), strides=(2, 2), padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(1),
        ],
        name="discriminator",
        seed=1,
    )


def generator() -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input(shape=(LATENT,)),
            keras.layers.Dense(2 * 2 * 6),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Reshape((2, 2, 6)),
            keras.layers.Conv2DTranspose(6, (4, 4), strides=(2, 2), padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Conv2DTranspose(6, (4, 4), strides=(2, 2), padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Conv2D(1, (3, 3), padding="same", activation="sigmoid"),
        ],
        name="generator",
        seed=2,
    )


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(**options)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = real_images.shape[0]
        latent = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(latent)
        combined_images = keras.ops.concatenate([generated_images, real_images], axis=0)
        labels = keras.ops.concatenate([keras.ops.ones((batch_size, 1)), keras.ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(labels.shape, seed=self.seed_generator)

        self.discriminator.zero_grad()
        d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        d_loss.backward()
        grads = [v.value.grad for v in self.discriminator.trainable_weights]
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)

        latent = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = keras.ops.zeros((batch_size, 1))
        self.generator.zero_grad()
        g_loss = self.loss_fn(misleading_labels, self.discriminator(self.generator(latent)))
        g_loss.backward()
        self.g_optimizer.apply(
            [v.value.grad for v in self.generator.trainable_weights], self.generator.trainable_weights
        )

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


def build(**options) -> GAN:
    keras.utils.set_random_seed(0)  # of the order of the images
    gan = GAN(discriminator(), generator(), LATENT)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        **options,
    )
    return gan


def images(rows: int = 22) -> np.ndarray:
    return np.random.default_rng(0).random((rows, SIDE, SIDE, 1), dtype=np.float32)


def test_both_are_trained_and_losses_are_means_over_batches():
    gan = build()
    before = [gan.discriminator.get_weights(), gan.generator.get_weights()]
    steps = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append((logs["d_loss"], logs["g_loss"]))

    history = gan.fit(images(), batch_size=8, epochs=2, verbose=0, callbacks=[Note()]).history
    assert list(history) == ["d_loss", "g_loss"]
    assert steps[2] == (history["d_loss"][0], history["g_loss"][0])
    assert int(gan.d_optimizer.iterations) == int(gan.g_optimizer.iterations) == 6
    for old, part in zip(before, (gan.discriminator, gan.generator), strict=True):
        assert all(not np.array_equal(a, b) for a, b in zip(old, part.get_weights(), strict=True))
    generated = gan.generator.predict(np.zeros((3, LATENT)), verbose=0)
    assert generated.shape == (3, SIDE, SIDE, 1)
    twin = build()
    assert twin.fit(images(), batch_size=8, epochs=2, verbose=0).history == history


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}, {"jit_compile": False}])
def test_the_same_losses_however_it_is_executed(options):
    gan, other = build(dtype="float64"), build(dtype="float64", **options)
    expected = gan.fit(images(), batch_size=8, epochs=2, verbose=0).history
    actual = other.fit(images(), batch_size=8, epochs=2, verbose=0).history
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-10)


def test_parts_are_used_before_and_after():
    gan = build()
    assert float(gan.discriminator(images(2))[0, 0]) == pytest.approx(
        gan.discriminator.predict(images(2))[0, 0], rel=1e-5
    )
    gan.fit(images(), batch_size=8, verbose=0)
    gan.discriminator.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    gan.discriminator.fit(images(), np.ones(22), verbose=0)
    gan.fit(images(), batch_size=8, verbose=0)
    with pytest.raises((ConfigError, NotImplementedError), match="call"):
        gan.predict(images())


def test_a_step_on_five_ranks_of_which_some_have_no_images():
    """Placed and executed rank by rank: the losses of one rank, and updates that all ranks agree on."""
    gan, data = build(dtype="float64"), images(3).astype(np.float64)
    gan.discriminator.build()
    gan.generator.build()
    gan._set_dtype("float64")
    step = gan._make_step("train")
    inputs = {"x": ((Dim.rows(3), SIDE, SIDE, 1), np.float64)}
    program = trace(lambda x: step.function(x), inputs)
    expected, updates = evaluate(program, {"x": data})
    actual, _ = run_on_ranks(place(program), {"x": data}, [1, 0, 0, 2, 0], {"x": 0})
    for outputs, updated in actual:
        for name in ("d_loss", "g_loss"):
            np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-11)
        for variable, value in updates.items():
            np.testing.assert_allclose(updated[variable], value, rtol=1e-8, atol=1e-11, err_msg=variable.path)
