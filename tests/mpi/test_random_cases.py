"""Random sizes of data, batches and validation: any number of ranks gives one process' numbers."""

import functools
import json

import numpy as np
import pytest

from tests.launching import mpirun
from tests.sample import examples

SCRIPT = """
import json, sys
import numpy as np, dptrain as dp
rng = np.random.default_rng(7)
found = []
for case in range(int(sys.argv[2])):
    rows, batch = int(rng.integers(4, 70)), int(rng.integers(3, 40))
    options = {"validation_split": float(rng.choice([0.0, 0.2, 0.5]))}
    if rng.random() < 0.4:
        options["class_weight"] = {0: 0.5, 2: 3.0}
    if rng.random() < 0.3:
        options["validation_batch_size"] = int(rng.integers(3, 20))
    options["shuffle"] = [True, False, "batch"][case % 3]
    x, y = rng.standard_normal((rows, 4)), rng.integers(0, 3, rows)
    model = dp.Sequential([dp.layers.Dense(5, "gelu", input_shape=(4,)), dp.layers.Dropout(0.2),
                           dp.layers.Dense(3, "softmax")], seed=case)
    optimizer = [dp.optimizers.Adam(0.01), dp.optimizers.SGD(0.1, momentum=0.9), dp.optimizers.RMSprop(0.01)][case % 3]
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64", device="cpu")
    history = model.fit(x, y, batch_size=batch, epochs=2, verbose=0, **options).history
    found.append([rows, history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).tolist()])
if dp.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
"""

CASES = examples(25)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    (folder / "script.py").write_text(SCRIPT)

    @functools.cache
    def run(ranks: int):
        out = folder / f"{ranks}.json"
        done = mpirun(ranks, str(folder / "script.py"), str(out), str(CASES), timeout=120)
        assert (done.code, done.err) == (0, "")
        return json.loads(out.read_text())

    return run


def test_any_sizes(outcome):
    alone = outcome(1)
    assert len({rows for rows, *_ in alone}) > 0.4 * CASES
    for expected, outcome_on_ranks in zip(alone, outcome(3), strict=True):
        assert sorted(expected[1]) == sorted(outcome_on_ranks[1])
        for key in expected[1]:
            np.testing.assert_allclose(
                outcome_on_ranks[1][key], expected[1][key], rtol=1e-9, err_msg=f"{expected[0]} rows: {key}"
            )
        for mine, theirs in zip(expected[2:], outcome_on_ranks[2:], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-8, atol=1e-12)
