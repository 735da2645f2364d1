"""Two variational autoencoders, as Keras' guides write them; rank 0 saves what came out. Arguments: out.json."""

import json
import sys
from pathlib import Path

import numpy as np

import dptrain as keras
from dptrain import layers, ops


class Sampling(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), dtype="float64", seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def divergence(mean, log_variance):
    return -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))


class WithAddedLoss(keras.Model):
    """The divergence is a loss and a metric of the call; `fit` is Keras'."""

    def __init__(self):
        super().__init__(seed=1)
        self.hidden, self.mean, self.log_variance = layers.Dense(6, "relu"), layers.Dense(2), layers.Dense(2)
        self.sampling, self.decoder = Sampling(), layers.Dense(10, "sigmoid")
        self.kl_loss = keras.metrics.Mean("kl_loss")

    def call(self, inputs):
        hidden = self.hidden(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        self.add_loss(ops.mean(divergence(mean, log_variance)))
        self.kl_loss.update_state(ops.sum(divergence(mean, log_variance), axis=1))
        return self.decoder(self.sampling((mean, log_variance)))


class WithOwnStep(keras.Model):
    """Encoder and decoder are models; the step is a tape's."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input(shape=(10,))
        hidden = layers.Dense(6, "relu")(inputs)
        parts = [layers.Dense(2, name="mean")(hidden), layers.Dense(2, name="log_variance")(hidden)]
        self.encoder = keras.Model(inputs, [*parts, Sampling()(parts)], seed=2)
        code = keras.Input(shape=(2,))
        self.decoder = keras.Model(code, layers.Dense(10, "sigmoid")(code), seed=3)
        self.trackers = {name: keras.metrics.Mean(name) for name in ("loss", "reconstruction_loss", "kl_loss")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        with keras.GradientTape() as tape:
            mean, log_variance, code = self.encoder(data)
            losses = keras.losses.binary_crossentropy(data, self.decoder(code))
            reconstruction, kl = ops.mean(losses), ops.mean(ops.sum(divergence(mean, log_variance), axis=1))
            loss = reconstruction + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.metrics, (loss, reconstruction, kl), strict=True):
            tracker.update_state(value)
        return {metric.name: metric.result() for metric in self.metrics}


rng = np.random.default_rng(0)
x, more, arguments = rng.random((45, 10)), rng.random((700, 10)), {"batch_size": 16, "epochs": 2, "verbose": 0}
results = []
added = WithAddedLoss()
added.compile(keras.optimizers.Adam(0.01), "mse", dtype="float64")
for _ in range(2):  # what is evaluated and predicted in between draws random numbers as well
    results.append(added.fit(x, x, validation_data=(more, more), **arguments).history)
    results.append([float(part.sum()) for part in np.array_split(added.predict(more, verbose=0), 5)])
    results.append(added.evaluate(more, more, verbose=0, return_dict=True))
with_own_step = WithOwnStep()
with_own_step.compile(keras.optimizers.Adam(0.01), dtype="float64")
for _ in range(2):
    results.append(with_own_step.fit(x, **arguments).history)
    results.append([float(part.sum()) for part in with_own_step.encoder.predict(more, verbose=0)])
if keras.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
