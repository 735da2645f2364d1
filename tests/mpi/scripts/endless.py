"""A training with a step that never ends, until a signal comes. Arguments: its folder, way, signal or "none".

Ways: "steps" one by one, "many" at once, "eager", "numpy" without a compiler, "validation", "one" rank has the signal.
"""

import os
import signal
import sys
import threading

import numpy as np

import dptrain as dp
from dptrain import ops
from dptrain.comm import current
from dptrain.train import step_deadline

folder, way, name = sys.argv[1:]
step_deadline._PATIENCE = 1.0
BATCH = 6
x = np.random.default_rng(0).normal(size=(8 * BATCH, 4)).astype(np.float32)
y = x[:, :1].copy()
x[5 * BATCH + BATCH - 1] = 1000  # of the last rank's rows of the sixth step
hangs = name != "none"


class Loop(dp.layers.Layer):
    """Ends only if all rows are small, or if nobody asks for a signal."""

    def call(self, rows):
        limit = 100.0 if hangs else 1e9
        start = ops.convert_to_tensor(np.float32(0)), ops.stop_gradient(ops.max(ops.abs(rows)))
        count, _ = ops.while_loop(lambda i, most: (i < 3) | (most > limit), lambda i, most: (i + 1, most), start)
        return rows + 0 * count


def build(loops: bool) -> dp.Sequential:
    loop = [Loop()] if loops else []
    layers = [*loop, dp.layers.Dense(3, "tanh"), dp.layers.BatchNormalization(), dp.layers.Dense(1)]
    model = dp.Sequential([dp.layers.Input((4,)), *layers], seed=1)
    many = 4 if way == "many" else 1
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=way == "eager", steps_per_execution=many)
    return model


def send() -> None:
    if way != "one" or current().rank == 1:
        os.kill(os.getpid(), getattr(signal, name))


class Sends(dp.callbacks.Callback):
    """Sends the signal in a while, once steps have begun."""

    def on_train_begin(self, logs=None) -> None:
        if hangs:
            threading.Timer(2.0, send).start()


model = build(loops=True)
calm = np.minimum(x, 1)
data = {"x": calm, "y": y, "validation_data": (x, y)} if way == "validation" else {"x": x, "y": y}
if hangs:  # all is compiled before
    model.fit(calm, y, batch_size=BATCH, validation_data=(calm, y), verbose=0)
    model = build(loops=True)
backup = dp.callbacks.BackupAndRestore(os.path.join(folder, "backup"), delete_checkpoint=False)
model.fit(**data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[backup, Sends()])
if current().rank == 0:
    np.savez(os.path.join(folder, "weights.npz"), *[weight.numpy() for weight in model.weights])
