"""Save and load on N ranks. Arguments: folder, ending of a whole model's file or "", what goes wrong."""

import os
import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

folder, whole, wrong = sys.argv[1:4]
rank = current().rank
rng = np.random.default_rng(4)
x, y = rng.random((37, 5)), rng.integers(0, 3, 37)
CPU = {"device": "cpu", "dtype": "float64"}


def build(seed: int) -> dp.Sequential:
    stack = [dp.layers.Dense(6, "tanh", input_shape=(5,)), dp.layers.Dropout(0.2), dp.layers.Dense(3, "softmax")]
    model = dp.Sequential(stack, seed=seed)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **CPU)
    return model


def train(model: dp.Sequential) -> None:
    model.fit(x, y, batch_size=10, epochs=2, verbose=0)


model = build(1)
train(model)
if wrong == "write":
    model.save_weights(os.path.join(folder, "none", "w.safetensors"))
if wrong == "read":
    # only rank 0 reads: a file that the others do not see, and one that is missing for all
    model.load_weights(os.path.join(folder, "none.safetensors"))

path = os.path.join(folder, f"model{whole}" if whole else "w.safetensors")
(model.save if whole else model.save_weights)(path)
if rank != 0:
    path = os.path.join(folder, f"rank {rank} has another working directory", os.path.basename(path))
if whole:
    loaded = dp.models.load_model(path, device="cpu")
    train(model)
    train(loaded)
else:
    loaded = build(1)
    train(loaded)
    loaded.set_weights([weight + rank for weight in loaded.get_weights()])  # the ranks' copies differ
    loaded.load_weights(path)
expected, outputs = model.predict(x, verbose=0), loaded.predict(x, verbose=0)
assert np.array_equal(expected, outputs), np.abs(expected - outputs).max()
digests = current().allgather([float(weight.sum()) for weight in loaded.get_weights()])
assert all(digest == digests[0] for digest in digests), digests
if rank == 0:
    print("same")
