"""Changes what one rank has, in one training after the other, and prints what becomes of each. Arguments: ways."""

import json
import os
import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

comm = current()
BAD = 1


class Change(dp.callbacks.Callback):
    """Changes something on one rank after step 14 or between epochs, where ranks compare after steps 4, 8, ..."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        if batch == 13 and self.way != "between":
            self.change()

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        if self.way == "between":
            self.model.optimizer.learning_rate = 0.01  # on all ranks, as they may
            self.change()

    def change(self) -> None:
        if comm.rank != BAD:
            return
        if self.way == "rate":
            self.model.optimizer.learning_rate = 0.5
        if self.way in ("parameter", "slot", "between"):
            slots = [
                variable
                for variable in self.model.optimizer.variables
                if variable._path.endswith("dense_kernel_velocity")
            ]
            target = slots[0] if self.way == "slot" else self.model.weights[0]
            value = target.numpy()
            value.view(np.uint32).reshape(-1)[17] ^= 1 << 12
            target.assign(value)


def build() -> dp.Sequential:
    model = dp.Sequential([dp.layers.Dense(8, "relu", input_shape=(6,)), dp.layers.Dense(3, "softmax")], seed=1)
    model.compile(dp.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def state(model: dp.Sequential) -> list[str]:
    return [variable.numpy().tobytes().hex() for variable in (*model.weights, *model.optimizer.variables)]


def told(action) -> list[object]:
    try:
        return ["done", action()]
    except dp.errors.AgreedError as error:
        return [int(error.exit_code), str(error)]


rng = np.random.default_rng(0)
x, y = rng.normal(size=(300, 6)).astype(np.float32), rng.integers(0, 3, 300)
outcomes: dict[str, object] = {}
for way in sys.argv[1:]:
    os.environ["DPTRAIN_DIGEST_EVERY"] = "0" if way == "never" else "4"
    mine, arguments = x.copy(), {"batch_size": 15, "epochs": 1, "verbose": 0}
    model = build()
    if way in ("data", "skip"):  # rank 1's part of the second of 20 batches
        mine[15 + 8] = np.nan
        arguments["shuffle"] = False
    if way == "last":  # the only row of the second batch: the other ranks have none
        mine[-1] = np.nan
        arguments.update(batch_size=len(mine) - 1, shuffle=False)
    if way == "skip":
        arguments["on_nonfinite"] = "skip"
    if way == "row" and comm.rank == BAD:
        mine[77, 3] += 1
    if way == "between":
        arguments["epochs"] = 2
    if way == "slots":  # of an earlier training, changed on one rank: those of rank 0 hold
        model.fit(x, y, **arguments)
        if comm.rank == BAD:
            for variable in (*model.weights, *model.optimizer.variables):
                if not variable._path.endswith("learning_rate"):  # with another one they would not begin
                    variable.assign(variable.numpy() + 1)
    change = Change("parameter" if way == "never" else way)
    data = (mine, y)
    if way == "stream":  # whose first step makes the optimizer's slots
        change = Change("slot")
        data = (((mine[begin : begin + 15], y[begin : begin + 15]) for begin in range(0, 300, 15)),)
        arguments = {"steps_per_epoch": 20, "verbose": 0, "shuffle": False}
    outcomes[way] = told(lambda: model.fit(*data, callbacks=[change], **arguments).history)  # noqa: B023
    if way in ("skip", "slots"):
        every = comm.allgather(state(model))
        outcomes[way].append(all(outcome == every[0] for outcome in every))
    if way == "skip":
        another = build()
        kept = np.r_[0:15, 30:300]
        another.fit(x[kept], y[kept], **arguments)
        outcomes[way].append(state(model) == state(another))
if comm.rank == 0:
    print(json.dumps(outcomes))
