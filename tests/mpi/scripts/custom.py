"""Steps of a user's own, which mix rows, on any number of ranks; rank 0 saves what came out.

Arguments: out.npz samples batch_size.
"""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain import ops
from dptrain.comm import current

out, samples, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Denoiser(dp.Model):
    """Adds noise, which a model of its own shapes, to its inputs, and notes it."""

    def __init__(self, denoising, shaping):
        super().__init__(seed=3)
        self.denoising, self.shaping = denoising, shaping
        self.seed_generator = dp.random.SeedGenerator(5)
        self.mixing = dp.layers.MixUp(0.8, seed=7)
        self.noise = dp.metrics.Mean("noise")
        self.batches = dp.metrics.Sum("batches")

    def call(self, inputs):
        return self.denoising(inputs)

    def train_step(self, data):
        x, _, weights = dp.utils.unpack_x_y_sample_weight(data)
        mixed = self.mixing({"images": ops.reshape(x, (-1, 1, 2, 3)), "labels": x}, training=True)
        x = 0.5 * mixed["labels"] + 0.5 * ops.reshape(mixed["images"], x.shape)
        noise = dp.random.normal(x.shape, dtype="float64", seed=self.seed_generator)
        self.noise.update_state(noise)
        self.batches.update_state(1.0)
        self.zero_grad()
        y_pred = self.denoising(x + self.shaping(noise, training=True), training=True)
        loss = self.compute_loss(x, x, y_pred, weights) + 0.01 * ops.max(ops.abs(y_pred))
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        self.metrics[0].update_state(loss, sample_weight=x.shape[0])
        return {**self.compute_metrics(x, x, y_pred, weights), "loudest": ops.max(noise)}

    def test_step(self, data):
        x, _, _ = dp.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x)
        self.metrics[0].update_state(self.compute_loss(x, x, y_pred, training=False), sample_weight=x.shape[0])
        logs = self.compute_metrics(x, x, y_pred)
        return {name: logs[name] for name in ("loss", "mae", "mse")}


class Notes(dp.callbacks.Callback):
    """The logs of every step, the same on every rank."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([logs["loss"], logs["noise"]])


x = np.random.default_rng(0).standard_normal((samples, 6))
shaping = dp.Sequential([dp.layers.Dense(6, use_bias=False, input_shape=(6,)), dp.layers.BatchNormalization()], seed=4)
denoising = dp.Sequential(
    [
        dp.layers.Dense(5, "tanh", kernel_regularizer="l2", input_shape=(6,)),
        dp.layers.BatchNormalization(),
        dp.layers.Dropout(0.2),
        dp.layers.Dense(6),
    ],
    seed=6,
)
model = Denoiser(denoising, shaping)
model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], dtype="float64")
weights = np.random.default_rng(1).uniform(0.5, 2, samples)
notes = Notes()
history = model.fit(
    x,
    x,
    batch_size=batch_size,
    epochs=2,
    sample_weight=weights,
    validation_data=(x[:5],),
    verbose=0,
    callbacks=[notes],
)
assert all(seen == notes.seen for seen in current().allgather(notes.seen))
score = model.evaluate(x[:1], verbose=0)  # some ranks have nothing to evaluate
if current().rank == 0:
    np.savez(out, **model._named_weights(), seen=notes.seen, score=score, history=json.dumps(history.history))
