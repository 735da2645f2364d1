"""Trains 26 steps and saves every loss. Arguments: data.npz out.npz device task."""

import sys

import numpy as np

import dptrain as dp
from dptrain.callbacks import Callback

data, out, device, task = sys.argv[1:]


class EveryLoss(Callback):
    """Keeps the mean loss and metric after each step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        """Read them."""
        self.seen.append(list(logs.values()))


(x, y), (x_test, y_test) = dp.datasets.load(data)
x, y = x[:503], y[:503]
if task == "classify":
    layers = [
        dp.layers.Rescaling(1 / 255, input_shape=(28, 28)),
        dp.layers.Flatten(),
        dp.layers.Dense(33, "relu"),
        dp.layers.Dropout(0.3),
        dp.layers.Dense(17, "tanh"),
        dp.layers.Dense(10, "softmax"),
    ]
    model = dp.Sequential(layers, seed=5)
    model.compile(dp.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"], device=device)
elif task == "layers":
    L = dp.layers
    layers = [
        dp.Input((28, 28)),
        L.Rescaling(1 / 255),
        L.Flatten(),
        L.Dense(20, use_bias=False, kernel_regularizer=dp.regularizers.L1L2(0.0003, 0.002)),
        L.BatchNormalization(momentum=0.9),
        L.Activation("gelu"),
        L.Dense(12, "silu"),
        L.Dense(12, "selu", trainable=False),
        L.BatchNormalization(trainable=False),
        L.LeakyReLU(0.1),
        L.Dense(10, "softmax"),
    ]
    model = dp.Sequential(layers, seed=5)
    chosen = dp.optimizers.OptimizerMap(
        dp.optimizers.SGD(0.05), {"dense_1/.*": dp.optimizers.ScheduleFreeAdamW(0.003, warmup_steps=10)}
    )
    optimizer = dp.optimizers.MultiOptimizer(chosen)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], device=device)
else:
    x, x_test = (images.reshape(len(images), -1).astype(np.float64) / 255 for images in (x, x_test))
    y, y_test = (np.stack([labels, labels % 2], 1) / 10 for labels in (y, y_test))
    layers = [
        dp.layers.Dense(20, "sigmoid", input_shape=(784,)),
        dp.layers.Rescaling(2.0, -1.0),
        dp.layers.Dense(9, use_bias=False),
        dp.layers.Activation("softmax"),
        dp.layers.Dense(2),
    ]
    model = dp.Sequential(layers, seed=5)
    model.compile(dp.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], device=device)
losses = EveryLoss()
# 503 samples: batches of 41 leave one of 11, which two ranks cut into 5 and 6.
history = model.fit(x, y, batch_size=41, epochs=2, validation_data=(x_test, y_test), verbose=0, callbacks=[losses])
# A last batch of one, which leaves a rank without samples, or of three; a part of the samples takes another program.
tail = model.fit(x, y, batch_size=251 if task == "layers" else 100, verbose=0)

from dptrain.comm import current  # noqa: E402 - after fit, as a script would

weights = model._named_weights()
prediction = model.predict(x_test[:37], verbose=0)
if current().rank == 0:
    np.savez(out, **weights, losses=losses.seen, val=history.history["val_loss"], prediction=prediction)
