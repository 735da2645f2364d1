"""Trains recurrent models, attention, branches, loops of unknown length: masked sequences, or states that last.

Arguments: out.npz CASE FOLDER. "attention" may have an ending: "attention sharded" has its weights and slots in parts,
"attention by heads" has a LayoutMap that divides heads and units among all ranks; so may "labelled". "stopped" ends in
the middle of the second epoch, "resumed" goes on from its checkpoint. Rank 0 saves weights, states, logs.
"""

import sys

import numpy as np

import dptrain as dp
from dptrain import distribution, layers, ops
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


def attention():
    """A causal transformer of masked ids, whose steps attend to others of the same sample."""
    ids = dp.Input((None,), dtype="int32")
    h = L.Embedding(9, 8, mask_zero=True, name="embedding")(ids)
    for number in range(2):
        layer = L.MultiHeadAttention(4, 2, dropout=0.2 * number, name=f"attention_{number}")  # 0: one op
        attended = layer(h, h, use_causal_mask=True)
        h = L.LayerNormalization()(L.Add()([h, attended]))
        units = L.Dense(12, "gelu", name=f"up_{number}")(h)
        h = L.LayerNormalization()(L.Add()([h, L.Dense(8, name=f"down_{number}")(units)]))
    x = rng.integers(1, 9, (23, 6)) * (np.arange(6) < rng.integers(1, 7, (23, 1)))
    labels = rng.integers(0, 3, (23, 6))
    model = dp.Model(ids, L.Dense(3, "softmax")(h), seed=1)
    return model, x, labels, "sparse_categorical_crossentropy", ["accuracy"]


def by_heads():
    """Return layouts of heads, units and rows of a table, over all ranks: 3 ranks have 2, 1 and 1 of the 4 heads."""
    mesh = distribution.DeviceMesh((1, comm.size), ["batch", "model"])
    layouts = distribution.LayoutMap(mesh)
    layouts[".*/(query|key|value)/kernel"] = (None, "model", None)
    layouts[".*/(query|key|value)/bias"] = ("model", None)
    layouts[".*/attention_output/kernel"] = ("model", None, None)
    layouts[".*up_./kernel"] = (None, "model")
    layouts[".*up_./bias"] = ("model",)
    layouts[".*down_./kernel"] = ("model", None)
    layouts[".*embedding/embeddings"] = ("model", None)
    layouts[".*_cell/(recurrent_)?kernel"] = (None, "model")
    return distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def stateful():
    """Batches go on where those before have ended."""
    model = dp.Sequential([dp.Input(batch_shape=(5, 3, 2)), L.LSTM(4, stateful=True), L.Dense(1)], seed=1)
    return model, rng.normal(size=(30, 3, 2)), rng.normal(size=(30, 1)), "mse", ["mae"]


class Depth(L.Layer):
    """A block, with statistics of all rows, that some steps leave out, and others for their values."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = L.Dense(4, "tanh"), L.BatchNormalization()
        self.count = self.add_weight((), "zeros", trainable=False, name="count")

    def call(self, x, training=False):
        self.count.assign_add(1.0)
        x = ops.cond(self.count % 3 < 2, lambda: x + self.norm(self.inner(x), training=training), lambda: x)
        return ops.cond(
            ops.mean(x) > 0, lambda: ops.scan(lambda c, b: (ops.tanh(c + b), None), x, ops.stack([x, -x]))[0], lambda: x
        )

    def compute_output_shape(self, shape):
        return shape


def branches():
    model = dp.Sequential([dp.Input((3,)), L.Dense(4), Depth(), L.Dense(1)], seed=1)
    return model, rng.normal(size=(23, 3)), rng.normal(size=(23, 1)), "mse", ["mae"]


class Settles(L.Layer):
    """Shrinks rows until those of all ranks are small, and counts: no gradient goes through its loops."""

    def build(self, shape):
        self.total = self.add_weight((), "zeros", trainable=False, name="total")

    def call(self, x):
        def shrink(n, y):
            self.total.assign_add(0.125)
            return n + 1, ops.tanh(y) * 0.75

        n, y = ops.while_loop(lambda n, y: ops.mean(y * y) > 0.125, shrink, (0, ops.stop_gradient(x)))
        scale = ops.fori_loop(0, n, lambda i, scale: scale * 0.75 + ops.mean(y), ops.ones((), x.dtype))
        return x * ops.stop_gradient(scale) + ops.stop_gradient(y)

    def compute_output_shape(self, shape):
        return shape


def until():
    model = dp.Sequential([dp.Input((3,)), L.Dense(4), Settles(), L.Dense(1)], seed=1)
    return model, rng.normal(size=(23, 3)), rng.normal(size=(23, 1)), "mse", ["mae"]


class Stops(Callback):
    """Ends the training with an error in the middle of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 10:
            raise RuntimeError("stopped")


case, _, form = case.partition(" ")
if form == "by heads":
    distribution.set_distribution(by_heads())
models = {"labelled": labelled, "attention": attention, "branches": branches, "until": until}
model, x, y, loss, metrics = models.get(case, stateful)()
in_order = case in ("stateful", "stopped", "resumed")


def fit(*callbacks):
    """Train for three epochs."""
    options = {"shard_weights": True} if form == "sharded" else {}
    model.compile(dp.optimizers.Adam(0.02), loss, metrics=metrics, dtype="float64", **options)
    options = {"batch_size": 5, "epochs": 3, "shuffle": not in_order, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **options).history


if case in ("stopped", "resumed"):
    history = fit(BackupAndRestore(folder, save_freq=4), *([Stops()] if case == "stopped" else []))
else:
    history = fit()
scores = model.evaluate(x, y, batch_size=5, verbose=0)
logs = [*np.transpose([history[key] for key in sorted(history)]).tolist()]
assert all(results == [logs, scores] for results in comm.allgather([logs, scores]))
weights = model.get_weights()
states = [] if not in_order else [state.numpy() for state in model.layers[0].states]
if comm.rank == 0:
    params = np.concatenate([weight.reshape(-1) for weight in [*weights, *states]])
    np.savez(out, params=params, logs=logs, scores=scores)
