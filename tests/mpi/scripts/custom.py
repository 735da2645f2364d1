"""Steps of a user's own on any number of ranks; rank 0 saves what came out. Arguments: out.npz samples batch_size."""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

out, samples, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Denoiser(dp.Sequential):
    """Adds noise, which a model of its own shapes, to its inputs, and notes it."""

    def __init__(self, layers, shaping):
        super().__init__(layers, seed=3)
        self.shaping = shaping
        self.noise = dp.metrics.MeanTracker("noise")
        self.batches = dp.metrics.MeanTracker("batches")

    def train_step(self, data):
        noise = self.random_normal("noise", data.rows, 6, data.first_row)
        self.noise.update_state(noise)
        x = self.buffer("x", (data.rows, 6))
        self.ops.affine(data.x, 1.0, 0.0, x)
        self.ops.add(self.shaping.forward(noise, training=True), x)
        y_pred = self.forward(x, training=True)
        loss, dy = self.compute_loss(x, data.x, y_pred, data.sample_weight)
        self.loss_tracker.update_state(loss, data.rows)
        logs = self.compute_metrics(x, data.x, y_pred, data.sample_weight)
        self.shaping.backward(self.backward(dy, input_gradient=True))
        self.apply_gradients()
        self.shaping.apply_gradients()
        return {**logs, "noise": self.noise.result()}

    def test_step(self, data):
        y_pred = self.forward(data.x)
        loss, _ = self.compute_loss(data.x, data.x, y_pred, training=False)
        self.loss_tracker.update_state(loss, data.rows)
        return self.compute_metrics(data.x, data.x, y_pred)


class Notes(dp.callbacks.Callback):
    """The logs of every step, the same on every rank."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([logs["loss"], logs["noise"]])


x = np.random.default_rng(0).standard_normal((samples, 6))
shaping = dp.Sequential([dp.layers.Dense(6, use_bias=False, input_shape=(6,)), dp.layers.BatchNormalization()], seed=4)
shaping.compile("adam", dtype="float64")
model = Denoiser(
    [
        dp.layers.Dense(5, "tanh", kernel_regularizer="l2", input_shape=(6,)),
        dp.layers.BatchNormalization(),
        dp.layers.Dropout(0.2),
        dp.layers.Dense(6),
    ],
    shaping,
)
model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], dtype="float64")
weights = np.random.default_rng(1).uniform(0.5, 2, samples)
notes = Notes()
history = model.fit(
    x,
    batch_size=batch_size,
    epochs=3,
    sample_weight=weights,
    validation_data=(x[:5],),
    verbose=0,
    callbacks=[notes],
)
assert all(other == notes.seen for other in current().allgather(notes.seen))
score = model.evaluate(x[:1], verbose=0)  # some ranks have nothing to evaluate
parameters = model.named_weights() | {f"shaping/{name}": one for name, one in shaping.named_weights().items()}
if current().rank == 0:
    np.savez(out, **parameters, seen=notes.seen, score=score, history=json.dumps(history.history))
