"""Two models trained in turn inside one `train_step`: the same class for dptrain and for Keras on PyTorch."""

import contextlib

import numpy as np
import pytest

import dptrain as dp

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LATENT, STEPS, RATE = 3, 200, 0.01


def make_gan(k):
    """Return a generator and a discriminator in a model of module k, dptrain or Keras."""
    if k is dp:
        no_grad = contextlib.nullcontext
    else:
        from torch import no_grad

    class Gan(k.Model):
        """The data are (noise, samples)."""

        def __init__(self):
            super().__init__()
            L = k.layers
            judging = [L.Dense(9, "tanh"), L.Dense(4, "sigmoid"), L.Dropout(0.0), L.Dense(1)]
            self.generator = k.Sequential([k.Input((LATENT,)), L.Dense(8, "tanh"), L.BatchNormalization(), L.Dense(2)])
            self.discriminator = k.Sequential([k.Input((2,)), *judging])
            self.d_loss, self.g_loss = k.metrics.Mean("d_loss"), k.metrics.Mean("g_loss")

        def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
            super().compile(**options)
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

        @property
        def metrics(self):
            return [self.d_loss, self.g_loss]

        def call(self, noise, training=False):
            return self.generator(noise, training=training)

        def train_step(self, data):
            noise, real = data
            rows = k.ops.shape(real)[0]
            fakes = self.generator(noise, training=True)
            images = k.ops.concatenate([k.ops.stop_gradient(fakes), real], axis=0)
            aims = k.ops.concatenate([k.ops.zeros((rows, 1)), k.ops.ones((rows, 1))], axis=0)
            d_loss = self.loss_fn(aims, self.discriminator(images, training=True))
            self.update(self.d_optimizer, d_loss, self.discriminator)

            g_loss = self.loss_fn(k.ops.ones((rows, 1)), self.discriminator(fakes, training=True))
            self.update(self.g_optimizer, g_loss, self.generator)
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

        def update(self, optimizer, loss, model):
            self.zero_grad()
            loss.backward()
            weights = model.trainable_weights
            gradients = [weight.value.grad for weight in weights]
            with no_grad():
                optimizer.apply(gradients, weights)

    return Gan()


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}])
def test_two_hundred_steps(torch_keras, options):
    rng = np.random.default_rng(0)
    noise, real = rng.standard_normal((40 * STEPS - 5, LATENT)), rng.standard_normal((40 * STEPS - 5, 2))
    real += np.array([2.0, -1.0])
    results, start = [], None
    for k in (torch_keras, dp):
        gan, losses = make_gan(k), []
        build_options = {"dtype": "float64", **options} if k is dp else {}
        loss = k.losses.BinaryCrossentropy(from_logits=True)
        gan.compile(k.optimizers.Adam(RATE), k.optimizers.Adam(RATE, beta_1=0.5), loss, **build_options)
        models = (gan.generator, gan.discriminator)
        start = start or [model.get_weights() for model in models]
        for model, weights in zip(models, start, strict=True):
            model.set_weights(weights)
        each_batch = k.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, losses=losses: losses.append([logs["d_loss"], logs["g_loss"]])
        )
        history = gan.fit(noise, real, batch_size=40, shuffle=False, verbose=0, callbacks=[each_batch])
        results.append(
            [np.array(losses), list(history.history), [weight for model in models for weight in model.get_weights()]]
        )
    (theirs, their_keys, their_weights), (ours, our_keys, our_weights) = results
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert our_keys == their_keys
    assert len(ours) == STEPS
    for mine, expected in zip(our_weights, their_weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-8, atol=1e-10)
