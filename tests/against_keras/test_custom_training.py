"""Two models trained in turn inside one `train_step`, by dptrain with gradients written out and by Keras."""

import numpy as np

import dptrain as dp

LATENT, STEPS, RATE = 3, 200, 0.01


class Gan(dp.Sequential):
    """A generator; x is its noise, y are the data that the discriminator compares with."""

    def __init__(self, layers, discriminator):
        super().__init__(layers)
        self.discriminator = discriminator
        self.d_loss, self.g_loss = dp.metrics.MeanTracker("d_loss"), dp.metrics.MeanTracker("g_loss")

    def judge(self, x, aim, mean):
        y_pred = self.discriminator.forward(x, training=True)
        y = self.buffer("aim", y_pred.shape)
        self.ops.fill(y, aim)
        loss, dy = self.discriminator.compute_loss(x, y, y_pred)
        mean.update_state(loss, len(x))
        return dy

    def train_step(self, data):
        made = self.forward(data.x, training=True)
        self.discriminator.backward(self.judge(data.y, 1.0, self.d_loss))
        self.discriminator.backward(self.judge(made, 0.0, self.d_loss))
        self.discriminator.apply_gradients()
        dy = self.judge(made, 1.0, self.g_loss)
        self.backward(self.discriminator.backward(dy, input_gradient=True, frozen=True))
        self.apply_gradients()
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def dense(layers):
    generator = [layers.Dense(8, activation="tanh"), layers.Dense(2)]
    discriminator = [layers.Dense(9, activation="tanh"), layers.Dense(4, activation="sigmoid"), layers.Dense(1)]
    return generator, discriminator


def test_two_hundred_steps(keras):
    rng = np.random.default_rng(0)
    noise, real = rng.standard_normal((40 * STEPS, LATENT)), rng.standard_normal((40 * STEPS, 2))
    real += np.array([2.0, -1.0])
    theirs = [
        keras.Sequential([keras.layers.Input((inputs,)), *layers])
        for inputs, layers in zip((LATENT, 2), dense(keras.layers), strict=True)
    ]
    own, judges = dense(dp.layers)
    discriminator = dp.Sequential(judges)
    discriminator.build((None, 2))
    gan = Gan(own, discriminator)
    gan.build((None, LATENT))
    for mine, other in zip((gan, discriminator), theirs, strict=True):
        mine.set_weights(weights(other))
        mine.compile(dp.optimizers.Adam(RATE), "mse", dtype="float64", jit_compile=False)

    class Seen(dp.callbacks.Callback):
        losses: list[list[float]] = []  # noqa: RUF012

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append([logs["d_loss"], logs["g_loss"]])

    gan.fit(noise, real, batch_size=40, shuffle=False, verbose=0, callbacks=[Seen()])

    import torch

    generator, judge = (lambda x, model=model: outputs(torch, model, x) for model in theirs)
    optimizers = [keras.optimizers.Adam(RATE) for _ in theirs]
    losses = []
    for step in range(STEPS):
        z, x = (torch.tensor(one[40 * step : 40 * step + 40]) for one in (noise, real))
        made = generator(z)
        d_parts = [((judge(x) - 1) ** 2).mean(), (judge(made.detach()) ** 2).mean()]
        update(torch, theirs[1], optimizers[1], d_parts[0] + d_parts[1])
        g_loss = ((judge(made) - 1) ** 2).mean()
        update(torch, theirs[0], optimizers[0], g_loss)
        losses.append([(d_parts[0].item() + d_parts[1].item()) / 2, g_loss.item()])
    means = np.cumsum(losses, axis=0) / np.arange(1, STEPS + 1)[:, None]  # of the epoch so far
    np.testing.assert_allclose(Seen.losses, means, rtol=1e-9)
    for mine, other in zip((gan, discriminator), theirs, strict=True):
        for one, another in zip(mine.get_weights(), weights(other), strict=True):
            np.testing.assert_allclose(one, another, rtol=1e-8, atol=1e-10)


def update(torch, model, optimizer, loss):
    variables = model.trainable_variables
    gradients = torch.autograd.grad(loss, [one.value for one in variables], retain_graph=True)
    with torch.no_grad():
        optimizer.apply(gradients, variables)


def outputs(torch, model, x):
    """Keras' layers on PyTorch round their inputs to float32, its weights and optimizers are float64."""
    for layer in model.layers:
        x = x @ layer.kernel.value + layer.bias.value
        name = layer.activation.__name__
        x = x if name == "linear" else getattr(torch, name)(x)
    return x


def weights(model):
    return [one.value.detach().numpy().copy() for one in model.weights]
