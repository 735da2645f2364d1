"""Steps of a user's own on any number of ranks; rank 0 saves what came out. Arguments: out.npz samples batch_size."""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

out, samples, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Denoiser(dp.Sequential):
    """Adds noise to its inputs; notes the largest weight's gradient and the rows."""

    def __init__(self, layers):
        super().__init__(layers, seed=3)
        self.noise = dp.metrics.MeanTracker("noise")
        self.batches = dp.metrics.MeanTracker("batches")

    def train_step(self, data):
        noise = self.random_normal("noise", data.rows, 6, data.first_row)
        self.noise.update_state(noise)
        x = self.buffer("x", (data.rows, 6))
        self.ops.affine(data.x, 1.0, 0.0, x)
        self.ops.add(noise, x)
        y_pred = self.forward(x, training=True)
        loss, dy = self.compute_loss(x, data.x, y_pred)
        self.loss_tracker.update_state(loss, data.rows)
        self.backward(dy)
        self.apply_gradients()
        return {**self.compute_metrics(x, data.x, y_pred), "noise": self.noise.result()}

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
model = Denoiser([dp.layers.Dense(5, "tanh", input_shape=(6,)), dp.layers.Dropout(0.2), dp.layers.Dense(6)])
model.compile("adam", "mse", ["mae"], dtype="float64")
notes = Notes()
history = model.fit(x, batch_size=batch_size, epochs=3, validation_data=(x[:5],), verbose=0, callbacks=[notes])
assert all(other == notes.seen for other in current().allgather(notes.seen))
score = model.evaluate(x[:1], verbose=0)  # some ranks have nothing to evaluate
if current().rank == 0:
    np.savez(out, **model.named_weights(), seen=notes.seen, score=score, history=json.dumps(history.history))
