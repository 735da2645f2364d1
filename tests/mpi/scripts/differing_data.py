"""Gives one rank other data or arguments than the others, in one call after the other, and prints what becomes of each.

Arguments: a rank, ways.
"""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

comm, odd = current(), int(sys.argv[1])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(14, 6)).astype(np.float32), rng.integers(0, 3, 14)
differs = comm.rank == odd
model = dp.Sequential([dp.layers.Dense(3, "softmax", input_shape=(6,))], seed=1)


class Rows(dp.utils.PyDataset):
    def __len__(self) -> int:
        return 3 if differs else 2

    def __getitem__(self, index: int):
        return (x[:7],)


def with_(rows: slice | list[int], method: str, **options):
    """Call a method with other rows, or values, on the odd rank."""
    mine = rows if differs else slice(None)
    data = (x[mine],) if method.startswith("predict") else (x[mine], y[mine])
    return getattr(model, method)(*data, **options)


def compiled(odd: dict, **usual) -> bool:
    """Compile the model, on the odd rank in another way."""
    model.compile(**{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"} | usual | (odd if differs else {}))
    return True


def activation(name: str) -> bool:
    """Give the layer another activation on the odd rank."""
    model.layers[0].activation = name if differs else "softmax"
    return True


def adapted(rows, method: str = "fit"):
    """Call a method of a model whose layer each rank adapts to rows of its own; None: not at all."""
    normalization = dp.layers.Normalization()
    if rows is not None:
        normalization.adapt(x[rows])
    normalized = dp.Sequential([dp.Input((6,)), normalization, dp.layers.Dense(1)], seed=1)
    normalized.compile("sgd", "mse")
    data = (x, y) if method == "fit" else (x,)
    getattr(normalized, method)(*data, verbose=0)
    expected = x.mean(0)
    np.testing.assert_allclose(normalized.layers[0].mean.numpy()[0], expected, rtol=1e-4, atol=1e-6)


local_rows = slice(comm.rank, None, comm.size)  # as data are divided by hand, for every rank another part
changed = x.copy()
changed[13, 5] += differs
ways = {
    "fit, adapted": lambda: adapted(local_rows),
    "predict, adapted": lambda: adapted(local_rows, "predict"),
    "fit, adapted on one rank": lambda: adapted(slice(None) if differs else None),
    "fit, adapted alike": lambda: adapted(slice(None)),
    "fit, adapted on rank 0": lambda: adapted(None if comm.rank else slice(None)),
    "predict, parts": lambda: model.predict(x[local_rows], verbose=0),
    "predict, a value": lambda: model.predict(changed, verbose=0),
    "predict, shuffled": lambda: with_(list(range(13, -1, -1)), "predict", verbose=0),
    "predict, dtype": lambda: model.predict(x.astype(np.float64) if differs else x, verbose=0),
    "predict, batch_size": lambda: model.predict(x, batch_size=4 + differs, verbose=0),
    "predict, steps": lambda: model.predict(x, steps=2 + differs, verbose=0),
    "predict, dataset": lambda: model.predict(Rows(), verbose=0),
    "predict_on_batch, parts": lambda: model.predict_on_batch(x[local_rows]),
    "predict_on_batch, a value": lambda: model.predict_on_batch(changed),
    "evaluate, parts": lambda: model.evaluate(x[local_rows], y[local_rows], verbose=0),
    "evaluate, batch_size": lambda: model.evaluate(x, y, batch_size=4 + differs, verbose=0),
    "evaluate, steps": lambda: model.evaluate(x, y, steps=2 + differs, verbose=0),
    "test_on_batch, parts": lambda: model.test_on_batch(x[local_rows], y[local_rows]),
    "test_on_batch, targets": lambda: model.test_on_batch(x, np.roll(y, differs)),
    "test_on_batch, weights": lambda: model.test_on_batch(x, y, np.ones(14) + differs),
    "train_on_batch, parts": lambda: model.train_on_batch(x[local_rows], y[local_rows]),
    "train_on_batch, a value": lambda: model.train_on_batch(changed, y),
    "train_on_batch, targets": lambda: model.train_on_batch(x, np.roll(y, differs)),
    "train_on_batch, class_weight": lambda: model.train_on_batch(x, y, class_weight={0: 1.0 + differs}),
    "train_on_batch, loss": lambda: (
        compiled({"loss": "mse"}, loss="categorical_crossentropy") and model.train_on_batch(x, np.eye(3)[y])
    ),
    "train_on_batch, momentum": lambda: (
        compiled({"optimizer": dp.optimizers.SGD(momentum=0.9)}) and model.train_on_batch(x, y)
    ),
    "test_on_batch, loss": lambda: (
        compiled({"loss": "mse"}, loss="categorical_crossentropy") and model.test_on_batch(x, np.eye(3)[y])
    ),
    "evaluate, metrics": lambda: compiled({"metrics": ["accuracy"]}) and model.evaluate(x, y, verbose=0),
    "predict, activation": lambda: activation("relu") and model.predict(x, verbose=0),
    "train_on_batch, activation": lambda: activation("relu") and model.train_on_batch(x, y),
    "predict": lambda: model.predict(x, verbose=0),
    "predict_on_batch": lambda: model.predict_on_batch(x[:1]),
    "evaluate": lambda: model.evaluate(x, y, verbose=0),
    "test_on_batch": lambda: model.test_on_batch(x, y),
    "train_on_batch": lambda: model.train_on_batch(x, y),
}
outcomes: dict[str, object] = {}
for way in sys.argv[2:]:
    model.layers[0].activation = "softmax"
    model.compile("sgd", "sparse_categorical_crossentropy")
    try:
        ways[way]()
    except dp.errors.AgreedError as error:
        outcomes[way] = [int(error.exit_code), str(error)]
    else:
        outcomes[way] = "done"
every = comm.allgather(outcomes)
assert all(outcome == every[0] for outcome in every), "the ranks do not end alike"
if comm.rank == 0:
    print(json.dumps(outcomes))
