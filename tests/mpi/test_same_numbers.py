"""Numbers in messages: the same fault names the same sample, row or step on one rank and on several."""

import json
import re

import pytest

from tests.launching import mpirun
from tests.sample import sample

SCRIPT = """
import json, sys
import numpy as np, dptrain as dp
from dptrain.errors import DptrainError
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)), rng.integers(0, 4, 40)

class Batches(dp.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y
    def __len__(self):
        return 4
    def __getitem__(self, index):
        part = slice(10 * index, 10 * index + 10)
        return self.x[part], self.y[part]

def batches(x, y):
    for first in range(0, 40, 10):
        yield x[first : first + 10], y[first : first + 10]

def model(inputs=None):
    layers = inputs or [dp.Input((3,)), dp.layers.Dense(4, "tanh")]
    model = dp.Sequential([*layers, dp.layers.Dense(4, "softmax")], seed=1)
    model.compile("sgd", "sparse_categorical_crossentropy", dtype="float64", device="cpu", metrics=["accuracy"])
    return model

def embedding():
    return model([dp.Input((3,), dtype="int64"), dp.layers.Embedding(9, 2), dp.layers.Flatten()])

def changed(values, rows, value):
    values = values.copy()
    values[rows] = value
    return values

IDS = rng.integers(0, 9, (40, 3))
SOURCES = {
    "arrays": lambda x, y: {"x": x, "y": y, "shuffle": False},
    "shuffled arrays": lambda x, y: {"x": x, "y": y},
    "generator": lambda x, y: {"x": batches(x, y), "shuffle": False, "steps_per_epoch": 4},
    "data set": lambda x, y: {"x": Batches(x, y), "shuffle": False},
}
FAULTS = {}
for source, data in SOURCES.items():
    for row in (0, 19, 38):
        FAULTS[f"{source}: nan {row}"] = lambda data=data, row=row: model().fit(
            **data(changed(X, row, np.nan), Y), batch_size=10, verbose=0)
        FAULTS[f"{source}: label {row}"] = lambda data=data, row=row: model().fit(
            **data(X, changed(Y, row, 4)), batch_size=10, verbose=0)
        FAULTS[f"{source}: id {row}"] = lambda data=data, row=row: embedding().fit(
            **data(changed(IDS, row, 9), Y), batch_size=10, verbose=0)
for row in (0, 19, 38):
    FAULTS[f"validation: label {row}"] = lambda row=row: model().fit(
        X, Y, validation_data=(X, changed(Y, row, 7)), batch_size=10, verbose=0)
    FAULTS[f"evaluate: id {row}"] = lambda row=row: embedding().evaluate(changed(IDS, row, 9), Y, verbose=0)
    FAULTS[f"predict: id {row}"] = lambda row=row: embedding().predict(changed(IDS, row, 9), verbose=0)
messages = {}
for name in [name for name in FAULTS if "id" not in name] if sys.argv[2] == "all" else sys.argv[2:]:
    dp.utils.set_random_seed(3)
    try:
        FAULTS[name]()
        messages[name] = "no error"
    except DptrainError as error:
        messages[name] = str(error)
if dp.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(messages, file)
"""


# Faults that end the job on several ranks, as only one rank knows of them.
ENDING = (
    "arrays: id 19",
    "shuffled arrays: id 38",
    "generator: id 19",
    "data set: id 38",
    "evaluate: id 19",
    "predict: id 38",
)


def messages(folder, ranks: int, *names: str) -> dict[str, str]:
    """Return the messages of faults by name."""
    (folder / "script.py").write_text(SCRIPT)
    out = folder / "messages.json"
    done = mpirun(ranks, str(folder / "script.py"), str(out), *names, timeout=120)
    if done.code == 0:
        return json.loads(out.read_text())
    (line,) = done.err.splitlines()
    return {names[0]: line[line.index("layer ") :]}


def numbers(message: str) -> list[str]:
    """Return the numbers of a message, without the rank, host and process that tell it."""
    return re.findall(r"\d+", re.sub(r" ?\(rank \d+[^)]*\)", "", message))


def test_the_same_fault_has_the_same_numbers_on_any_number_of_ranks(tmp_path):
    alone, on_ranks = messages(tmp_path, 1, "all"), messages(tmp_path, 3, "all")
    assert "no error" not in alone.values()
    differing = {
        name: (alone[name], on_ranks[name]) for name in alone if numbers(alone[name]) != numbers(on_ranks[name])
    }
    assert not differing


@pytest.mark.parametrize("name", sample(ENDING, 3, single=True))
def test_a_fault_that_ends_the_job_has_the_numbers_of_one_rank(tmp_path, name):
    alone, on_ranks = messages(tmp_path, 1, name)[name], messages(tmp_path, 3, name)[name]
    assert "id 9" in alone
    assert numbers(alone) == numbers(on_ranks), (alone, on_ranks)
