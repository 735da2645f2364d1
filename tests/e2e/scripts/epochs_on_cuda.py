"""Trains so many epochs on samples on the device, streamed, and from a generator. Argument: epochs."""

import sys

import numpy as np

import dptrain as dp

epochs = int(sys.argv[1])
rng = np.random.default_rng(0)
x, y = rng.standard_normal((70, 5)).astype(np.float32), rng.integers(0, 3, 70)


def batches():
    """Yield the first rows, again and again."""
    while True:
        yield x[:16], y[:16]


for device_mb in (None, 0.0005):
    for data in (
        {"x": x, "y": y, "batch_size": 16},
        {"x": batches(), "steps_per_epoch": 4, "shuffle": False},
    ):
        layers = [dp.layers.Dense(6, "relu", input_shape=(5,)), dp.layers.Dropout(0.2), dp.layers.Dense(3, "softmax")]
        model = dp.Sequential(layers)
        model.compile(
            "adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cuda", device_mb=device_mb
        )
        stop = dp.callbacks.EarlyStopping(patience=9, restore_best_weights=True)
        model.fit(**data, epochs=epochs, validation_data=(x[:21], y[:21]), callbacks=[stop], verbose=0)
