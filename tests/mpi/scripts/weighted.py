"""Trains with sample weights; rank 0 saves the weights and the logs of every epoch. Arguments: out.npz JSON."""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain import losses, metrics
from dptrain.comm import current
from dptrain.layers import Dense

out, options = sys.argv[1], json.loads(sys.argv[2])
comm, rng = current(), np.random.default_rng(3)
steps = options.get("steps", [])  # of a sample, each with a label and a weight
x, labels = rng.standard_normal((53, *steps, 6)), rng.integers(0, 4, (53, *steps))
loss = losses.deserialize(options["loss"])
y = labels if loss._takes_labels else np.eye(4)[labels]
weights = rng.random((53, *steps)) * (rng.random((53, *steps)) < 0.8) if options["weighted"] else None
measured = ["accuracy"] if loss._takes_labels else ["accuracy", "mae", metrics.Precision(0.3), metrics.Recall(0.3)]
again = ["accuracy"] if loss._takes_labels else ["accuracy", "mae", metrics.Precision(0.3), metrics.Recall(0.3)]

model = dp.Sequential([Dense(9, "tanh", input_shape=(*steps, 6)), Dense(4, "softmax")], seed=1)
model.compile(dp.optimizers.SGD(0.3), loss, metrics=measured, weighted_metrics=again, dtype="float64")
# The last batch of an epoch has five samples, less than a batch of eight has on three ranks each.
options = {"sample_weight": weights, "batch_size": 8, "verbose": 0}
history = model.fit(x, y, epochs=6, **options, validation_data=(x[:31], y[:31])).history
scores = [model.evaluate(x, y, **options), model.evaluate(x, y, sample_weight=weights, verbose=0)]
if steps:  # batches of the user's own, all of them or this rank's part

    class Batches(dp.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return tuple(array[8 * index : 8 * index + 8] for array in (x, y, weights))

    model.fit(Batches(), verbose=0, shuffle=False)
    scores += [
        model.evaluate(Batches(), verbose=0),
        model.evaluate(iter(list(Batches())), steps=7, verbose=0),
        model.train_on_batch(x[:20], y[:20], weights[:20]),
    ]
logs = [*np.transpose(list(history.values())).tolist()]
assert all(results == [logs, scores] for results in comm.allgather([logs, scores]))
if comm.rank == 0:
    params = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
    np.savez(out, params=params, keys=list(history), logs=logs, scores=scores)
