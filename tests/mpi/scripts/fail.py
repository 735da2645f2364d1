"""Fails on one rank, in one of many ways. Arguments: way rank."""

import os
import sys
import time

import numpy as np

import dptrain as dp

way, bad = sys.argv[1], int(sys.argv[2])
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
x = np.random.default_rng(0).integers(0, 256, (64, 4), np.uint8)
y = (x[:, 0] // 128).astype(np.int64)


class Bomb(dp.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs=None) -> None:
        if batch == 2 and rank == bad:
            if way == "exit in callback":
                sys.exit(3)
            raise RuntimeError("bomb")


class Poison(dp.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs=None) -> None:
        if batch == 7 and rank == bad:  # the epoch's last, so that no later step carries it to the others
            weight = self.model.weights[0]
            value = weight.numpy()
            value[0, 1] = np.inf
            weight.assign(value)


if way == "before mpi" and rank == bad:
    raise ValueError("early")
if way == "before mpi late" and rank == bad:
    time.sleep(1)
    raise ValueError("early")
model = dp.Sequential([dp.layers.Dense(2, "softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy")
if way == "labels" and rank == bad:
    y[5] = 2
if way == "shape" and rank == bad:
    x = x[:, :3]
if way == "other data" and rank == bad:
    x = x[::-1].copy()
weights = np.ones(64)
if way == "other weights" and rank == bad:
    weights[9] = 2
size = 5 if way == "other batch size" and rank == bad else 8
callbacks = [Bomb()] if way in ("callback", "exit in callback", "swallowed") else []
if way == "parameters":
    callbacks = [Poison()]
try:
    model.fit(x, y, batch_size=size, epochs=2, verbose=0, callbacks=callbacks, sample_weight=weights)
except Exception:
    if way != "swallowed":
        raise
    time.sleep(30)
if way == "after fit" and rank == bad:
    raise KeyError("late")
model.evaluate(x, y, verbose=0)
