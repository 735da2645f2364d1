"""One file a callback; what they share is here."""

from types import SimpleNamespace
from typing import Any

import numpy as np

import dptrain as dp
from dptrain.callbacks import Callback, CallbackList
from dptrain.comm import Communicator, SoloCommunicator
from dptrain.metrics import METRICS, Metric


def toy(rows: int = 50, features: int = 6, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features))
    return x, (np.abs(x[:, 0]) * classes).astype(np.int64) % classes


def build(optimizer: Any = None, dropout: float = 0.0, **options) -> dp.Sequential:
    model = dp.Sequential(
        [
            dp.layers.Dense(8, activation="tanh", input_shape=(6,)),
            dp.layers.Dropout(dropout),
            dp.layers.Dense(3, activation="softmax"),
        ],
        seed=1,
    )
    optimizer = dp.optimizers.Adam(0.01) if optimizer is None else optimizer
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        dtype="float64",
        **options,
    )
    return model


class FakeModel:
    """What Keras' callbacks ask of a model: weights that a test can look at, and an optimizer with a learning rate."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        self.optimizer = SimpleNamespace(learning_rate=learning_rate, iterations=0)
        self._metrics_by_key: dict[str, Metric] = {}
        self.stop_training = False
        self.weights = [np.zeros(1)]
        self.saved: list[tuple[str, str]] = []

    def get_weights(self) -> list[np.ndarray]:
        return [weight.copy() for weight in self.weights]

    def set_weights(self, values: list[np.ndarray]) -> None:
        self.weights = [value.copy() for value in values]

    def save(self, filepath, overwrite=True) -> None:
        assert overwrite
        self.saved.append(("model", str(filepath)))

    def save_weights(self, filepath, overwrite=True) -> None:
        assert overwrite
        self.saved.append(("weights", str(filepath)))


class Rank1(SoloCommunicator):
    """A rank that does not write, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 1


def trainer(comm: Communicator | None = None) -> Any:
    return SimpleNamespace(comm=comm or SoloCommunicator())


def drive(
    callback: Callback,
    epochs: list[dict[str, float]],
    model: FakeModel | None = None,
    steps: list[list[dict[str, float]]] | None = None,
    comm: Communicator | None = None,
    metrics: tuple[str, ...] = (),
) -> list[dict[str, float]]:
    """Call the hooks of a training with hand-made logs, each epoch's weight its number; return the logs afterwards."""
    model = model or FakeModel()
    hooks = CallbackList(callback, model, verbose=0, epochs=len(epochs), steps=None)
    model._metrics_by_key = {name: METRICS[name](name=name) for name in metrics}
    hooks._set_trainer(trainer(comm))
    epochs_logs: list[dict[str, float]] = []
    recorder = Callback()
    vars(recorder)["on_epoch_end"] = lambda epoch, logs: epochs_logs.append(dict(logs))
    hooks.callbacks.append(recorder)
    hooks.on_train_begin()
    logs: dict[str, float] = {}
    for epoch, logs in enumerate(epochs):
        hooks.on_epoch_begin(epoch)
        for step, of_step in enumerate(steps[epoch] if steps else []):
            hooks.on_train_batch_begin(step)
            hooks.on_train_batch_end(step, of_step)
            if model.stop_training:
                break
        model.weights = [np.full(1, float(epoch))]
        hooks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    hooks.on_train_end(logs)
    return epochs_logs
