"""Trains recurrent models, of masked sequences or with states that batches leave to others.

Arguments: out.npz CASE FOLDER. "stopped" ends in the middle of the second epoch, "resumed" goes on from its checkpoint.
Rank 0 saves weights, states, logs.
"""

import sys

import numpy as np

import dptrain as dp
from dptrain import layers
from dptrain.callbacks import BackupAndRestore, Callback
from dptrain.comm import current

out, case, folder = sys.argv[1:]
comm, rng = current(), np.random.default_rng(3)
L = layers


def labelled():
    """A label for each step: the loss, the metrics and the layers leave steps of the id 0 out, many of them."""
    model = dp.Sequential(
        [
            dp.Input((None,), dtype="int32"),
            L.Embedding(9, 4, mask_zero=True),
            L.Bidirectional(L.LSTM(3, return_sequences=True, dropout=0.2)),
            L.GRU(5, return_sequences=True),
            L.Dense(3, "softmax"),
        ],
        seed=1,
    )
    ids = rng.integers(1, 9, (29, 4)) * (np.arange(4) < rng.integers(1, 5, (29, 1)))
    return model, ids, rng.integers(0, 3, (29, 4)), "sparse_categorical_crossentropy", ["accuracy"]


def stateful():
    """Batches go on where those before have ended."""
    model = dp.Sequential([dp.Input(batch_shape=(5, 3, 2)), L.LSTM(4, stateful=True), L.Dense(1)], seed=1)
    return model, rng.normal(size=(30, 3, 2)), rng.normal(size=(30, 1)), "mse", ["mae"]


class Stops(Callback):
    """Ends the training with an error in the middle of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 10:
            raise RuntimeError("stopped")


model, x, y, loss, metrics = (labelled if case == "labelled" else stateful)()


def fit(*callbacks):
    """Train for three epochs."""
    model.compile(dp.optimizers.Adam(0.02), loss, metrics=metrics, dtype="float64")
    options = {"batch_size": 5, "epochs": 3, "shuffle": case == "labelled", "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **options).history


if case in ("stopped", "resumed"):
    history = fit(BackupAndRestore(folder, save_freq=4), *([Stops()] if case == "stopped" else []))
else:
    history = fit()
scores = model.evaluate(x, y, batch_size=5, verbose=0)
logs = [*np.transpose([history[key] for key in sorted(history)]).tolist()]
assert all(results == [logs, scores] for results in comm.allgather([logs, scores]))
states = [] if case == "labelled" else [state.numpy() for state in model.layers[0].states]
if comm.rank == 0:
    params = np.concatenate([weight.reshape(-1) for weight in [*model.get_weights(), *states]])
    np.savez(out, params=params, logs=logs, scores=scores)
