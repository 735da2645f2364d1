"""`dptrain.sweep` from a script, and a training of all ranks together before and after it. Argument: out.json."""

import json
import sys
from dataclasses import asdict

import numpy as np

import dptrain as dp
from dptrain import comm

rng = np.random.default_rng(5)
x, y = rng.normal(size=(70, 6)).astype(np.float32), rng.integers(0, 3, 70)


def build(units, seed):
    model = dp.Sequential([dp.layers.Dense(units, "tanh", input_shape=(6,)), dp.layers.Dense(3, "softmax")], seed=seed)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def together():
    return build(4, 9).fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]


before = together()
result = dp.sweep(build, {"units": [3, 4, 5]}, seeds=[1, 9], x=x, y=y, epochs=2, batch_size=16, verbose=0)
assert together() == before
ranks = comm.current()
ranks.require_same("the ranks have different results", {"result": asdict(result)})
if dp.rank() == 0:
    facts = {**asdict(result), "runs": [{**run, "seconds": 0} for run in result.runs], "together": before}
    facts["trials"] = [{**trial, "seconds": 0} for trial in result.trials]
    with open(sys.argv[1], "w") as file:
        json.dump(facts, file)
