"""Trains on batches that a script makes itself. Arguments: kind trouble rank out.npz (rank -1: no trouble)."""

import os
import sys

import numpy as np

import dptrain as dp

kind, trouble, bad, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
rng = np.random.default_rng(9)
x, y = rng.standard_normal((59, 4)), rng.standard_normal((59, 2))
# Some leave ranks without a sample; of shards one batch more takes new memory on one rank alone.
SIZES = [8, 8, 9, 9, 8, 8, 7, 2] if kind == "shards" else [8, 8, 1, 13, 2, 8, 8, 8, 3]
ENDS = np.cumsum(SIZES)
indices: list[int] = []


def batch(number: int, trouble: str = trouble):
    stop = int(ENDS[number])
    begin = stop - SIZES[number]
    part = x[begin:stop], y[begin:stop]
    if trouble == "nan" and number == 3:
        part[0][11, 2] = np.nan
    if rank == bad and number == 4:
        if trouble == "size":
            part = part[0][:1], part[1][:1]
        elif trouble == "dtype":
            part = part[0].astype(np.float32), part[1]
        elif trouble == "values":
            part = part[0] + 1, part[1]
        elif trouble == "shape":
            part = part[0][:, :3], part[1]
        elif trouble == "raises":
            raise KeyError("the disk is gone")
        elif trouble == "exits":
            sys.exit(3)
    return part


def generator():
    for number in range(len(SIZES)):
        if trouble == "ends" and rank == bad and number == 5:
            return
        yield batch(number)


class Batches(dp.utils.PyDataset):
    def __len__(self) -> int:
        return len(SIZES) - (trouble == "length" and rank == bad)

    def __getitem__(self, index: int):
        return batch(index)


class Listed(dp.utils.PyDataset):
    def __init__(self, batches) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int):
        return self.batches[index]


class Parts(Batches):
    """Cut where `dptrain` would not: the parts' sizes are the data set's own."""

    def shard(self, index: int, part: int, parts: int):
        indices.append(index)
        bounds = [round(SIZES[index] * (p / parts) ** 2) for p in range(parts + 1)]
        return tuple(array[bounds[part] : bounds[part + 1]] for array in batch(index))


def source():
    sources = {"generator": generator, "dataset": Batches, "shards": Batches, "parts": Parts}
    return Parts(workers=3) if kind == "workers" else sources[kind]()


model = dp.Sequential(
    [dp.layers.Dense(6, "tanh", input_shape=(4,)), dp.layers.Dropout(0.3), dp.layers.Dense(2)], seed=2
)
model.compile(dp.optimizers.Adam(0.02), "mse", dtype="float64", shards_per_batch=8 if kind == "shards" else None)
if kind == "generator":
    arguments = {"steps_per_epoch": 4, "epochs": 2, "shuffle": False}
else:
    arguments = {"epochs": 2}
validation = [batch(number, "none") for number in range(len(SIZES))]
history = model.fit(source(), validation_data=Listed(validation), verbose=0, **arguments)
steps = {"steps": len(SIZES)} if kind == "generator" else {}
prediction = model.predict(source(), verbose=0, **steps)
score = model.evaluate(source(), verbose=0, **steps)

from dptrain.comm import current  # noqa: E402 - after fit, as a script would

comm = current()
sums = [float(weight.sum()) for weight in model.get_weights()]
assert all(sums_of_rank == sums for sums_of_rank in comm.allgather(sums)), "ranks differ"
assert bool(indices) == (kind in ("parts", "workers") and comm.size > 1)
if comm.rank == 0:
    losses = np.array([history.history["loss"], history.history["val_loss"]])
    np.savez(out, *model.get_weights(), prediction=prediction, score=score, losses=losses)
